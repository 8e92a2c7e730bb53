"""Run directories as commands and pages see them: found by name, read without torch, never written.

Whatever a directory holds, listing it does not fail: a file that is missing or damaged is named in
the run's state.
"""

import fcntl
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from protocol.config import keel_home
from protocol.files import digest, full_path
from protocol.options import did_you_mean
from protocol.own_code import table_of
from protocol.text import in_one_line, shortened
from server_app.history import curve, headline_of, scalars
from server_app.run_reader import CONFIG_FILE, CONFUSION_FILE, HISTORY_FILE, LOCK_FILE, RunReader

MAX_DEPTH = 5  # folders from a root to a run: table/runs/code/cell/attempt
STARTING, RUNNING, FINISHED, INTERRUPTED = "starting", "running", "finished", "interrupted"
# of states in a terminal; other states are red
COLOURS = {FINISHED: "green", RUNNING: "cyan", "stopped": "yellow", INTERRUPTED: "yellow"}
# keys in which repetitions of a setting differ
NOT_A_SETTING = {"seed", "output-dir", "run-name", "data-dir", "resume", "tracker"}
PARTITION_KEYS = {
    "dirichlet": "alpha",
    "dirichlet-balanced": "alpha",
    "classes": "classes-per-client",
    "shards": "shards-per-client",
}
UNREADABLE = (OSError, ValueError)  # another user's file, or a damaged one


class SavedRun(RunReader):
    """One run directory, with what commands show of it."""

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def reference(self) -> str:
        """What commands find it by: its name if it is in the runs directory, else its path."""
        is_there = self.directory.parent == full_path(runs_directory())
        return shlex.quote(self.name if is_there else str(self.directory))

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
        with suppress(*UNREADABLE):
            return self.manifest.get("simulated") is False
        return False

    @cached_property
    def fault(self) -> str:
        """Why the run cannot be read: the first file that is damaged or may not be read; or ""."""
        try:
            _ = self.config, self.summary, self.history
        except OSError as error:
            return f"{Path(error.filename).name}: {error.strerror}"
        except ValueError as error:
            return in_one_line(str(error).removeprefix(f"{self.directory}/"))
        return ""

    @property
    def state(self) -> str:
        """finished, stopped, failed: ..., running, interrupted, or `fault`."""
        if self.fault:
            return self.fault
        if self.is_running:
            return RUNNING
        status = str(self.summary["status"])
        is_cut = status in (STARTING, RUNNING) or (status == FINISHED and not self.has_finished)
        return INTERRUPTED if is_cut else status

    def damaged_checkpoints(self) -> list[str]:
        """The names of checkpoints that are not as they were written; a resume skips them."""
        damaged = []
        for path in self.checkpoints:
            with suppress(FileNotFoundError):  # replaced by a newer one meanwhile
                if digest(path.read_bytes()) not in path.name:
                    damaged.append(path.name)
        return damaged

    @property
    def headline(self) -> tuple[str, str]:
        """The curve that stands for the run: a key of the history's lines, and the name within."""
        return headline_of(self.history)

    @property
    def accuracy(self) -> float | None:
        """The last value of the headline curve, in [0, 1]; None if there is none."""
        points = curve(self.history, *self.headline)
        return points[-1][1] if points else None

    def rows(self) -> list[dict[str, float]]:
        """Every round's numbers under flat names; `cohort` counts the sampled clients.

        `left_out` of them were not aggregated.
        """
        return [
            {
                "round": line["round"],
                "cohort": line["num_participants"] + line["num_left_out"],
                **scalars(line),
            }
            for line in self.history
        ]

    def confusion(self, which: str) -> tuple[int, list[str], list[list[int]]] | None:
        """(round, classes, samples by label and predicted class) of the "last" or "best" round.

        None where no global model was evaluated.
        """
        with suppress(FileNotFoundError):
            found = json.loads((self.directory / CONFUSION_FILE).read_text())
            return found[which]["round"], found["classes"], found[which]["matrix"]
        return None

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


def method_text(config: Mapping[str, Any]) -> str:
    """The method, with the server optimizer if that is not plain averaging."""
    optimizer = config["server-optimizer"]
    return str(config["method"]) + ("" if optimizer == "fedavg" else f" + {optimizer}")


def split_text(config: Mapping[str, Any]) -> str:
    """The partition of a simulation with its parameter, such as `dirichlet 0.5`."""
    kind = str(config["partition"])
    return f"{kind} {config[PARTITION_KEYS[kind]]}" if kind in PARTITION_KEYS else kind


def uses(config: Mapping[str, Any], key: str) -> bool:
    """Whether a run uses the key: False for an option of another method or server optimizer."""
    table, dot, _ = key.partition(".")
    method = str(config.get("method"))
    used = (table_of(method) or method, config.get("server-optimizer"), "privacy")
    return not dot or table in used


DATA_DIGEST, SITE_COUNTS, OWN_CODE = "data digest", "site counts digest", "own code"


def setting_of(run: RunReader, with_seed: bool = False) -> dict[str, Any]:
    """The config keys that a run uses, and digests of its own code and of its data.

    Runs of one setting repeat each other, with other seeds. with_seed: the seed as well. The data
    digest covers the server's training and test images, labels and classes. A deployment's
    count digest covers the samples of each class at each site: a site sends no digest of its data.
    """
    used = {"seed": run.config["seed"]} if with_seed else {}
    left_out = {*NOT_A_SETTING, *run.unused}
    used |= {k: v for k, v in run.config.items() if k not in left_out and uses(run.config, k)}
    if run.own_digests:
        used[OWN_CODE] = ", ".join(f"{spec} {found}" for spec, found in run.own_digests.items())
    used[DATA_DIGEST] = run.manifest.get("data", "")
    if run.manifest.get("simulated") is False:
        used[SITE_COUNTS] = run.manifest.get("split", "")
    return used


def differing_keys(configs: Sequence[Mapping[str, Any]], ignored: Set[str]) -> list[str]:
    """The keys, except `ignored`, whose values differ between the runs that use them.

    configs: config keys, or what `setting_of` returns.
    """
    keys = sorted({key for config in configs for key in config} - ignored)

    def has(config: Mapping[str, Any], key: str) -> bool:
        return uses(config, key) and (key in config or key == SITE_COUNTS)

    return [k for k in keys if len({str(c.get(k)) for c in configs if has(c, k)}) > 1]


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


def run_directories(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """The run directories at and below a folder."""
    if os.path.isfile(folder / CONFIG_FILE):
        yield folder
        return
    try:
        children = [Path(each) for each in os.scandir(folder) if each.is_dir()]
    except OSError:  # removed meanwhile, or not the user's
        return
    for child in children if depth else ():
        yield from run_directories(child, depth - 1)


def all_runs(base: Path | None = None) -> list[SavedRun]:
    """The runs in a directory, such as the output of `keel experiments`, the last changed first."""
    found = map(SavedRun, run_directories(base or runs_directory()))
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
    for place in (Path(text).expanduser(), base / text):
        if (place / CONFIG_FILE).is_file():
            return SavedRun(full_path(place))
    names = sorted(found.parent.name for found in base.glob(f"*/{CONFIG_FILE}"))
    matches = [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return SavedRun(base / matches[0])
    if matches:
        raise ValueError(f"{text!r} begins the names of {len(matches)} runs: {shortened(matches)}")
    hint = did_you_mean(text, names) or "; `keel list` shows what there is"
    raise ValueError(
        f"{text!r} is no run directory, and there is no run of this name in {base}{hint}"
    )
