"""One run of an experiment: its config, its name, and the run directories of its attempts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from keel.experiments.measure import History
from keel.experiments.recipe import Cell
from keel.experiments.scale import SCALES, Keys, scaled
from protocol.config import RENAMED_KEYS, RENAMED_VALUES, default_config, resolve_config
from protocol.options import OptionValue
from server_app.history import read_history

# --- identity ---------------------------------------------------------------------------------
#
# The name of a run ends in a hash of the keys that its result depends on, where they differ from
# the defaults: a key that is new in Keel changes no name. Keys and values are hashed under their
# names of Keel 0.1, so that runs finished then are found. A name that leaves RENAMED_KEYS or
# RENAMED_VALUES has to move here.

_OLD_KEYS = {new: old for old, new in RENAMED_KEYS.items()}
_OLD_VALUES = {(key, new): old for (key, old), new in RENAMED_VALUES.items()}
IRRELEVANT = {
    *("preset", "output-dir", "data-dir", "resume", "run-name", "device", "cache-mb"),
    "last-rounds",
}


def with_old_names(flat: Keys) -> dict[str, OptionValue]:
    """A flat config under the names of 0.1, whichever release wrote it."""
    return {
        _OLD_KEYS.get(key, key): _OLD_VALUES.get((key, str(value)), value)
        for key, value in flat.items()
    }


def identity(flat: Keys) -> dict[str, OptionValue]:
    """What the result depends on: no folders, no options of methods that are not used."""
    old = with_old_names(flat)
    tables = {str(old["method"]), str(old["server"]), "privacy"}
    if old.get("privacy.metrics") == "exact" or not old["privacy.epsilon"]:
        old.pop("privacy.metrics", None)  # runs before this key sent exact metrics
    return {
        key: value
        for key, value in old.items()
        if key not in IRRELEVANT and ("." not in key or key.partition(".")[0] in tables)
    }


# --- runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How a recipe is run. full_grid: try all values under `tune`, not only the paper's best.

    tuned_on: the seed that chooses among them; None: the first of `seeds`.
    """

    scale: str
    changes: Mapping[str, OptionValue]
    seeds: Sequence[int]
    full_grid: bool
    tuned_on: int | None = None

    @property
    def tuning_seed(self) -> int:
        """The seed that chooses among the values under `tune`."""
        return self.seeds[0] if self.tuned_on is None else self.tuned_on

    @property
    def label(self) -> str:
        """Scale and changed keys."""
        changed = [f"{key}={value}" for key, value in sorted(self.changes.items())]
        return ", ".join([f"scale {self.scale}", *changed])


@dataclass(frozen=True)
class Run:
    """One run: its config keys, and the folder that holds the run directories of its attempts."""

    keys: Mapping[str, OptionValue]
    rounds: int
    paper_rounds: int
    clients: int
    name: str
    folder: Path

    @cached_property
    def identity(self) -> dict[str, OptionValue]:
        """What its result depends on."""
        return identity(resolve_config(self.keys).flat)

    def attempts(self) -> list[Path]:
        """Its run directories, oldest first."""
        return sorted(path.parent for path in self.folder.glob("*/config.json"))

    def completed(self) -> list[Path]:
        """The attempts that ran all rounds."""
        return [
            attempt
            for attempt in self.attempts()
            if read_json(attempt / "summary.json").get("status") == "finished"
        ]

    def finished(self) -> Path | None:
        """The run directory that counts: the newest completed one that has today's defaults."""
        return next((d for d in reversed(self.completed()) if not self.other_default(d)), None)

    def other_default(self, directory: Path) -> str:
        """A key that had another default when this attempt was run, with both; else empty."""
        then = identity(read_json(directory / "config.json")["config"])
        defaults = with_old_names(default_config())
        for key in sorted(then.keys() | self.identity.keys()):
            before = then.get(key, defaults.get(key))
            if before != self.identity.get(key):
                name = RENAMED_KEYS.get(key, key)
                return f"{name} = {before!r}, today {self.identity.get(key)!r}"
        return ""

    def outdated(self) -> str:
        """Why no completed attempt counts; empty if one does, or if there is none."""
        completed = [] if self.finished() else self.completed()
        return self.other_default(completed[-1]) if completed else ""


def make_run(
    keys: Keys, seed: int, options: Options, output: Path, read_at: Sequence[int] = ()
) -> Run:
    """The run of these recipe keys. ValueError if the config is invalid.

    Runs with the same identity share a folder; runs at different scales do not have the same.
    """
    full = {**keys, **scaled(keys, SCALES[options.scale], read_at), **options.changes, "seed": seed}
    config = resolve_config(full)
    if not config.rounds.num_clients:
        raise ValueError("num-clients = 0: expected the recipe to set the number of clients")
    defaults = with_old_names(default_config())
    hashed = {k: v for k, v in identity(config.flat).items() if v != defaults[k]}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:12]
    source = config.data.source.rpartition("/")[2]
    stem = re.sub(r"[^a-z0-9]+", "-", f"{config.rounds.method}-{source}".lower())
    name = f"{stem}-seed{seed}-{digest}"
    return Run(
        keys=full,
        rounds=config.rounds.num_rounds,
        paper_rounds=resolve_config(keys).rounds.num_rounds,
        clients=config.rounds.num_clients,
        name=name,
        folder=output / "runs" / name,
    )


def run_of(cell: Cell, candidate: Keys, seed: int, options: Options, output: Path) -> Run:
    """The run of one cell with one tuned value and one seed."""
    return make_run({**cell.keys, **candidate}, seed, options, output, cell.read_at)


# --- what a run directory says ----------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no file. ValueError naming a damaged one."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object")
    return content


@lru_cache(maxsize=4096)
def history_in(directory: Path) -> History:
    """The history of a finished run."""
    return read_history(directory)


def wall_seconds(directory: Path) -> float:
    """Duration of all rounds of a finished run."""
    return sum(sum(line["seconds"].values()) for line in history_in(directory))


def machines_of(directory: Path) -> list[str]:
    """What a run trained on: `cpu: NAME` or `cuda: NAME`, several if it was resumed elsewhere.

    "its clients' own" if its clients were sites, whose machines are not known.
    """
    path = directory / "manifest.json"
    manifest = read_json(path if path.exists() else directory / "bundle.json")  # its name in 0.1
    if not manifest.get("simulated", True):
        return ["its clients' own"]
    versions = manifest.get("versions", {"cpu": "not recorded", "gpu": "none"})
    on_gpu = versions["gpu"] != "none"
    kind = f"cuda: {versions['gpu']}" if on_gpu else f"cpu: {versions['cpu']}"
    return manifest.get("machines") or [kind]
