"""The web server of `keel ui`: read-only pages on 127.0.0.1, for who has the link.

Every request needs the token, from the link or, after the first visit, from an HttpOnly cookie. Its
Host has to be this machine by a local name (a name of another site could be made to resolve to
127.0.0.1), and a foreign Origin is refused. Pages load nothing from elsewhere, by their own
Content-Security-Policy too. Any local port may stand in Host: ssh forwards from other ports.
"""

import hmac
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jinja2
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from markupsafe import Markup
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keel.runs import FINISHED, INTERRUPTED, RUNNING, STARTING
from keel.views import compare_page, run_page
from keel.views.charts import static_file
from keel.views.compare_page import View, grouped, view_of
from keel.views.store import ANYTHING, Entry, Store, number, text_of
from protocol.config import keel_version
from protocol.files import digest

LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
STATIC = ("page.css", "page.js", "tables.js", "charts.js", "plotly.js")
POLL_NODES_S = 15.0
MAX_DEPLOYMENTS = 5  # shown: the last changed
RESULTS = ("rounds", "final_accuracy", "best_accuracy")  # of a summary
UNENDED = (None, STARTING, RUNNING)  # status of a summary that was not written at a run's end
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",  # Plotly sets styles of elements
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",  # the token is in the first link
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Lets a request through that has the token, a local Host and no foreign Origin."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token
        self.cookie = f"keel-ui-{digest(token.encode())[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                own = {"cache-control": "no-store", **HEADERS}
                message["headers"] += [
                    (k.encode(), v.encode()) for k, v in own.items() if k.encode() not in present
                ]
            await send(message)

        request = Request(scope)
        answer = self.refusal(request) or self.first_visit(request)
        await (answer or self.app)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        """Why a request is refused; None if it is not."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if hostname(f"//{host}") not in LOCAL_HOSTS:
            return PlainTextResponse("refused: the Host is not this machine\n", 403)
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("refused: the request comes from another site\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("refused: these pages change nothing\n", 405)
        token = request.query_params.get("token") or request.cookies.get(self.cookie, "")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            text = "refused: open the link that `keel ui` printed: it has the token\n"
            return PlainTextResponse(text, 403)
        return None

    def first_visit(self, request: Request) -> Response | None:
        """Store the token of the link as a cookie and remove it from the address."""
        if "token" not in request.query_params:
            return None
        rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
        # "//host" and "/\\host" would lead elsewhere
        path = "/" + quote(request.scope["path"].lstrip("/"))
        target = path + (f"?{urlencode(rest)}" if rest else "")
        answer = Response(status_code=303, headers={"location": target})
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax", path="/")
        return answer


def hostname(url: str) -> str | None:
    """The host in a URL, without its port; None if there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def printable(value: Any) -> Any:
    """What a template may show: text without control characters and surrogates."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return "" if value is None else value
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() or c == "\n" else " " for c in value)


def environment() -> jinja2.Environment:
    """Everything in a template is escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=printable,
    )
    found.globals |= {"keel_version": keel_version(), "ago": run_page.ago}
    found.filters["percent"] = lambda v: "" if v is None else f"{100 * v:.2f}"
    found.filters["megabytes"] = lambda v: f"{v / 1e6:,.1f} MB"
    return found


class SuperLinkNodes:
    """The nodes of a SuperLink, asked now and then in a thread of their own."""

    def __init__(self, nodes: Callable[[], list[dict[str, Any]]]) -> None:
        self.nodes = nodes
        self.online: dict[int, str] | None = None
        self.problem = "asking the SuperLink"
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            self.ask()
            time.sleep(POLL_NODES_S)

    def ask(self) -> None:
        """Ask once."""
        try:
            self.online = {int(row["node-id"]): text_of(row["status"], 40) for row in self.nodes()}
            self.problem = ""
        except Exception as error:  # shown on the page
            self.online, self.problem = None, text_of(error)


def create_app(store: Store, token: str, nodes: SuperLinkNodes | None = None) -> ASGIApp:
    """The pages over these runs, behind a `Guard`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=4000, compresslevel=1)
    pages = environment()

    def page(name: str, status: int = 200, **content: Any) -> HTMLResponse:
        return HTMLResponse(pages.get_template(name).render(content), status)

    def entry_of(run_id: str) -> Entry:
        if entry := store.find(run_id):
            return entry
        raise HTTPException(404)

    @app.exception_handler(404)
    def missing(request: Request, error: Exception) -> HTMLResponse:
        what = "run (any more)" if request.url.path.startswith("/run/") else "page"
        return page("error.html.j2", 404, problem=f"There is no such {what}.")

    @app.exception_handler(500)
    def failed(request: Request, error: Exception) -> HTMLResponse:
        return page("error.html.j2", 500, problem=f"{type(error).__name__}: {text_of(error)}")

    # --- runs ---------------------------------------------------------------------------------

    def run_table() -> tuple[str, str]:
        rows = run_rows(store)
        version = [(row["id"], row["state"], row["done"], row["accuracy"]) for row in rows]
        return pages.get_template("rows.html.j2").render(rows=rows), digest_of(version)

    @app.get("/")
    def runs() -> HTMLResponse:
        html, version = run_table()
        return page("runs.html.j2", rows=Markup(html), version=version, roots=map(str, store.roots))

    @app.get("/rows")
    def rows(version: str = "") -> Response:
        html, now = run_table()
        return unchanged() if version == now else JSONResponse({"version": now, "html": html})

    # --- one run ------------------------------------------------------------------------------

    @app.get("/run/{run_id}")
    def run(run_id: str) -> HTMLResponse:
        entry = entry_of(run_id)
        state = entry.state  # the rest comes with `run_data`: the browser compiles Plotly meanwhile
        config = run_page.config_rows(entry)
        return page("run.html.j2", entry=entry, state=state, kind=kind_of(state), config=config)

    @app.get("/run/{run_id}/data")
    def run_data(run_id: str, version: str = "") -> Response:
        entry = entry_of(run_id)
        with store.lock:
            reader, state = store.history(entry), entry.state
            log, pictures = run_page.log_tail(entry), run_page.pictures(entry)
            now = digest_of((state, reader.version, reader.fault, log, pictures, entry.summary))
            if now == version:  # before what takes seconds with 100,000 rounds
                return unchanged()
            found, total = run_page.events(entry, reader.lines)
            content = {
                "entry": entry,
                "state": state,
                "kind": kind_of(state),
                "progress": run_page.progress(entry, reader),
                "events": found,
                "num_events": total,
                "privacy": run_page.privacy_rows(entry),
                "log": log,
                "pictures": pictures,
            }
            parts = ("status", "events", "privacy", "log", "pictures")
            html = {p: pages.get_template(f"run_{p}.html.j2").render(content) for p in parts}
            charts = run_page.main_charts(reader)
            coming = [] if entry.problem else run_page.coming_charts(reader)
            return JSONResponse({"version": now, "html": html, "charts": charts, "coming": coming})

    @app.get("/run/{run_id}/clients")
    def run_clients(run_id: str, version: str = "") -> Response:
        entry = entry_of(run_id)
        with store.lock:
            reader = store.history(entry)
            now = digest_of(reader.version)
            if now == version:
                return unchanged()
            charts = {} if entry.problem else run_page.client_charts(reader)
            return JSONResponse({"version": now, "charts": charts})

    @app.get("/run/{run_id}/labels")
    def run_labels(run_id: str) -> Response:
        entry = entry_of(run_id)
        return JSONResponse({"charts": {} if entry.problem else run_page.label_chart(entry)})

    @app.get("/run/{run_id}/picture")
    def run_picture(run_id: str, name: str) -> Response:
        entry = entry_of(run_id)
        if name not in run_page.pictures(entry):
            raise HTTPException(404)
        return FileResponse(entry.directory / name, media_type="image/png")

    # --- several runs -------------------------------------------------------------------------

    def selected(ids: Sequence[str]) -> list[compare_page.Run]:
        entries = [entry for run_id in dict.fromkeys(ids) if (entry := store.find(run_id))]
        return [(e, store.history(e)) for e in entries[: compare_page.MAX_RUNS] if not e.problem]

    def compared(ids: Sequence[str], view: View) -> dict[str, Any]:
        chosen = selected(ids)
        groups = grouped(chosen, view.by_seed)
        return {
            "groups": groups,
            "header": compare_page.header(view),
            "results": compare_page.result_rows(groups, view),
            "config": compare_page.config_rows(groups),
            "view": view,
            "note": compare_page.note(view),
            "axes": compare_page.AXES,
            "ids": list(dict.fromkeys(ids)),  # the page asks again for all of them
            "num_left_out": len(set(ids)) - len(chosen),
            "max_runs": compare_page.MAX_RUNS,
        }

    Ids = Query(default=[], alias="run")

    @app.get("/compare")
    def compare(request: Request, ids: list[str] = Ids) -> HTMLResponse:
        with store.lock:
            content = compared(ids, view_of(request.query_params))
            found = [run for group in content["groups"] for run in group.runs]
            choices = compare_page.choices(found)
            return page("compare.html.j2", choices=choices, **content)

    @app.get("/compare/data")
    def compare_data(request: Request, ids: list[str] = Ids) -> Response:
        with store.lock:
            view = view_of(request.query_params)
            content = compared(ids, view)
            tables = pages.get_template("compare_tables.html.j2").render(content)
            html = {"tables": tables, "note": content["note"]}
            now = digest_of([content["results"], content["config"], view])
            if now == request.query_params.get("version"):
                return unchanged()
            charts = {"compare": compare_page.chart(content["groups"], view)}
            return JSONResponse({"version": now, "html": html, "charts": charts})

    @app.get("/compare.csv")
    @app.get("/compare.tex")
    def compare_table(request: Request, ids: list[str] = Ids) -> Response:
        name = request.url.path[1:]
        is_csv = name.endswith("csv")
        as_text = compare_page.as_csv if is_csv else compare_page.as_latex
        with store.lock:
            view = view_of(request.query_params)
            text = as_text(compared(ids, view)["groups"], view)
        return download(text, name, "text/csv" if is_csv else "text/plain")

    # --- deployment ---------------------------------------------------------------------------

    def sites() -> dict[str, Any]:
        found: list[tuple[Entry, str, list[dict[str, str]]]] = []
        online = nodes.online if nodes else None
        for entry in store.runs().values():
            if entry.problem or len(found) == MAX_DEPLOYMENTS or entry.is_simulated:
                continue
            try:
                rows = run_page.site_rows(entry, store.history(entry), online)
            except ANYTHING as error:
                rows = [{"site": f"cannot be read: {text_of(error)}"}]
            if rows:
                found.append((entry, entry.state, rows))
        return {"runs": found, "nodes": nodes, "problem": nodes.problem if nodes else ""}

    @app.get("/deployment")
    def deployment() -> HTMLResponse:
        with store.lock:
            return page("deployment.html.j2", **sites())

    @app.get("/deployment/data")
    def deployment_data(version: str = "") -> Response:
        with store.lock:
            html = pages.get_template("sites.html.j2").render(sites())
        now = digest_of(html)
        if now == version:
            return unchanged()
        return JSONResponse({"version": now, "html": {"sites": html}})

    @app.get("/static/{name}")
    def static(name: str, request: Request) -> Response:
        if name not in STATIC:
            return PlainTextResponse("no such file\n", 404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        age = {"cache-control": "private, max-age=3600" if name == "plotly.js" else "no-cache"}
        if name == "plotly.js" and "gzip" in request.headers.get("accept-encoding", ""):
            age |= {"content-encoding": "gzip", "vary": "accept-encoding"}
            return Response(compressed_plotly(), media_type=kind, headers=age)
        return FileResponse(static_file(name), media_type=kind, headers=age)

    return Guard(app, token)


@cache
def compressed_plotly() -> bytes:
    """Plotly's script, compressed once.

    It is sent in one piece: each chunk of a `FileResponse` would wait for a thread that is reading
    a history.
    """
    return zlib.compress(static_file("plotly.js").read_bytes(), 1, wbits=zlib.MAX_WBITS | 16)


def run_rows(store: Store) -> list[dict[str, Any]]:
    """A row of the table of runs for each run."""
    entries = store.runs()
    seeds: dict[str, set[str]] = {}
    settings = {run_id: entry.setting for run_id, entry in entries.items() if entry.config}
    for run_id, setting in settings.items():
        seeds.setdefault(setting, set()).add(text_of(entries[run_id].config.get("seed")))
    rows = []
    for entry in entries.values():
        config, summary, state = entry.config, entry.summary, entry.state
        done, *accuracies = (number(summary.get(key)) for key in RESULTS)
        if state != RUNNING and not entry.problem and summary.get("status") in UNENDED:
            done, *accuracies = entry.measured
        rows.append(
            {
                "id": entry.id,
                "name": entry.name,
                "method": text_of(entry.method, 60),
                "data": text_of(entry.source, 60),
                "split": text_of(entry.split, 40),
                "model": text_of(config.get("model", "?"), 40),
                "clients": number(summary.get("clients") or config.get("num-clients")),
                "done": int(done or 0),
                "total": int(number(config.get("num-rounds")) or 0),
                "state": state,
                "accuracy": accuracies[0],
                "best": accuracies[1],
                "seed": text_of(config.get("seed", "?"), 20),
                "seeds": sorted(seeds.get(settings.get(entry.id, ""), ())),
                "setting": settings.get(entry.id, entry.id),
                "changed": entry.changed,
                "kind": kind_of(state),
            }
        )
    return rows


def kind_of(state: str) -> str:
    """The class that colours a state."""
    known = {FINISHED: "good", RUNNING: "live", "stopped": "warn", INTERRUPTED: "warn"}
    return known.get(state, "bad")


def digest_of(value: Any) -> str:
    """A short digest of anything; equal values have equal ones."""
    return digest(repr(value).encode(errors="replace"))


def unchanged() -> Response:
    """The answer to a look at what has not changed since."""
    return Response(status_code=204)


def download(text: str, name: str, kind: str) -> Response:
    """A file to save."""
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(
        text.encode(errors="replace"), media_type=f"{kind}; charset=utf-8", headers=headers
    )


def listening(port: int) -> socket.socket:
    """A socket on 127.0.0.1. ValueError, one line, if the port is in use."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen(64)  # who opens the link at once is answered as soon as pages are served
    except OSError as error:
        found.close()
        raise ValueError(
            f"--port {port}: {error.strerror}; choose another, or 0 for any that is free"
        ) from error
    return found


def serve(app: ASGIApp, at: socket.socket) -> None:
    """Serve until Ctrl-C."""
    config = uvicorn.Config(
        app,
        log_level="critical",  # pages show their errors
        access_log=False,  # it would show the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,  # open pages keep their connections
    )
    uvicorn.Server(config).run(sockets=[at])
