"""Who may see the pages of `keel ui`, and what they hold, whatever the run directories hold."""

import contextlib
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest
from views_fixtures import HOSTILE, TOKEN, Pages, damaged_runs

from keel.cli.main import main
from keel.views.charts import static_file
from keel.views.server import SuperLinkNodes, listening, run_rows
from tests.tools.run_directories import append_round, line_of, make_run

LOOK = """
import json, sys
from pathlib import Path
from views_fixtures import Pages
pages = Pages(Path(sys.argv[1]))
runs = list(pages.store.runs())
for run in runs:
    for part in ("/data", "/clients", "/labels"):
        assert pages.get(f"/run/{run}{part}").status_code == 200
print(json.dumps([pages.get("/").text, *(pages.get(f"/run/{run}").text for run in runs)]))
"""


@pytest.fixture
def pages(tmp_path):
    """Pages over one run."""
    make_run(tmp_path / "runs" / "one", {"method": "fedavg"}, 3)
    return Pages(tmp_path / "runs")


def test_without_the_token_nothing_is_shown(pages):
    run = pages.id_of("one")
    for path in ("/", "/rows", f"/run/{run}", f"/run/{run}/data", "/static/page.js", "/compare"):
        assert pages.get(path, cookies={}).status_code == 403
        assert pages.get(path, cookies={pages.app.cookie: "wrong"}).status_code == 403
        assert pages.get(f"{path}?token=wrong").status_code == 403
        assert pages.get(path).status_code == 200


def test_the_token_of_the_link_becomes_a_cookie_that_no_script_reads(pages):
    answer = pages.get(f"/compare?run=x&token={TOKEN}", cookies={})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/compare?run=x"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "samesite=lax" in answer.headers["set-cookie"].lower()
    twice = pages.get(f"http://127.0.0.1:8777//evil.example/?token={TOKEN}")
    assert twice.headers["location"] == "/evil.example/"


@pytest.mark.parametrize("path", ["/%5Cevil.example", "/run/%E2%86%92", "/a%3Fb", "/a%0D%0Ab"])
def test_the_first_visit_leads_to_the_path_of_the_link(pages, path):
    answer = pages.get(f"{path}?token={TOKEN}", cookies={})
    assert answer.status_code == 303
    assert answer.headers["location"] == path


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8777"},
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"host": "[::1"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
    ],
)
def test_a_foreign_host_or_origin_is_refused(pages, headers):
    assert pages.get("/", headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:8777"])
def test_a_forwarded_port_is_let_in(pages, host):
    # cookies belong to the name in the address
    answer = pages.get(f"/?token={TOKEN}", headers={"host": host, "origin": f"http://{host}"})
    assert answer.status_code == 303


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(pages, method):
    for path in ("/", f"/?token={TOKEN}"):
        assert pages.get(path, method).status_code == 405


def test_no_answer_is_stored_framed_or_says_where_it_came_from(pages):
    """The address of the first one has the token."""
    link = f"/?token={TOKEN}"
    for answer in (pages.get(link), pages.get("/"), pages.get("/", cookies={}), pages.get("/no")):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_pages_name_no_other_host_and_have_no_script_in_them(pages):
    run = pages.id_of("one")
    for path in ("/", f"/run/{run}", f"/compare?run={run}", "/deployment", "/static/page.css"):
        answer = pages.get(path)
        assert not re.search(r"(src|href|action|url)\s*[=(]\s*[\"']?(https?:)?//", answer.text)
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+\s*=", answer.text)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy


@pytest.mark.parametrize(
    "path",
    [
        "/static/../store.py",
        "/static/%2e%2e/store.py",
        "/run/../../etc/passwd",
        "/run/%2e%2e%2fetc%2fpasswd",
        "/run/{}/picture?name=../one/config.json",
        "/run/{}/picture?name=config.json",
        "/run/{}/picture?name=/etc/passwd",
        "/run/{}/picture?name=linked.png",
        "/docs",
        "/openapi.json",
    ],
)
def test_no_other_file_is_served(pages, tmp_path, path):
    (tmp_path / "runs" / "one" / "linked.png").symlink_to("/etc/passwd")
    assert pages.get(path.format(pages.id_of("one"))).status_code == 404


@pytest.mark.parametrize("folder", ["diagnostics", "diagnostics-models"])  # a run's, the command's
def test_a_picture_of_the_run_is_served_as_png(pages, tmp_path, folder):
    (tmp_path / "runs" / "one" / folder).mkdir()
    (tmp_path / "runs" / "one" / folder / "cka.png").write_bytes(b"<script>alert(1)</script>")
    answer = pages.get(f"/run/{pages.id_of('one')}/picture?name={folder}/cka.png")
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_directory_without_runs_says_how_to_start_one(pages, tmp_path):
    (tmp_path / "empty").mkdir()
    assert '<p id="none-yet">' in Pages(tmp_path / "empty").get("/").text
    assert '<p id="none-yet" hidden>' in pages.get("/").text


def test_a_comparison_asks_again_for_the_runs_that_it_leaves_out(pages):
    """Its form lacked them: the first answer to its script removed the note about them."""
    text = pages.get(f"/compare?run={pages.id_of('one')}&run=gone").text
    form = re.findall(r'<input type="hidden" name="run" value="(.*?)">', text)
    assert form == [pages.id_of("one"), "gone"]


def test_a_comparison_says_that_a_selected_run_is_gone(pages, tmp_path):
    make_run(tmp_path / "runs" / "two", {"method": "moon"}, 3)
    query = f"run={pages.id_of('one')}&run={pages.id_of('two')}"
    shutil.rmtree(tmp_path / "runs" / "two")
    tables = pages.get(f"/compare/data?{query}").json()["html"]["tables"]
    assert "Selected runs that are not shown: 1." in tables
    shutil.rmtree(tmp_path / "runs" / "one")
    assert "None of the selected runs can be shown" in pages.get(f"/compare?{query}").text


def test_an_unknown_address_leads_back_to_the_runs(pages):
    for path in ("/nothing", "/run/0123456789abcdef"):
        answer = pages.get(path)
        assert answer.status_code == 404
        assert '<a href="/">All runs</a>' in answer.text


def test_a_finished_run_has_no_so_far_and_its_keys_are_counted(pages):
    run = pages.id_of("one")
    assert "so far" not in pages.get(f"/run/{run}/data").json()["html"]["status"]
    assert "1 key set by the user" in pages.get(f"/run/{run}").text


def test_a_picture_whose_name_is_no_text_breaks_no_page(pages, tmp_path):
    for name in (b"a b&#?.png", b"\xff.png"):
        Path(os.fsdecode(os.fsencode(tmp_path / "runs" / "one") + b"/" + name)).write_bytes(b"")
    run = pages.id_of("one")
    shown = pages.get(f"/run/{run}/data").json()["html"]["pictures"]
    addresses = re.findall('src="([^"]*)"', shown)
    assert len(addresses) == 1
    assert pages.get(addresses[0]).status_code == 200


def test_damaged_run_directories_are_shown_as_such(tmp_path):
    names = damaged_runs(tmp_path)
    pages = Pages(tmp_path)
    table = pages.get("/").text
    assert all(f">{name}</a>" in table for name in names)
    for name in names:
        run = pages.id_of(name)
        for part in ("", "/data", "/clients", "/labels"):
            assert pages.get(f"/run/{run}{part}").status_code == 200, (name, part)
    ids = "&".join(f"run={pages.id_of(name)}" for name in names)
    for path in ("/compare", "/compare/data", "/compare.csv", "/compare.tex"):
        assert pages.get(f"{path}?{ids}").status_code == 200
    assert pages.get("/deployment").status_code == 200
    assert "config.json is damaged" in pages.get(f"/run/{pages.id_of('deep-config')}").text
    assert "config.json is damaged" in pages.get(f"/run/{pages.id_of('wrong-config')}").text
    status = {
        name: pages.get(f"/run/{pages.id_of(name)}/data").json()["html"]["status"]
        for name in ("wrong-history", "half-written", "deep-config")
    }
    assert "round" not in status["deep-config"]
    assert "history.jsonl, line 1 is damaged" in status["wrong-history"]
    assert "round 2 of 3" in status["half-written"]
    assert "root:" not in pages.get(f"/run/{pages.id_of('linked')}/data").text


def test_a_history_that_lacks_a_round_is_said_to_be_damaged(tmp_path):
    history = make_run(tmp_path / "a", {"method": "fedavg"}, 4) / "history.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    history.write_text("".join([lines[0], lines[3]]))
    pages = Pages(tmp_path)
    shown = pages.get(f"/run/{pages.id_of('a')}/data").json()["html"]["status"]
    assert "history.jsonl is damaged" in shown
    [row] = run_rows(pages.store)
    assert row["state"].startswith("history.jsonl is damaged")
    assert row["kind"] == "bad"


@pytest.mark.parametrize("has_summary", [True, False])
def test_a_killed_run_has_the_numbers_of_its_history_not_of_an_older_summary(tmp_path, has_summary):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 9, num_written=2, status="running")
    for number, accuracy in ((3, 0.75), (4, 0.5)):
        line = line_of(number, Random(0)) | {"global": {"accuracy": accuracy, "loss": 1.0}}
        append_round(run, line)
    if not has_summary:
        (run / "summary.json").unlink()
    (row,) = run_rows(Pages(tmp_path).store)
    assert (row["state"], row["done"], row["accuracy"]) == ("interrupted", 4, 0.5)
    assert row["best"] == 0.75


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("round", 10**400, id="round"),
        ("global", {"accuracy": 1e308, "loss": 1.7e308}),
        ("losses", {"supervised": 1.7e308}),
        ("seconds", {"training": 1.7e308, "aggregation": 1.7e308}),
        ("bytes_down", 17 * 10**307),
        ("local_global", {"mean": 0.5, "worst_decile": 0.4, "clients": {"a": 1e308, "b": 0.5}}),
        ("local_global", {"mean": 0.5, "worst_decile": 0.4, "clients": {"a": -1e308, "b": 1}}),
    ],
)
def test_numbers_near_the_limit_of_floats_break_no_page(tmp_path, key, value):
    for seed in range(2):
        path = make_run(tmp_path / f"run-{seed}", {"seed": seed}, 3, ["a", "b"]) / "history.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1][key] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pages = Pages(tmp_path)
    runs = [pages.id_of(f"run-{seed}") for seed in range(2)]
    for part in ("", "/data", "/clients"):
        assert pages.get(f"/run/{runs[0]}{part}").status_code == 200
    for options in ("x=seconds", "x=bytes", "curve=loss.supervised", "smooth=0.5"):
        for page in ("compare/data", "compare.csv"):
            assert pages.get(f"/{page}?run={runs[0]}&run={runs[1]}&{options}").status_code == 200


@pytest.mark.end_to_end
@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="no setpriv")
def test_what_may_not_be_read_is_shown_as_such(tmp_path):
    """Root reads everything: here without the capability to."""
    expected = {
        name: f"unreadable: no permission to read {name}"
        for name in ("config.json", "summary.json", "history.jsonl", "run.log")
    } | {"all": "unreadable: Permission denied"}
    for name in expected:
        run = make_run(tmp_path / f"closed-{name}", {"method": "fedavg"}, 1)
        (run if name == "all" else run / name).chmod(0)
    make_run(tmp_path / "open", {"method": "fedavg"}, 1)
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    found = subprocess.run(
        [*(drop if os.geteuid() == 0 else []), sys.executable, "-c", LOOK, tmp_path],
        env={**os.environ, "PYTHONPATH": f"{root}:{here}"},
        stdout=subprocess.PIPE,
        check=True,
    )
    (tmp_path / "closed-all").chmod(0o700)
    table, *pages = json.loads(found.stdout)
    assert ">open</a>" in table
    assert len(pages) == len(expected) + 1
    for sentence in expected.values():
        assert sentence in table
        assert sum(sentence in page for page in pages) == 1


def test_hostile_names_are_shown_and_not_executed(tmp_path):
    keys = {"method": HOSTILE, "source": HOSTILE, "model": HOSTILE, "seed": HOSTILE}
    run = make_run(tmp_path / '<img src=x onerror="alert(1)">', keys, 2, clients=[HOSTILE, "b"])
    hostile = {"left_out": {HOSTILE: HOSTILE}, "late": [HOSTILE], "losses": {HOSTILE: 1.0}}
    append_round(run, line_of(3, Random(0)) | hostile)
    (run / "summary.json").write_text(
        json.dumps({"status": HOSTILE, "num_rounds": 3, "privacy": {HOSTILE: HOSTILE}})
    )
    (run / "run.log").write_text(HOSTILE)
    (run / '"><script>.png').write_bytes(b"")
    pages = Pages(tmp_path)
    ((found, _),) = pages.store.runs().items()
    parts = ("", "/data", "/clients", "/labels")
    compared = (f"/compare?run={found}", f"/compare/data?run={found}")
    for path in ("/", "/rows", *(f"/run/{found}{part}" for part in parts), *compared):
        answer = pages.get(path)
        assert answer.status_code == 200
        assert "<img src=x" not in answer.text
        assert "<script>" not in answer.text
        assert "\x1b" not in answer.text
        assert "\\u001b" not in answer.text


def test_a_runs_page_is_sent_before_its_history_is_read(pages, monkeypatch):
    def fail(entry):
        raise AssertionError("the browser waits for this before it loads a script")

    run = pages.id_of("one")
    monkeypatch.setattr(pages.store, "history", fail)
    assert ">one</h1>" in pages.get(f"/run/{run}").text


def test_plotlys_script_comes_compressed_to_who_takes_it(pages):
    script = static_file("plotly.js").read_bytes()
    for coding, is_compressed in (("gzip", True), ("identity", False)):
        answer = pages.get("/static/plotly.js", headers={"accept-encoding": coding})
        assert ("content-encoding" in answer.headers) == is_compressed
        assert answer.content == script  # as httpx has decoded it


def test_a_look_at_what_has_not_changed_is_answered_without_content(pages, tmp_path, monkeypatch):
    base = f"/run/{pages.id_of('one')}"
    for path in ("/rows", f"{base}/data", f"{base}/clients"):
        first = pages.get(path).json()["version"]
        with monkeypatch.context() as patch:  # of a long history, it would hold up other pages
            patch.setattr("keel.views.run_page.progress", pytest.fail)
            assert pages.get(f"{path}?version={first}").status_code == 204
    append_round(tmp_path / "runs" / "one", line_of(4, Random(0)))
    news = pages.get(f"{base}/data?version={first}").json()
    assert news["charts"]["accuracy"]["data"][0]["x"] == [1, 2, 3, 4]


class Relay(socketserver.BaseRequestHandler):
    """Copies bytes to the server's port and back, as `ssh -L` does."""

    def handle(self):
        with socket.create_connection(("127.0.0.1", self.server.target)) as far:
            back = threading.Thread(target=copy_bytes, args=[far, self.request])
            back.start()
            copy_bytes(self.request, far)
            back.join()


def copy_bytes(source, target):
    with contextlib.suppress(OSError):  # the other side has gone
        while block := source.recv(1 << 16):
            target.sendall(block)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.end_to_end
def test_the_pages_work_through_another_port_while_the_run_writes(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 5, num_written=1, status="running")
    command = [sys.executable, "-m", "keel", "ui", str(tmp_path), "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay,
    ):
        try:
            link = urlsplit(server.stdout.readline().strip())
            assert server.stdout.readline().startswith("1 run in ")
            relay.target = link.port
            threading.Thread(target=relay.serve_forever, daemon=True).start()
            base = f"http://127.0.0.1:{relay.server_address[1]}"
            assert relay.server_address[1] != link.port
            with httpx.Client(base_url=base, follow_redirects=True, timeout=60) as client:
                first = client.get(f"/?{link.query}", headers={"origin": base})
                assert (first.status_code, str(first.url)) == (200, f"{base}/")
                page = re.search(r"/run/\w+", first.text)[0]
                assert client.get(page).status_code == 200
                news = client.get(f"{page}/data", headers={"origin": base}).json()
                same = f"{page}/data?version={news['version']}"
                assert client.get(same).status_code == 204
                append_round(run, line_of(2, Random(0)))
                later = client.get(same).json()
                assert later["charts"]["accuracy"]["data"][0]["x"] == [1, 2]
                direct = {"origin": f"http://127.0.0.1:{link.port}"}
                assert client.get(page, headers=direct).status_code == 403
        finally:
            server.terminate()
            relay.shutdown()


def test_the_folder_of_the_connection_to_a_superlink_goes_with_the_server(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        "keel.views.server.serve", lambda app, at: folders.extend(tmp_path.glob("keel-ui-*"))
    )
    assert main(["ui", str(tmp_path), "--port", "0", "--federation", "127.0.0.1:1"]) == 0
    assert len(folders) == 1
    assert not folders[0].exists()


def test_only_this_machine_is_answered():
    with listening(0) as at:
        assert at.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: Address already in use; choose"):
            listening(port)


def test_a_superlink_that_cannot_be_asked_is_named():
    def fail():
        raise RuntimeError("flwr supernode list: no such <connection>")

    nodes = SuperLinkNodes(fail)
    nodes.ask()
    assert nodes.problem == "flwr supernode list: no such ‹connection›"
    nodes.nodes = lambda: [{"node-id": "7", "status": "online"}]
    nodes.ask()
    assert (nodes.online, nodes.problem) == ({7: "online"}, "")
