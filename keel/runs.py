"""Run directories as seen from outside: found by name, read without torch, never written.

Whatever a directory holds, listing it does not fail: a file that is missing or damaged is named in
the run's state.
"""

import fcntl
import os
import shlex
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from protocol.config import keel_home
from protocol.files import digest, full_path
from protocol.options import did_you_mean
from protocol.text import in_one_line, shortened
from server_app.history import HISTORY_FILE, curve, read_history
from server_app.summary import (
    HEADLINE,
    SUMMARY_FILE,
    has_finished,
    lacking_rounds,
    lost_rounds,
    read_config_file,
    read_manifest,
    read_summary,
)

CONFIG_FILE, LOCK_FILE = "config.json", ".lock"
STARTING, RUNNING, FINISHED, INTERRUPTED = "starting", "running", "finished", "interrupted"
GONE = "moved or deleted"
# of states in a terminal; other states are red
COLOURS = {FINISHED: "green", RUNNING: "cyan", "stopped": "yellow", INTERRUPTED: "yellow"}
DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError)  # of a file of any content


@dataclass(frozen=True)
class SavedRun:
    """One run directory. Its files are read when an attribute is first used."""

    directory: Path

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def reference(self) -> str:
        """What commands find it by: its name if it is in the runs directory, else its path."""
        is_there = self.directory.parent == full_path(runs_directory())
        return shlex.quote(self.name if is_there else str(self.directory))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every config key with its value. ValueError if config.json is missing or damaged."""
        return read_config_file(self.directory)[0]

    @cached_property
    def overrides(self) -> dict[str, Any]:
        """The config keys that the user set. ValueError as for `config`."""
        return read_config_file(self.directory)[1]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json under today's names; empty if it is missing or damaged."""
        try:
            return read_summary(self.directory) if self.has_summary else {}
        except DAMAGE:
            return {}

    @property
    def has_summary(self) -> bool:
        """Whether there is a summary.json."""
        return (self.directory / SUMMARY_FILE).exists()

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One dict a round. ValueError naming the file and the line if one is damaged."""
        return read_history(self.directory)

    @property
    def is_running(self) -> bool:
        """Whether a living process writes the run."""
        return is_locked(self.directory / LOCK_FILE)

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        where = " --engine deployment --federation NAME" if self.has_sites else ""
        return f"keel resume {self.reference}{where}"

    @property
    def has_sites(self) -> bool:
        """Whether its clients have data of their own, as those of a deployment."""
        with suppress(*DAMAGE):
            return read_manifest(self.directory).get("simulated") is False
        return False

    @property
    def state(self) -> str:
        """finished, stopped, failed: ..., running, interrupted, or which file is damaged.

        "moved or deleted" if the directory no longer exists.
        """
        with suppress(PermissionError):  # of a folder above
            if not self.directory.exists():
                return GONE
        try:
            self.config  # noqa: B018  # read for its error
        except ValueError:
            return f"{CONFIG_FILE} is damaged"
        except OSError as error:  # another user's, for example
            return f"{CONFIG_FILE}: {error.strerror}"
        if self.is_running:
            return RUNNING
        if not self.summary:
            return self._summary_fault()
        status = str(self.summary.get("status"))
        is_cut = status in (STARTING, RUNNING) or (
            status == FINISHED and not has_finished(self.directory)
        )
        return INTERRUPTED if is_cut else status

    def _summary_fault(self) -> str:
        """The state of a run that has no summary, or one that cannot be read."""
        if not self.has_summary:
            return INTERRUPTED
        with suppress(*DAMAGE):
            try:
                read_summary(self.directory)
            except OSError as error:
                return f"{SUMMARY_FILE}: {error.strerror}"
        return f"{SUMMARY_FILE} is damaged"

    @property
    def rounds(self) -> int:
        """The last round that is done; 0 if there is none or it cannot be read."""
        try:
            return int(self.history[-1]["round"]) if self.history else 0
        except DAMAGE:
            return 0

    @property
    def lost_rounds(self) -> str:
        """A sentence if the history lacks rounds, or is unreadable."""
        try:
            history = self.history
        except OSError as error:  # another user's, for example, which is not lost
            return f"{HISTORY_FILE}: {error.strerror}"
        except DAMAGE as error:
            fault = in_one_line(str(error).removeprefix(f"{self.directory}/"))
            return f"{fault}; put back a copy of the file if there is one"
        num_rounds = self.config["num-rounds"]
        is_number = isinstance(num_rounds, int)
        ends_early = lost_rounds(self.directory, self.rounds, num_rounds) if is_number else ""
        return ends_early or lacking_rounds(history)

    def damaged_checkpoints(self) -> list[str]:
        """The names of checkpoints that are not as they were written; a resume skips them."""
        damaged = []
        for path in sorted((self.directory / "checkpoints").glob("round-*.safetensors")):
            with suppress(FileNotFoundError):  # replaced by a newer one meanwhile
                if digest(path.read_bytes()) not in path.name:
                    damaged.append(path.name)
        return damaged

    @property
    def headline(self) -> tuple[str, str]:
        """The curve that stands for the run: a key of the history's lines, and the name within it.

        ValueError if the history is damaged.
        """
        return next((pair for pair in HEADLINE if curve(self.history, *pair)), HEADLINE[0])

    @property
    def accuracy(self) -> float | None:
        """The last value of the headline curve, in [0, 1]; None if there is none."""
        try:
            points = curve(self.history, *self.headline)
        except DAMAGE:
            return None
        return points[-1][1] if points else None

    def rows(self) -> list[dict[str, float]]:
        """Every round's numbers under flat names; `cohort` counts the sampled clients.

        `left_out` of them were not aggregated. ValueError if the history is damaged.
        """
        from server_app.observers import scalars

        try:
            return [
                {
                    "round": line["round"],
                    "cohort": len(line["participants"]) + len(line["left_out"]),
                    **scalars(line),
                }
                for line in self.history
            ]
        except KeyError as error:
            path = self.directory / HISTORY_FILE
            raise ValueError(
                f"{path}: a line has no key {error}: the file is damaged, or was restored from an "
                "archive, which does not have it"
            ) from error

    @property
    def source(self) -> str:
        """`short_source` of the config."""
        return short_source(self.config["source"])

    @property
    def last_change(self) -> float:
        """When the run last wrote a round or began, as a POSIX time; 0 if nothing can be read."""
        times = [0.0]
        for name in (HISTORY_FILE, CONFIG_FILE):
            with suppress(OSError):
                times.append((self.directory / name).stat().st_mtime)
        return max(times)


def short_source(source: object) -> str:
    """The data source; of folder:PATH and npz:PATH the last part of PATH."""
    kind, colon, path = str(source).partition(":")
    return f"{kind}:{Path(path).name}" if colon else kind


def uses(config: Mapping[str, Any], key: str) -> bool:
    """Whether a run uses the key: False for an option of another method or server optimizer."""
    table, dot, _ = key.partition(".")
    return not dot or table in (config.get("method"), config.get("server-optimizer"), "privacy")


def differing_keys(configs: Sequence[Mapping[str, Any]], ignored: Set[str]) -> list[str]:
    """The config keys, except `ignored`, whose values differ between runs that use them."""
    keys = sorted({key for config in configs for key in config} - ignored)
    return [k for k in keys if len({str(c.get(k)) for c in configs if uses(c, k)}) > 1]


def is_locked(path: Path) -> bool:
    """Whether a living process holds an exclusive lock on the file."""
    if not os.path.isfile(path):  # a pipe would be waited for; False where it may not be looked for
        return False
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_holder(path: Path) -> int | None:
    """The process that has the lock file open: as the file says, else as /proc does."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return next(iter(holders(path)), None)


def holders(path: Path) -> list[int]:
    """Ids of the other processes that have this file open, as far as they can be inspected."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # another user's, or gone
            if link.readlink() == path.resolve():
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})


def runs_directory() -> Path:
    """Where runs go unless output-dir says otherwise."""
    return keel_home() / "runs"


def all_runs(base: Path | None = None) -> list[SavedRun]:
    """The runs in a directory, the last changed first; also directories that cannot be looked into.

    Their state says so.
    """
    base = base or runs_directory()
    found = [SavedRun(path.parent) for path in base.glob(f"*/{CONFIG_FILE}")]
    found += [SavedRun(path) for path in base.glob("*/") if not os.access(path, os.X_OK)]
    return sorted(found, key=lambda run: (run.last_change, run.name), reverse=True)


def only_run(found: Sequence[SavedRun], what: str, command: str) -> SavedRun:
    """The run in a list of one; ValueError, one line, naming those that `what` otherwise."""
    if not found:
        raise ValueError(f"no run in {runs_directory()} {what}; `keel list` shows what there is")
    if len(found) > 1:
        names = [run.name for run in found]
        raise ValueError(f"{len(names)} runs {what}: {shortened(names)}; name one: {command} RUN")
    return found[0]


def find_run(run: str | Path = "") -> SavedRun:
    """The run of this path, name under the runs directory, or unique prefix; "": the newest.

    ValueError, one line, if there is none or there are several.
    """
    text, base = str(run), runs_directory()
    if not text:
        runs = all_runs()
        if not runs:
            raise ValueError(f"there is no run in {base} yet; `keel run` starts one")
        return runs[0]
    path = Path(text).expanduser()
    places = [place for place in (path, base / text) if place.is_dir()]
    for place in places:
        if (place / CONFIG_FILE).is_file():
            return SavedRun(full_path(place))
    if places:
        raise ValueError(f"{places[0]} has no {CONFIG_FILE}: not a run directory")
    if len(path.parts) > 1:
        fault = "is a file: expected a run directory" if path.exists() else "does not exist"
        raise ValueError(f"{path} {fault}")
    names = sorted(found.parent.name for found in base.glob(f"*/{CONFIG_FILE}"))
    matches = [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return SavedRun(base / matches[0])
    if matches:
        raise ValueError(f"{text!r} begins the names of {len(matches)} runs: {shortened(matches)}")
    hint = did_you_mean(text, names) or "; `keel list` shows what there is"
    raise ValueError(f"there is no run {text!r} in {base}{hint}")
