"""Keeps processes running: what dies is started again, after a pause that grows.

    python -m keel.deployment.supervise -- python -m client_app.worker_server -- flower-superexec ...

Each command follows a `--`. The pause is 1 s, twice as long each time up to 10 s, and 1 s again
after a minute of life. SIGTERM or SIGINT ends all; what does not end in 10 s is killed. If the
supervisor itself is killed, its processes are ended by the kernel (Linux).
"""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

log = logging.getLogger("keel.supervise")
shortest_pause_s, longest_pause_s = 1.0, 10.0
healthy_s = 60.0  # who lived so long begins with the shortest pause again
end_limit_s = 10.0
look_every_s = 0.1
set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Kept:
    """One command and the process that runs it now."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        output: int | None = None,
        cwd: str | None = None,
    ) -> None:
        """output: file descriptor of what it prints; the supervisor's own where None."""
        self.command, self.env, self.output, self.cwd = list(command), env, output, cwd
        self.starts = 0
        self.pause_s = shortest_pause_s
        self.due = 0.0
        self.start()

    def start(self) -> None:
        """Start the command in a process group of its own, ended with this thread's process."""
        self.process = subprocess.Popen(
            self.command,
            env=self.env,
            cwd=self.cwd,
            stdout=self.output,
            stderr=None if self.output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        self.starts += 1
        self.started, self.due = time.monotonic(), 0.0

    def look(self) -> None:
        """Start it again if it has ended and its pause is over."""
        now, ended = time.monotonic(), self.process.poll()
        if ended is None:
            return
        if not self.due:
            if now - self.started > healthy_s:
                self.pause_s = shortest_pause_s
            self.due = now + self.pause_s
            how = f"signal {-ended}" if ended < 0 else f"exit status {ended}"
            log.warning("%s ended (%s): again in %g s", self.name, how, self.pause_s)
            self.pause_s = min(2 * self.pause_s, longest_pause_s)
        elif now >= self.due:
            self._kill_group()  # its children had the pause to end by themselves
            self.start()

    @property
    def name(self) -> str:
        """The command, short."""
        return " ".join(self.command[:3])

    def end(self) -> None:
        """End the process and its children: SIGTERM, then SIGKILL."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(end_limit_s)
        self._kill_group()
        self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(self.process.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent's thread ends (Linux)."""
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def supervise(kept: Sequence[Kept], stop: threading.Event) -> None:
    """Keep all running until `stop` is set; then end them, the last first."""
    try:
        while not stop.wait(look_every_s):
            for each in kept:
                each.look()
    finally:
        for each in reversed(kept):
            each.end()


def split_commands(words: Sequence[str]) -> list[list[str]]:
    """The commands after each `--`; ValueError if there is none, or an empty one."""
    commands: list[list[str]] = []
    for word in words:
        if word == "--":
            commands.append([])
        elif not commands:
            raise ValueError(f"{word!r}: the first command has to follow a --")
        else:
            commands[-1].append(word)
    if not commands or not all(commands):
        raise ValueError("give at least one command, each after a --")
    return commands


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keel.deployment.supervise", description=__doc__
    )
    if sys.argv[1:] and sys.argv[1] in ("-h", "--help"):
        parser.print_help()
        return 0
    logging.basicConfig(format="%(asctime)s supervise: %(message)s", datefmt="%H:%M:%S")
    try:
        commands = split_commands(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    supervise([Kept(command) for command in commands], stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
