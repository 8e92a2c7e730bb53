"""The whole under Flower's own simulation: `flwr run` of every method, and the same bits as inline.

One SuperLink for all tests of this file, with a home and ports of its own; what it started is ended
by process id. Every run costs a Ray start, so the tests share runs where they can.
"""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from client_app.methods import METHODS
from server_app.inline import parse_overrides, run_inline

project = Path(__file__).parent.parent
flwr = str(Path(sys.executable).parent / "flwr")
common = "num-rounds=2 lr=0.05 local-test-fraction=0.2 batch-size=32"
in_test_time = 280


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(home: Path) -> list[int]:
    """Ids of the processes whose environment names this Flower home."""
    mark = f"FLWR_HOME={home}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a Flower of our own."""
    home = tmp_path_factory.mktemp("flower")
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "KEEL_HOME": str(home / "keel"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    yield environment
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(home):
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while processes_of(home) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert not processes_of(home)


def flwr_run(
    environment: dict[str, str], overrides: str, federation: str
) -> tuple[Path | None, str]:
    """(run folder or None, all output) of one `flwr run . --stream`."""
    done = subprocess.run(
        [
            flwr,
            "run",
            ".",
            "--stream",
            "--run-config",
            overrides,
            "--federation-config",
            federation,
        ],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=in_test_time,
        check=False,
    )
    output = done.stdout + done.stderr
    found = re.findall(r"^folder: (.+)$", output, re.M)
    return (Path(found[-1]) if found else None), output


def model_hash(folder: Path) -> str:
    arrays = sorted(load_file(folder / "model.safetensors").items())
    return hashlib.sha256(b"".join(a.numpy().tobytes() for _, a in arrays)).hexdigest()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_flwr_run_of_every_method(flower: dict[str, str], method: str) -> None:
    """Two rounds, two of three clients each: one joins in round 2."""
    folder, output = flwr_run(
        flower,
        f'method="{method}" model="cnn-fedreco" fraction-train=0.67 seed=1 {common}',
        "num-supernodes=3 client-resources-num-cpus=1",
    )
    assert folder, output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert all(len(line["participants"]) == 2 and not line["left_out"] for line in lines)
    assert lines[0]["participants"] != lines[1]["participants"]
    assert "global" in lines[1] or "personal" in lines[1]
    for name in ("accuracy.png", "labels.png", "model.safetensors", "config.json"):
        assert (folder / name).stat().st_size > 0


@pytest.mark.parametrize("method", ["fedintr", "fedreco"])
def test_one_worker_two_workers_and_inline_give_the_same_bits(
    flower: dict[str, str], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = f'method="{method}" model="cnn-fedreco" flip=true local-epochs=2 {common}'
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    inline = run_inline(parse_overrides(overrides.split()), num_clients=3)
    cores = os.cpu_count() or 1
    for cpus in {cores, 1}:  # one worker; as many as there are cores
        folder, output = flwr_run(
            flower, overrides, f"num-supernodes=3 client-resources-num-cpus={cpus}"
        )
        assert folder, output
        assert model_hash(folder) == model_hash(inline)


def test_a_mistake_in_the_config_is_one_clear_line(flower: dict[str, str]) -> None:
    folder, output = flwr_run(flower, 'method="fedinter"', "num-supernodes=2")
    assert folder is None
    assert "method = 'fedinter' is unknown; did you mean fedintr?" in output


def test_the_tree_stays_as_it_was(flower: dict[str, str]) -> None:
    """The CLI rewrites a pyproject.toml that it thinks is outdated; not ours."""
    before = (project / "pyproject.toml").read_bytes()
    _, output = flwr_run(flower, "num-rounds=1", "num-supernodes=2 client-resources-num-cpus=1")
    assert (project / "pyproject.toml").read_bytes() == before, output
