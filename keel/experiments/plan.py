"""From a recipe and a scale to runs, and from the runs' folders to the numbers of its cells."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from keel.experiments.measure import History, measure
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.scale import SCALES, Keys, round_read, scaled
from protocol.config import default_config, resolve_config
from protocol.options import OptionValue


@dataclass(frozen=True)
class Options:
    """How a recipe is run. `full_grid`: every value under tune, not the paper's best alone."""

    scale: str
    changes: Mapping[str, OptionValue]
    seeds: Sequence[int]
    full_grid: bool
    tuned_on: int | None = None

    @property
    def tuning_seed(self) -> int:
        """The seed that chooses among the values under tune; the first, unless said otherwise."""
        return self.seeds[0] if self.tuned_on is None else self.tuned_on

    @property
    def label(self) -> str:
        """What every number of it is labelled with."""
        changed = [f"{key}={value}" for key, value in sorted(self.changes.items())]
        return ", ".join([f"scale {self.scale}", *changed])


@dataclass(frozen=True)
class Run:
    """One run: all keys that differ from the defaults, and where its folders are."""

    keys: Mapping[str, OptionValue]
    rounds: int
    paper_rounds: int
    clients: int
    name: str
    folder: Path

    @cached_property
    def expected(self) -> dict[str, OptionValue]:
        """The keys that its result depends on, with their values."""
        return relevant(resolve_config(self.keys).flat)

    def attempts(self) -> list[Path]:
        """The folders that runs of it have left, oldest first."""
        return sorted(path.parent for path in self.folder.glob("*/config.json"))

    def finished(self) -> Path | None:
        """The folder of the attempt that ran to its end, with today's defaults."""
        ended = reversed(self.ended())
        return next((folder for folder in ended if not self.other_defaults(folder)), None)

    def ended(self) -> list[Path]:
        """The attempts that ran to their end."""
        return [
            f for f in self.attempts() if read_json(f / "summary.json").get("status") == "finished"
        ]

    def other_defaults(self, folder: Path) -> str:
        """A key that this attempt had another value of, by the defaults of its day; mostly none."""
        then = relevant(read_json(folder / "config.json")["config"])
        for key in sorted(then.keys() | self.expected.keys()):
            if then.get(key, default_config().get(key)) != self.expected.get(key):
                return f"{key} = {then.get(key)!r}, today {self.expected.get(key)!r}"
        return ""

    def outdated(self) -> str:
        """Why what has ended does not count, where nothing that counts has; else empty."""
        ended = [] if self.finished() else self.ended()
        return self.other_defaults(ended[-1]) if ended else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is not there. ValueError naming a damaged one."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content


@lru_cache(maxsize=4096)
def history_in(folder: Path) -> History:
    """The lines of a finished run's history.jsonl."""
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def relevant(flat: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The keys that the result depends on: not folders, nor the options of methods not used."""
    used = {str(flat["method"]), str(flat["server-optimizer"]), "privacy"}
    left_out = ("preset", "output-dir", "data-dir", "resume", "device", "cache-mb", "last-rounds")
    return {
        key: value
        for key, value in flat.items()
        if key not in left_out and ("." not in key or key.partition(".")[0] in used)
    }


def machines_of(folder: Path) -> list[str]:
    """What a run trained on, `cpu: NAME` or `cuda: NAME`; several where it was resumed.

    Not known of sites: "its clients' own".
    """
    bundle = read_json(folder / "manifest.json")
    if not bundle.get("simulated", True):
        return ["its clients' own"]
    kinds = bundle.get("versions", {"cpu": "not noted", "gpu": "none"})
    on_gpu = kinds["gpu"] != "none"
    # bundles of before there was `machines` say what the machine had
    return bundle.get("machines") or [f"cuda: {kinds['gpu']}" if on_gpu else f"cpu: {kinds['cpu']}"]


def make_run(
    keys: Keys, seed: int, options: Options, output: Path, read_at: Sequence[int] = ()
) -> Run:
    """The run of these recipe keys. Runs that agree in all that matters have one folder.

    Ones of another scale do not agree. ValueError if the config makes no sense.
    """
    full = {**keys, **scaled(keys, SCALES[options.scale], read_at), **options.changes, "seed": seed}
    config = resolve_config(full)
    if not config.rounds.num_clients:
        raise ValueError("num-clients = 0: a recipe has to say how many clients there are")
    # defaults are left out: a key that is new in Keel changes no name
    odd = {k: v for k, v in relevant(config.flat).items() if v != default_config()[k]}
    digest = hashlib.sha256(json.dumps(odd, sort_keys=True).encode()).hexdigest()[:12]
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


def candidates_of(cell: Cell, options: Options) -> Sequence[Keys]:
    """The values under tune that are tried: the paper's best alone, unless asked for all."""
    if cell.paper_candidate and not options.full_grid:
        return [cell.paper_candidate]
    return cell.candidates


def run_of(cell: Cell, candidate: Keys, seed: int, options: Options, output: Path) -> Run:
    """The run of one cell, one value of what is tuned, one seed."""
    return make_run({**cell.keys, **candidate}, seed, options, output, cell.read_at)


def last_read(cell: Cell, run: Run) -> int:
    """The last round that counts for the cell's number."""
    return round_read(cell.at, run.paper_rounds, run.rounds) if cell.at else run.rounds


def number_of(cell: Cell, run: Run) -> float | None:
    """The cell's number from one run; None if that is not finished, or never got there."""
    folder = run.finished()
    if folder is None:
        return None
    shrunk = run.rounds / run.paper_rounds
    on_cpu = all(name.startswith("cpu:") for name in machines_of(folder))
    clock = "client_cpu_seconds" if on_cpu else "client_seconds"  # other runs share the cores
    at = last_read(cell, run)
    return measure(history_in(folder), cell.of, cell.take, at, shrunk, clock)


def winner(
    cell: Cell, options: Options, output: Path, given_up: Collection[str] | None = None
) -> Keys | None:
    """The candidate that is best on the first seed, as a paper tunes: on the test set.

    None while one is neither finished nor `given_up`; without that, the best of those that are.
    """
    candidates = candidates_of(cell, options)
    if len(candidates) == 1:
        return candidates[0]
    found: list[tuple[float, Keys]] = []
    for candidate in candidates:
        run = run_of(cell, candidate, options.tuning_seed, options, output)
        if run.finished():
            number = number_of(cell, run)
            sign = -1 if cell.take.is_time else 1
            found.append((float("-inf") if number is None else sign * number, candidate))
        elif given_up is not None and run.name not in given_up:
            return None
    return max(found, key=lambda pair: pair[0])[1] if found else None


def due(
    recipe: Recipe, cells: Sequence[Cell], options: Options, output: Path, given_up: Collection[str]
) -> Iterator[Run]:
    """Every run that can be named now, once each, the first seed of all cells first.

    Of a tuned cell the other seeds follow once its first seed has shown the best candidate.
    """
    if recipe.shows == "labels":
        return
    seen: set[str] = set()
    for seed in dict.fromkeys([options.tuning_seed, *options.seeds]):
        for cell in cells:
            if seed == options.tuning_seed:
                tried = candidates_of(cell, options)
                if len(tried) == 1 and seed not in options.seeds:
                    continue  # there is nothing to choose
            else:
                best = winner(cell, options, output, given_up)
                tried = [] if best is None else [best]
            for candidate in tried:
                run = run_of(cell, candidate, seed, options, output)
                if run.name not in seen:
                    seen.add(run.name)
                    yield run


@dataclass(frozen=True)
class Result:
    """A cell's outcome: one number a finished seed, and the candidate that they are of.

    A time that was never reached is infinite. seeds: how many were asked for. folders: of those
    numbers. tuned_on: the seed that chose the candidate, where there are several, and `tried` of
    these have been run with it. outdated: what a run had another default of.
    """

    cell: Cell
    candidate: Keys | None
    by_seed: Mapping[int, float]
    seeds: int
    folders: Sequence[Path] = ()
    tuned_on: int | None = None
    tried: int = 1
    candidates: int = 1
    outdated: str = ""

    @property
    def reached(self) -> list[float]:
        """The numbers that are finite."""
        return [number for number in self.by_seed.values() if math.isfinite(number)]

    @property
    def mean(self) -> float | None:
        """Over the seeds that reached it."""
        return statistics.fmean(self.reached) if self.reached else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over them; None of fewer than two."""
        return statistics.stdev(self.reached) if len(self.reached) > 1 else None

    @property
    def machines(self) -> list[str]:
        """All that its runs trained on."""
        return sorted({name for folder in self.folders for name in machines_of(folder)})


def result_of(cell: Cell, options: Options, output: Path) -> Result:
    """What the finished runs say of this cell."""
    candidates = candidates_of(cell, options)
    first = [run_of(cell, each, options.tuning_seed, options, output) for each in candidates]
    best = winner(cell, options, output)
    wanted = [] if best is None else [run_of(cell, best, s, options, output) for s in options.seeds]
    numbers = {run.keys["seed"]: number_of(cell, run) for run in wanted}
    return Result(
        cell=cell,
        candidate=best,
        by_seed={int(seed): number for seed, number in numbers.items() if number is not None},
        seeds=len(options.seeds),
        folders=[folder for run in wanted if (folder := run.finished())],
        tuned_on=options.tuning_seed if len(candidates) > 1 else None,
        tried=sum(run.finished() is not None for run in first),
        candidates=len(candidates),
        outdated=next(filter(None, (run.outdated() for run in [*first, *wanted])), ""),
    )


def narrowed(recipe: Recipe, asked: Sequence[Sequence[str]]) -> Recipe:
    """The recipe with the rows and columns of these cells alone, each (row, column) by name."""
    rows, columns = ({names[axis] for names in asked} for axis in (0, 1))
    return replace(
        recipe,
        rows=[row for row in recipe.rows if row.name in rows],
        columns=[column for column in recipe.columns if column.name in columns],
        cells=[c for c in recipe.cells if c.row.name in rows and c.column.name in columns],
    )


def chosen(recipe: Recipe, only: Sequence[str]) -> list[Cell]:
    """The cells whose row and column have the names in `only`; all, if it is empty.

    A name is of a row, a column, or a part of either; of several names of one axis any will do.
    """
    if not only:
        return list(recipe.cells)
    axes = [
        {entry.parts[i] for entry in entries}
        for entries in (recipe.rows, recipe.columns)
        for i in range(len(entries[0].parts))
    ]
    whole = [{entry.name for entry in entries} for entries in (recipe.rows, recipe.columns)]
    for name in only:
        if not any(name in names for names in axes + whole):
            known = sorted(set().union(*axes))
            raise ValueError(f"--only {name!r}: {recipe.name} has {', '.join(known)}")

    def is_wanted(cell: Cell) -> bool:
        parts = [*cell.row.parts, *cell.column.parts, cell.row.name, cell.column.name]
        return all(
            wanted & {part}
            for names, part in zip(axes + whole, parts, strict=True)
            if (wanted := names & set(only))
        )

    return [cell for cell in recipe.cells if is_wanted(cell)]
