"""The writer of a run directory, locked; run_reader.py has its format and reads it."""

import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

from client_app.methods import method_of
from client_app.node_config import RUN_NAME
from client_app.state import NUM_CHECKPOINTS
from protocol import own_code
from protocol.arrays import UNREADABLE, Arrays, Pieces, mismatch, packed_pieces, unpacked
from protocol.config import RunConfig, digests_entry, keel_home, resolve_config
from protocol.files import (
    append_line,
    digest,
    full_path,
    remove_parts,
    round_of,
    versions_in,
    write_atomically,
    write_version,
)
from protocol.options import OptionValue
from protocol.text import num_of
from server_app.history import Line
from server_app.manifest import AuditLog, check_audit, finish_manifest
from server_app.record import split
from server_app.run_reader import (
    CLIENTS_FILE,
    CONFIG_FILE,
    COPY,
    HISTORY_FILE,
    LOCK_FILE,
    LOG_FILE,
    RunReader,
    check_has_rounds_left,
    new_path,
)

log = logging.getLogger("keel.server")
LOCK_ATTEMPTS = 5


@dataclass(frozen=True)
class Checkpoint:
    """The server after `round` rounds: global arrays and the strategy's state."""

    round: int
    arrays: Arrays
    state: Arrays

    def pieces(self) -> Pieces:
        """The content of its file."""
        flat = {f"model/{k}": v for k, v in self.arrays.items()}
        flat |= {f"state/{k}": v for k, v in self.state.items()}
        return packed_pieces(flat, metadata_entry({"round": self.round}))


class RunDirectory:
    """One run's directory, locked: one process at a time may write it.

    id: by which a deployment's clients recognise the run that their state belongs to. audit: its
    audit log. skipped: damaged checkpoints that `newest_checkpoint` passed over.
    """

    def __init__(self, path: Path, checkpoint_interval: int = 1) -> None:
        """checkpoint_interval: rounds between checkpoints."""
        self.path, self.checkpoint_interval = path, checkpoint_interval
        self.skipped: list[Path] = []
        self._lock: TextIO = (path / LOCK_FILE).open("w")
        self._log: logging.Handler | None = None
        self._level_before = logging.NOTSET
        try:
            lock(self._lock, path)
            remove_parts(path)
            is_new = not (path / CONFIG_FILE).exists()
            self.id = secrets.token_hex(8) if is_new else RunReader(path).id
            self.audit = AuditLog(path)
        except BaseException:
            self._lock.close()
            raise

    def start_log(self, early: MemoryHandler | None) -> None:
        """Copy Keel's log to run.log until `close`.

        early: has records from before, which come first; it gets no more.
        """
        logger = logging.getLogger("keel")
        self._log = logging.FileHandler(self.path / LOG_FILE)
        self._log.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk
        line_format = f"%(asctime)s {self.path.name} %(levelname)s %(message)s"
        self._log.setFormatter(logging.Formatter(line_format))
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

    def save_config(
        self, config: RunConfig, overrides: Mapping[str, OptionValue], unused: Iterable[str] = ()
    ) -> None:
        """Write config.json and the run's own code.

        overrides: the keys that the user set. unused: those that the run does not use.
        """
        own_code.save(self.path, config.own)
        content = {"config": dict(config.flat), "overrides": dict(overrides), "id": self.id}
        content["unused"] = sorted(unused)
        content |= digests_entry(config.own)
        write_atomically(self.path / CONFIG_FILE, json.dumps(content, indent=2).encode())

    def record(self, line: Mapping[str, Any]) -> Line:
        """Write a round's lines (record.py); they are on the disk when this returns the short one.

        Its checkpoint comes after: a resume drops what is ahead of the checkpoint.
        """
        short, of_clients = split(line)
        append_line(self.path / CLIENTS_FILE, json.dumps(of_clients, allow_nan=False))
        append_line(self.path / HISTORY_FILE, json.dumps(short, allow_nan=False))
        return short

    def rewind(self, last_round: int) -> list[Line]:
        """Drop the lines of rounds after `last_round`, which a resume repeats; the others.

        ValueError if one of those is missing.
        """
        run = RunReader(self.path)
        for path in (self.path / CLIENTS_FILE, self.path / HISTORY_FILE):
            if not path.exists():
                path.touch()
            keep_lines(path, last_round)
        return run.history[:last_round]

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write this round's checkpoint and delete all others except the one before.

        A checkpoint that a resume skipped because it is damaged, or ahead of the history, is thus
        replaced when its round is repeated.
        """
        directory = self.path / "checkpoints"
        directory.mkdir(exist_ok=True)
        path = write_version(directory, checkpoint.round, *checkpoint.pieces())
        oldest = checkpoint.round - (NUM_CHECKPOINTS - 1) * self.checkpoint_interval
        for other in versions_in(directory):
            if other != path and not oldest <= round_of(other) < checkpoint.round:
                other.unlink()

    def checkpoint_rounds(self) -> list[int]:
        """The rounds that a resume may begin after; [0] if there is no checkpoint."""
        return list(map(round_of, versions_in(self.path / "checkpoints"))) or [0]

    def has_checkpoint(self) -> bool:
        """Whether there is, or should be, a checkpoint to resume from; if not, a run starts again.

        A round's line is written before its checkpoint, so only a line after the first interval
        proves that there was a checkpoint.
        """
        run = RunReader(self.path)
        return bool(run.checkpoints) or run.last_round > self.checkpoint_interval

    def newest_checkpoint(self, expected: Arrays) -> Checkpoint:
        """The newest intact checkpoint of a round that is in the history.

        ValueError if there is none, or if its arrays are not those of `expected`.
        """
        run = RunReader(self.path)
        paths = versions_in(self.path / "checkpoints", run.last_round)
        for path in reversed(paths):
            if digest(path.read_bytes()) in path.name:
                return read_checkpoint(path, expected)
            self.skipped.append(path)
        found_text = f"{len(paths)} damaged" if paths else "there is none"
        raise ValueError(
            f"resume = {str(self.path)!r}: no intact checkpoint ({found_text}): restore "
            f"{self.path / 'checkpoints'} from a backup, or start a new run"
        )

    def finish(self, last_round: int, removes_state: bool, is_personal: bool) -> None:
        """Complete the manifest of a run that has ended after `last_round`.

        removes_state: remove checkpoints and client state; of a method with personal models the
        newest of each stay, from which they are made.
        """
        # the manifest first: without state, no resume could complete it
        finish_manifest(self.path, last_round, is_personal or not removes_state)
        if removes_state:
            try:
                remove_state(self.path, last_round, is_personal)
            except OSError as error:
                text = "state of the finished run is left: %s: %s"
                log.warning(text, error.filename, error.strerror)


def lock(file: TextIO, directory: Path) -> None:
    """Lock a run directory's lock file; ValueError if another process has it."""
    for attempt in range(LOCK_ATTEMPTS):  # a look whether it is locked may hold it briefly
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if attempt == LOCK_ATTEMPTS - 1:
                raise ValueError(
                    f"{directory} is being written by another process: wait for it, or stop it"
                ) from error
            time.sleep(0.05)


def keep_lines(path: Path, num_lines: int) -> None:
    """Cut a file of one line a round after its first `num_lines`; ValueError if it has fewer."""
    with path.open("rb+") as file:
        for number in range(1, num_lines + 1):
            if not file.readline().endswith(b"\n"):
                raise ValueError(f"{path} is damaged: round {number} is missing; {COPY}")
        file.truncate(file.tell())
        os.fsync(file.fileno())


def remove_state(directory: Path, last_round: int, keeps_newest: bool) -> None:
    """Remove checkpoints, then client state: no resume starts from a checkpoint without it."""
    for folder in (directory / "checkpoints", *sorted((directory / "clients").glob("*"))):
        newest = versions_in(folder, last_round)[-1:]
        for path in versions_in(folder):
            if not (keeps_newest and path in newest):
                path.unlink()
    if not keeps_newest:
        for folder in filter(Path.exists, (directory / "checkpoints", directory / "clients")):
            shutil.rmtree(folder)


def read_checkpoint(path: Path, expected: Arrays) -> Checkpoint:
    """The checkpoint at `path`; ValueError if its arrays are not those of `expected`."""
    flat, metadata = read_arrays(path)
    arrays, state = (
        {k.removeprefix(p): v for k, v in flat.items() if k.startswith(p)}
        for p in ("model/", "state/")
    )
    if wrong := mismatch(arrays, expected, with_values=False):
        raise ValueError(f"{path} is a checkpoint of another model than the run's: {wrong}")
    # a file has them in another order, on which the last bits of a norm over all arrays depend
    arrays = {name: arrays[name] for name in expected}
    return Checkpoint(int(metadata["round"]), arrays, state)


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
        return RunDirectory(path, config.rounds.checkpoint_every)


def open_run_directory(
    path: str, overrides: Mapping[str, OptionValue]
) -> tuple[RunDirectory, RunConfig, dict[str, OptionValue]]:
    """(directory, config, overrides) of a run to resume; only `num-rounds` may be new.

    path: the run directory, or its name under $KEEL_HOME/runs of this machine.
    ValueError, one line, if it is not a run directory, if it is damaged, if other keys are set, or
    if a default has changed since.
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
    run = RunReader(directory)
    saved = run.config
    if changed := sorted(overrides.keys() - {"resume", "num-rounds"}):
        raise ValueError(
            f"resume = {path!r}: {changed[0]} cannot be changed: a resumed run keeps its config; "
            "only num-rounds can be changed"
        )
    merged = run.overrides | {k: v for k, v in overrides.items() if k == "num-rounds"}
    config = resolve_config(merged, run.own)
    num_rounds = config.rounds.num_rounds
    check_num_rounds(run, config)
    expected = saved | {"num-rounds": num_rounds}
    for key, value in config.flat.items():
        if value != expected[key]:
            raise ValueError(
                f"resume = {path!r}: the defaults changed since: {key} was {expected[key]!r}, "
                f"is {value!r}; set {key} explicitly in a new run"
            )
    opened = RunDirectory(directory, config.rounds.checkpoint_every)
    try:
        if run.manifest:
            check_audit(run, is_resumed=True)
    except BaseException:
        opened.close()
        raise
    return opened, config, merged


def check_num_rounds(run: RunReader, config: RunConfig) -> None:
    """ValueError, one line, if the run cannot be resumed with the num-rounds of this config."""
    num_rounds, before, done = config.rounds.num_rounds, run.config["num-rounds"], run.last_round
    if num_rounds == done < before and done % config.rounds.evaluate_every:
        raise ValueError(
            f"{run.directory.name}: {num_of('round is', done, 'rounds are')} done, and the last "
            f"was not evaluated: set num-rounds={done + 1} or more"
        )
    reader = config.rounds.method if method_of(config).depends_on_num_rounds() else ""
    if config.train.lr_schedule == "cosine":
        reader = "lr-schedule = 'cosine'"
    if num_rounds != before and reader:
        raise ValueError(
            f"num-rounds = {num_rounds}: the result of {reader} depends on it: it "
            f"was {before} and cannot change on resume"
        )
    check_has_rounds_left(run, num_rounds)


def metadata_entry(about: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as a single entry, because safetensors writes several in random order."""
    return {"about": json.dumps(dict(about), sort_keys=True)}


def save_arrays(path: Path, arrays: Arrays, about: Mapping[str, str]) -> None:
    """Write arrays and their metadata as one safetensors file, whole or not at all."""
    write_atomically(path, *packed_pieces(arrays, metadata_entry(about)))


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """(arrays, metadata) of a file of `save_arrays`; ValueError if it is damaged."""
    try:
        arrays, metadata = unpacked(path.read_bytes())
        return arrays, json.loads(metadata["about"])
    except UNREADABLE as error:
        raise ValueError(f"{path} is damaged: {error}") from error
