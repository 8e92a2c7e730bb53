"""Claims of a paper, judged by our runs: reproduced, not reproduced, inconclusive or not tested."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

from keel.experiments.plan import Result
from keel.experiments.recipe import Claim, Recipe

CONFIDENCE = 0.95
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_TESTED)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, and what it rests on."""

    claim: Claim
    word: str
    detail: str


def verdict_of(claim: Claim, recipe: Recipe, results: Mapping[tuple[str, str], Result]) -> Verdict:
    """Judge a claim by the differences of its two sides, paired over seeds.

    The seed that chose a side's candidate is left out: it favours that side. A time that is never
    reached is longer than any other; times of different machines are not compared.
    """
    is_rows = any(row.name == claim.left for row in recipe.rows)
    left, right = (
        results.get((name, claim.place) if is_rows else (claim.place, name))
        for name in (claim.left, claim.right)
    )
    if left is None or right is None:
        return Verdict(claim, NOT_TESTED, "")
    seeds = left.by_seed.keys() & right.by_seed.keys()
    if not seeds:
        return Verdict(claim, NOT_TESTED, "")
    if left.cell.take.is_time and len(machines := {*left.machines, *right.machines}) > 1:
        names = ", ".join(sorted(machines))
        return Verdict(claim, INCONCLUSIVE, f"different machines: {names}")
    tuned_on = seeds & {left.tuned_on, right.tuned_on}
    pairs = [(left.by_seed[seed], right.by_seed[seed]) for seed in seeds - tuned_on]
    basis = f"{len(pairs)} seeds" if len(pairs) > 1 else "one seed" if pairs else "no other seed"
    basis += "".join(f"; without seed {seed}, which chose the tuned value" for seed in tuned_on)
    sign = 1 if claim.is_above else -1
    leads = [sign * (a - b) if a != b else 0.0 for a, b in pairs]  # both may be infinite
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        ours, theirs = (sum(map(math.isfinite, side)) for side in zip(*pairs, strict=True))
        detail = f"{claim.left} reaches it with {ours}, {claim.right} with {theirs} of "
    else:
        spread = f" ± {statistics.stdev(leads):.2f}" if len(leads) > 1 else ""
        detail = f"{sign * statistics.fmean(leads):+.2f}{spread}, " if leads else ""
    return Verdict(claim, judge(leads), detail + basis)


def judge(leads: Sequence[float]) -> str:
    """The verdict on leads, one a seed, that a claim says are positive.

    Decided if the 95 % t interval of the mean does not contain 0. Infinite leads decide if all
    leads are infinite with the same sign.
    """
    if len(leads) < 2:
        return INCONCLUSIVE
    if any(map(math.isinf, leads)):
        low, high = min(leads), max(leads)
        return (
            REPRODUCED if low == math.inf else NOT_REPRODUCED if high == -math.inf else INCONCLUSIVE
        )
    mean, deviation = statistics.fmean(leads), statistics.stdev(leads)
    quantile = student.ppf((1 + CONFIDENCE) / 2, len(leads) - 1)
    half_width = quantile * deviation / math.sqrt(len(leads))
    if abs(mean) <= half_width:
        return INCONCLUSIVE
    return REPRODUCED if mean > 0 else NOT_REPRODUCED


def tally(verdicts: Sequence[Verdict]) -> str:
    """How many claims have which verdict, and how often chance alone decides one."""
    counts = Counter(verdict.word for verdict in verdicts)
    found = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    return f"{found}; where there is no difference, chance decides one judged claim in 20"
