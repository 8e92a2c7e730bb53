"""The run directory: enough to plot, compare, verify and resume a run bit for bit.

config.json         the resolved config, the keys that the user set, and an id (`RunDirectory.id`)
roster.json         the clients: samples per class, model, versions
history.jsonl       one line a round (history.py); run.log: the log, with times
checkpoints/        the newest two: model, server state, round (safetensors)
clients/            in simulation: client state
releases.jsonl      with differential privacy: the releases requested; chained digests
model.safetensors   the final model; summary.json (summary.py), accuracy.png, labels.png
manifest.json       versions; digests of split, files and first rounds (manifest.py)
"""

import fcntl
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open

from client_app.methods import method_of
from client_app.node_config import RUN_NAME
from client_app.state import NUM_CHECKPOINTS
from protocol.chained import append_chained, read_chained
from protocol.config import RunConfig, keel_home, resolve_config
from protocol.files import digest, full_path, remove_parts, write_atomically
from protocol.messages import UNREADABLE, Arrays, mismatch
from protocol.options import OptionValue
from protocol.packing import Pieces, packed_pieces
from protocol.text import num_of
from server_app.audit import released_clients
from server_app.history import DAMAGE, HISTORY_FILE, whole_lines
from server_app.summary import (
    check_has_rounds_left,
    check_last_is_evaluated,
    new_path,
    read_config_file,
    round_of,
)

log = logging.getLogger("keel.server")
RELEASES_FILE = "releases.jsonl"
RELEASES = "releases"  # their numbers, in the state of a checkpoint
LOCK_ATTEMPTS = 5


@dataclass(frozen=True)
class Checkpoint:
    """The server after `round` rounds: global arrays and the strategy's state."""

    round: int
    arrays: Arrays
    state: Arrays

    def noted_digest(self, model: str) -> str:
        """Its content's digest, without the numbers of releases: a repeated round adds to them."""
        state = {name: array for name, array in self.state.items() if name != RELEASES}
        return digest(*replace(self, state=state).pieces(model))

    def pieces(self, model: str) -> Pieces:
        """The content of its file. model: the network's name."""
        flat = {f"model/{k}": v for k, v in self.arrays.items()}
        flat |= {f"state/{k}": v for k, v in self.state.items()}
        return packed_pieces(flat, metadata_entry({"round": self.round, "model": model}))


class RunDirectory:
    """One run's directory, locked: one process at a time may write it.

    id: a deployment's clients recognise by it the run that their state belongs to. Random; in runs
    made before ids existed a digest, so that a backup of such a run has the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = saved_id(path)
        self.checkpoint_interval = 1  # rounds between checkpoints
        self._lock: TextIO = (path / ".lock").open("w")
        self._log: logging.Handler | None = None
        self._level_before = logging.NOTSET
        self.skipped: list[Path] = []  # damaged checkpoints, at the last look
        self._releases: Counter[str] = Counter()
        self._num_damaged = 0  # lines of releases.jsonl, when last read
        for attempt in range(LOCK_ATTEMPTS):  # `is_being_written` may hold the lock briefly
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    self._lock.close()
                    raise ValueError(
                        f"{path} is being written by another process: wait for it, or stop it"
                    ) from error
                time.sleep(0.05)
        remove_parts(path)

    def start_log(
        self,
        is_own: Callable[[logging.LogRecord], bool] | None = None,
        early: MemoryHandler | None = None,
    ) -> None:
        """Copy Keel's log, or its records that are this run's own, to run.log until `close`.

        early: has records from before, which come first; it gets no more.
        """
        logger = logging.getLogger("keel")
        self._log = logging.FileHandler(self.path / "run.log")
        self._log.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk
        line_format = f"%(asctime)s {self.path.name} %(levelname)s %(message)s"
        self._log.setFormatter(logging.Formatter(line_format))
        if is_own:
            self._log.addFilter(is_own)
        self._level_before = logger.level
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        logger.addHandler(self._log)
        if early:
            logger.removeHandler(early)
            early.setTarget(self._log)
            early.close()

    def close(self) -> None:
        """Release the lock and stop logging to run.log."""
        if self._log:
            logger = logging.getLogger("keel")
            logger.removeHandler(self._log)
            logger.setLevel(self._level_before)
            self._log.close()
            self._log = None
        self._lock.close()

    def save_config(self, config: RunConfig, overrides: Mapping[str, OptionValue]) -> None:
        """Write config.json; `overrides` are the keys that the user set."""
        content = {"config": dict(config.flat), "overrides": dict(overrides), "id": self.id}
        write_atomically(self.path / "config.json", json.dumps(content, indent=2).encode())

    def append_releases(self, server_round: int, *cohorts: list[str]) -> None:
        """Record the clients whose private release is about to be requested; never truncated.

        cohorts: a line each.
        """
        lines = ({"round": server_round, "clients": clients} for clients in cohorts)
        append_chained(self.path / RELEASES_FILE, *lines)
        for clients in cohorts:
            self._releases.update(clients)

    def read_releases(self) -> list[list[str]]:
        """The clients whose release was requested, one list per request.

        A line that is damaged, edited or out of place counts as one that names every client of the
        file (or one unknown client, if there is no other): the budget spent is never under-counted.
        """
        path = self.path / RELEASES_FILE
        entries, num_damaged = read_chained(path)
        named = [entry["clients"] for entry in entries if isinstance(entry.get("clients"), list)]
        requested = [[str(client) for client in clients] for clients in named]
        num_damaged += len(entries) - len(named)
        if num_damaged > self._num_damaged:
            self._num_damaged = num_damaged
            damaged = num_of("line", num_damaged)
            log.warning("%s: %s damaged: each counts for every client", path, damaged)
        everyone = sorted({client for clients in requested for client in clients}) or ["unknown"]
        return requested + num_damaged * [everyone]

    def release_counts(self) -> Counter[str]:
        """Releases requested of each client: the larger of this process's count and the file's."""
        in_file = Counter(client for clients in self.read_releases() for client in clients)
        return self._releases | in_file

    def release_state(self) -> Arrays:
        """Each client's number of releases, for a checkpoint.

        Counted in memory since the file was read, so that no round reads it again.
        """
        counts = json.dumps(self._releases, sort_keys=True).encode()
        return {RELEASES: torch.tensor([*counts], dtype=torch.uint8)}

    def restore_releases(self, state: Arrays) -> None:
        """Complete releases.jsonl before a resume, so that no release is forgotten.

        Each client's releases are counted in the audit log, the history and the checkpoint's
        `state`; the largest number counts. Where the file has fewer (deleted, cut short), the
        difference is appended to it, and one more for each client: a round may have been under way.
        Only the audit log has rounds that an earlier resume repeated before its next checkpoint.
        """
        in_checkpoint = json.loads(bytes(state[RELEASES].tolist())) if RELEASES in state else {}
        in_history = Counter[str]()
        for line in whole_lines(self.path)[0]:
            participants = (name for name in line.get("participants", []) if isinstance(name, str))
            in_history.update({*participants, *line.get("left_out", [])})
        known = Counter[str](in_checkpoint) | in_history | released_clients(self.path)
        self._releases = self.release_counts()
        missing = known - self._releases
        if missing:
            log.warning(
                "%s: lines are missing: completed from audit log, history and checkpoint, and one "
                "release more for each client",
                self.path / RELEASES_FILE,
            )
            missing += Counter(known.keys())
            names = sorted(missing)
            # a line for each release, not one for all: damage to a line counts as one release
            cohorts = ([c for c in names if missing[c] > n] for n in range(max(missing.values())))
            self.append_releases(0, *cohorts)

    def save_checkpoint(self, checkpoint: Checkpoint, model: str) -> str:
        """Write this round's checkpoint and delete all others except the one before; its digest.

        A checkpoint that a resume skipped because it is damaged, or ahead of the history, is thus
        replaced when its round is repeated.
        """
        directory = self.path / "checkpoints"
        directory.mkdir(exist_ok=True)
        pieces = checkpoint.pieces(model)
        content_digest = digest(*pieces)
        name = f"round-{checkpoint.round:05d}-{content_digest}.safetensors"
        write_atomically(directory / name, *pieces)
        oldest = checkpoint.round - (NUM_CHECKPOINTS - 1) * self.checkpoint_interval
        for other in directory.glob("round-*.safetensors"):
            if other.name != name and not oldest <= round_of(other) < checkpoint.round:
                other.unlink()
        return content_digest

    def checkpoint_rounds(self) -> list[int]:
        """The rounds that a resume may begin after; [0] if there is no checkpoint."""
        return sorted(map(round_of, (self.path / "checkpoints").glob("round-*"))) or [0]

    def has_checkpoint(self, interval: int) -> bool:
        """Whether there is, or should be, a checkpoint to resume from; if not, a run starts again.

        interval: rounds from one checkpoint to the next. A round's line is written before its
        checkpoint, so only a line after the first interval proves that there was a checkpoint.
        """
        lines, faults = whole_lines(self.path)
        num_done = max([len(lines) + len(faults), *(line["round"] for line in lines)])
        is_due = num_done > interval
        return is_due or any((self.path / "checkpoints").glob("round-*"))

    def newest_checkpoint(self, expected: Arrays, model: str) -> Checkpoint:
        """The newest intact checkpoint, of those whose round is in the history if there are any.

        `skipped` then has the damaged ones that came before it. ValueError if none is left, or if
        its arrays are not those of `expected`.
        """
        lines, _ = whole_lines(self.path)
        last = max((line["round"] for line in lines), default=0)
        paths = list((self.path / "checkpoints").glob("round-*.safetensors"))
        paths.sort(key=lambda path: (round_of(path) <= last, round_of(path)), reverse=True)
        for path in paths:
            if digest(path.read_bytes()) in path.name:
                with suppress(SafetensorError):  # damaged before it was written
                    return read_checkpoint(path, expected, model)
            self.skipped.append(path)
        found_text = f"{len(paths)} damaged" if paths else "there is none"
        raise ValueError(
            f"resume = {str(self.path)!r}: no intact checkpoint ({found_text}): restore "
            f"{self.path / 'checkpoints'} from a backup, or start a new run"
        )


def saved_id(directory: Path) -> str:
    """The id in a run's config.json; a new one in a new directory.

    In runs made before ids existed: the digest of the history's first line, which no resume
    changes, or of config.json before the first round. A damaged config.json is refused elsewhere.
    """
    config, history = directory / "config.json", directory / HISTORY_FILE
    with suppress(OSError, *DAMAGE):
        content = config.read_bytes()
        if found := json.loads(content).get("id"):
            return str(found)
        first = b""
        if history.exists():
            with history.open("rb") as file:
                first = file.readline()
        return digest(first or content)
    return secrets.token_hex(8)


def read_checkpoint(path: Path, expected: Arrays, model: str) -> Checkpoint:
    """The checkpoint at `path`; ValueError if its arrays are not those of `expected`.

    SafetensorError if it cannot be read.
    """
    try:
        flat, metadata = read_safetensors(path)
        round_ = int(metadata["round"])
    except UNREADABLE as error:
        raise SafetensorError(str(error)) from error
    arrays, state = (
        {k.removeprefix(p): v for k, v in flat.items() if k.startswith(p)}
        for p in ("model/", "state/")
    )
    if wrong := mismatch(arrays, expected, with_values=False):
        raise ValueError(
            f"{path} is a checkpoint of another model ({metadata.get('model')}, the run's is "
            f"{model}): {wrong}"
        )
    return Checkpoint(round_, arrays, state)


def new_run_directory(config: RunConfig) -> RunDirectory:
    """A new, empty directory at `new_path`; never an existing one."""
    while True:
        path = new_path(config)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if path.is_dir():  # another run was faster
                continue
            raise ValueError(f"output-dir: {path} cannot be made: {error.strerror}") from error
        return RunDirectory(path)


def open_run_directory(
    path: str, overrides: Mapping[str, OptionValue]
) -> tuple[RunDirectory, RunConfig, dict[str, OptionValue]]:
    """(directory, config, overrides) of a run to resume; only `num-rounds` may be new.

    path: the run directory, or its name under $KEEL_HOME/runs of this machine.
    ValueError, one line, if it is not a run directory, if other keys are set, or if a default has
    changed since.
    """
    directory = Path(path).expanduser()
    if not directory.is_absolute():
        directory = keel_home() / "runs" / path
    directory = full_path(directory)
    if not RUN_NAME.fullmatch(directory.name):
        raise ValueError(
            f"{directory}: expected a name of letters, digits, '.', '_' and '-' that does not "
            "begin with '.': rename the directory"
        )
    saved, saved_overrides = read_config_file(directory)
    changed = sorted(overrides.keys() - {"resume", "num-rounds"})
    if changed:
        raise ValueError(
            f"resume = {path!r}: {changed[0]} cannot be changed: a resumed run keeps its config; "
            "only num-rounds can be changed"
        )
    merged = saved_overrides | {k: v for k, v in overrides.items() if k == "num-rounds"}
    config = resolve_config(merged)
    num_rounds = config.rounds.num_rounds
    if num_rounds < saved["num-rounds"]:
        check_last_is_evaluated(directory, config)
    if num_rounds != saved["num-rounds"] and method_of(config).depends_on_num_rounds():
        raise ValueError(
            f"num-rounds = {num_rounds}: the result of {config.rounds.method} depends on it: it "
            f"was {saved['num-rounds']} and cannot change on resume"
        )
    check_has_rounds_left(directory, num_rounds)
    expected = saved | {"num-rounds": num_rounds}
    for key, value in config.flat.items():
        if value != expected.get(key):
            raise ValueError(
                f"resume = {path!r}: the defaults changed since: {key} was {expected.get(key)!r}, "
                f"is {value!r}; set {key} explicitly in a new run"
            )
    return RunDirectory(directory), config, merged


def metadata_entry(about: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as a single entry, because safetensors writes several in random order."""
    return {"about": json.dumps(dict(about), sort_keys=True)}


def save_arrays(path: Path, arrays: Arrays, about: Mapping[str, str]) -> None:
    """Write arrays and their metadata as one safetensors file, whole or not at all."""
    write_atomically(path, *packed_pieces(arrays, metadata_entry(about)))


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """(arrays, metadata) of a file of `save_arrays`; ValueError if it is damaged."""
    try:
        return read_safetensors(path)
    except UNREADABLE as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_safetensors(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """(arrays under current names, metadata); raises one of UNREADABLE if it is damaged."""
    check_opens(path)
    with safe_open(path, framework="pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, json.loads(file.metadata()["about"])


def check_opens(path: Path) -> None:
    """OSError with the reason if a file cannot be opened: safetensors calls them all missing."""
    with path.open("rb"):
        pass
