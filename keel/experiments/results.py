"""Which runs a recipe needs, and the number of each of its cells from finished runs."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from keel.experiments.measure import measure
from keel.experiments.recipe import Cell, Keys, Recipe
from keel.experiments.runs import (
    DIVERGED,
    FAILED,
    FINISHED,
    Options,
    Run,
    history_in,
    identity,
    incomparable,
    last_round_read,
    machines_of,
    paper_round_read,
    reads_elsewhere,
    run_of,
)
from protocol.config import resolve_config
from protocol.models import model_spec
from protocol.options import OptionValue
from protocol.text import num_of
from server_app.history import LOWER_IS_BETTER

Results = Mapping[tuple[str, str], "Result"]  # by row and column


def number_of(cell: Cell, run: Run) -> float | None:
    """The cell's number from one run; None if it is not finished or does not contain it."""
    if run.status != FINISHED:
        return None
    on_cpu = all(name.startswith("cpu:") for name in machines_of(run.directory))
    clock = "client_cpu_seconds" if on_cpu else "client_seconds"  # other runs share the cores
    history, at = history_in(run.directory), last_round_read(cell, run)
    return measure(history, cell.of, cell.take, at, clock)


def best_candidate(cell: Cell, options: Options, folder: Path, is_final: bool) -> Keys | None:
    """The best candidate with the first seed: on the test set, as the papers tune.

    is_final: None until each candidate's run has ended; otherwise the best of those that have. One
    that failed or diverged is the worst.
    """
    if len(cell.candidates) == 1:
        return cell.candidates[0]
    found: list[tuple[float, Keys]] = []
    for candidate in cell.candidates:
        run = run_of(cell, candidate, options.seeds[0], options, folder)
        if run.status:
            number = number_of(cell, run)
            is_low = cell.take.is_time or cell.of.partition(".")[2] in LOWER_IS_BETTER
            sign = -1 if is_low else 1
            found.append((-math.inf if number is None else sign * number, candidate))
        elif is_final:
            return None
    return max(found, key=lambda pair: pair[0])[1] if found else None


def runs_needed(
    cells: Sequence[Cell], options: Options, folder: Path
) -> Iterator[tuple[Cell, Run]]:
    """Each run that is known to be needed, once, with its first cell; the first seed's first.

    For a tuned cell, runs with the other seeds follow when its best candidate is known.
    """
    seen: set[str] = set()
    for seed in options.seeds:
        for cell in cells:
            candidates = cell.candidates
            if seed != options.seeds[0]:
                best = best_candidate(cell, options, folder, is_final=True)
                candidates = [] if best is None else [best]
            for candidate in candidates:
                run = run_of(cell, candidate, seed, options, folder)
                if run.name not in seen:
                    seen.add(run.name)
                    yield cell, run


@dataclass(frozen=True)
class Result:
    """A cell's outcome. by_seed: the numbers of finished runs; a time never reached is inf.

    runs: of the chosen candidate, one a seed. failures: `diverged` or `failed`, by seed, also of
    finished runs without number. tuned_on: the seed that chose the candidate, if there are several;
    of `num_tried` of them its run finished or diverged.
    """

    cell: Cell
    candidate: Keys | None
    runs: Sequence[Run]
    by_seed: Mapping[int, float]
    failures: Mapping[int, str] = field(default_factory=dict)
    tuned_on: int | None = None
    num_tried: int = 1

    @cached_property
    def finished(self) -> list[Run]:
        """The runs that finished."""
        return [run for run in self.runs if run.status == FINISHED]

    @property
    def counted(self) -> Mapping[int, float]:
        """The numbers that are averaged.

        Without the seed that chose the candidate, which favours it, if there are others.
        """
        return {s: n for s, n in self.by_seed.items() if s != self.tuned_on} or self.by_seed

    @property
    def counted_runs(self) -> list[Run]:
        """The finished runs of `counted`."""
        return [run for run in self.finished if run.seed in self.counted] or self.finished

    @property
    def reached(self) -> list[float]:
        """The finite ones of `counted`."""
        return [number for number in self.counted.values() if math.isfinite(number)]

    @cached_property
    def incomparable(self) -> str:
        """Why its numbers are not averaged; "" if they are."""
        return incomparable(self.finished, self.cell.take.is_time)

    @property
    def mean(self) -> float | None:
        """Mean of `reached`; None if they are not averaged."""
        return statistics.fmean(self.reached) if self.reached and not self.incomparable else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of `reached`; None for fewer than two, or without a mean."""
        if len(self.reached) < 2 or self.mean is None:
            return None
        return statistics.stdev(self.reached)

    @property
    def difference(self) -> float | None:
        """The mean minus the paper's number; None if a run is read at another round."""
        paper = self.cell.paper
        if any(reads_elsewhere(self.cell, run) for run in self.finished):
            return None
        return None if paper is None or self.mean is None else self.mean - paper

    @property
    def is_ranked(self) -> bool:
        """Whether each seed has a number: none failed, and a time was always reached."""
        return not self.failures and len(self.reached) == len(self.counted)

    @property
    def not_finite(self) -> set[int]:
        """Seeds of runs with updates left out for values that are not finite, or too large."""
        return {run.seed for run in self.finished if history_in(run.directory).rounds_not_finite}

    @property
    def left_out(self) -> str:
        """How many updates of its runs were not aggregated, and clients not evaluated; or ""."""
        found = [history_in(run.directory) for run in self.finished]
        counts = {
            "updates": [(h.num_left_out, h.rounds_not_finite) for h in found],
            "evaluations": [(h.num_not_evaluated, h.rounds_partial) for h in found],
        }
        texts = []
        for what, each in counts.items():
            number, rounds = sum(n for n, _ in each), sum(r for _, r in each)
            why = f", in {num_of('round', rounds)} for values not finite or too large"
            texts += [f"{what} left out: {number}{why if rounds else ''}"] if number else []
        return "; ".join(texts)

    @property
    def absence(self) -> str:
        """What is shown where there is no mean."""
        return self.incomparable or ("not reached" if self.by_seed else "–")

    @property
    def missing(self) -> list[str]:
        """What a number lacks: failed runs, seeds and values to come."""
        words, ended = [], len(self.by_seed) + len(self.failures)
        if self.failures:
            words.append(share_of(self))
        if 0 < len(self.reached) < len(self.counted):
            words.append(f"reached by {len(self.reached)} of {len(self.counted)} seeds")
        if self.left_out:
            words.append(self.left_out)
        if 0 < ended < len(self.runs):
            words.append(f"{ended} of {len(self.runs)} seeds")
        if 0 < self.num_tried < len(self.cell.candidates):
            words.append(f"{self.num_tried} of {len(self.cell.candidates)} values tried")
        for run in self.finished[:1]:
            if reads_elsewhere(self.cell, run):
                words.append(f"at round {run.rounds} instead of {paper_round_read(self.cell, run)}")
        return words

    @property
    def tuned_value(self) -> str:
        """The chosen values of what is tuned."""
        return ", ".join(str(value) for value in (self.candidate or {}).values())

    def __str__(self) -> str:
        """Mean, standard deviation over seeds, the tuned value, and what is missing."""
        number = self.absence
        if self.mean is not None:
            deviation = "" if self.deviation is None else f" ± {self.deviation:.2f}"
            tuned = f" ({self.tuned_value})" if self.candidate else ""
            number = f"{self.mean:.2f}{deviation}{tuned}"
        return "; ".join([number, *self.missing])


def share_of(side: Result) -> str:
    """`diverged 2/3, failed 1/3`: of the runs that ended."""
    counts, ended = Counter(side.failures.values()), len({*side.by_seed, *side.failures})
    return ", ".join(f"{word} {number}/{ended}" for word, number in sorted(counts.items()))


def result_of(cell: Cell, options: Options, folder: Path) -> Result:
    """The cell's outcome from the runs that have ended."""
    first, values = options.seeds[0], cell.candidates
    tried = [run_of(cell, value, first, options, folder).is_done for value in values]
    best = best_candidate(cell, options, folder, is_final=False)
    runs = [] if best is None else [run_of(cell, best, s, options, folder) for s in options.seeds]
    by_seed, failures = dict[int, float](), dict[int, str]()
    for run in runs:
        status, number = run.status, number_of(cell, run)
        if number is not None:
            by_seed[run.seed] = number
        elif status == FINISHED:  # it has no accuracy that means anything
            history = history_in(run.directory)
            has_diverged = history.rounds_partial or history.rounds_diverged
            failures[run.seed] = DIVERGED if has_diverged else FAILED
        elif status:
            failures[run.seed] = status
    return Result(
        cell=cell,
        candidate=best,
        runs=runs,
        by_seed=by_seed,
        failures=failures,
        tuned_on=first if len(values) > 1 else None,
        num_tried=sum(tried),
    )


def results_of(recipe: Recipe, options: Options, folder: Path) -> dict[tuple[str, str], Result]:
    """The outcome of each cell, by row and column."""
    return {cell.name: result_of(cell, options, folder) for cell in recipe.cells}


def differing(
    cell: Cell, candidate: Keys, run: Run
) -> Iterator[tuple[str, OptionValue, OptionValue | None]]:
    """(key, the run's value, the paper's) where the run's setting differs.

    Not how a run is computed: `threads` and `cuda-graphs` where no seconds are read,
    `evaluate-every` where only the last round is, `precision = fp32`, as the papers state none.
    """
    same = {"seed", "diagnostics-every"}
    same |= set() if cell.is_timed else {"threads", "cuda-graphs"}
    same |= set() if cell.take.reads_earlier else {"evaluate-every"}
    flats = (resolve_config(keys).flat for keys in (run.keys, {**cell.keys, **candidate}))
    ours, paper = (with_own_lengths(identity(flat, cell.is_timed)) for flat in flats)
    for key in sorted(ours.keys() - same):
        is_plain = key == "precision" and ours[key] == "fp32"
        if ours[key] != paper.get(key) and not is_plain:
            yield key, ours[key], paper.get(key)


def with_own_lengths(flat: Keys) -> dict[str, OptionValue]:
    """A flat config in which a 0 is replaced by what it means.

    That is the model's own width, and for FedProc's schedule the number of rounds.
    """
    model = model_spec(str(flat["model"]))
    own = {"width": model.width, "fedproc.schedule-rounds": flat["num-rounds"]}
    return {key: value or own.get(key, value) for key, value in flat.items()}
