"""Runs on a deployment: submitted to a SuperLink, whose log of the run is shown."""

import math
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from keel.deployment.reach import handshake, proxy_hint
from keel.deployment.superlink import SuperLinkClient, app_directory
from keel.job import EngineOptions, Job
from keel.progress import Terminal
from protocol.options import OptionValue
from protocol.text import printable

STOP_TIMEOUT_S = 60.0  # for a run to write its summary after `flwr stop`
COMPLETED = "finished:completed"
# all that Flower says of a ServerApp that a signal ended, such as that of `keel stop`
ENDED_BY_SIGNAL = "Task failed with unknown error."


def run_remotely(job: Job, terminal: Terminal) -> None:
    """Submit the run and follow its log until it has ended; Ctrl-C stops the run there.

    KeyboardInterrupt if `keel stop` ended it on the server. RuntimeError, one line, if it failed,
    or if the SuperLink cannot be reached. A log that breaks
    off, as when the SuperLink restarts, does not end the run.
    """
    options = job.options
    with app_directory() as app, tempfile.TemporaryDirectory(prefix="keel-") as folder:
        home = Path(folder) if ":" in options.federation else None
        client = SuperLinkClient(home, options.federation, options.root_certificates)
        overrides = dict(job.overrides)
        if not overrides.get("resume"):  # named here, so that it can be resumed by its name
            named = f"{time.strftime('%Y%m%d-%H%M%S')}-{job.config.method_table}"
            overrides["run-name"] = overrides.get("run-name") or named
        terminal.phase(f"submitting to {options.federation}")
        try:
            run_id = client.submit(overrides, app)
        except RuntimeError as error:
            raise RuntimeError(unreachable(options) or str(error)) from error
        terminal.resume_command = resume_command(overrides, options)
        terminal.phase(f"running on {options.federation}")
        try:
            show_log(client, run_id, terminal)
            status = client.wait(run_id, math.inf)
        except BaseException:
            terminal.phase("stopping")
            with suppress(RuntimeError, TimeoutError):
                client.stop(run_id)
                client.wait(run_id, STOP_TIMEOUT_S)
            raise
        if status != COMPLETED:
            details = client.run_info(run_id)["status-details"]
            if details == ENDED_BY_SIGNAL:
                raise KeyboardInterrupt
            raise RuntimeError(f"run {run_id} of the SuperLink: {status}: {details}")


def show_log(client: SuperLinkClient, run_id: int, terminal: Terminal) -> None:
    """Print the run's log as it grows, until the run ends or the SuperLink no longer sends it."""
    with subprocess.Popen(
        client.command("log", str(run_id), client.connection, "--stream"),
        env=client.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # so that Ctrl-C reaches this process only
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                terminal.print(printable(line.rstrip()), markup=False)
        finally:
            process.terminate()


def unreachable(options: EngineOptions) -> str:
    """Why the SuperLink cannot be reached, such as a certificate or a proxy; "" if it can.

    Flower says only that the SuperLink is unavailable.
    """
    if ":" not in options.federation or not options.root_certificates:
        return ""
    hint = proxy_hint(options.federation)
    try:
        handshake(options.federation, options.root_certificates)
        reason = "Flower's command line gets no answer" if hint else ""
    except (OSError, ValueError) as error:
        reason = str(error)
    return reason and f"the SuperLink {options.federation} cannot be reached: {reason}{hint}"


def resume_command(overrides: Mapping[str, OptionValue], options: EngineOptions) -> str:
    """The command that continues a run of a deployment; its directory is on the server."""
    name = str(overrides.get("resume") or overrides["run-name"])
    if (folder := str(overrides.get("output-dir", ""))) and not overrides.get("resume"):
        name = f"{folder}/{name}"
    command = ["keel", "resume", name, "--engine", "deployment"]
    command += ["--federation", options.federation]
    if options.root_certificates:
        command += ["--root-certificates", str(options.root_certificates)]
    return shlex.join(command)
