"""A SuperLink as its users see it: Flower's command line, with a timeout on every wait."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.config import app_folder
from protocol.flower_compat import superlink_unavailable
from protocol.options import OptionValue

command_timeout_s = 100.0
poll_s = 2.0  # each look takes a process a second
connection = "deployment"  # name of the SuperLink in the configuration of Flower's command line
max_refusals = 5  # consecutive and identical: then the SuperLink means it


def toml(value: OptionValue) -> str:
    """The value as a TOML literal."""
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def run_config(values: Mapping[str, OptionValue]) -> str:
    """Keys and values in the form of --run-config and --node-config."""
    return " ".join(f"{key}={toml(value)}" for key, value in values.items())


class SuperLinkClient:
    """Talks to the SuperLink at `address` (its HTTP API) through `flwr`."""

    def __init__(self, flwr_home: Path, address: str, ca: Path, prefix: Sequence[str] = ()) -> None:
        """Writes config.toml into flwr_home, a directory of this client's own.

        prefix: words before each command, such as those that enter a network namespace.
        """
        self.flwr_home, self.prefix = flwr_home, list(prefix)
        flwr_home.mkdir(parents=True, exist_ok=True)
        (flwr_home / "config.toml").write_text(
            f'[superlink]\ndefault = "{connection}"\n\n[superlink.{connection}]\n'
            f'address = "{address}"\nroot-certificates = "{ca.absolute()}"\n'
        )

    def flwr(self, *words: str) -> str:
        """The output of `flwr`; RuntimeError, with that output, if it fails or takes too long."""
        try:
            done = subprocess.run(
                [*self.prefix, "flwr", *words],
                env=environment(self.flwr_home),
                cwd=app_folder,
                capture_output=True,
                text=True,
                timeout=command_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CommandTimeout(f"flwr {' '.join(words)}: timed out") from None
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def flwr_json(self, *words: str) -> dict[str, Any]:
        """The parsed output of `flwr ... --format json`; RuntimeError if it reports a failure."""
        output = self.flwr(*words, "--format", "json")
        parsed: dict[str, Any] = json.loads(output[output.index("{") :])
        if parsed.get("success") is False:
            raise RuntimeError(f"flwr {' '.join(words)}: {parsed.get('error-message', parsed)}")
        return parsed

    def nodes(self) -> list[dict[str, Any]]:
        """The registered SuperNodes: node-id, status, ..."""
        nodes: list[dict[str, Any]] = self.flwr_json("supernode", "list", connection)["nodes"]
        return nodes

    def submit(self, overrides: Mapping[str, OptionValue], app: Path = app_folder) -> int:
        """Start a run of the Flower app in `app`; its id."""
        words = ["--run-config", run_config(overrides)]
        return int(self.flwr_json("run", str(app), connection, *words)["run-id"])

    def run_info(self, run_id: int) -> dict[str, Any]:
        """What the SuperLink knows about a run: status, network-traffic, ..."""
        listed: dict[str, Any] = self.flwr_json("list", connection, "--run-id", str(run_id))
        row: dict[str, Any] = listed["runs"][0]
        return row

    def log(self, run_id: int) -> str:
        """The log of a run's ServerApp."""
        return self.flwr("log", str(run_id), connection, "--show")

    def wait(self, run_id: int, timeout_s: float) -> str:
        """The status of a run once it has ended; TimeoutError if it does not.

        A SuperLink that does not answer, for example while it restarts, is asked again. One that
        keeps refusing, for example because it does not know the run, raises its RuntimeError.
        """
        deadline = time.monotonic() + timeout_s
        refusals: list[str] = []  # consecutive and identical
        while True:
            try:
                status = str(self.run_info(run_id)["status"])
                refusals = []
            except RuntimeError as error:
                text = " ".join(str(error).split())
                status = f"unknown ({text[:300]})"
                is_passing = isinstance(error, CommandTimeout) or superlink_unavailable in text
                refusals = [] if is_passing else [r for r in refusals if r == text] + [text]
                if len(refusals) == max_refusals:
                    raise
            if status.startswith("finished"):
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"run {run_id} is {status} after {timeout_s:g} s")
            time.sleep(poll_s)

    def stop(self, run_id: int) -> None:
        """Stop a run."""
        self.flwr("stop", str(run_id), connection)


class CommandTimeout(RuntimeError):
    """`flwr` did not end in time."""


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
