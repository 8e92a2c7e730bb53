"""The run directory: its format, and the one class that reads it. Needs no torch.

config.json     {"config": every key, "overrides": those that the user set, "id": the run's id}
manifest.json   {"layout": 2, ...}: versions; digests of code, data, split, files (manifest.py)
roster.json     the clients: samples per class, model, versions; of very many only their number
history.jsonl   one short line a round, for rounds 1, 2, ...: `record.py` lists its fields
clients.jsonl   one line a round with what is about single clients: who took part, accuracies
audit.jsonl     who joined, was sent what, released what: chained lines (audit.py)
summary.json    status and results (summary.py)
confusion.json  matrices of the global model, of the last and the best round (confusion.py)
checkpoints/    round-<round>-<digest>.safetensors: global arrays and server state; the newest two
clients/        in simulation: client state, in the same form
model.safetensors, run.log, accuracy.png, labels.png, diagnostics/

A round is done once its line is in the history: the lines of clients.jsonl and audit.jsonl that
are about it come before, its checkpoint comes after. A kill at any point leaves a directory to
resume from: a resume drops an incomplete last line, and whatever is of later rounds than its
checkpoint. Other damage is refused in one line that names the file.

A directory of another layout is refused in one line; the layout changes when a reader of the
layout before would misread a file.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from protocol import own_code
from protocol.config import RunConfig, config_from_json, default_config, digests_entry, keel_home
from protocol.files import HISTORY_FILE as HISTORY_FILE
from protocol.files import full_path, versions_in
from protocol.own_code import Own, table_of
from protocol.text import num_of
from server_app.history import Line

LAYOUT = 2
CONFIG_FILE, MANIFEST_FILE, SUMMARY_FILE = "config.json", "manifest.json", "summary.json"
CLIENTS_FILE, AUDIT_FILE, ROSTER_FILE = "clients.jsonl", "audit.jsonl", "roster.json"
CONFUSION_FILE = "confusion.json"
LOG_FILE, LOCK_FILE, MODEL_FILE = "run.log", ".lock", "model.safetensors"
STARTING = {"status": "starting"}  # the summary of a run that has not written one
# what reading JSON of another form raises
DAMAGE = (ValueError, AttributeError, LookupError, TypeError, RecursionError)


@dataclass(frozen=True)
class RunReader:
    """A run directory, read only. Each file is read once, when an attribute is first used.

    ValueError, one line naming the file, if a file is damaged or the directory is of another
    layout.
    """

    directory: Path

    @cached_property
    def _saved(self) -> dict[str, Any]:
        """config.json."""
        self._check_exists()
        path = self.directory / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"{self.directory} has no {CONFIG_FILE}: it is not a run directory")
        self._check_layout()
        saved = read_object(path)
        if not all(isinstance(saved.get(key), dict) for key in ("config", "overrides")):
            raise ValueError(f"{path} is damaged: it lacks config or overrides")
        return saved

    def _check_exists(self) -> None:
        """ValueError if the directory was moved or deleted."""
        if not self.directory.exists():
            raise ValueError(f"{self.directory} does not exist: `keel list` names the runs that do")

    def _check_layout(self) -> None:
        """ValueError if the directory is of another layout; a new one has no manifest yet."""
        found = self.manifest.get("layout", 1)
        if not self.manifest and not (self.directory / HISTORY_FILE).exists():
            return
        if found != LAYOUT:
            reader = "Keel 0.1" if found == 1 else "a newer Keel"
            raise ValueError(
                f"{self.directory} has layout {found} of run directories, which {reader} reads; "
                f"this version reads layout {LAYOUT}"
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key; a newer one than the run has its default, one that is gone is omitted.

        The options of the run's own method are among them.
        """
        defaults, saved = default_config(), self._saved["config"]
        table = f"{table_of(str(saved.get('method')))}."
        of_own_method = {k: v for k, v in saved.items() if k.startswith(table) and table != "."}
        return defaults | {k: v for k, v in saved.items() if k in defaults} | of_own_method

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys that the user set."""
        return dict(self._saved["overrides"])

    @property
    def unused(self) -> set[str]:
        """The keys that the run does not use, such as the options of other methods."""
        return set(self._saved.get("unused", ()))

    @property
    def id(self) -> str:
        """By which a deployment's clients recognise the run that their state belongs to."""
        return str(self._saved.get("id", ""))

    @property
    def run_config(self) -> RunConfig:
        """The config, parsed, with the run's own code, which is executed when it is used."""
        assert self.own is not None  # read: `config_from_json` finds it
        return config_from_json(json.dumps(self.config | digests_entry(self.own)))

    @cached_property
    def own(self) -> dict[str, Own]:
        """The run's own code, as it began with it. ValueError if a file is missing or changed."""
        return own_code.read(self.directory, self.own_digests)

    @property
    def own_digests(self) -> dict[str, str]:
        """The digest of each piece of own code, by spec."""
        return dict(self._saved.get("own", {}))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """manifest.json; {} if there is none yet."""
        path = self.directory / MANIFEST_FILE
        return read_object(path) if path.exists() else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json as the run last wrote it; status "starting" if there is none yet."""
        self._check_exists()
        path = self.directory / SUMMARY_FILE
        found = read_object(path) if path.exists() else dict(STARTING)
        if not isinstance(found.get("status"), str):
            raise ValueError(f"{path} is damaged: it has no status; {COPY}")
        return found

    @cached_property
    def history(self) -> list[Line]:
        """The lines of history.jsonl: of round 1, 2, ..., and of all if the run has finished."""
        path = self.directory / HISTORY_FILE
        lines = lines_in_order(path)
        if self.has_finished and len(lines) < self.config["num-rounds"]:
            raise missing(path, len(lines) + 1)
        return lines

    @property
    def last_round(self) -> int:
        """The last round that is done; 0: none."""
        return len(self.history)

    def clients(self) -> Iterator[Line]:
        """The lines of clients.jsonl of the rounds that are done, read one by one."""
        for line in read_lines(self.directory / CLIENTS_FILE):
            if line["round"] > self.last_round:  # its round is under way, or was interrupted
                return
            yield line

    @cached_property
    def has_finished(self) -> bool:
        """Whether the run has finished and its last files were written: a kill may come between."""
        return self.summary["status"] == "finished" and self.manifest.get("files") != {}

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return versions_in(self.directory / "checkpoints")

    @property
    def is_over(self) -> bool:
        """Whether the run has finished and has no checkpoints to continue it from."""
        return not self.checkpoints and self.has_finished


COPY = "put back a copy of the file if there is one"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError naming the file if it has none."""
    return parsed(path.read_bytes(), str(path))


def parsed(text: bytes, place: str) -> dict[str, Any]:
    """The JSON object in a text; ValueError naming its place."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is damaged: {error}; {COPY}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place} is damaged: it is not a JSON object; {COPY}")
    return found


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file of rounds, one at a time; one without its newline is being written.

    Nothing if there is no file. ValueError naming the file and the line if one is damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            line = parsed(text, place := f"{path}, line {number}")
            if type(line.get("round")) is not int:
                raise ValueError(f"{place} is damaged: it has no round; {COPY}")
            yield line


def lines_in_order(path: Path) -> list[Line]:
    """The lines of a history, of rounds 1, 2, ...; ValueError naming the file if one is missing."""
    lines = []
    for number, line in enumerate(read_lines(path), 1):
        if line["round"] != number:
            raise missing(path, number)
        lines.append(line)
    return lines


def missing(path: Path, server_round: int) -> ValueError:
    """The refusal of a history without this round."""
    return ValueError(f"{path} is damaged: round {server_round} is missing; {COPY}")


def runs_directory(config: RunConfig) -> Path:
    """The directory in which the run directory is made."""
    return full_path(Path(config.rounds.output_dir or keel_home() / "runs"))


def new_path(config: RunConfig) -> Path:
    """A path for a run directory, named by run-name, else by time, method and data.

    If a path named by time exists, a number is appended; if that of `run-name` does, ValueError.
    """
    rounds, parent = config.rounds, runs_directory(config)
    if name := rounds.run_name:
        path = parent / name
        if path.exists():
            raise ValueError(
                f"run-name = {name!r}: {path} exists: choose another name, remove it, or continue "
                f"that run with `keel resume {name}`"
            )
        return path
    source = config.data.source.partition(":")[0]
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method_table}-{source}"
    path, number = parent / stem, 0
    while path.exists():
        number += 1
        path = parent / f"{stem}-{number}"
    return path


def check_has_rounds_left(run: RunReader, num_rounds: int) -> None:
    """ValueError, one line, if a resume up to this round would do nothing or undo rounds.

    A resume without rounds left is allowed for a run that ended before its last files were written.
    """
    name, done = run.directory.name, run.last_round
    if run.is_over:
        raise ValueError(
            f"{run.directory}: it finished with keep-state = false, which removes its checkpoints: "
            "start a new run with more rounds, and with keep-state = true if it is to be continued"
        )
    if run.has_finished and num_rounds <= done:
        raise ValueError(
            f"{name} has finished its {num_of('round', done)}: set more, such as "
            f"num-rounds={2 * done}"
        )
    if num_rounds < done:
        raise ValueError(
            f"{name}: {num_of('round is', done, 'rounds are')} done, which a resume keeps: "
            f"num-rounds = {num_rounds} is fewer; set {done} or more"
        )
