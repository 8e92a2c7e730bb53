"""Runs on a deployment as the machine sees them that submits them; the SuperLink is a stand-in."""

import subprocess
from contextlib import nullcontext

import pytest

import keel.remote
from keel.deployment.credentials import make_credentials
from keel.deployment.superlink import SuperLinkClient, free_ports
from keel.engine import execute, prepare
from keel.job import Engine, EngineOptions
from keel.progress import Terminal
from keel.remote import ENDED_BY_SIGNAL


class SuperLink:
    """Stands in for `flwr`: a run whose log breaks off, and which then ends with `status`."""

    def __init__(self, status):
        self.status, self.stopped, self.submitted = status, [], {}

    def submit(self, client, overrides, app):
        self.submitted = overrides
        return 12

    def wait(self, client, run_id, timeout_s):
        if self.status == "Ctrl-C" and not self.stopped:
            raise KeyboardInterrupt
        return self.status

    def stop(self, client, run_id):
        self.stopped.append(run_id)


@pytest.fixture
def job(home):
    options = EngineOptions(Engine.deployment, federation="localhost:1")
    return prepare({"method": "fedprox", "output-dir": "/on/the/server"}, options)


@pytest.mark.parametrize(
    ("status", "details", "ends"),
    [
        ("finished:completed", "", nullcontext()),
        ("finished:failed", "no replies", pytest.raises(RuntimeError, match="no replies")),
        ("finished:stopped", "by a user", pytest.raises(RuntimeError, match="by a user")),
        ("finished:failed", ENDED_BY_SIGNAL, pytest.raises(KeyboardInterrupt)),
        ("Ctrl-C", "", pytest.raises(KeyboardInterrupt)),
    ],
)
def test_a_run_is_followed_to_its_end_though_its_log_breaks_off(
    status, details, ends, job, monkeypatch, capsys
):
    link, popen = SuperLink(status), subprocess.Popen
    for name in ("submit", "wait", "stop"):
        method = getattr(link, name)
        monkeypatch.setattr(SuperLinkClient, name, lambda *words, call=method: call(*words))
    info = {"status-details": details}
    monkeypatch.setattr(SuperLinkClient, "run_info", lambda *_: info)
    monkeypatch.setattr(
        keel.remote.subprocess, "Popen", lambda _, **given: popen(["echo", "round 1"], **given)
    )
    with ends:
        assert execute(job, Terminal(3)) is None
    shown = capsys.readouterr().out
    assert "round 1" in shown
    assert link.stopped == ([12] if status == "Ctrl-C" else [])
    name = f"/on/the/server/{link.submitted['run-name']}"
    expected = f"keel resume {name} --engine deployment --federation localhost:1"
    assert (expected in shown) == (status == "Ctrl-C" or details == ENDED_BY_SIGNAL)


def test_why_a_superlink_cannot_be_reached_is_said(home, tmp_path):
    """Flower says that it is unavailable, be it the port, the CA or an expired certificate."""
    make_credentials(tmp_path, ["localhost"], [])
    federation = f"localhost:{free_ports(1)[0]}"
    ca = tmp_path / "ca" / "ca.pem"
    options = EngineOptions(Engine.deployment, federation=federation, root_certificates=ca)
    with pytest.raises(RuntimeError, match=f"{federation}.*refused"):
        execute(prepare({}, options), Terminal(3))
