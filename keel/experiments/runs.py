"""One run of an experiment: its config, its name, and the run directories of its attempts."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from keel.experiments.measure import History, is_divergence
from keel.experiments.recipe import Cell
from keel.experiments.scale import SCALES, Keys, scaled
from protocol.code import code_version
from protocol.config import RunConfig, default_config, resolve_config
from protocol.files import digest, write_atomically
from protocol.options import OptionValue
from server_app.run_reader import CLIENTS_FILE, HISTORY_FILE, LAYOUT, RunReader, read_object

# The name of a run ends in a hash of the keys that its result depends on, where they differ from
# the defaults: a key that is new in Keel changes no name.

IRRELEVANT = {
    "preset",
    "output-dir",
    "data-dir",
    "resume",
    "run-name",
    "last-rounds",
    "tracker",
    "keep-state",
    "checkpoint-every",
}
RELEVANT_TO_SECONDS = {"device", "cache-mb"}  # and `threads`, on which the bits depend too
DIVERGED, FAILED = "diverged", "failed"
NOTE = "failed"  # the folder of `Run.note_failure`, beside the run directories
REMEDY = "remove its run directory, then run it again or restore it from an archive"  # of damage
UNKNOWN = "not recorded"  # code that a manifest does not name


def identity(flat: Keys, is_timed: bool = False) -> dict[str, OptionValue]:
    """What the result depends on: no folders, no options of methods that are not used.

    is_timed: seconds are read, so what they depend on counts too.
    """
    tables = {str(flat["method"]), str(flat["server-optimizer"]), "privacy"}
    if flat.get("fedproc.schedule-rounds") == flat["num-rounds"]:
        flat = {**flat, "fedproc.schedule-rounds": 0}  # which means the same
    irrelevant = IRRELEVANT if is_timed else IRRELEVANT | RELEVANT_TO_SECONDS
    return {
        key: value
        for key, value in flat.items()
        if key not in irrelevant and ("." not in key or key.partition(".")[0] in tables)
    }


def hash_of(relevant: Keys) -> str:
    """12 hex digits of what `identity` returns; an integer where a float is due is that float."""
    defaults = default_config()
    hashed = {
        key: float(value) if type(defaults[key]) is float else value
        for key, value in relevant.items()
        if value != defaults[key]
    }
    return digest(json.dumps(hashed, sort_keys=True).encode())[:12]


@dataclass(frozen=True)
class Options:
    """How a recipe is run. full_grid: try all values under `tune`, not only the paper's best.

    tuned_on: the seed that chooses among them; None: the first of `seeds`.
    any_code: for a report: where no run of today's code has ended, one of other code counts.
    """

    scale: str
    changes: Mapping[str, OptionValue]
    seeds: Sequence[int]
    full_grid: bool
    tuned_on: int | None = None
    any_code: bool = False

    @property
    def tuning_seed(self) -> int:
        """The seed that chooses among the values under `tune`."""
        return self.seeds[0] if self.tuned_on is None else self.tuned_on

    @property
    def label(self) -> str:
        """Scale and changed keys."""
        changed = [f"{key}={value}" for key, value in sorted(self.changes.items())]
        return ", ".join([f"scale {self.scale}", *changed])


def name_of(config: RunConfig, is_timed: bool) -> str:
    """The name of the run with this config: method, source, seed and the hash."""
    source = config.data.source.rpartition("/")[2]
    stem = re.sub(r"[^a-z0-9]+", "-", f"{config.rounds.method}-{source}".lower())
    return f"{stem}-seed{config.rounds.seed}-{hash_of(identity(config.flat, is_timed))}"


@dataclass(frozen=True)
class Run:
    """One run: its config keys, and the folder that holds the run directories of its attempts.

    is_scaled: the scale maps the paper's rounds onto fewer; otherwise they are the run's.
    is_timed, only_last: as in `Cell`. any_code: as in `Options`.
    """

    keys: Mapping[str, OptionValue]
    rounds: int
    paper_rounds: int
    clients: int
    name: str
    folder: Path
    is_scaled: bool = False
    is_timed: bool = False
    only_last: bool = False
    any_code: bool = False

    @property
    def shrink(self) -> float:
        """Rounds of the run / rounds of the paper that they stand for."""
        return self.rounds / self.paper_rounds if self.is_scaled else 1.0

    @cached_property
    def identity(self) -> dict[str, OptionValue]:
        """What its result depends on."""
        return identity(resolve_config(self.keys).flat, self.is_timed)

    def attempts(self) -> list[Path]:
        """Its run directories, oldest first."""
        found = (path.parent for path in self.folder.glob("*/config.json"))
        return sorted(path for path in found if path.name != NOTE)

    @property
    def note(self) -> Path:
        """Where `note_failure` says why the newest attempt left no result."""
        return self.folder / NOTE

    def note_failure(self, reason: str) -> None:
        """Record a failure of which the run directory does not know; it counts until one ends.

        Call it with the run's lock, where none has ended.
        """
        self.note.mkdir(exist_ok=True)
        for name, content in (
            ("manifest.json", {"layout": LAYOUT, "code": [code_version()]}),
            ("config.json", {"config": dict(resolve_config(self.keys).flat), "overrides": {}}),
            ("summary.json", {"status": f"{FAILED}: {reason}"}),  # last: without it, no note
        ):
            write_atomically(self.note / name, json.dumps(content).encode())

    def remove_note(self) -> None:
        """Remove what `note_failure` wrote, before another attempt."""
        (self.note / "summary.json").unlink(missing_ok=True)
        shutil.rmtree(self.note, ignore_errors=True)

    def ended(self) -> Path | None:
        """The attempt that counts: the newest that finished or failed with today's config and code.

        Of other code only with `any_code`. A failure does not count if an attempt of the same code
        finished or diverged: with a wrong clock, the failure may be dated later.
        ValueError naming a damaged file, and what to do.
        """
        attempts, had_note = (self.note, *self.attempts()), self.note.exists()
        try:
            found = [a for a in attempts if status_of(a) and not self.other_default(a)]
            of_today = [attempt for attempt in found if code_of(attempt) == (code_version(),)]
        except (OSError, ValueError) as error:
            if had_note and not self.note.exists():
                return self.ended()  # another runner has just removed the note
            raise ValueError(f"{error}; {REMEDY}") from error
        counting = of_today or (found if self.any_code else [])
        if len(counting) < 2:
            return counting[0] if counting else None
        newest_code = code_of(counting[-1])
        same = [attempt for attempt in counting if code_of(attempt) == newest_code]
        with_result = [attempt for attempt in same if status_of(attempt) != FAILED]
        return (with_result or same)[-1]

    def finished(self) -> Path | None:
        """The attempt that counts, if it ran all rounds."""
        attempt = self.ended()
        return attempt if attempt and status_of(attempt) == "finished" else None

    def failure(self) -> str:
        """`diverged` or `failed` if that is how the attempt that counts ended, else empty."""
        attempt = self.ended()
        status = status_of(attempt) if attempt else ""
        return "" if status == "finished" else status

    def is_done(self) -> bool:
        """Whether another attempt would end as the last: it finished, or diverged."""
        return bool(self.finished()) or self.failure() == DIVERGED

    def other_default(self, directory: Path) -> str:
        """A key that had another default when this attempt was run, with both; else empty."""
        then = identity(RunReader(directory).config, self.is_timed)
        for key in sorted(then.keys() | self.identity.keys()):
            before, today = then.get(key), self.identity.get(key)
            if before != today and not (key == "evaluate-every" and self.only_last):
                return f"{key} = {before!r}, today {today!r}"
        return ""

    def other_code(self, directory: Path) -> str:
        """The code that this attempt was run with, and today's, if they differ; else empty."""
        then = ", then ".join(code_of(directory))
        return "" if then == code_version() else f"{then}; today {code_version()}"

    def outdated(self) -> str:
        """Why no attempt that ended counts; empty if one does, or if there is none."""
        if self.ended():
            return ""
        ended = [attempt for attempt in self.attempts() if status_of(attempt)]
        return (self.other_default(ended[-1]) or self.other_code(ended[-1])) if ended else ""


def run_of(cell: Cell, candidate: Keys, seed: int, options: Options, output: Path) -> Run:
    """The run of one cell with one tuned value and one seed. ValueError if the config is invalid.

    Runs with the same identity share a folder; runs at different scales do not have the same.
    Where only the last round is read, a method that fine-tunes a copy of the global model at each
    evaluation is evaluated after that round alone.
    """
    keys = {**cell.keys, **candidate}
    smaller = scaled(keys, SCALES[options.scale], cell.read_at)
    full = {**keys, **smaller, **options.changes, "seed": seed}
    config = resolve_config(full)
    if not config.rounds.num_clients:
        raise ValueError("num-clients = 0: expected the recipe to set the number of clients")
    if cell.only_last and is_adapted_without_state(config.rounds.method):
        full |= {"evaluate-every": config.rounds.num_rounds, **options.changes}
        config = resolve_config(full)
    name = name_of(config, cell.is_timed)
    return Run(
        keys=full,
        rounds=config.rounds.num_rounds,
        paper_rounds=resolve_config(keys).rounds.num_rounds,
        clients=config.rounds.num_clients,
        name=name,
        folder=output / "runs" / name,
        is_scaled=options.scale != "paper",
        is_timed=cell.is_timed,
        only_last=cell.only_last,
        any_code=options.any_code,
    )


def is_adapted_without_state(name: str) -> bool:
    """Whether the method's personal model is made from the global one alone."""
    from client_app.methods import method_class  # imports torch

    method = method_class(name)
    return method.is_adapted_from_global and method.is_stateful is not True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no file. ValueError naming a damaged one."""
    return read_object(path) if path.is_file() else {}


def status_of(directory: Path) -> str:
    """`finished`, `diverged` (values not finite or too large), `failed`; empty: can be resumed."""
    run = RunReader(directory)
    status = str(run.summary["status"])
    if status.startswith(FAILED):
        return DIVERGED if is_divergence(status) else FAILED
    return "finished" if run.has_finished else ""


def code_of(directory: Path) -> tuple[str, ...]:
    """The code that worked on the run, one `code_version` each; several after a resume."""
    return tuple(RunReader(directory).manifest.get("code", [UNKNOWN]))


def precision_of(directory: Path) -> list[str]:
    """The run's precision; where it was "auto", what that was, if this is recorded."""
    run = RunReader(directory)
    value = run.config["precision"]
    return list(run.manifest.get("precision", [] if value == "auto" else [value]))


def data_of(directory: Path) -> str:
    """The digest of the run's data; empty if it recorded none."""
    return str(RunReader(directory).manifest.get("data", ""))


@lru_cache(maxsize=4096)
def history_in(directory: Path) -> History:
    """The history of a run that has ended.

    ValueError naming the file if it is damaged, or not as the run wrote it.
    """
    run = RunReader(directory)
    try:
        history = History(run.history, run.clients())
    except ValueError as error:
        raise ValueError(f"{error}; {REMEDY}") from error
    check_unchanged(directory)
    return history


def check_unchanged(directory: Path) -> None:
    """ValueError if the history does not match its digest in the manifest."""
    files = RunReader(directory).manifest.get("files", {})
    for name in files.keys() & {HISTORY_FILE, CLIENTS_FILE}:
        if digest((directory / name).read_bytes()) != files[name]:
            raise ValueError(
                f"{directory / name} was changed after the run: its digest is not the one in "
                f"manifest.json; {REMEDY}"
            )


def wall_seconds(directory: Path) -> float:
    """Duration of all rounds of a finished run."""
    return sum(history_in(directory).wall_s)


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
