"""One run of an experiment: its config, its name, its directory, and how it ended.

A run's directory is `runs/CODE/NAME` in the output directory. CODE names the sources and torch, so
that runs of different code never meet; NAME ends in a hash of the keys that the result depends on,
where they differ from the defaults, so that recipes share runs. Beside it are `NAME.lock`, which a
runner holds while it executes the run, `NAME.log` and, if the last attempt failed without a
summary, `NAME.failed` with the reason.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from keel.experiments.measure import History, is_divergence
from keel.experiments.recipe import Cell, Keys
from protocol.code import code_version
from protocol.config import RunConfig, default_config, resolve_config
from protocol.files import digest
from protocol.models import model_spec
from protocol.options import OptionValue, typed
from protocol.own_code import table_of
from server_app.run_reader import CONFIG_FILE, RunReader

IRRELEVANT = {
    *("preset", "output-dir", "data-dir", "resume", "run-name", "last-rounds", "tracker"),
    *("keep-state", "checkpoint-every"),
}
RELEVANT_TO_SECONDS = {"device", "cache-mb"}  # and `threads`, on which the bits depend too
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"


@dataclass(frozen=True)
class Options:
    """How a recipe is run: the config keys of all runs, and the seeds.

    The first of the seeds selects the best of the values under `tune`.
    """

    changes: Mapping[str, OptionValue]
    seeds: Sequence[int]

    @property
    def label(self) -> str:
        """The changed keys."""
        return ", ".join(f"{key}={value}" for key, value in sorted(self.changes.items()))


def identity(flat: Keys, is_timed: bool = False) -> dict[str, OptionValue]:
    """What the result depends on: no folders, no options of methods that are not used.

    is_timed: seconds are read, so what they depend on counts too.
    """
    method = str(flat["method"])
    tables = {table_of(method) or method, str(flat["server-optimizer"]), "privacy"}
    if flat.get("fedproc.schedule-rounds") == flat["num-rounds"]:
        flat = {**flat, "fedproc.schedule-rounds": 0}  # which means the same
    irrelevant = IRRELEVANT if is_timed else IRRELEVANT | RELEVANT_TO_SECONDS
    return {
        key: value
        for key, value in flat.items()
        if key not in irrelevant and ("." not in key or key.partition(".")[0] in tables)
    }


def name_of(config: RunConfig, is_timed: bool) -> str:
    """The name of the run with this config: method, source, seed and the hash of `identity`."""
    defaults = default_config()
    hashed = {  # an integer where a float is due is that float
        key: float(value) if type(defaults.get(key)) is float else value
        for key, value in identity(config.flat, is_timed).items()
        if value != defaults.get(key)
    }
    hashed |= {spec: own.digest for spec, own in config.own.items()}  # edited, it is other code
    source = config.data.source.rpartition("/")[2]
    stem = re.sub(r"[^a-z0-9]+", "-", f"{config.rounds.method}-{source}".lower())
    key = digest(json.dumps(hashed, sort_keys=True).encode())[:12]
    return f"{stem}-seed{config.rounds.seed}-{key}"


def code_folder(code: str = "") -> str:
    """The name of the folder for runs of this code, by default the installed one."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", (code or code_version()).removeprefix("sources "))


@dataclass(frozen=True)
class Run:
    """One run: its config keys and its directory. paper_rounds: as the recipe has them."""

    keys: Keys
    directory: Path
    rounds: int
    paper_rounds: int

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.name

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.keys["seed"])

    def beside(self, kind: str) -> Path:
        """The file `NAME.KIND` beside the directory: lock, log or failed."""
        return self.directory.with_name(f"{self.name}.{kind}")

    @property
    def config(self) -> RunConfig:
        """The config, parsed."""
        return resolve_config(self.keys)

    @property
    def status(self) -> str:
        """finished, diverged, failed; "": it has not ended, or not begun.

        ValueError naming a damaged file.
        """
        if (self.directory / CONFIG_FILE).is_file():
            run = RunReader(self.directory)
            status = str(run.summary["status"])
            if status.startswith(FAILED):
                return DIVERGED if is_divergence(status) else FAILED
            if run.has_finished:
                return FINISHED
        return FAILED if self.beside("failed").exists() else ""

    @property
    def reason(self) -> str:
        """Why it failed, in one line; "" if it has not."""
        if self.status != FAILED:
            return ""
        if (note := self.beside("failed")).exists():
            return note.read_text()
        return str(RunReader(self.directory).summary["status"]).removeprefix(f"{FAILED}: ")

    def note_failure(self, reason: str) -> None:
        """Record a failure of which the run directory does not know, until the next attempt."""
        self.beside("failed").write_text(reason)

    @property
    def is_done(self) -> bool:
        """Whether another attempt would end like the last: it finished, or diverged."""
        return self.status in (FINISHED, DIVERGED)

    def prepare(self) -> list[str]:
        """The words after `keel` that resume the run, or start it from an empty directory."""
        self.beside("failed").unlink(missing_ok=True)
        if RunReader(self.directory).checkpoints or self.lacks_last_files:
            return ["resume", str(self.directory)]
        shutil.rmtree(self.directory, ignore_errors=True)
        place = {"output-dir": str(self.directory.parent), "run-name": self.name}
        used = {key: self.keys[key] for key in used_keys(self.config, self.keys)} | place
        return ["run", *(f"{key}={typed(value)}" for key, value in used.items())]

    @property
    def lacks_last_files(self) -> bool:
        """Whether it has finished but for its last files, which a resume writes."""
        is_there = (self.directory / CONFIG_FILE).is_file()
        return is_there and RunReader(self.directory).summary["status"] == FINISHED


def used_keys(config: RunConfig, keys: Keys) -> Iterator[str]:
    """Those of the keys that the run uses: `config` of a recipe is for all of its rows."""
    from server_app.checks import keys_without_effect  # imports torch

    flat = identity(config.flat, is_timed=True)
    for key in keys:
        is_own = key in flat or key in IRRELEVANT
        if is_own and not keys_without_effect(config, [key]):
            yield key


def run_of(cell: Cell, candidate: Keys, seed: int, options: Options, folder: Path) -> Run:
    """The run of one cell with one tuned value and one seed. ValueError if the config is invalid.

    folder: of its code. Runs with the same identity share a directory. Where only the last round is
    read, a method that fine-tunes a copy of the global model at each evaluation is evaluated after
    that round alone.
    """
    keys = {**cell.keys, **candidate}
    full = {**keys, **options.changes, "seed": seed}
    config = resolve_config(full)
    if not config.rounds.num_clients:
        raise ValueError("num-clients = 0: expected the recipe to set the number of clients")
    if cell.only_last and is_adapted_without_state(config):
        full |= {"evaluate-every": config.rounds.num_rounds, **options.changes}
        config = resolve_config(full)
    return Run(
        keys=full,
        directory=folder / name_of(config, cell.is_timed),
        rounds=config.rounds.num_rounds,
        paper_rounds=resolve_config(keys).rounds.num_rounds,
    )


def is_adapted_without_state(config: RunConfig) -> bool:
    """Whether the method's personal model is made from the global one alone."""
    from client_app.methods import method_of  # imports torch

    method = method_of(config)
    return method.is_adapted_from_global and method.is_stateful is not True


def last_round_read(cell: Cell, run: Run) -> int:
    """The last round that counts for the cell's number, at most the run's last."""
    return min(cell.at or run.rounds, run.rounds)


def paper_round_read(cell: Cell, run: Run) -> int:
    """The round at which the paper reads the cell's number."""
    return cell.at or run.paper_rounds


def reads_elsewhere(cell: Cell, run: Run) -> bool:
    """Whether the cell is read at another round than the paper's.

    A later round counts only if the paper has a number.
    """
    read, due = last_round_read(cell, run), paper_round_read(cell, run)
    return read < due or (read > due and cell.paper is not None)


@lru_cache(maxsize=4096)
def history_in(directory: Path) -> History:
    """The history of a run that has ended. ValueError naming the file if it is damaged."""
    run = RunReader(directory)
    try:
        return History(run.history, run.clients())
    except ValueError as error:
        raise ValueError(f"{error}; remove its run directory, then run it again") from error


def machines_of(directory: Path) -> list[str]:
    """What a run trained on: `cpu: NAME` or `cuda: NAME`, several if it was resumed elsewhere.

    "its clients' own" if its clients were sites, whose machines the manifest does not name.
    """
    manifest = RunReader(directory).manifest
    if not manifest.get("simulated", True):
        return ["its clients' own"]
    versions = {"cpu": "not recorded", "gpu": "none"} | manifest.get("versions", {})
    kind = f"cuda: {versions['gpu']}" if versions["gpu"] != "none" else f"cpu: {versions['cpu']}"
    return manifest.get("machines") or [kind]


def precision_of(directory: Path) -> list[str]:
    """The run's precision; where it was "auto", what that was, if this is recorded."""
    run = RunReader(directory)
    value = run.config["precision"]
    return list(run.manifest.get("precision", [] if value == "auto" else [value]))


def data_of(directory: Path) -> str:
    """The digest of the run's data; empty if it recorded none."""
    return str(RunReader(directory).manifest.get("data", ""))


def incomparable(runs: Sequence[Run], is_timed: bool) -> str:
    """Why the numbers of these runs are not averaged or compared; "" if they are.

    The digest of the data depends on the shape to which images are converted, so only runs with the
    same shape have to have the same digest. is_timed: the numbers are seconds.
    """
    digests: dict[tuple[object, ...], set[str]] = {}
    for run in runs:
        config, model = run.config, model_spec(run.config.model.model)
        key = (config.data.source, config.image_size, config.data.channels or model.channels)
        digests.setdefault(key, set()).add(data_of(run.directory))
    if any(len(each - {""}) > 1 for each in digests.values()):
        return "runs on different data"
    if len({name for run in runs for name in precision_of(run.directory)}) > 1:
        return "runs in different precision"
    if is_timed and len({name for run in runs for name in machines_of(run.directory)}) > 1:
        return "runs on different machines"
    return ""
