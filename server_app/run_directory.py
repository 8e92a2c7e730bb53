"""What a run leaves on disk: enough to plot, to compare, and to resume bit for bit.

config.json         the resolved config, and which keys the user gave
roster.json         who takes part: samples per class, model, versions
history.jsonl       one line a round;  run.log: what was logged, with times
checkpoints/        the newest two: model, server's state, round (safetensors)
clients/            in simulation: what each client keeps
model.safetensors   the final model;  summary.json, accuracy.png, labels.png
manifest.json         versions, and digests of split, files and first rounds: see bundle.py
"""

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from client_app.methods import method_of
from protocol.array_names import with_current_names
from protocol.config import RunConfig, keel_home, resolve_config
from protocol.files import digest, write_atomically
from protocol.messages import Arrays
from protocol.options import OptionValue

log = logging.getLogger("keel.server")
kept_checkpoints = 2
lock_attempts = 5


@dataclass(frozen=True)
class Checkpoint:
    """The server after `round` rounds: global arrays and what the strategy keeps."""

    round: int
    arrays: Arrays
    state: Arrays


class RunDirectory:
    """One run's folder; one process at a time may write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO = (path / ".lock").open("w")
        self._log: logging.Handler | None = None
        self._level_before = logging.NOTSET
        for attempt in range(lock_attempts):  # a reader of the status holds it for a moment
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if attempt == lock_attempts - 1:
                    self._lock.close()
                    raise ValueError(f"{path} is being written by another process") from error
                time.sleep(0.05)

    def start_log(self) -> None:
        """Write what Keel logs to run.log too, until the folder is closed."""
        logger = logging.getLogger("keel")
        self._log = logging.FileHandler(self.path / "run.log")
        form = f"%(asctime)s {self.path.name} %(levelname)s %(message)s"
        self._log.setFormatter(logging.Formatter(form))
        self._level_before = logger.level
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        logger.addHandler(self._log)

    def close(self) -> None:
        """Let another process write the folder."""
        if self._log:
            logger = logging.getLogger("keel")
            logger.removeHandler(self._log)
            logger.setLevel(self._level_before)
            self._log.close()
            self._log = None
        self._lock.close()

    @property
    def history_path(self) -> Path:
        """history.jsonl."""
        return self.path / "history.jsonl"

    def save_config(self, config: RunConfig, given: Mapping[str, OptionValue]) -> None:
        """Write config.json; `given` are the keys that the user set."""
        text = json.dumps({"config": dict(config.flat), "given": dict(given)}, indent=2)
        write_atomically(self.path / "config.json", text.encode())

    def append_history(self, line: Mapping[str, Any]) -> None:
        """Add one round's line."""
        append_line(self.history_path, json.dumps(only_finite(line), allow_nan=False))

    def append_releases(self, server_round: int, clients: list[str]) -> None:
        """Note who will be asked for a private release; never truncated, whatever is resumed."""
        line = json.dumps({"round": server_round, "clients": clients})
        append_line(self.path / "releases.jsonl", line)

    def read_releases(self) -> list[list[str]]:
        """Who was asked, each time that somebody was.

        A line that cannot be read, as a full disk or a power cut may leave one, counts as one that
        names every client of the file, or one unknown where no other line names any: what was spent
        is never under-counted.
        """
        path = self.path / "releases.jsonl"
        asked: list[list[str]] = []
        damaged = 0
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                asked.append([str(client) for client in json.loads(line)["clients"]])
            except (ValueError, TypeError, KeyError):
                damaged += 1
        if damaged:
            log.warning("%s: %d lines are damaged: each counts for every client", path, damaged)
        everybody = sorted({client for clients in asked for client in clients}) or ["unknown"]
        return asked + damaged * [everybody]

    def read_history(self) -> list[dict[str, Any]]:
        """All rounds' lines so far; see the function of the same name."""
        return read_history(self.history_path)

    def truncate_history(self, last_round: int) -> list[dict[str, Any]]:
        """Drop the lines of rounds that a resume will run again; return the others."""
        lines = [line for line in self.read_history() if line["round"] <= last_round]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(self.history_path, text.encode())
        return lines

    def save_checkpoint(self, checkpoint: Checkpoint, model: str) -> str:
        """Write this round's checkpoint, delete all but it and those of the round before.

        So one that was passed over, being damaged or ahead of the history, goes when its round is
        done again, and the one that the round began from stays. Returns the digest.
        """
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        flat = {f"model/{k}": v for k, v in checkpoint.arrays.items()}
        flat |= {f"state/{k}": v for k, v in checkpoint.state.items()}
        content = save(
            {k: v.contiguous() for k, v in flat.items()},
            metadata=one_line({"round": checkpoint.round, "model": model}),
        )
        content_digest = digest(content)
        name = f"round-{checkpoint.round:05d}-{content_digest}.safetensors"
        write_atomically(folder / name, content)
        oldest = checkpoint.round - kept_checkpoints + 1
        for other in folder.glob("round-*.safetensors"):
            if other.name != name and not oldest <= round_of(other) < checkpoint.round:
                other.unlink()
        return content_digest

    def has_rounds(self) -> bool:
        """Whether any round was finished, or left a checkpoint."""
        return bool(self.read_history() or any((self.path / "checkpoints").glob("round-*")))

    def newest_checkpoint(self, expected: Arrays, model: str) -> Checkpoint:
        """The newest checkpoint that can be read and whose round has its line in the history.

        One cut short is passed over with a warning. ValueError if there is none, or if it is of
        another model than `expected` arrays.
        """
        last = max((line["round"] for line in self.read_history()), default=0)
        found = sorted((self.path / "checkpoints").glob("round-*.safetensors"), reverse=True)
        paths = [path for path in found if round_of(path) <= last]
        for path in paths:
            if digest(path.read_bytes()) in path.name:
                return read_checkpoint(path, expected, model)
            log.warning("%s is damaged or cut short (its digest differs): passed over", path)
        state = f"{len(paths)} there, all damaged" if paths else "there is none"
        raise ValueError(f"resume = {str(self.path)!r}: no readable checkpoint in it ({state})")


def append_line(path: Path, line: str) -> None:
    """Add a line, on the disk when this returns; one before that was cut short is ended first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def round_of(checkpoint: Path) -> int:
    """The round in the name of a checkpoint."""
    return int(checkpoint.name.split("-")[1])


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a history.jsonl so far; a last line that is not whole (yet) is left out.

    ValueError naming the line if another one is damaged.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return lines


def read_checkpoint(path: Path, expected: Arrays, model: str) -> Checkpoint:
    """The checkpoint at `path`; ValueError if its arrays are not those of `expected`."""
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["about"])
        flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    flat = with_current_names(flat)
    arrays, state = (
        {k.removeprefix(p): v for k, v in flat.items() if k.startswith(p)}
        for p in ("model/", "state/")
    )
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    wanted = {name: list(array.shape) for name, array in expected.items()}
    if shapes != wanted:
        odd = sorted(k for k in shapes.keys() | wanted.keys() if shapes.get(k) != wanted.get(k))[0]
        raise ValueError(
            f"{path} is a checkpoint of another model ({metadata.get('model')}, the run's is "
            f"{model}): array {odd!r} is {shapes.get(odd)}, not {wanted.get(odd)}"
        )
    return Checkpoint(int(metadata["round"]), arrays, state)


def new_run_directory(config: RunConfig) -> RunDirectory:
    """A fresh, empty folder named after time, method and data; never an existing one."""
    base = Path(config.rounds.output_dir or keel_home() / "runs").expanduser()
    source = config.data.source.partition(":")[0]
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.rounds.method}-{source}"
    for attempt in range(1000):
        path = base / (f"{stem}-{attempt}" if attempt else stem)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"output-dir: {path} cannot be made: {error.strerror}") from error
        return RunDirectory(path)
    raise ValueError(f"output-dir: {base} holds a thousand runs of this second")


def open_run_directory(
    path: str, given: Mapping[str, OptionValue]
) -> tuple[RunDirectory, RunConfig, dict[str, OptionValue]]:
    """(folder, config, keys given) of a run to resume; `num-rounds` alone may be new.

    ValueError, one line, if it is no run's folder or if other keys are given.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"resume = {path!r}: there is no config.json in it: not a run's folder")
    try:
        kept = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'config.json'} is damaged or cut short: {error}") from error
    changed = sorted(given.keys() - {"resume", "num-rounds"})
    if changed:
        raise ValueError(
            f"resume goes on with the run's own config: {changed[0]} cannot be given with it; "
            "num-rounds alone can"
        )
    merged = kept["given"] | {k: v for k, v in given.items() if k == "num-rounds"}
    config = resolve_config(merged)
    is_longer = config.flat["num-rounds"] != kept["config"].get("num-rounds")
    if is_longer and method_of(config).depends_on_num_rounds():
        raise ValueError(
            f"num-rounds = {config.flat['num-rounds']}: {config.rounds.method} depends on their "
            f"number, which was {kept['config'].get('num-rounds')}: it cannot change on resume"
        )
    now, then = dict(config.flat), kept["config"] | {"num-rounds": config.flat["num-rounds"]}
    if now != then:
        key = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))[0]
        raise ValueError(
            f"resume = {path!r}: the defaults changed since: {key} was {then.get(key)!r}, is "
            f"{now.get(key)!r}"
        )
    return RunDirectory(folder), config, merged


def one_line(about: Mapping[str, Any]) -> dict[str, str]:
    """Metadata as one entry: safetensors writes several in an order that is never the same."""
    return {"about": json.dumps(dict(about), sort_keys=True)}


def save_arrays(path: Path, arrays: Arrays, about: Mapping[str, str]) -> None:
    """Arrays and a few words about them as one safetensors file, written whole or not at all."""
    content = save({k: v.contiguous() for k, v in arrays.items()}, metadata=one_line(about))
    write_atomically(path, content)


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """What `save_arrays` wrote; ValueError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return with_current_names(arrays), json.loads(file.metadata()["about"])
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error


def only_finite(value: Any) -> Any:
    """The value with None (null) for every NaN and infinity in it, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: only_finite(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
