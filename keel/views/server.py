"""The web server of `keel ui`: read-only pages on 127.0.0.1, behind a `Guard`."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from markupsafe import Markup
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from keel.saved_runs import FINISHED, INTERRUPTED, RUNNING
from keel.views import compare_page, run_page
from keel.views.charts import static_file
from keel.views.compare_page import view_of
from keel.views.guard import Guard
from keel.views.store import ANYTHING, PAGE_FILES, ShownRun, Store, id_of, stamp_of
from protocol.config import keel_version
from protocol.files import digest
from protocol.text import in_one_line, printable

STATIC = ("page.css", "page.js", "tables.js", "charts.js", "plotly.js")
POLL_NODES_S = 15.0
KINDS = {FINISHED: "good", RUNNING: "live", "stopped": "warn", INTERRUPTED: "warn"}
PARTS = ("status", "events", "log", "pictures")  # of a run's page, as they are now


def environment() -> jinja2.Environment:
    """Templates, in which everything is escaped and no control character is shown."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    found.globals |= {"keel_version": keel_version(), "ago": run_page.ago, "id_of": id_of}
    found.filters["percent"] = lambda v: "–" if v is None else f"{100 * v:.2f}"
    found.filters["line"] = in_one_line
    found.filters["kind"] = lambda state: KINDS.get(state, "bad")
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
            self.online = {int(row["node-id"]): str(row["status"]) for row in self.nodes()}
            self.problem = ""
        except Exception as error:  # shown on the page
            self.online, self.problem = None, in_one_line(error)


def create_app(store: Store, token: str, nodes: SuperLinkNodes | None = None) -> ASGIApp:
    """The pages over these runs."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=4000, compresslevel=1)
    app.middleware("http")(Guard(token))
    pages = environment()
    add_runs(app, store, pages)
    add_run(app, store, pages, nodes)
    add_comparison(app, store, pages)

    @app.exception_handler(404)
    def missing(request: Request, error: Exception) -> HTMLResponse:
        what = "run (any more)" if request.url.path.startswith("/run/") else "page"
        return page(pages, "error.html.j2", 404, problem=f"There is no such {what}.")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in STATIC:
            raise HTTPException(404)
        age = "private, max-age=3600" if name == "plotly.js" else "no-cache"
        return FileResponse(static_file(name), headers={"cache-control": age})

    return app


def page(pages: jinja2.Environment, name: str, status: int = 200, **content: Any) -> HTMLResponse:
    """A page from its template."""
    return HTMLResponse(pages.get_template(name).render(content), status)


def news(version: object, shown: str, build: Callable[[], dict[str, Any]]) -> Response:
    """What `build` makes, or 204 if `version` is the one that the page shows."""
    now = digest(repr(version).encode(errors="replace"))
    return Response(status_code=204) if now == shown else JSONResponse({"version": now, **build()})


def add_runs(app: FastAPI, store: Store, pages: jinja2.Environment) -> None:
    """The table of runs."""

    def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seeds: dict[str, set[str]] = {}
        for row in rows:
            seeds.setdefault(row["setting"] or row["id"], set()).add(row["seed"])
        return {"html": pages.get_template("rows.html.j2").render(rows=rows, seeds=seeds)}

    @app.get("/")
    def runs() -> HTMLResponse:
        rows = store.rows()
        shown = Markup(table(rows)["html"])  # escaped by its template
        return page(pages, "runs.html.j2", rows=shown, roots=list(map(str, store.roots)))

    @app.get("/rows")
    def rows(version: str = "") -> Response:
        found = store.rows()
        shown = [(row, run_page.ago(row["changed"])) for row in found]
        return news(shown, version, lambda: table(found))


def add_run(
    app: FastAPI, store: Store, pages: jinja2.Environment, nodes: SuperLinkNodes | None
) -> None:
    """The page of one run."""

    def run_of(run_id: str) -> ShownRun:
        if run := store.find(run_id):
            return run
        raise HTTPException(404)

    @app.get("/run/{run_id}")
    def run(run_id: str) -> HTMLResponse:
        found = run_of(run_id)
        content: dict[str, Any] = {
            "run": found,
            "id": run_id,
            "config": [],
            "num_set": 0,
            "scores": [],
        }
        if not found.fault:
            rows = run_page.config_rows(found)
            content |= {"config": rows, "num_set": sum(is_set for *_, is_set in rows)}
            content["scores"] = run_page.score_names(found)
        return page(pages, "run.html.j2", **content)

    @app.get("/run/{run_id}/data")
    def run_data(run_id: str, version: str = "") -> Response:
        found = run_of(run_id)
        stamp = stamp_of(found.directory, PAGE_FILES), nodes and (nodes.online, nodes.problem)
        return news(stamp, version, lambda: content_of(found, run_id))

    def content_of(run: ShownRun, run_id: str) -> dict[str, Any]:
        content: dict[str, Any] = {"state": run.state, "id": run_id, "status": None}
        content |= {"events": [], "log": run_page.log_tail(run), "pictures": run_page.pictures(run)}
        charts: dict[str, Any] = {}
        try:
            if not run.fault:
                clients = run_page.of_clients(run)
                online = nodes.online if nodes else None
                content |= {
                    "status": run_page.status(run),
                    "events": list(clients.events)[::-1],
                    "sites": run_page.site_rows(run, clients, online),
                    "nodes": nodes,
                }
                charts = run_page.main_charts(run) | run_page.client_charts(clients)
                charts |= run_page.label_chart(run)
        except ANYTHING as error:  # the files are JSON, but not as a run writes it
            content |= {"state": f"unreadable: {in_one_line(repr(error))}", "status": None}
        html = {part: pages.get_template(f"run_{part}.html.j2").render(content) for part in PARTS}
        return {"html": html, "charts": charts}

    @app.get("/run/{run_id}/picture")
    def run_picture(run_id: str, name: str) -> Response:
        found = run_of(run_id)
        if name not in run_page.pictures(found):
            raise HTTPException(404)
        return FileResponse(found.directory / name, media_type="image/png")


def add_comparison(app: FastAPI, store: Store, pages: jinja2.Environment) -> None:
    """The page of several runs, and its exports."""
    ids_of = Query(default=[], alias="run")

    def content_of(request: Request, ids: Sequence[str]) -> dict[str, Any]:
        view = view_of(request.query_params)
        found = [store.find(run_id) for run_id in dict.fromkeys(ids)]
        chosen = [run for run in found if run and is_readable(run)]
        groups = compare_page.grouped(chosen, view.by_seed)
        return {
            "view": view,
            "groups": groups,
            "header": compare_page.header(view),
            "results": compare_page.result_rows(groups, view),
            "config": compare_page.config_rows(groups),
            "num_left_out": len(found) - len(chosen),
        }

    def is_readable(run: ShownRun) -> bool:
        try:
            return not run.fault and bool(run_page.status(run))
        except ANYTHING:
            return False

    @app.get("/compare")
    def compare(request: Request, ids: list[str] = ids_of) -> HTMLResponse:
        content = content_of(request, ids)
        runs = [run for group in content["groups"] for run in group.runs]
        content |= {"choices": compare_page.choices(runs), "axes": compare_page.AXES}
        return page(pages, "compare.html.j2", ids=list(dict.fromkeys(ids)), **content)

    @app.get("/compare/data")
    def compare_data(request: Request, version: str = "", ids: list[str] = ids_of) -> Response:
        runs = [run for run_id in ids if (run := store.find(run_id))]
        query = [pair for pair in request.query_params.multi_items() if pair[0] != "version"]
        stamp = query, [stamp_of(run.directory, PAGE_FILES) for run in runs]

        def build() -> dict[str, Any]:
            content = content_of(request, ids)
            tables = pages.get_template("compare_tables.html.j2").render(content)
            figure = compare_page.chart(content["groups"], content["view"])
            return {"html": {"tables": tables}, "charts": {"compare": figure}}

        return news(stamp, version, build)

    @app.get("/compare.csv")
    @app.get("/compare.tex")
    def table(request: Request, ids: list[str] = ids_of) -> Response:
        name, content = request.url.path[1:], content_of(request, ids)
        make = compare_page.as_csv if name.endswith("csv") else compare_page.as_latex
        return Response(
            make(content["groups"], content["view"]).encode(errors="replace"),
            media_type=f"text/{'csv' if name.endswith('csv') else 'plain'}; charset=utf-8",
            headers={"content-disposition": f'attachment; filename="{name}"'},
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
