"""From a recipe and a scale to runs, and from the runs' folders to the numbers of its cells."""

import hashlib
import json
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from experiments.measure import History, measure
from experiments.recipe import Cell, Recipe
from experiments.scale import SCALES, Keys, scaled
from protocol.config import default_config, resolve_config
from protocol.options import OptionValue


@dataclass(frozen=True)
class Options:
    """How a recipe is run. `full_grid`: every value under tune, not the paper's best alone."""

    scale: str
    changes: Mapping[str, OptionValue]
    seeds: Sequence[int]
    full_grid: bool

    @property
    def label(self) -> str:
        """What every number of it is labelled with."""
        changed = [f"{key}={value}" for key, value in sorted(self.changes.items())]
        grid = ["full grid" if self.full_grid else "the paper's best mu alone"]
        return ", ".join([f"scale {self.scale}", *changed, *grid])


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
        """The folder of the attempt that ran to its end.

        ValueError if that was with other defaults than today's.
        """
        for folder in reversed(self.attempts()):
            if read_json(folder / "summary.json").get("status") == "finished":
                then = relevant(read_json(folder / "config.json")["config"])
                for key in sorted(then.keys() | self.expected.keys()):
                    if then.get(key, default_config().get(key)) != self.expected.get(key):
                        raise ValueError(
                            f"{folder} was run with {key} = {then.get(key)!r}, by today's defaults "
                            f"it is {self.expected.get(key)!r}: choose another --output"
                        )
                return folder
        return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is not there."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


@lru_cache(maxsize=4096)
def history_in(folder: Path) -> History:
    """The lines of a finished run's history.jsonl."""
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def relevant(flat: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The keys that the result depends on: not folders, nor the options of methods not used."""
    used = {str(flat["method"]), str(flat["server"]), "privacy"}
    left_out = ("preset", "output-dir", "data-dir", "resume", "device", "cache-mb", "last-rounds")
    return {
        key: value
        for key, value in flat.items()
        if key not in left_out and ("." not in key or key.partition(".")[0] in used)
    }


def make_run(keys: Keys, seed: int, options: Options, output: Path) -> Run:
    """The run of these recipe keys. Runs that agree in all that matters have one folder.

    Ones of another scale do not agree. ValueError if the config makes no sense.
    """
    full = {**keys, **scaled(keys, SCALES[options.scale]), **options.changes, "seed": seed}
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
    return make_run({**cell.keys, **candidate}, seed, options, output)


def number_of(cell: Cell, run: Run) -> float | None:
    """The cell's number from one run; None if that is not finished, or never got there."""
    folder = run.finished()
    if folder is None:
        return None
    shrunk = run.rounds / run.paper_rounds
    at = max(1, round(cell.at * shrunk)) if cell.at else run.rounds
    return measure(history_in(folder), cell.of, cell.take, at, shrunk)


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
        run = run_of(cell, candidate, options.seeds[0], options, output)
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
    for seed in options.seeds:
        for cell in cells:
            if seed == options.seeds[0]:
                tried = candidates_of(cell, options)
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
    """A cell's outcome: one number a seed that has one, and the candidate that it is of."""

    cell: Cell
    candidate: Keys | None
    by_seed: Mapping[int, float]
    finished: int

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None of fewer than two."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


def result_of(cell: Cell, options: Options, output: Path) -> Result:
    """What the finished runs say of this cell."""
    best = winner(cell, options, output)
    by_seed, finished = {}, 0
    for seed in options.seeds if best is not None else ():
        assert best is not None
        run = run_of(cell, best, seed, options, output)
        finished += run.finished() is not None
        number = number_of(cell, run)
        if number is not None:
            by_seed[seed] = number
    return Result(cell, best, by_seed, finished)


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
