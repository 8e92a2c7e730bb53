"""`keel stop`: the signal of Ctrl-C to the process of a run."""

import os
import signal
import time
from pathlib import Path

from keel.cli.arguments import OptionalRun
from keel.saved_runs import SavedRun, all_runs, find_run, holders, only_run
from server_app.run_reader import LOCK_FILE

STOP_TIMEOUT_S = 90.0


def stop(run: OptionalRun = "") -> None:
    """Stop a run cleanly, as Ctrl-C in its terminal does; `keel resume` continues it.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one; it can be left out if only
    one run is running.
    """
    running = [] if run else [each for each in all_runs() if each.is_running]
    saved = find_run(run) if run else only_run(running, "can be stopped", "keel stop")
    if not saved.is_running:
        raise ValueError(f"{saved.name} is not running: {saved.state}")
    pid = next(iter(holders(saved.directory / LOCK_FILE)), None)
    if pid is None:
        raise RuntimeError(
            f"cannot determine which process writes {saved.directory}: press Ctrl-C where it runs"
        )
    if is_flower(pid):
        raise ValueError(
            f"{saved.name} was started by `flwr run` (process {pid}): use `flwr stop RUN_ID`"
        )
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while saved.is_running and time.monotonic() < deadline:
        time.sleep(0.1)
    if saved.is_running:
        raise RuntimeError(
            f"process {pid} still writes the run {STOP_TIMEOUT_S:g} s after it was asked to stop: "
            "repeat `keel stop` to end it at once"
        )
    saved = SavedRun(saved.directory)
    print(f"{saved.name}: {saved.state} after round {saved.last_round}")


def is_flower(pid: int) -> bool:
    """Whether the process is one of Flower's, whose runs `flwr stop` ends."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return any(Path(part).name.startswith(("flower-", "flwr-")) for part in command[:2])
