"""A SuperLink as its users see it: Flower's command line, with limits on every wait."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.config import app_folder
from protocol.options import OptionValue

command_limit_s = 100.0
look_every_s = 2.0  # each look is a process of a second
connection = "deployment"  # name of the SuperLink in the config of Flower's command line
finished = "finished"  # how the status of a run that has ended begins
unavailable = "Connection to the SuperLink is unavailable"  # so says flwr where nobody answers
same_refusals = 5  # in a row, in the same words: it is no passing one


def toml(value: OptionValue) -> str:
    """The value as it stands in --run-config."""
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def as_words(values: Mapping[str, OptionValue]) -> str:
    """Keys and values as Flower's command lines take them."""
    return " ".join(f"{key}={toml(value)}" for key, value in values.items())


class SuperLinkClient:
    """Speaks to the SuperLink at `address` (its HTTP API) through `flwr`."""

    def __init__(self, flwr_home: Path, address: str, ca: Path, inside: Sequence[str] = ()) -> None:
        """Writes config.toml into flwr_home, which is this client's own.

        inside: what comes before each command, such as words that enter a network namespace.
        """
        self.flwr_home, self.inside = flwr_home, list(inside)
        flwr_home.mkdir(parents=True, exist_ok=True)
        (flwr_home / "config.toml").write_text(
            f'[superlink]\ndefault = "{connection}"\n\n[superlink.{connection}]\n'
            f'address = "{address}"\nroot-certificates = "{ca.absolute()}"\n'
        )

    def flwr(self, *words: str) -> str:
        """What `flwr` prints; RuntimeError, with what it said, if it fails."""
        done = subprocess.run(
            [*self.inside, "flwr", *words],
            env=environment(self.flwr_home),
            cwd=app_folder,
            capture_output=True,
            text=True,
            timeout=command_limit_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def flwr_json(self, *words: str) -> dict[str, Any]:
        """The same with --format json, read; RuntimeError where it says so."""
        printed = self.flwr(*words, "--format", "json")
        said: dict[str, Any] = json.loads(printed[printed.index("{") :])
        if said.get("success") is False:
            raise RuntimeError(f"flwr {' '.join(words)}: {said.get('error-message', said)}")
        return said

    def register(self, public_key: Path, name: str) -> None:
        """Register a client's public key."""
        self.flwr_json("supernode", "register", str(public_key), connection, "--name", name)

    def nodes(self) -> list[dict[str, Any]]:
        """The registered SuperNodes: node-id, status, ..."""
        found: list[dict[str, Any]] = self.flwr_json("supernode", "list", connection)["nodes"]
        return found

    def submit(self, overrides: Mapping[str, OptionValue]) -> int:
        """Start a run; its id."""
        words = ["--run-config", as_words(overrides)]
        return int(self.flwr_json("run", str(app_folder), connection, *words)["run-id"])

    def listed(self, run_id: int) -> dict[str, Any]:
        """What the SuperLink says of a run: status, network-traffic, ..."""
        said: dict[str, Any] = self.flwr_json("list", connection, "--run-id", str(run_id))
        row: dict[str, Any] = said["runs"][0]
        return row

    def wait(self, run_id: int, limit_s: float) -> str:
        """The status of a run once it has ended; TimeoutError if it does not.

        A SuperLink that does not answer, as one that is being restarted, is asked again. One that
        keeps refusing, as where it does not know the run, ends the wait with its RuntimeError.
        """
        deadline = time.monotonic() + limit_s
        refusals: list[str] = []  # the last ones, in the same words
        while True:
            try:
                status = str(self.listed(run_id)["status"])
                refusals = []
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                said = str(error)
                status = f"not known ({' '.join(said.split())[:300]})"
                passing = isinstance(error, subprocess.TimeoutExpired) or unavailable in said
                refusals = [] if passing else [r for r in refusals if r == said] + [said]
                if len(refusals) == same_refusals:
                    raise
            if status.startswith(finished):
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"run {run_id} is {status} after {limit_s:g} s")
            time.sleep(look_every_s)

    def stop(self, run_id: int) -> None:
        """End a run."""
        self.flwr("stop", str(run_id), connection)


def environment(flwr_home: Path) -> dict[str, str]:
    """This environment with Flower's home there, quick polls, and nothing sent to Flower."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(flwr_home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's own: 1 s
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "COLUMNS": "200",
    }
