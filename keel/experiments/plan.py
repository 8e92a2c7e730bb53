"""Which runs a recipe needs, in which order, and the numbers of its cells from finished runs."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from keel.experiments.measure import measure
from keel.experiments.recipe import Cell, Recipe, parse_recipe
from keel.experiments.runs import (
    DIVERGED,
    FAILED,
    NOTE,
    Options,
    Run,
    code_of,
    data_of,
    history_in,
    identity,
    machines_of,
    precision_of,
    read_json,
    run_of,
)
from keel.experiments.scale import SCALES, Keys, scaled_round
from protocol.config import RunConfig, resolve_config
from protocol.files import digest
from protocol.models import model_spec
from protocol.options import MAX_INTEGER, OptionValue, did_you_mean
from protocol.text import num_of

TUNED_SEEDS = 5  # that judge a tuned side, beside the one that tuned it
JOB_KINDS: dict[str, type] = {
    "text": str,
    "recipe": str,
    "scale": str,
    "changes": dict,
    "seeds": list,
    "full_grid": bool,
}
# why the numbers of runs are not compared
OTHER_CODE = "runs of different code"
OTHER_PRECISION, OTHER_DATA = "runs in different precision", "runs on different data"
MAX_SLUG = 120  # characters: file systems allow 255, and a report's pictures have longer names


def candidates_of(cell: Cell, options: Options) -> Sequence[Keys]:
    """The values under `tune` to try: only the paper's best, unless the full grid is asked for."""
    if cell.paper_candidate and not options.full_grid:
        return [cell.paper_candidate]
    return cell.candidates


def last_round_read(cell: Cell, run: Run) -> int:
    """The last round that counts for the cell's number, at most the run's last."""
    if cell.at and run.is_scaled:
        return scaled_round(cell.at, run.paper_rounds, run.rounds)
    return min(cell.at or run.rounds, run.rounds)


def images_of(config: RunConfig) -> str:
    """The source, with the shape that its images are converted to if the source's own is not."""
    model = model_spec(config.model.model)
    size = config.data.image_size or model.image_size
    return f"{config.data.source} {size} {config.data.channels or model.channels}"


def differs(data: Collection[tuple[str, str]]) -> bool:
    """Whether images have different contents. data: (`images_of`, digest of their content)."""
    return len({*data}) > len({images for images, _ in data})


def paper_round_read(cell: Cell, run: Run) -> int:
    """The round at which the paper reads the cell's number."""
    return cell.at or run.paper_rounds


def reads_elsewhere(cell: Cell, run: Run) -> bool:
    """Whether the cell is read at another round than the paper's.

    A later round counts only if the paper has a number.
    """
    read, due = last_round_read(cell, run), paper_round_read(cell, run)
    return not run.is_scaled and (read < due or (read > due and cell.paper is not None))


def keys_not_read(cell: Cell) -> set[str]:
    """Keys that are not part of its setting: `evaluate-every` if it reads the last round alone."""
    same = {"seed", "diagnostics-every"}
    if not cell.is_timed:
        same |= {"threads", "cuda-graphs"}
    return same if cell.take.reads_earlier else same | {"evaluate-every"}


def with_own_lengths(flat: Keys) -> dict[str, OptionValue]:
    """A flat config in which a 0 is replaced by what it means.

    That is the model's own width, and for FedProc's schedule the number of rounds.
    """
    own = {
        "width": model_spec(str(flat["model"])).width,
        "fedproc.schedule-rounds": flat["num-rounds"],
    }
    return {key: value or own.get(key, value) for key, value in flat.items()}


def differing(
    cell: Cell, candidate: Keys, run: Run
) -> Iterator[tuple[str, OptionValue, OptionValue | None]]:
    """(key, the run's value, the paper's) where the run's setting differs.

    `precision = fp32` never counts: the papers state no precision.
    """
    configs = (resolve_config(keys) for keys in (run.keys, {**cell.keys, **candidate}))
    ours, paper = (with_own_lengths(identity(config.flat, cell.is_timed)) for config in configs)
    for key in sorted(ours.keys() - keys_not_read(cell)):
        is_plain = key == "precision" and ours[key] == "fp32"
        if ours[key] != paper.get(key) and not is_plain:
            yield key, ours[key], paper.get(key)


def number_of(cell: Cell, run: Run) -> float | None:
    """The cell's number from one run; None if it is not finished or does not contain it."""
    directory = run.finished()
    if directory is None:
        return None
    on_cpu = all(name.startswith("cpu:") for name in machines_of(directory))
    clock = "client_cpu_seconds" if on_cpu else "client_seconds"  # other runs share the cores
    at = last_round_read(cell, run)
    return measure(history_in(directory), cell.of, cell.take, at, run.shrink, clock)


def best_candidate(
    cell: Cell, options: Options, output: Path, failed: Collection[str] | None = None
) -> Keys | None:
    """The best candidate with the tuning seed: on the test set, as the papers tune.

    None until each candidate's run has ended or is in `failed`; if `failed` is None, the best of
    those that have. One that diverged is the worst.
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
            found.append((-math.inf if number is None else sign * number, candidate))
        elif run.failure() == DIVERGED or (failed is None and run.failure()):
            found.append((-math.inf, candidate))
        elif failed is not None and run.name not in failed:
            return None
    return max(found, key=lambda pair: pair[0])[1] if found else None


def runs_needed(
    recipe: Recipe,
    cells: Sequence[Cell],
    options: Options,
    output: Path,
    failed: Collection[str] | None,
) -> Iterator[Run]:
    """Each run that is known to be needed, once, finished or not; the tuning seed's runs first.

    For a tuned cell, runs with the other seeds follow when its best candidate is known.
    """
    if recipe.shows == "labels":
        return
    seen: set[str] = set()
    for seed in dict.fromkeys([options.tuning_seed, *options.seeds]):
        for cell in cells:
            if seed == options.tuning_seed:
                candidates = candidates_of(cell, options)
                if len(candidates) == 1 and seed not in options.seeds:
                    continue  # nothing to choose
            else:
                best = best_candidate(cell, options, output, failed)
                candidates = [] if best is None else [best]
            for candidate in candidates:
                run = run_of(cell, candidate, seed, options, output)
                if run.name not in seen:
                    seen.add(run.name)
                    yield run


@dataclass(frozen=True)
class Result:
    """A cell's outcome: one number a finished seed, of one candidate. A time never reached is inf.

    num_seeds: how many were asked for. finished: the runs of the numbers, with their directories.
    failures: `diverged` or `failed`, by seed, also of finished runs without number. ended: the run
    directories of all runs, the tuning's and failed ones too. code, precision: of these runs.
    tuned_on: the seed that chose the candidate, if there are several: of `num_tried` its run
    finished or diverged, of `num_failed` it failed.
    outdated: why the first run that does not count does not: its config, or its code.
    """

    cell: Cell
    candidate: Keys | None
    by_seed: Mapping[int, float]
    num_seeds: int
    finished: Sequence[tuple[Run, Path]] = ()
    tuned_on: int | None = None
    num_tried: int = 1
    num_failed: int = 0
    num_candidates: int = 1
    outdated: str = ""
    failures: Mapping[int, str] = field(default_factory=dict)
    ended: Sequence[Path] = ()
    code: Collection[str] = ()
    precision: Collection[str] = ()

    @property
    def counted(self) -> Mapping[int, float]:
        """The numbers that are averaged.

        Without the seed that chose the candidate, which favours it, if there are others.
        """
        return {s: n for s, n in self.by_seed.items() if s != self.tuned_on} or self.by_seed

    @property
    def counted_runs(self) -> Sequence[tuple[Run, Path]]:
        """The finished runs of `counted`."""
        found = [(run, path) for run, path in self.finished if run.keys["seed"] in self.counted]
        return found or self.finished

    @property
    def reached(self) -> list[float]:
        """The finite ones of `counted`."""
        return [number for number in self.counted.values() if math.isfinite(number)]

    @cached_property
    def mixes(self) -> str:
        """Why its runs are not averaged: what they differ in; empty if they are."""
        if len(self.code) > 1:
            return OTHER_CODE
        if len(self.precision) > 1:
            return OTHER_PRECISION
        if differs(self.data):
            return OTHER_DATA
        if self.cell.take.is_time and len(self.machines) > 1:
            return "runs on different machines"
        return ""

    @property
    def mean(self) -> float | None:
        """Mean of `reached`; None where `mixes`."""
        return statistics.fmean(self.reached) if self.reached and not self.mixes else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of `reached`; None if there are fewer than two, or where `mixes`."""
        if len(self.reached) < 2 or self.mean is None:
            return None
        return statistics.stdev(self.reached)

    @property
    def difference(self) -> float | None:
        """The mean minus the paper's number; None if a run is read at another round."""
        paper = self.cell.paper
        if any(reads_elsewhere(self.cell, run) for run, _ in self.finished):
            return None
        return None if paper is None or self.mean is None else self.mean - paper

    @property
    def left_out(self) -> str:
        """How many updates of its runs were not aggregated, and clients not evaluated; or empty."""
        found = [history_in(path) for _, path in self.finished]
        updates = [(h.num_left_out, h.rounds_not_finite) for h in found]
        evaluations = [(h.num_not_evaluated, h.rounds_partial) for h in found]
        words = []
        for what, counts in (("updates", updates), ("evaluations", evaluations)):
            number, num_rounds = sum(n for n, _ in counts), sum(rounds for _, rounds in counts)
            why = ""
            if num_rounds:
                why = f", in {num_of('round', num_rounds)} for values not finite or too large"
            if number:
                words.append(f"{what} left out: {number}{why}")
        return "; ".join(words)

    @property
    def not_finite(self) -> set[int]:
        """Seeds of runs with updates left out for values that are not finite, or too large."""
        found = self.finished
        return {int(run.keys["seed"]) for run, path in found if history_in(path).rounds_not_finite}

    @cached_property
    def machines(self) -> list[str]:
        """The machines of its runs."""
        return sorted({name for _, path in self.finished for name in machines_of(path)})

    @cached_property
    def data(self) -> set[tuple[str, str]]:
        """(`images_of`, digest of their content) of its runs, as far as they recorded it."""
        pairs = {(images_of(resolve_config(r.keys)), data_of(path)) for r, path in self.finished}
        return {(images, digest) for images, digest in pairs if digest}


def result_of(cell: Cell, options: Options, output: Path) -> Result:
    """The cell's outcome from the runs that are finished."""
    candidates = candidates_of(cell, options)
    tried = [run_of(cell, each, options.tuning_seed, options, output) for each in candidates]
    best = best_candidate(cell, options, output)
    runs = [] if best is None else [run_of(cell, best, s, options, output) for s in options.seeds]
    numbers = {int(run.keys["seed"]): number_of(cell, run) for run in runs}
    failures = {int(run.keys["seed"]): run.failure() for run in runs}
    for run in runs:
        seed, directory = int(run.keys["seed"]), run.finished()
        if directory and numbers[seed] is None:
            history = history_in(directory)
            has_diverged = history.rounds_partial or history.rounds_diverged
            failures[seed] = DIVERGED if has_diverged else FAILED
    read = [directory for run in [*tried, *runs] if (directory := run.ended())]
    return Result(
        cell=cell,
        candidate=best,
        by_seed={seed: number for seed, number in numbers.items() if number is not None},
        num_seeds=len(options.seeds),
        finished=[(run, directory) for run in runs if (directory := run.finished())],
        tuned_on=options.tuning_seed if len(candidates) > 1 else None,
        num_tried=sum(run.is_done() for run in tried),
        num_failed=sum(run.failure() == FAILED for run in tried),
        num_candidates=len(candidates),
        outdated=next(filter(None, (run.outdated() for run in [*tried, *runs])), ""),
        failures={seed: word for seed, word in failures.items() if word},
        ended=[directory for directory in read if directory.name != NOTE],
        code=sorted({code for directory in read for code in code_of(directory)}),
        precision=sorted({name for directory in read for name in precision_of(directory)}),
    )


def first_seeds(recipe: Recipe, num_seeds: int) -> Sequence[int]:
    """This many seeds: the recipe's in their order, then the lowest others."""
    more = (seed for seed in itertools.count() if seed not in recipe.seeds)
    return list(itertools.islice(itertools.chain(recipe.seeds, more), num_seeds))


def seeds_for(recipe: Recipe, cells: Sequence[Cell], full_grid: bool) -> Sequence[int]:
    """The recipe's seeds; where values are tried, five beside the one that chooses among them."""
    options = Options("paper", {}, recipe.seeds, full_grid)
    if all(len(candidates_of(cell, options)) == 1 for cell in cells):
        return recipe.seeds
    return first_seeds(recipe, max(TUNED_SEEDS + 1, len(recipe.seeds)))


def job_name(recipe: Recipe, options: Options) -> str:
    """The file name of a job, without suffix; ASCII alone, so that it has few bytes."""
    key = json.dumps([recipe.content, options.label, options.full_grid]).encode()
    slug = re.sub("[^A-Za-z0-9]", "-", f"{recipe.name}--{options.label}")
    return f"{slug[:MAX_SLUG]}-{digest(key)[:8]}"


def fault_of_job(about: Mapping[str, Any]) -> str:
    """The first key of a job that is missing or has an unexpected value; "" for none."""
    for key, kind in JOB_KINDS.items():
        if key not in about:
            return f"{key!r} is missing"
        if not isinstance(about[key], kind):
            return f"{key} = {about[key]!r:.40}"
    if about["scale"] not in SCALES:
        return f"scale = {about['scale']!r:.40}"
    seeds, cells = about["seeds"], about.get("cells", [])
    if not seeds or not all(type(s) is int and 0 <= s <= MAX_INTEGER for s in seeds):
        return f"seeds = {seeds!r:.40}"
    if not isinstance(cells, list) or not all(
        isinstance(cell, list) and [type(name) for name in cell] == [str, str] for cell in cells
    ):
        return f"cells = {cells!r:.40}"
    return ""


def read_job(job: Path) -> dict[str, Any]:
    """The content of a job of `runner.save_job`. ValueError, with what to do, if it is damaged."""
    try:
        about = read_json(job)
        if fault := fault_of_job(about):
            raise ValueError(f"{job} is damaged: {fault}")
    except ValueError as error:
        remedy = "remove it and repeat its `keel experiments run`, which keeps the finished runs"
        raise ValueError(f"{error}; {remedy}") from error
    return about


def load_job(job: Path) -> tuple[Recipe, Options]:
    """The recipe, with the selected cells alone, and the options of a job of `runner.save_job`.

    Finished runs of other code than today's count. ValueError if the file is damaged, or names a
    method or key that no longer exists.
    """
    about = read_job(job)
    scale, changes, seeds = about["scale"], about["changes"], about["seeds"]
    options = Options(scale, changes, seeds, about["full_grid"], any_code=True)
    try:
        recipe = parse_recipe(about["text"], Path(about["recipe"]))
        if "cells" in about:  # under a --set, other cells may coincide with these
            recipe = narrowed(recipe, about["cells"])
            if about["cells"] and not recipe.cells:  # as of a row `off`, once called False
                raise ValueError(
                    f"none of its cells, such as {about['cells'][0]}, is in its recipe; repeat its "
                    "`keel experiments run`, which keeps the finished runs"
                )
        for cell in recipe.cells:
            run_of(cell, candidates_of(cell, options)[0], 0, options, job.parent)  # resolves it
    except ValueError as error:
        raise ValueError(
            f"{job}: {error}; to leave its table out, move this file out of jobs/"
        ) from error
    return recipe, options


def results_of(recipe: Recipe, options: Options, output: Path) -> dict[tuple[str, str], Result]:
    """The outcome of each cell, by row and column."""
    return {(c.row.name, c.column.name): result_of(c, options, output) for c in recipe.cells}


def narrowed(recipe: Recipe, names: Sequence[Sequence[str]]) -> Recipe:
    """The recipe with only these cells, given as (row, column), and their rows and columns."""
    rows, columns = ({pair[axis] for pair in names} for axis in (0, 1))
    cells = {(row, column) for row, column in names}
    return replace(
        recipe,
        rows=[row for row in recipe.rows if row.name in rows],
        columns=[column for column in recipe.columns if column.name in columns],
        cells=[c for c in recipe.cells if (c.row.name, c.column.name) in cells],
    )


def selected(recipe: Recipe, only: Sequence[str]) -> list[Cell]:
    """The cells whose row and column are named in `only`; all if it is empty.

    A name is that of a row, of a column, or of a part of either. On an axis that is named, one of
    its names has to match.
    """
    if not only:
        return list(recipe.cells)
    axes = [
        {entry.parts[i] for entry in entries}
        for entries in (recipe.rows, recipe.columns)
        for i in range(len(entries[0].parts))
    ]
    axes += [{entry.name for entry in entries} for entries in (recipe.rows, recipe.columns)]
    for name in only:
        if not any(name in names for names in axes):
            known = ", ".join(sorted(set().union(*axes[:-2])))
            hint = did_you_mean(name, set().union(*axes))
            raise ValueError(f"--only {name!r}: {recipe.name} has {known}{hint}")

    def is_selected(cell: Cell) -> bool:
        parts = [*cell.row.parts, *cell.column.parts, cell.row.name, cell.column.name]
        named = [names & set(only) for names in axes]
        return all(part in names for names, part in zip(named, parts, strict=True) if names)

    return [cell for cell in recipe.cells if is_selected(cell)]
