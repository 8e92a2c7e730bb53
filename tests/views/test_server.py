"""Who may see the pages of `keel ui`, and that no run directory breaks one."""

import shutil

import pytest
from views_fixtures import HOSTILE, TOKEN, Pages, damaged_runs

from keel.views.server import SuperLinkNodes, listening
from tests.tools.run_directories import make_run


@pytest.fixture
def pages(tmp_path):
    """Pages over one run."""
    make_run(tmp_path / "runs" / "one", {"method": "fedavg"}, 3)
    return Pages(tmp_path / "runs")


def test_without_the_token_nothing_is_shown(pages):
    run = pages.id_of("one")
    cookie = next(iter(pages.cookies))
    for path in ("/", "/rows", f"/run/{run}", f"/run/{run}/data", "/static/page.js", "/compare"):
        assert pages.get(path, cookies={}).status_code == 403
        assert pages.get(path, cookies={cookie: "wrong"}).status_code == 403
        assert pages.get(f"{path}?token=wrong").status_code == 403
        assert pages.get(path).status_code == 200


def test_the_token_of_the_link_becomes_a_cookie_that_no_script_reads(pages):
    answer = pages.get(f"/compare?run=x&token={TOKEN}", cookies={})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/compare?run=x"
    assert "HttpOnly" in answer.headers["set-cookie"]
    twice = pages.get(f"http://127.0.0.1:8777//evil.example/?token={TOKEN}")
    assert twice.headers["location"] == "/evil.example/"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8777"},
        {"host": "[::1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
def test_a_foreign_host_or_origin_is_refused(pages, headers):
    assert pages.get("/", headers=headers).status_code == 403
    forwarded = {"host": "localhost:9000", "origin": "http://localhost:9000"}  # by ssh
    assert pages.get("/", headers=forwarded).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(pages, method):
    assert pages.get(f"/?token={TOKEN}", method).status_code == 405


def test_no_answer_is_stored_framed_or_says_where_it_came_from(pages):
    for answer in (pages.get(f"/?token={TOKEN}"), pages.get("/"), pages.get("/", cookies={})):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "path",
    [
        "/static/%2e%2e/store.py",
        "/run/%2e%2e%2fetc%2fpasswd",
        "/run/{}/picture?name=../one/config.json",
        "/run/{}/picture?name=config.json",
        "/run/{}/picture?name=/etc/passwd",
        "/run/0123456789abcdef",
        "/openapi.json",
    ],
)
def test_no_other_file_is_served(pages, path):
    answer = pages.get(path.format(pages.id_of("one")))
    assert answer.status_code == 404
    assert '<a href="/">All runs</a>' in answer.text


def test_a_picture_of_the_run_is_served_as_png(pages, tmp_path):
    folder = tmp_path / "runs" / "one" / "diagnostics"
    folder.mkdir()
    (folder / "cka.png").write_bytes(b"<script>alert(1)</script>")
    answer = pages.get(f"/run/{pages.id_of('one')}/picture?name=diagnostics/cka.png")
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_only_what_is_new_is_sent(pages, tmp_path):
    run = pages.id_of("one")
    for path in (f"/run/{run}/data?", "/rows?", f"/compare/data?run={run}"):
        version = pages.get(path).json()["version"]
        again = f"{path}&version={version}"
        if path != "/rows?":  # which has the ages of runs
            assert pages.get(again).status_code == 204
        with (tmp_path / "runs" / "one" / "history.jsonl").open("a") as file:
            file.write(" ")
        assert pages.get(again).status_code == 200


def test_a_comparison_says_that_a_selected_run_is_gone(pages, tmp_path):
    make_run(tmp_path / "runs" / "two", {"method": "moon"}, 3)
    query = f"run={pages.id_of('one')}&run={pages.id_of('two')}"
    shutil.rmtree(tmp_path / "runs" / "two")
    tables = pages.get(f"/compare/data?{query}").json()["html"]["tables"]
    assert "cannot be read: 1." in tables
    shutil.rmtree(tmp_path / "runs" / "one")
    assert "None of the selected runs" in pages.get(f"/compare?{query}").text


def test_damaged_run_directories_are_shown_as_such(tmp_path):
    names = damaged_runs(tmp_path)
    pages = Pages(tmp_path)
    table = pages.get("/").text
    assert all(f">{name}</a>" in table for name in names)
    ids = {name: pages.id_of(name) for name in names}
    status = {}
    for name, run in ids.items():
        assert pages.get(f"/run/{run}").status_code == 200, name
        answer = pages.get(f"/run/{run}/data")
        assert answer.status_code == 200, name
        status[name] = answer.json()["html"]["status"]
    for file in ("config.json", "history.jsonl"):
        assert file in status[f"binary-{file}"]
        assert file in status[f"empty-{file}"]
    assert "round 2 of 3" in status["half-written"]
    query = "&".join(f"run={run}" for run in ids.values())
    for path in ("/compare", "/compare/data", "/compare.csv", "/compare.tex"):
        assert pages.get(f"{path}?{query}").status_code == 200


def test_hostile_names_are_escaped(tmp_path):
    keys = {"method": HOSTILE, "model": HOSTILE, "source": f"npz:{HOSTILE}"}
    run = make_run(tmp_path / "<b>run", keys, 3, [HOSTILE, "b"], status=f"failed: {HOSTILE}")
    (run / "run.log").write_text(HOSTILE)
    pages = Pages(tmp_path)
    [row] = pages.store.rows()
    for path in ("/", f"/run/{row['id']}", f"/compare?run={row['id']}", "/compare.csv"):
        text = pages.get(path).text
        assert "<img" not in text
        assert "<b>run" not in text
        assert "\x1b" not in text
    for path in (f"/run/{row['id']}/data", f"/compare/data?run={row['id']}"):
        assert "<img" not in pages.get(path).text


def test_only_this_machine_is_answered_and_a_taken_port_is_named():
    with listening(0) as at:
        host, port = at.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(ValueError, match=f"--port {port}"):
            listening(port)


def test_a_superlink_that_cannot_be_asked_is_named():
    def fail():
        raise RuntimeError("no such <connection>")

    nodes = SuperLinkNodes(fail)
    nodes.ask()
    assert (nodes.online, "connection" in nodes.problem, "<" in nodes.problem) == (
        None,
        True,
        False,
    )
    nodes.nodes = lambda: [{"node-id": "7", "status": "online"}]
    nodes.ask()
    assert (nodes.online, nodes.problem) == ({7: "online"}, "")
