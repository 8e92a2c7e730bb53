"""The client of a SuperLink: failures that pass, and those that do not."""

import json
import subprocess

import pytest

import keel.deployment.superlink
from keel.deployment.__main__ import check_database
from keel.deployment.superlink import SuperLinkClient


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr(keel.deployment.superlink, "poll_s", 0.002)
    return SuperLinkClient(tmp_path, "localhost:1", tmp_path / "ca.pem")


ended = {"run-id": "7", "status": "finished:completed"}


def replies(client, monkeypatch, looks):
    """Let the client find these lists of runs, one after the other."""
    left = iter(looks)

    def flwr(*words):
        look = next(left)
        if isinstance(look, Exception):
            raise look
        return json.dumps({"runs": [look]})

    monkeypatch.setattr(client, "flwr", flwr)


def test_a_failing_request_is_repeated(client, monkeypatch):
    away, hangs = RuntimeError("unavailable"), RuntimeError("timed out")
    looks = [{"run-id": "7", "status": "running"}, *(20 * [away, hangs]), ended]
    replies(client, monkeypatch, looks)
    assert client.wait(7, 60) == "finished:completed"


def test_a_superlink_that_does_not_know_the_run_ends_the_wait(client, monkeypatch):
    replies(client, monkeypatch, [RuntimeError("unavailable"), ended])
    with pytest.raises(ValueError, match="run 8"):
        client.wait(8, 60)


def test_a_superlink_that_never_answers_is_a_timeout(client, monkeypatch):
    def unavailable(*words):
        raise RuntimeError("unavailable")

    monkeypatch.setattr(client, "flwr", unavailable)
    with pytest.raises(TimeoutError, match="run 7"):
        client.wait(7, 0.1)


def test_a_command_that_hangs_is_an_error_of_one_line(client, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match="flwr stop 7 deployment: timed out"):
        client.stop(7)


def test_a_database_that_cannot_be_used_is_named_and_its_directory_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for elsewhere in (":flwr-in-memory:", "sqlite:///x/y.db"):
        check_database(elsewhere)
    assert not list(tmp_path.iterdir())
    check_database(str(tmp_path / "srv/keel/superlink.db"))
    assert (tmp_path / "srv/keel").is_dir()
    (tmp_path / "damaged.db").write_bytes(b"no database" * 100)
    (tmp_path / "file").touch()
    for name in ("damaged.db", "file/x.db"):
        with pytest.raises(SystemExit, match=str(tmp_path / name)):
            check_database(str(tmp_path / name))
