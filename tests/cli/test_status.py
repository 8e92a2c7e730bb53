"""`keel status --follow`: one run until it ends."""

import fcntl
import io
import json
from contextlib import contextmanager
from random import Random

import pytest
from rich.console import Console

from keel.cli import status
from tests.tools.run_directories import append_round, line_of, make_run


@contextmanager
def running(directory):
    """A living process writes the run."""
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_is_followed_until_it_ends(tmp_path, monkeypatch, is_terminal):
    run = make_run(tmp_path / "a", {"method": "moon"}, 3, num_written=1, status="running")
    out, waits = io.StringIO(), 0
    console = Console(file=out, width=120, force_terminal=is_terminal)

    def wait(seconds):
        nonlocal waits
        waits += 1
        if waits < 3:
            append_round(run, line_of(waits + 1, Random(0)))
        else:
            (run / "summary.json").write_text(json.dumps({"status": "stopped"}))
            lock.__exit__(None, None, None)

    monkeypatch.setattr(status.time, "sleep", wait)
    lock = running(run)
    lock.__enter__()
    status.follow_run(run, console)
    text = out.getvalue()
    if is_terminal:
        assert "round     3 of 3" in text
        assert "contrastive" in text
    else:
        lines = text.splitlines()
        assert [line.split()[:2] for line in lines[:3]] == [["round", f"{i}/3"] for i in (1, 2, 3)]
        assert lines[3:] == ["stopped"]


def test_names_from_the_run_send_the_terminal_no_control_characters(tmp_path):
    run = make_run(tmp_path / "a", {"method": "moon"}, 1)
    append_round(run, line_of(2, Random(0)) | {"losses": {"\x1b[31m[red]": 1.0}})
    out = io.StringIO()
    Console(file=out, width=120).print(status.live_view(status.SavedRun(run)))
    assert "[red]" in out.getvalue()
    assert "\x1b[31m" not in out.getvalue()


def test_json_is_of_one_moment(refusal):
    assert "--follow and --json" in refusal("status", "--follow", "--json")
