"""Shared by the tests of the doctor's checks and of deployments."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from run_fixtures import SMALL, wait_until
from typer.testing import CliRunner

from keel.cli.doctor import app
from keel.deployment.loopback import Loopback
from protocol.config import app_folder

limit_s = 300  # for one round
LOOPBACK_CLIENTS = 2
LOOPBACK_KEYS = {key: value for key, value in SMALL.items() if key != "lr"} | {  # has its own
    "method": "fedreco",
    "fedreco.eta-0": 0.5,
    "local-test-fraction": 0.2,
    "num-rounds": 3,
    "round-timeout": 250.0,
    "device": "cpu",
}


class QuietLoopback(Loopback):
    """Its processes poll a third as often: a deployment that waits for a test took half a core."""

    def environment(self, owner: str) -> dict[str, str]:
        slower = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3", "KEEL_POLL_S": "0.5"}
        return super().environment(owner) | slower


@contextlib.contextmanager
def refusing_proxy() -> Iterator[tuple[dict[str, str], list[bytes]]]:
    """(Variables that name a proxy which refuses everything, what it was asked)."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        stop = threading.Event()

        def refuse() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        asked.append(connection.recv(200))
                        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        yield dict.fromkeys(names, url), asked
        stop.set()
        thread.join()


def result(findings):
    """(whether it is a problem, the text) of the only finding."""
    [finding] = list(findings)
    return finding.is_problem, finding.text


def problem(findings):
    """The text of the only finding, which has to be a problem."""
    is_problem, text = result(findings)
    assert is_problem, text
    return text


def program(path, script):
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def documented_commands(marker):
    """The only block of commands of the page on deployment that contains `marker`."""
    page = (app_folder / "docs" / "how-to" / "deployment.md").read_text()
    [found] = [block for block in page.split("```")[1::2] if marker in block]
    return found


def doctor(*words):
    """(exit status, lines) of `keel doctor`."""
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output.splitlines()


def runs(local: Loopback) -> list[Path]:
    return sorted((local.root / "server" / "keel" / "runs").glob("*"))


def new_run(local: Loopback, overrides) -> tuple[int, Path]:
    """The id and the folder of a run just submitted, once its folder is there."""
    before = set(runs(local))
    run_id = local.superlink.submit(overrides)
    deadline = time.monotonic() + limit_s
    while not (new := set(runs(local)) - before):
        assert time.monotonic() < deadline, local.log_file("serverapp-executor").read_text()
        time.sleep(0.1)
    return run_id, new.pop()


def state_of_clients(local: Loopback, run: Path) -> dict[str, set[str]]:
    """Names of the newest state files; a name holds the round and the content's digest."""
    return {
        name: {max(path.name for path in folder.glob("round-*"))}
        for name in local.clients
        if (folder := local.root / name / "keel" / "clients" / run.name / name).exists()
    }


def state_inline(run: Path) -> dict[str, set[str]]:
    return {
        folder.name: {max(path.name for path in folder.glob("round-*"))}
        for folder in (run / "clients").iterdir()
    }


def wait_for_round(run: Path, number: int) -> None:
    """Return once this round is in the history."""
    wait_until(lambda: len(lines_of(run)) >= number, limit_s)


def lines_of(run: Path) -> list[str]:
    path = run / "history.jsonl"
    return path.read_text().splitlines() if path.exists() else []
