"""Where a client's state goes: never where a server's `run-dir` leads outside its own folder."""

from types import SimpleNamespace

import pytest

from client_app.node_config import state_folder
from protocol.config import resolve_config

NODE = {"name": "site-a"}


def state_of(run_dir, **node):
    request = SimpleNamespace(run_dir=str(run_dir), run_id="0a1b", config=resolve_config({}))
    return state_folder(request, NODE | node)


def folder_of(run_dir, **node):
    return state_of(run_dir, **node).folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("worker", ["", "/run/keel/worker.sock"])
@pytest.mark.parametrize("own", [{}, {"state-dir": "/elsewhere"}])
@pytest.mark.parametrize(
    "run_dir", ["..", "", "/srv/runs/..", "a/b", "/runs/../etc/x", ".hidden", "a\0b", "x" * 129]
)
def test_a_run_dir_with_odd_parts_is_refused(home, monkeypatch, worker, own, run_dir):
    monkeypatch.setenv("KEEL_WORKER", worker)
    with pytest.raises(ValueError, match="run-dir"):
        folder_of(run_dir, **own)


@pytest.mark.parametrize(
    ("worker", "own"), [("/run/keel/worker.sock", {}), ("", {"source": "folder:/data"})]
)
def test_a_deployed_client_takes_no_path_at_all(home, tmp_path, monkeypatch, worker, own):
    monkeypatch.setenv("KEEL_WORKER", worker)
    assert folder_of("20260101-moon", **own) == home / "clients/20260101-moon/site-a"
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="run-dir"):
        folder_of(tmp_path, **own)


def test_a_worker_takes_a_state_dir_below_its_clients_folder_only(home, monkeypatch):
    """The node config passes through a run's code, which must not write beside the ledger."""
    monkeypatch.setenv("KEEL_WORKER", "/run/keel/worker.sock")
    inside = home / "clients" / "disk"
    assert folder_of("a", **{"state-dir": str(inside)}) == inside / "a" / "site-a"
    for outside in ("/elsewhere", home / "privacy", home / "clients/../privacy", "privacy"):
        with pytest.raises(ValueError, match="state-dir"):
            folder_of("a", **{"state-dir": str(outside)})
    (home / "clients").mkdir(parents=True)
    (home / "clients" / "link").symlink_to(home)
    with pytest.raises(ValueError, match="state-dir"):
        folder_of("a", **{"state-dir": str(home / "clients" / "link" / "privacy")})


@pytest.mark.parametrize(
    "name",
    [
        *("reset-state", "run-id", "state-was-reset-00003", "state-was-reset-00003.set-aside"),
        *(f"round-00000-0123456789abcdef.{end}" for end in ("safetensors", "set-aside")),
    ],
)
def test_no_folder_has_the_name_of_a_file_of_client_state(home, monkeypatch, name):
    """A run's code could so allow the reset of another run's state."""
    monkeypatch.setenv("KEEL_WORKER", "/run/keel/worker.sock")
    clients = home / "clients"
    for run, node in (
        ("site-a", {"name": name, "state-dir": str(clients / "other-run")}),
        (name, {"name": "x", "state-dir": str(clients / "other-run" / "site-a")}),
        ("x", {"name": "x", "state-dir": str(clients / "other-run" / "site-a" / name)}),
    ):
        with pytest.raises(ValueError, match=name):
            folder_of(run, **node)
