"""Fills the disks and damages the files of a loopback deployment; says what each moment cost.

    python -m tests.tools.damage --disk-full 10 --corrupt 10 --seed 0

As root: the server's and every client's directories are on small file systems of their own. FedReCo
trains on `digits` in one run. At a disk-full moment, the disk of the server or of a client is
filled for 3 to 15 seconds. To damage one of the server's files, its ServerApp is killed first; of a
client, the newest version of its state is damaged. Bytes are overwritten, or the file is cut short.
A run that has ended is resumed. Where a resume is refused, its message has to name the file, which
is then put back, as from a backup.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keel.deployment.loopback import Loopback, partitions, running
from server_app.audit import audit_problem
from server_app.history import whole_lines
from tests.tools.faults import (
    common,
    lost_models,
    methods,
    send,
    status,
    submit_until,
    unnamed_failures,
)
from tests.tools.processes import descendants

disk_mb = 256
settings = common | methods["fedreco"] | {"local-epochs": 1, "evaluate-every": 10}
settings |= {"fedreco.eta-0": 0.01}  # converges also while a client is left out
patience_s = 400.0
server_files = (
    *("history.jsonl", "summary.json", "manifest.json", "audit.jsonl", "config.json"),
    *("roster.json", "checkpoints/newest"),
)


@contextlib.contextmanager
def small_disks(root: Path, owners: list[str]) -> Iterator[None]:
    """A file system of `disk_mb` at the directory of each owner."""
    for owner in owners:
        (root / owner).mkdir(parents=True)
        options = f"size={disk_mb}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", root / owner], check=True)
    try:
        yield
    finally:
        for owner in owners:
            subprocess.run(["umount", "-l", root / owner], check=False)


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    path = folder / "filler"
    with path.open("wb") as file, contextlib.suppress(OSError):
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(size))
    return path


def damage(path: Path, draw: random.Random) -> bytes:
    """Overwrite some bytes, or cut the file short; its content before."""
    whole = path.read_bytes()
    if draw.random() < 0.5:
        path.write_bytes(whole[: draw.randrange(len(whole))])
    else:
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + draw.randbytes(16) + whole[at + 16 :])
    return whole


class Watch:
    """The run under way, and what its logs have said since the last look."""

    def __init__(self, local: Loopback) -> None:
        self.local = local
        runs = local.root / "server" / "keel" / "runs"
        keys = settings | {"num-rounds": 100_000}
        submit_until(local, keys, time.monotonic() + patience_s)
        self.wait(lambda: bool(list(runs.glob("*"))))
        [self.folder] = runs.glob("*")
        self.sizes: dict[Path, int] = {}
        self.run_ids: list[int] = []  # of the resumes since the last look
        self.resumes, self.ended = 0, ""  # the status of a run that ended before a resume

    def wait(self, is_done: Callable[[], bool]) -> bool:
        """Whether it is done in time."""
        until = time.monotonic() + patience_s
        while not is_done():
            if time.monotonic() > until:
                return False
            time.sleep(0.3)
        return True

    def rounds(self) -> int:
        """Of the last line of the history."""
        return max((line["round"] for line in whole_lines(self.folder)[0]), default=0)

    def left_out(self) -> int:
        """Clients left out of rounds so far."""
        return sum(len(line["left_out"]) for line in whole_lines(self.folder)[0])

    def is_alive(self) -> bool:
        """Whether there is a ServerApp."""
        below = descendants(self.local.pid("serverapp-executor")).values()
        return any("keel.deployment.serverapp" in command for command in below)

    def news(self) -> str:
        """What the logs of all processes, the run's log, history and status say since then."""
        paths = [*self.local.root.glob("*.log"), self.folder / "run.log"]
        found = []
        for path in paths:
            content = path.read_bytes() if path.exists() else b""
            found.append(content[self.sizes.get(path, 0) :].decode(errors="replace"))
            self.sizes[path] = len(content)
        for run_id in self.run_ids:  # what was said before run.log was opened
            with contextlib.suppress(RuntimeError):
                found.append(self.local.superlink.log(run_id))
        self.run_ids = []
        if problem := audit_problem(self.folder):  # which `keel experiments verify` says
            found.append(problem)
        found.append(self.ended)
        self.ended = ""
        return "\n".join(found)

    def goes_on(self, rounds: int) -> bool:
        """Whether the run does `rounds` more, resumed if it has ended."""
        goal = self.rounds() + rounds
        until = time.monotonic() + patience_s
        while self.rounds() < goal:
            if time.monotonic() > until:
                return False
            if not self.is_alive():
                self.ended += status(self.folder)
                with contextlib.suppress(RuntimeError):
                    self.resume()
                self.wait_briefly()
            time.sleep(0.3)
        return True

    def resume(self) -> None:
        """Submit the run again."""
        self.run_ids.append(self.local.superlink.submit({"resume": str(self.folder)}))
        self.resumes += 1

    def wait_briefly(self) -> None:
        """Until the ServerApp of a resumed run has started, which it may refuse."""
        until = time.monotonic() + 20
        while not self.is_alive() and time.monotonic() < until:
            time.sleep(0.2)


def disk_full(watch: Watch, draw: random.Random) -> Sequence[str]:
    """One moment, as a row of the table."""
    owner = draw.choice(["server", draw.choice(watch.local.clients)])
    watch.news()
    left_out = watch.left_out()
    resumes, filler = watch.resumes, fill(watch.local.root / owner)
    seconds = draw.uniform(3, 15)
    time.sleep(seconds)
    filler.unlink()
    goes_on, news = watch.goes_on(2), watch.news()
    named = any(words in news for words in ("No space left on device", "disk is full"))
    is_harmless = watch.resumes == resumes and watch.left_out() == left_out
    what = f"disk of {owner} full for {seconds:.0f} s"
    found = "nothing failed" if is_harmless else yes(named)
    return what, yes(goes_on), str(watch.resumes - resumes), found


def corrupt(watch: Watch, draw: random.Random) -> Sequence[str]:
    """One damaged file, as a row of the table."""
    watch.news()
    resumes, local = watch.resumes, watch.local
    if draw.random() < 0.4:
        client = draw.choice(local.clients)
        folder = local.root / client / "keel" / "clients" / watch.folder.name / client
        before = max(folder.glob("round-*.safetensors"))
        # A version that the client has just written is the one that it reads next.
        watch.wait(lambda: max(folder.glob("round-*.safetensors")) != before)
        path = max(folder.glob("round-*.safetensors"))
        name = f"state of {client}"
        damage(path, draw)
        goes_on = watch.goes_on(3)
        names = (path.name,)
    else:
        name = draw.choice(server_files)
        send(signal.SIGKILL, local, "serverapp", "")
        watch.wait(lambda: not watch.is_alive())
        path = watch.folder / name
        if name.endswith("newest"):
            path = max((watch.folder / "checkpoints").glob("round-*"))
        whole = damage(path, draw)
        watch.resume()
        watch.wait_briefly()
        goal = watch.rounds() + 2
        watch.wait(lambda: watch.rounds() >= goal or not watch.is_alive())
        goes_on = watch.is_alive() and watch.goes_on(1)
        names = (path.name, name)
        if not goes_on:
            refused = watch.news()
            path.write_bytes(whole)
            goes_on = watch.goes_on(2)
            named = yes(any(n in refused for n in names))
            answer = f"refused by name: {named}; after the file was put back: {yes(goes_on)}"
            return name, answer, str(watch.resumes - resumes), named
    news = watch.news()
    named = yes(any(n in news for n in names))
    return name, yes(goes_on), str(watch.resumes - resumes), named


def yes(value: bool) -> str:
    """As the tables have it."""
    return "yes" if value else "**no**"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.damage", description=__doc__)
    parser.add_argument("--disk-full", type=int, default=10)
    parser.add_argument("--corrupt", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", type=Path, help="a file for the outcomes")
    arguments = parser.parse_args()
    draw, rows = random.Random(arguments.seed), list[Sequence[str]]()
    clients = partitions(arguments.clients)
    print("| moment | goes on | resumed | named in a log |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="keel-damage-") as name:
        root = Path(name)
        with small_disks(root, ["server", *clients]), running(root, clients) as local:
            watch = Watch(local)
            assert watch.goes_on(3), "the run does not start"
            for number in range(arguments.disk_full + arguments.corrupt):
                happen = disk_full if number < arguments.disk_full else corrupt
                rows.append(happen(watch, draw))
                print(f"| {' | '.join(rows[-1])} |", flush=True)
            silent = unnamed_failures(whole_lines(watch.folder)[0], clients)
            print(f"\n{watch.rounds()} rounds, {watch.resumes} resumes; {len(silent)} absences")
            lost = lost_models(local, watch.folder)
            print(f"without a reason; state damaged or old at the end: {lost}")
            print(json.dumps(silent[:10]))
    damaged = {name for name, *_ in rows}
    unexpected = [client for client in lost if f"state of {client}" not in damaged]
    if arguments.json:
        found = {"rows": rows, "unnamed": len(silent), "lost": unexpected}
        arguments.json.write_text(json.dumps(found, indent=1))
    return 1 if unexpected or silent or any(yes(False) in " ".join(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
