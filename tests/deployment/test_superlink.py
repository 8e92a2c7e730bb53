"""The client of a SuperLink: failures that pass, and those that do not."""

import json
import os
import subprocess
import sys

import pytest

import keel.deployment.superlink
from keel.deployment.__main__ import check_database
from keel.deployment.superlink import SuperLinkClient


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr(keel.deployment.superlink, "poll_s", 0.002)
    return SuperLinkClient(tmp_path, "localhost:1", tmp_path / "ca.pem")


ended = {"status": "finished:completed"}


def replies(client, monkeypatch, looks):
    """Let the client find these, one after the other."""
    left = iter(looks)

    def run_info(run_id):
        look = next(left)
        if isinstance(look, Exception):
            raise look
        return look

    monkeypatch.setattr(client, "run_info", run_info)


def test_a_failing_request_is_repeated(client, monkeypatch):
    away, hangs = RuntimeError("unavailable"), RuntimeError("timed out")
    replies(client, monkeypatch, [{"status": "running"}, *(20 * [away, hangs]), ended])
    monkeypatch.setattr(client, "flwr", lambda *words: json.dumps({"runs": [{"run-id": "7"}]}))
    assert client.wait(7, 60) == "finished:completed"


def test_a_superlink_that_does_not_know_the_run_ends_the_wait(client, monkeypatch):
    replies(client, monkeypatch, [RuntimeError("Run ID not found"), ended])
    monkeypatch.setattr(client, "flwr", lambda *words: json.dumps({"runs": [{"run-id": "8"}]}))
    with pytest.raises(RuntimeError, match="not found"):
        client.wait(7, 60)


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


def test_a_missing_command_line_of_flower_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=str(tmp_path / "bin")):
        SuperLinkClient(tmp_path, "localhost:1")


def test_a_database_that_cannot_be_used_is_named_and_its_directory_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_database([f"--database={tmp_path}/srv/keel/superlink.db"])
    assert (tmp_path / "srv/keel").is_dir()
    for name in (":flwr-in-memory:", f"sqlite:///{tmp_path}/x.db", "sqlite:///:memory:"):
        check_database(["--database", name])  # which Flower takes, and are no paths
    check_database(["--database", "--insecure"])  # Flower refuses it
    assert os.listdir() == ["srv"]
    (tmp_path / "damaged.db").write_bytes(b"no database" * 100)
    (tmp_path / "file").touch()
    for name in ("damaged.db", "file/x.db"):
        with pytest.raises(SystemExit, match=str(tmp_path / name)):
            check_database(["--port", "1", "--database", str(tmp_path / name)])
