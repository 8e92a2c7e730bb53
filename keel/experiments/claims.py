"""Claims of a paper, judged by our runs.

`judge` is the whole procedure: may the sides be compared, their differences paired over seeds, the
decision on these, and what to know beside it. `Verdict.reading` has the words for all pages.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import scipy  # loads submodules on first use: scipy.stats takes a second

from keel.experiments.jobs import seeds_for
from keel.experiments.recipe import Cell, Claim, Recipe
from keel.experiments.results import Result, Results, differing, share_of
from keel.experiments.runs import (
    Options,
    incomparable,
    last_round_read,
    paper_round_read,
    reads_elsewhere,
)
from protocol.config import resolve_config

CONFIDENCE = 0.95
PER_ROUND = "seconds a round"  # what a cell takes of its runs
MIN_SEEDS = 3  # with fewer, a decision is provisional
CLASSES = {1: "holds", -1: "opposite", 0: "undecided", None: "not-tested"}  # of pages, for colours
# of a 95 % interval
CHANCE = (
    "where there is no true difference, about one judged claim in 20 is still decided by chance, "
    "and more if seeds were added after seeing the verdict"
)


@dataclass(frozen=True)
class Pairs:
    """Two sides, paired over the seeds of both, without those that tuned a side.

    differences: left minus right, of the pairs that have one.
    leads: one a pair, how far the side that the claim puts ahead is ahead. Minus infinity if that
    side failed, 0 if only the other did, and at most 0 if updates of the other were left out for
    values that are not finite. A time that is never reached is longer than any other.
    tuned_on: the seeds left out.
    """

    differences: Sequence[float]
    leads: Sequence[float]
    tuned_on: Sequence[int]


@dataclass(frozen=True)
class Verdict:
    """What our runs say of a claim: of the planned seeds, if there are more.

    decision: 1 as claimed, -1 the contrary, 0 undecided, None not tested.
    effect, interval, paper_effect: left minus right, in percentage points or seconds; the interval
    is the 95 % t interval of the mean. None where there is no number; the interval also where a
    pair has no difference.
    reason: why there is no verdict. failures: sides of which a run diverged, failed or left out
    updates. deviations: keys that differ from the paper's.
    read_otherwise: what is read at another round than the paper's, or differently from two sides.
    num_planned: seeds, without those that tuned. on_all: the verdict on all seeds, if there are
    more.
    can_compare: whether the paper's difference is of the same kind. Its times are of other
    machines, and a claim within a margin is not about the size.
    """

    claim: Claim
    decision: int | None = None
    reason: str = "not run"
    pairs: Pairs = Pairs((), (), ())
    effect: float | None = None
    interval: tuple[float, float] | None = None
    paper_effect: float | None = None
    failures: str = ""
    deviations: Sequence[str] = ()
    read_otherwise: Sequence[str] = ()
    num_planned: int = 0
    on_all: "Verdict | None" = None
    can_compare: bool = False

    @property
    def num_seeds(self) -> int:
        """Pairs of runs that were judged, failed ones included."""
        return len(self.pairs.leads)

    @property
    def seeds(self) -> str:
        """`2 of 3`: judged and planned; a dash without any."""
        if not self.num_seeds:
            return "–"
        is_short = self.num_seeds < self.num_planned
        return f"{self.num_seeds} of {self.num_planned}" if is_short else str(self.num_seeds)

    @property
    def shown_effect(self) -> str:
        """`+1.92 [+0.50, +3.34]`: the mean difference and its 95 % interval; a dash without one."""
        if self.effect is None:
            return "–"
        if self.interval is None:
            return f"{self.effect:+.2f}"
        low, high = self.interval
        return f"{self.effect:+.2f} [{low:+.2f}, {high:+.2f}]"

    @property
    def remarks(self) -> list[str]:
        """What to know beside the verdict, apart from deviations.

        The runs are read at another round than the paper's, or the two sides differently; seeds
        were added after a look; the paper's own difference is another.
        """
        words = [*self.read_otherwise, *self.with_all_seeds]
        if self.is_paper_outside:
            words.append(f"the paper's {self.paper_effect:+.2f} is outside the interval")
        return words

    @property
    def with_all_seeds(self) -> list[str]:
        """`with 5 seeds instead of the planned 3: +1.52 [+0.28, +2.77], holds`; or nothing."""
        every = self.on_all
        if every is None:
            return []
        planned = f"with {every.num_seeds} seeds instead of the planned {self.num_planned}"
        return [f"{planned}: {every.shown_effect}, {every.reading}"]

    @property
    def is_paper_outside(self) -> bool:
        """Whether the paper's difference may be compared with ours and is outside the interval."""
        if not self.can_compare or self.interval is None or self.paper_effect is None:
            return False
        low, high = self.interval
        return not low <= self.paper_effect <= high

    @property
    def reading(self) -> str:
        """The verdict in two or three words: `holds, smaller`, `opposite sign, provisional`.

        Where the paper has no number, there is nothing to hold: a side is "ahead" or "behind".
        """
        if not self.decision:
            return "not tested" if self.decision is None else "undecided"
        is_held = self.decision > 0
        if self.claim.margin:
            words = ["holds" if is_held else "does not hold"]
        elif self.paper_effect is None:
            words = ["ahead" if is_held else "behind"]
        else:
            words = ["holds" if is_held else "opposite sign"]
            if is_held and self.is_paper_outside:
                is_smaller = abs(self.effect or 0.0) < abs(self.paper_effect)
                words.append("smaller" if is_smaller else "larger")
        if self.num_seeds < max(MIN_SEEDS, self.num_planned):
            words.append("provisional")
        return ", ".join(words)

    @property
    def kind(self) -> str:
        """One of CLASSES."""
        return CLASSES[self.decision]


def judge_all(recipe: Recipe, results: Results, options: Options) -> list[Verdict]:
    """The verdict on each claim of the recipe.

    The recipe's seeds are planned; those that were asked for in a sweep, which has no paper.
    """
    verdicts = []
    for claim in recipe.claims:
        cells = [recipe.cell(*side) for side in recipe.sides_of(claim)]
        planned = seeds_for(recipe, cells) if recipe.paper else options.seeds
        sides = [results[cell.name] for cell in cells if cell.name in results]
        if len(sides) == 2:
            verdicts.append(judge(claim, sides[0], sides[1], planned))
        else:
            verdicts.append(Verdict(claim, paper_effect=paper_effect_of(*cells)))
    return verdicts


def judge(claim: Claim, left: Result, right: Result, planned: Collection[int]) -> Verdict:
    """The verdict on a claim. planned: the seeds that decide, once the runs with all have ended."""
    found = Verdict(claim, paper_effect=paper_effect_of(left.cell, right.cell))
    pairs = paired(claim, left, right)
    if not pairs.leads and not pairs.tuned_on:
        return found
    is_time, sides = left.cell.take.is_time, {claim.left: left, claim.right: right}
    failed = [f"{name} {share_of(side)}" for name, side in sides.items() if side.failures]
    left_out = [f"{name}: {side.left_out}" for name, side in sides.items() if side.left_out]
    elsewhere = read_elsewhere(left, right)
    found = replace(
        found,
        reason=incomparable([*left.finished, *right.finished], is_time),
        pairs=pairs,
        failures=", ".join([*failed, *left_out]),
        deviations=list(dict.fromkeys(d for side in sides.values() for d in deviations_of(side))),
        read_otherwise=[*elsewhere, *read_differently(left, right)],
        num_planned=len({*planned} - {left.tuned_on, right.tuned_on}),
        can_compare=not (claim.margin or elsewhere or is_time),
    )
    if found.reason:
        return found
    found = replace(with_differences(found, pairs), reason=reason_not_to_judge(claim, left, right))
    if found.reason:
        return found
    every = replace(found, decision=decided(claim, pairs))
    early = paired(claim, left, right, planned)
    if 1 < found.num_planned == len(early.leads) < len(pairs.leads):
        found = replace(with_differences(found, early), decision=decided(claim, early))
        return replace(found, on_all=every)
    return every


def with_differences(found: Verdict, pairs: Pairs) -> Verdict:
    """The verdict with the numbers of these pairs: the mean difference and its interval."""
    effect = statistics.fmean(pairs.differences) if pairs.differences else None
    is_whole = len(pairs.differences) == len(pairs.leads)
    interval = interval_of(pairs.differences) if is_whole else None
    return replace(found, pairs=pairs, effect=effect, interval=interval)


def paper_effect_of(left: Cell, right: Cell) -> float | None:
    """The paper's left number minus its right one."""
    return None if left.paper is None or right.paper is None else left.paper - right.paper


def paired(claim: Claim, left: Result, right: Result, seeds: Collection[int] = ()) -> Pairs:
    """The sides, paired over the seeds of both. seeds: only these; all if it is empty."""
    ended = {*left.by_seed, *left.failures} & {*right.by_seed, *right.failures}
    common = sorted(seed for seed in ended if not seeds or seed in seeds)
    tuned_on = [s for s in dict.fromkeys((left.tuned_on, right.tuned_on)) if s in common]
    # "above" puts the left side ahead; of times, which are better if shorter, the right side
    is_left_ahead = claim.is_above != left.cell.take.is_time
    ahead, behind = (left, right) if is_left_ahead else (right, left)
    sign = 1 if claim.is_above else -1
    differences, leads = [], []
    for seed in common:
        if seed in tuned_on:
            continue
        ours, theirs = left.by_seed.get(seed), right.by_seed.get(seed)
        if ours is None or theirs is None:
            leads.append(0.0 if seed in ahead.by_seed else -math.inf)
            continue
        if claim.margin and seed in {*left.not_finite, *right.not_finite}:
            leads.append(0.0)  # without a difference
            continue
        lead = sign * (ours - theirs) if ours != theirs else 0.0  # both may be infinite
        leads.append(min(lead, 0.0) if seed in behind.not_finite else lead)
        if leads[-1] == lead and math.isfinite(lead) and math.isfinite(ours):
            differences.append(ours - theirs)
    return Pairs(differences, leads, tuned_on)


def decided(claim: Claim, pairs: Pairs) -> int:
    """What the 95 % t interval of the mean decides: 1 as claimed, -1 the contrary, 0 neither.

    A claim that two sides are within a margin is open where any pair has no difference. For others,
    an infinite lead counts as the largest finite one on its side, and rules out the other decision;
    where more than half are negative and infinite, the contrary is true. Fewer than two differences
    decide nothing.
    """
    leads, num_differences = pairs.leads, len(pairs.differences)
    if claim.margin:
        interval = interval_of(pairs.differences)
        if interval is None or num_differences < len(leads):
            return 0
        low, high = interval
        if -claim.margin < low and high < claim.margin:
            return 1
        return -1 if low > claim.margin or high < -claim.margin else 0
    if len(leads) < 2:
        return 0
    if min(leads) == math.inf:
        return 1
    if statistics.median_high(leads) == -math.inf:
        return -1
    finite = [lead for lead in leads if math.isfinite(lead)]
    if min(len(finite), num_differences) < 2:
        return 0
    interval = interval_of([max(min(finite), min(lead, max(finite))) for lead in leads])
    assert interval is not None
    low, high = interval
    if low > 0 and -math.inf not in leads:
        return 1
    if high < 0 and math.inf not in leads:
        return -1
    return 0


def reason_not_to_judge(claim: Claim, left: Result, right: Result) -> str:
    """Why the runs do not test the claim; "" if they do."""
    for side in (left, right):
        run, cell = side.runs[0], side.cell
        if 1 < len(cell.candidates) > side.num_tried:
            return "not all values under `tune` were tried, or some failed"
        ours, paper = (resolve_config(keys).data.source for keys in (run.keys, cell.keys))
        if ours != paper and ":" not in ours:  # a folder may hold the paper's data
            return f"runs on {ours} instead of {paper}"
        read_at = paper_round_read(cell, run)
        first = min(claim.from_round or read_at, read_at)
        if cell.take.how != PER_ROUND and (last := last_round_read(cell, run)) < first:
            return f"read at round {last}, and the claim is made from round {first}"
    return ""


def read_elsewhere(left: Result, right: Result) -> list[str]:
    """`at round 200 instead of 500`: where a side is read at another round than the paper's."""
    for cell, run in ((left.cell, left.runs[0]), (right.cell, right.runs[0])):
        if cell.take.how != PER_ROUND and reads_elsewhere(cell, run):
            paper = paper_round_read(cell, run)
            return [f"at round {last_round_read(cell, run)} instead of {paper}"]
    return []


def read_differently(left: Result, right: Result) -> list[str]:
    """How the sides are read, if not in the same way."""
    reads = [
        cell.take.of("accuracy").removesuffix(", in %")
        + (f" at round {cell.at}" if cell.at else "")
        for cell in (left.cell, right.cell)
    ]
    return [f"read differently: {reads[0]} and {reads[1]}"] if reads[0] != reads[1] else []


def deviations_of(side: Result) -> Iterator[str]:
    """The keys of a side's runs that differ from the paper's, with both values."""
    for key, ours, paper in differing(side.cell, side.candidate or {}, side.runs[0]):
        kind, _, name = str(ours).rpartition("/")[0].partition(":")  # of paths, the end
        shown = f"{kind}:{str(ours).rpartition('/')[2]}" if name else ours
        yield f"{key} {shown} (paper: {paper})"


def interval_of(numbers: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t interval of the mean; None for fewer than two numbers."""
    if len(numbers) < 2:
        return None
    mean = statistics.fmean(numbers)
    half_width = half_width_of(statistics.stdev(numbers), len(numbers))
    return mean - half_width, mean + half_width


def half_width_of(deviation: float, number: int) -> float:
    """Half the width of the t interval of the mean of `number` values."""
    quantile = scipy.special.stdtrit(number - 1, (1 + CONFIDENCE) / 2)
    return float(quantile * deviation / math.sqrt(number))


def tally(verdicts: Sequence[Verdict]) -> str:
    """How many claims have which reading, and how often chance alone decides a judged one."""
    counts = Counter(verdict.reading for verdict in verdicts)
    found = "; ".join(f"{reading}: {number}" for reading, number in counts.most_common())
    is_judged = any(verdict.decision is not None for verdict in verdicts)
    return f"{found}; {CHANCE}" if is_judged else found
