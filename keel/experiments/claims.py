"""Claims of a paper, judged by our runs: reproduced, not reproduced, inconclusive or not tested.

Plain data: what a report, a page or a figure shows of a claim is a field of `JudgedClaim`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import scipy  # loads submodules on first use: scipy.stats takes a second

from keel.experiments.plan import (
    OTHER_CODE,
    OTHER_DATA,
    OTHER_PRECISION,
    Result,
    differing,
    differs,
    last_round_read,
    paper_round_read,
    reads_elsewhere,
    seeds_for,
)
from keel.experiments.recipe import Claim, Recipe
from keel.experiments.runs import UNKNOWN, Options, Run, run_of
from keel.experiments.scale import steps_per_round
from protocol.config import RunConfig, resolve_config

CONFIDENCE = 0.95
PER_ROUND = "seconds a round"  # what a cell takes of its runs
MAX_SEEDS = 1000  # where the search for a sufficient number ends
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
INCONCLUSIVE, NOT_TESTED = "inconclusive", "not tested"
VERDICTS = (REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, NOT_TESTED)
# of a 95 % interval; the README and the page of the claims say the same
CHANCE = (
    "where there is no true difference, about one judged claim in 20 is still decided by chance, "
    "and more if seeds were added after seeing the verdict"
)

Results = Mapping[tuple[str, str], Result]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict and what it rests on.

    effect, interval, paper_effect: left minus right, in percentage points or seconds; the interval
    is the 95 % t interval of the mean; None where there is no number, and the interval also if the
    verdict rests on pairs without one.
    seeds: pairs of runs that were judged, failed ones included. share: the local steps of the runs
    over those from which the paper makes the claim. deviations: keys that differ from
    the paper's. failures: sides of which a run diverged, failed or left out updates.
    decide: what would decide an open claim, or complete its seeds; empty for a decided one.
    runs: equal for claims that say the same about the same runs, each at its round `read_at`.
    remarks: what to know beside the verdict, joined by "; ": "at round 200 instead of 500" if the
    runs are read at another round than the paper reads, "at 40% of the local steps" if a scaled run
    has fewer than the paper there, "after 4 of 5 seeds" if the verdict comes before all seeds of
    the recipe, and all that were asked for, have ended, "inconclusive with the planned 3 seeds" if
    seeds were added, whether the two numbers are read differently, and whether the paper's effect
    lies outside the interval.
    """

    paper: str
    recipe: str
    text: str
    verdict: str
    detail: str
    effect: float | None
    interval: tuple[float, float] | None
    paper_effect: float | None
    seeds: int
    share: float
    scale: str
    deviations: Sequence[str]
    failures: str
    decide: str
    is_headline: bool
    runs: tuple[str, ...] = ()
    read_at: int = 0
    remarks: str = ""


def judge_claims(recipe: Recipe, results: Results, options: Options) -> list[JudgedClaim]:
    """Each claim of the recipe, judged by the differences of its two sides, paired over seeds.

    - Not tested: without runs of both sides, or where `lacking` names a reason; if the runs end
      before the local steps from which the paper makes the claim.
    - Otherwise as `judge` says. The seed that chose a side's candidate is left out: it favours it.
    - A pair counts as the worst difference if the side that the claim puts ahead diverged or
      failed. If only the other side did, it counts as 0; if updates of the other side were left out
      for values that are not finite, it counts as at most 0.
    - A time that is never reached is longer than any other. Times of different machines are not
      compared.
    """
    code = {code for result in results.values() for code in result.code}
    return [_judged(claim, recipe, results, options, code) for claim in recipe.claims]


def _judged(
    claim: Claim, recipe: Recipe, results: Results, options: Options, code: Collection[str]
) -> JudgedClaim:
    names = recipe.sides_of(claim)
    sides = [results[name] for name in names if name in results]
    cells = [c for name in names for c in recipe.cells if (c.row.name, c.column.name) == name]
    papers = [cell.paper for cell in cells if cell.paper is not None]
    paper_effect = papers[0] - papers[1] if len(papers) == 2 else None
    found = JudgedClaim(
        paper=f"{recipe.paper} {recipe.item}".strip(),
        recipe=recipe.name,
        text=claim.text,
        verdict=NOT_TESTED,
        detail="not run",
        effect=None,
        interval=None,
        paper_effect=paper_effect,
        seeds=0,
        share=0.0,
        scale=options.scale,
        deviations=[],
        failures="",
        decide="runs of both sides at the paper's setting",
        is_headline=claim.is_headline,
        runs=(recipe.name, claim.text),
    )
    if len(sides) < 2:
        return found
    differences, leads, detail = compared(claim, *sides)
    failures = failures_of(claim, sides)
    named = zip((claim.left, claim.right), sides, strict=True)
    lost = [f"{name}: {side.left_out}" for name, side in named if side.left_out]
    runs = [run_of(s.cell, s.candidate or {}, 0, options, Path()) for s in sides]
    both = list(zip(sides, runs, strict=True))
    share = min(share_of_steps(claim, side, run) for side, run in both)
    elsewhere = elsewhere_of(sides, runs)
    remarks = [*elsewhere, *read_differently(sides)] if leads else []
    read = [f"{run.name} {side.cell.of} {side.cell.take}" for side, run in both]
    found = replace(
        found,
        detail=detail,
        seeds=len(leads),
        share=share,
        deviations=list(dict.fromkeys(d for side, run in both for d in deviations_of(side, run))),
        failures=", ".join(filter(None, [failures, *lost])),
        runs=(*read, f"above {claim.is_above}, within {claim.margin}"),
        read_at=max(last_round_read(side.cell, run) for side, run in both),
        remarks="; ".join(remarks),
    )
    if detail == "not run":
        return found

    take = sides[0].cell.take
    machines = sorted({name for side in sides for name in side.machines})
    if lacks := lacking(sides, runs, code):
        # `lacking` compares the code of the whole table: these two sides may still be comparable
        have_other_code = len({name for side in sides for name in side.code}) > 1
        are_mixed = have_other_code or lacks[0] in (OTHER_PRECISION, OTHER_DATA)
        number = "" if are_mixed else f"; {detail}"
        return replace(found, detail=f"no verdict on {lacks[0]}{number}", decide=lacks[1])
    if take.is_time and len(machines) > 1:
        detail = f"different machines: {', '.join(machines)}"
        return replace(found, verdict=INCONCLUSIVE, detail=detail, decide="runs on one machine")

    interval = interval_of(differences) if len(differences) == len(leads) else None
    effect = statistics.fmean(differences) if differences else None
    found = replace(found, effect=effect, interval=interval)
    if share < 1:
        percent = "under 1%" if share < 0.01 else f"{share:.0%}"
        whose = "paper" if recipe.paper else "recipe"
        what = "samples a round" if take.how == PER_ROUND else "local steps"
        times = f"{1 / share:.2g}" if share < 0.95 else f"{1 / share:.3g}"
        detail = f"at {percent} of the {whose}'s {what}; {detail}"
        return replace(found, detail=detail, decide=f"{times} times the {what}")

    verdict = verdict_on(claim, differences, leads)
    asked, tuned_on = {*options.seeds, *recipe.seeds}, {side.tuned_on for side in sides}
    num_asked = len(asked - tuned_on) if leads else 0
    is_early = len(leads) < num_asked
    if is_early:
        remarks.append(f"after {len(leads)} of {num_asked} seeds")
    remarks += seeds_added(claim, sides, recipe, options, verdict, len(leads))
    # the paper's times are of other machines
    if interval and paper_effect is not None and not (claim.margin or elsewhere or take.is_time):
        low, high = interval
        if not low <= paper_effect <= high:
            remarks.append(f"the paper's {paper_effect:+.2f} is outside the interval")
    if verdict in (REPRODUCED, NOT_REPRODUCED):
        decide = f"{len(asked)} seeds" if is_early else ""
    else:
        effects = [] if effect is None else [abs(effect)]
        if claim.margin:
            effects = [abs(claim.margin - each) for each in effects]
        elif paper_effect is not None:
            effects.append(abs(paper_effect))
        decide = what_decides(differences, effects, failures, len(leads), len(asked & tuned_on))
    return replace(found, verdict=verdict, decide=decide, remarks="; ".join(remarks))


def verdict_on(claim: Claim, differences: Sequence[float], leads: Sequence[float]) -> str:
    """The verdict on a claim that can be judged, by `judge` where it has no margin.

    A claim that two sides are within a margin is reproduced if the interval of the differences lies
    within it, not reproduced if it lies outside; it is open where any pair has no difference.
    """
    if not claim.margin:
        return judge(leads, len(differences))
    interval = interval_of(differences)
    if interval is None or len(differences) < len(leads):
        return INCONCLUSIVE
    low, high = interval
    if -claim.margin < low and high < claim.margin:
        return REPRODUCED
    if low > claim.margin or high < -claim.margin:
        return NOT_REPRODUCED
    return INCONCLUSIVE


def seeds_added(
    claim: Claim,
    sides: Sequence[Result],
    recipe: Recipe,
    options: Options,
    verdict: str,
    num_judged: int,
) -> Iterator[str]:
    """In words, that more seeds were judged than planned, and the verdict with the planned alone.

    To add seeds after a look at a verdict makes a decision too likely. One seed decides nothing,
    so seeds beside it are not added to a verdict.
    """
    planned = {*seeds_for(recipe, [side.cell for side in sides], options.full_grid)}
    differences, leads, _ = compared(claim, *(only_seeds(side, planned) for side in sides))
    num_planned = len(planned - {side.tuned_on for side in sides})
    have_all_ended = len(leads) == num_planned
    if num_planned > 1 and have_all_ended and num_judged > num_planned:
        then = verdict_on(claim, differences, leads)
        word = "more than" if then == verdict else f"{then} with"
        yield f"{word} the planned {len(leads)} seeds"


def only_seeds(side: Result, seeds: Collection[int]) -> Result:
    """The side without the runs of other seeds."""
    numbers = {seed: number for seed, number in side.by_seed.items() if seed in seeds}
    failures = {seed: word for seed, word in side.failures.items() if seed in seeds}
    return replace(side, by_seed=numbers, failures=failures)


def read_differently(sides: Sequence[Result]) -> Iterator[str]:
    """In words, that the sides' numbers are not read in the same way.

    Of which accuracy they are is for the recipe to choose: a global model beside personal ones.
    """
    reads = [
        side.cell.take.of("accuracy").removesuffix(", in %")
        + (f" at round {side.cell.at}" if side.cell.at else "")
        for side in sides
    ]
    if reads[0] != reads[1]:
        yield f"read differently: {reads[0]} and {reads[1]}"


def lacking(
    sides: Sequence[Result], runs: Sequence[Run], code: Collection[str]
) -> tuple[str, str] | None:
    """(the runs on which there is no verdict, what would decide); None where there can be one.

    code: of all runs of the table.
    """
    if len(code) > 1:
        return OTHER_CODE, "runs of one code"
    if any(UNKNOWN in each for each in code):
        return "runs whose code is not recorded", "runs of today's code"
    if len({name for side in sides for name in side.precision}) > 1:
        return OTHER_PRECISION, "runs in one precision"
    if differs(set[tuple[str, str]]().union(*(side.data for side in sides))):
        return OTHER_DATA, "runs on the same data"
    if any(1 < s.num_candidates > s.num_tried for s in sides):
        return (
            "a side whose tuned values were not all tried, or failed",
            "the other values under `tune`",
        )
    for side, run in zip(sides, runs, strict=True):
        ours, paper = (resolve_config(keys).data.source for keys in (run.keys, side.cell.keys))
        if ours != paper and ":" not in ours:  # a folder may hold the paper's data
            return f"runs on {ours}", f"runs on {paper}"
    return None


def compared(claim: Claim, left: Result, right: Result) -> tuple[list[float], list[float], str]:
    """(finite differences left - right, leads of the claim, both in words) over common seeds."""
    seeds = sorted({*left.by_seed, *left.failures} & {*right.by_seed, *right.failures})
    if not seeds:
        return [], [], "not run"
    tuned_on = [s for s in dict.fromkeys((left.tuned_on, right.tuned_on)) if s in seeds]
    judged = [seed for seed in seeds if seed not in tuned_on]
    sign = 1 if claim.is_above else -1
    # "above" puts the left side ahead; of times, which are better if shorter, the right side
    is_left_ahead = claim.is_above != left.cell.take.is_time
    ahead, behind = (left, right) if is_left_ahead else (right, left)
    differences, leads = [], []
    for seed in judged:
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
    words = [failures_of(claim, (left, right))]
    is_time = left.cell.take.how == "seconds to"
    if is_time and any(s.by_seed.get(n) == math.inf for n in judged for s in (left, right)):
        left_num, right_num = (
            sum(math.isfinite(s.by_seed.get(n, math.inf)) for n in judged) for s in (left, right)
        )
        words.append(f"{claim.left} reaches it with {left_num}, {claim.right} with {right_num}")
    elif differences:
        spread = f" ± {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
        words.append(f"{statistics.fmean(differences):+.2f}{spread}")
    basis = {0: "no other seed", 1: "one seed"}.get(len(judged), f"{len(judged)} seeds")
    basis += "".join(f"; without seed {seed}, which chose the tuned value" for seed in tuned_on)
    words.append(basis)
    return differences, leads, ", ".join(filter(None, words))


def failures_of(claim: Claim, sides: Sequence[Result]) -> str:
    """`FedReCo diverged 2/3`, of the seeds that ended, for each side of which any failed."""
    words = []
    for name, side in zip((claim.left, claim.right), sides, strict=True):
        if counts := Counter(side.failures.values()):
            words.append(f"{name} {failed_share(counts, len({*side.by_seed, *side.failures}))}")
    return ", ".join(words)


def failed_share(counts: Mapping[str, int], ended: int) -> str:
    """`diverged 2/3`."""
    return ", ".join(f"{word} {number}/{ended}" for word, number in sorted(counts.items()))


def share_of_steps(claim: Claim, side: Result, run: Run) -> float:
    """Local steps of the run where it is read / those of the paper from which it makes the claim.

    For seconds a round, which do not depend on the number of rounds: the samples of a round.
    """
    if side.cell.take.how == PER_ROUND:
        ours, paper = (
            config.train.batch_size * config.rounds.num_clients * config.rounds.fraction_train
            for config in (resolve_config(run.keys), paper_config(side))
        )
        return steps_ratio(side, run) * ours / paper
    read_at = paper_round_read(side.cell, run)
    first = min(claim.from_round or read_at, read_at)
    return steps_ratio(side, run) * last_round_read(side.cell, run) / first


def steps_ratio(side: Result, run: Run) -> float:
    """Local steps in a round of the run / in one of the paper.

    Where several keys say how long a round trains, of the one with the smallest ratio. Runs of
    another data set, which have no verdict, count as if on the paper's.
    """
    ours, paper = resolve_config(run.keys), paper_config(side)
    source = paper.data.source
    return min(
        steps_per_round(ours, source, key) / (steps_per_round(paper, source, key) or 1)
        for key in paper.method_options().duration_keys
    )


def paper_config(side: Result) -> RunConfig:
    """The paper's setting of a side, with the tuned value that was chosen."""
    return resolve_config({**side.cell.keys, **(side.candidate or {})})


def elsewhere_of(sides: Sequence[Result], runs: Sequence[Run]) -> list[str]:
    """In words, where runs are read, if not where the paper reads its number.

    Nothing for seconds a round, which do not depend on it.
    """
    both = [(s, run) for s, run in zip(sides, runs, strict=True) if s.cell.take.how != PER_ROUND]
    for side, run in both:
        if reads_elsewhere(side.cell, run):
            due = paper_round_read(side.cell, run)
            return [f"at round {last_round_read(side.cell, run)} instead of {due}"]
    shares = [
        steps_ratio(side, run) * last_round_read(side.cell, run) / paper_round_read(side.cell, run)
        for side, run in both
        if run.is_scaled
    ]
    return [f"at {min(shares):.0%} of the local steps"] if min(shares, default=1) < 0.995 else []


def deviations_of(side: Result, run: Run) -> Iterator[str]:
    """The keys of the run that differ from the paper's, with both values; of paths the end."""
    for key, ours, paper in differing(side.cell, side.candidate or {}, run):
        kind, _, name = str(ours).rpartition("/")[0].partition(":")
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


def judge(leads: Sequence[float], num_differences: float = math.inf) -> str:
    """The verdict on leads, one a seed, that a claim says are positive.

    Decided if the 95 % t interval of the mean does not contain 0. An infinite lead counts as the
    largest finite one on its side, and rules out the other verdict; where more than half are
    negative and infinite, the claim is not reproduced. Fewer than two finite leads, or differences,
    decide nothing. Two failed runs have a lead of 0, but no difference.
    """
    if len(leads) < 2:
        return INCONCLUSIVE
    finite = [lead for lead in leads if math.isfinite(lead)]
    if min(leads) == math.inf:
        return REPRODUCED
    if statistics.median_high(leads) == -math.inf:
        return NOT_REPRODUCED
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


def what_decides(
    differences: Sequence[float],
    effects: Sequence[float],
    failures: str = "",
    num_seeds: int = 1,
    num_tuning: int = 0,
) -> str:
    """What an inconclusive claim lacks: runs that finish, or seeds, at the spread found.

    effects: distances from the boundary of a decision, of the mean and of the paper's effect; the
    smallest counts. num_seeds: how many were judged. If there are fewer differences, a time was
    never reached, and the number of seeds needed is unknown. num_tuning: seeds beside these, which
    chose a tuned value.
    """
    if failures:
        return f"runs that finish: {failures}"
    if not differences or len(differences) < num_seeds:
        return "more seeds"
    if len(differences) == 1:
        return "a second seed, to know the spread"
    effect, deviation = min(effects), statistics.stdev(differences)
    more = range(len(differences) + 1, MAX_SEEDS)
    seeds = next((n for n in more if half_width_of(deviation, n) < effect), None)
    return f"{seeds + num_tuning} seeds" if seeds else f"more than {MAX_SEEDS} seeds"


def different_headlines(claims: Sequence[JudgedClaim]) -> list[JudgedClaim]:
    """The headline claims; of those that read the same runs at one round, only the first."""
    found: dict[tuple[object, ...], JudgedClaim] = {}
    for claim in claims:
        if claim.is_headline:
            found.setdefault((claim.runs, claim.read_at), claim)
    return list(found.values())


def counted(claims: Sequence[JudgedClaim]) -> list[JudgedClaim]:
    """The claims, without those that another claim repeats at a later round of the same runs."""
    last = {claim.runs: claim for claim in sorted(claims, key=lambda claim: claim.read_at)}
    return [claim for claim in claims if last[claim.runs] is claim]


def tally(claims: Sequence[JudgedClaim]) -> str:
    """How many claims have which verdict; if any was judged, how often chance alone decides one."""
    once = counted(claims)
    counts = Counter(claim.verdict for claim in once)
    found = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    again = len(claims) - len(once)
    if again:
        found += f"; {again} at an earlier round of the same runs not counted"
    if all(claim.verdict == NOT_TESTED for claim in once):
        return found
    return f"{found}; {CHANCE}"


def shown_effect(claim: JudgedClaim) -> str:
    """`+1.92 [+0.50, +3.34]`: the mean difference and its 95 % interval; a dash without one."""
    if claim.effect is None:
        return "–"
    if claim.interval is None:
        return f"{claim.effect:+.2f}"
    low, high = claim.interval
    return f"{claim.effect:+.2f} [{low:+.2f}, {high:+.2f}]"
