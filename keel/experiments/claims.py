"""Claims of a paper, judged by our runs: reproduced, not reproduced, inconclusive or not tested.

`judge` is the whole procedure: may the sides be compared, their differences paired over seeds, the
verdict on these, and what to know beside it.
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
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_TESTED)
UNDECIDED = {INCONCLUSIVE: "undecided", NOT_TESTED: NOT_TESTED}  # readings
MIN_SEEDS = 3  # with fewer, a decision is provisional
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
    """What our runs say of a claim.

    effect, interval, paper_effect: left minus right, in percentage points or seconds; the interval
    is the 95 % t interval of the mean. None where there is no number; the interval also where a
    pair has no difference.
    basis: the differences and seeds, or why there is no verdict, in words. failures: sides of which
    a run diverged, failed or left out updates. deviations: keys that differ from the paper's.
    read_otherwise: what is read at another round than the paper's, or differently from two sides.
    num_planned, num_asked: the recipe's seeds, and these with others asked for, without those that
    tuned.
    on_planned: the verdict on the planned seeds alone, if others were judged too.
    can_compare: whether the paper's difference is of the same kind. Its times are of other
    machines, and a claim within a margin is not about the size.
    """

    claim: Claim
    word: str = NOT_TESTED
    basis: str = "not run"
    pairs: Pairs = Pairs((), (), ())
    effect: float | None = None
    interval: tuple[float, float] | None = None
    paper_effect: float | None = None
    failures: str = ""
    deviations: Sequence[str] = ()
    read_otherwise: Sequence[str] = ()
    num_planned: int = 0
    num_asked: int = 0
    on_planned: "Verdict | None" = None
    can_compare: bool = False

    @property
    def seeds(self) -> int:
        """Pairs of runs that were judged, failed ones included."""
        return len(self.pairs.leads)

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
        """What to know beside the verdict.

        The reader could otherwise not tell that the runs are read at another round than the
        paper's, or the two sides differently; that seeds are still missing, or were added after a
        look, either of which makes a decision too likely; that the paper's own difference is
        another.
        """
        words = [*self.read_otherwise]
        if 0 < self.seeds < self.num_asked:
            words.append(f"after {self.seeds} of {self.num_asked} seeds")
        if self.on_planned:
            then = self.on_planned.word
            word = "more than" if then == self.word else f"{then} with"
            words.append(f"{word} the planned {self.num_planned} seeds")
        if self.is_paper_outside:
            words.append(f"the paper's {self.paper_effect:+.2f} is outside the interval")
        return words

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

        A claim without a number in the paper is not reproduced: the side is "ahead" or "behind".
        """
        if self.word in UNDECIDED:
            return UNDECIDED[self.word]
        is_held = self.word == REPRODUCED
        if self.paper_effect is None:
            words = ["ahead" if is_held else "behind"]
        elif self.claim.margin:
            words = ["holds" if is_held else "does not hold"]
        else:
            words = ["holds" if is_held else "opposite sign"]
            if is_held and self.is_paper_outside:
                is_smaller = abs(self.effect or 0.0) < abs(self.paper_effect)
                words.append("smaller" if is_smaller else "larger")
        if self.seeds < max(MIN_SEEDS, self.num_planned):
            words.append("provisional")
        return ", ".join(words)


def judge_all(recipe: Recipe, results: Results, options: Options) -> list[Verdict]:
    """The verdict on each claim of the recipe."""
    verdicts = []
    for claim in recipe.claims:
        cells = [recipe.cell(*side) for side in recipe.sides_of(claim)]
        planned = set(seeds_for(recipe, cells, options.full_grid))
        asked = {*options.seeds, *recipe.seeds}
        sides = [results[cell.name] for cell in cells if cell.name in results]
        if len(sides) == 2:
            verdicts.append(judge(claim, sides[0], sides[1], planned, asked))
        else:
            verdicts.append(Verdict(claim, paper_effect=paper_effect_of(*cells)))
    return verdicts


def judge(
    claim: Claim, left: Result, right: Result, planned: Collection[int], asked: Collection[int]
) -> Verdict:
    """The verdict on a claim. planned: the recipe's seeds; asked: these, and others asked for."""
    sides = {claim.left: left, claim.right: right}
    paper_effect = paper_effect_of(left.cell, right.cell)
    pairs = paired(claim, left, right)
    if not pairs.leads and not pairs.tuned_on:
        return Verdict(claim, paper_effect=paper_effect)
    failed = [f"{name} {share_of(side)}" for name, side in sides.items() if side.failures]
    left_out = [f"{name}: {side.left_out}" for name, side in sides.items() if side.left_out]
    basis = ", ".join([*failed, *basis_of(claim, left, right, pairs)])
    found = Verdict(
        claim,
        basis=basis,
        pairs=pairs,
        paper_effect=paper_effect,
        failures=", ".join([*failed, *left_out]),
        deviations=list(dict.fromkeys(d for side in sides.values() for d in deviations_of(side))),
    )
    if reason := incomparable([*left.finished, *right.finished], left.cell.take.is_time):
        return replace(found, basis=f"no verdict on {reason}")
    found = with_differences(found, pairs)
    if reason := reason_not_to_judge(claim, left, right):
        return replace(found, basis=f"{reason}; {basis}")
    tuned_on = {side.tuned_on for side in sides.values()}
    found = replace(
        found,
        word=decided(claim, pairs),
        read_otherwise=list(readings_of(left, right)),
        num_planned=len({*planned} - tuned_on),
        num_asked=len({*asked} - tuned_on),
        can_compare=not (claim.margin or read_elsewhere(left, right) or left.cell.take.is_time),
    )
    early = paired(claim, left, right, planned)
    if 1 < found.num_planned == len(early.leads) < len(pairs.leads):
        on_planned = replace(with_differences(found, early), word=decided(claim, early))
        return replace(found, on_planned=on_planned)
    return found


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


def decided(claim: Claim, pairs: Pairs) -> str:
    """The verdict that the 95 % t interval of the mean decides, without regard to remarks.

    A claim that two sides are within a margin is open where any pair has no difference. For others,
    an infinite lead counts as the largest finite one on its side, and rules out the other verdict;
    where more than half are negative and infinite, the claim is not reproduced. Fewer than two
    differences decide nothing.
    """
    leads, num_differences = pairs.leads, len(pairs.differences)
    if claim.margin:
        interval = interval_of(pairs.differences)
        if interval is None or num_differences < len(leads):
            return INCONCLUSIVE
        low, high = interval
        if -claim.margin < low and high < claim.margin:
            return REPRODUCED
        return NOT_REPRODUCED if low > claim.margin or high < -claim.margin else INCONCLUSIVE
    if len(leads) < 2:
        return INCONCLUSIVE
    if min(leads) == math.inf:
        return REPRODUCED
    if statistics.median_high(leads) == -math.inf:
        return NOT_REPRODUCED
    finite = [lead for lead in leads if math.isfinite(lead)]
    if min(len(finite), num_differences) < 2:
        return INCONCLUSIVE
    interval = interval_of([max(min(finite), min(lead, max(finite))) for lead in leads])
    assert interval is not None
    low, high = interval
    if low > 0 and -math.inf not in leads:
        return REPRODUCED
    if high < 0 and math.inf not in leads:
        return NOT_REPRODUCED
    return INCONCLUSIVE


def reason_not_to_judge(claim: Claim, left: Result, right: Result) -> str:
    """Why the runs do not test the claim; "" if they do."""
    for side in (left, right):
        run, cell = side.runs[0], side.cell
        if 1 < side.num_candidates > side.num_tried:
            return "not all values under `tune` were tried, or some failed"
        ours, paper = (resolve_config(keys).data.source for keys in (run.keys, cell.keys))
        if ours != paper and ":" not in ours:  # a folder may hold the paper's data
            return f"runs on {ours} instead of {paper}"
        if run.is_scaled:
            return "runs at a reduced scale"
        read_at = paper_round_read(cell, run)
        first = min(claim.from_round or read_at, read_at)
        if cell.take.how != PER_ROUND and (last := last_round_read(cell, run)) < first:
            return f"read at round {last}, and the claim is made from round {first}"
    return ""


def read_elsewhere(left: Result, right: Result) -> str:
    """`at round 200 instead of 500`: where a side is read at another round than the paper's."""
    for side in (left, right):
        run, cell = side.runs[0], side.cell
        if cell.take.how != PER_ROUND and reads_elsewhere(cell, run):
            return f"at round {last_round_read(cell, run)} instead of {paper_round_read(cell, run)}"
    return ""


def readings_of(left: Result, right: Result) -> Iterator[str]:
    """How the sides are read otherwise than in the paper, or differently from each other."""
    if rounds := read_elsewhere(left, right):
        yield rounds
    reads = [
        s.cell.take.of("accuracy").removesuffix(", in %")
        + (f" at round {s.cell.at}" if s.cell.at else "")
        for s in (left, right)
    ]
    if reads[0] != reads[1]:
        yield f"read differently: {reads[0]} and {reads[1]}"


def basis_of(claim: Claim, left: Result, right: Result, pairs: Pairs) -> Iterator[str]:
    """`-1.82 ± 0.09`, `2 seeds`: the differences and how many pairs were judged."""
    never = [sum(number == math.inf for number in s.counted.values()) for s in (left, right)]
    if any(never):
        reached = [len(s.counted) - n for s, n in zip((left, right), never, strict=True)]
        yield f"{claim.left} reaches it with {reached[0]}, {claim.right} with {reached[1]}"
    elif pairs.differences:
        few = len(pairs.differences) < 2
        spread = "" if few else f" ± {statistics.stdev(pairs.differences):.2f}"
        yield f"{statistics.fmean(pairs.differences):+.2f}{spread}"
    num = len(pairs.leads)
    seeds = {0: "no other seed", 1: "one seed"}.get(num, f"{num} seeds")
    chose = [f"; without seed {seed}, which chose the tuned value" for seed in pairs.tuned_on]
    yield "".join([seeds, *chose])


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
    """How many claims have which verdict; if any was judged, how often chance alone decides one."""
    counts = Counter(verdict.word for verdict in verdicts)
    found = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    return found if counts[NOT_TESTED] == len(verdicts) else f"{found}; {CHANCE}"
