"""Verdicts on claims, from numbers made up so that the answer is known by hand."""

import json
import math
from dataclasses import replace

import pytest
from experiment_fixtures import (
    NOT_FINITE,
    THREE,
    TWO_ROWS,
    folder_in,
    leave_all,
    leave_run,
    options,
    recipe_of,
    result_with,
    results_in,
)

from keel.experiments.claims import Pairs, decided, interval_of, judge_all, tally
from keel.experiments.recipe import Claim, load_recipe
from keel.experiments.results import best_candidate, runs_needed
from keel.experiments.runs import run_of

A_AND_B = """\
paper: P
config: {num-clients: 2, num-rounds: 9}
rows: {A: {method: fedavg}, B: {method: moon}}
"""
ABOVE = Claim("", "A", "B", is_above=True, place="result")


def verdict_on(text, a, b, how=THREE, **of_a):
    """The verdict on the only claim, with these numbers by seed of the rows A and B."""
    recipe = recipe_of(text)
    results = {("A", "result"): result_with(recipe, "A", a, how, **of_a)}
    results["B", "result"] = result_with(recipe, "B", b, how)
    (verdict,) = judge_all(recipe, results, how)
    return verdict


def verdicts_in(output, recipe, how=THREE):
    return judge_all(recipe, results_in(output, recipe, how), how)


def by_seed(*numbers):
    return dict(enumerate(numbers))


HIGH, LOW = by_seed(52.0, 53.0, 51.5), by_seed(50.0, 51.0, 50.0)


@pytest.mark.parametrize(
    ("claim", "a", "b", "decision", "effect"),
    [
        # 3 seeds: t(0.975, 2) = 4.303; sd 0.289 reaches 0.72
        ("A above B", HIGH, LOW, 1, 1.8333),
        ("A above B", LOW, HIGH, -1, -1.8333),
        ("A below B", LOW, HIGH, 1, -1.8333),
        # sd 3.51 reaches 8.7
        ("A above B", by_seed(52.0, 49.0, 55.0), LOW, 0, 1.6667),
        ("A above B", {0: 52.0}, by_seed(50.0, 51.0), 0, 2.0),
        ("A above B", {}, {0: 50.0}, None, None),
        ("A within 3 of B", HIGH, LOW, 1, 1.8333),
        ("A within 1 of B", HIGH, LOW, -1, 1.8333),
        ("A within 2 of B", HIGH, LOW, 0, 1.8333),  # 1.12 to 2.55
    ],
)
def test_a_claim_is_judged_by_the_interval_of_paired_differences(claim, a, b, decision, effect):
    verdict = verdict_on(f"{A_AND_B}claims: [{claim} in result]\nseeds: 3\n", a, b)
    assert verdict.decision == decision
    assert verdict.effect == (effect if effect is None else pytest.approx(effect, abs=1e-4))


def test_an_interval_is_that_of_students_t():
    low, high = interval_of([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), abs=1e-4)
    assert interval_of([1.0]) is None


INF = math.inf


@pytest.mark.parametrize(
    ("leads", "decision"),
    [
        ([1.0, 1.1, 1.2, -INF], 0),  # one failed: cannot be reproduced
        ([-1.0, -1.1, -1.2, -INF], -1),
        ([1.0, -INF, -INF], -1),  # more than half
        ([1.0, -INF], 0),  # a single difference
        ([INF, INF], 1),  # a time that only the other side never reaches
        ([INF, -1.0, -1.1], 0),
        ([1.0, 1.1, 0.0], 0),  # a pair without a difference counts as 0
        ([INF], 0),
    ],
)
def test_a_lead_without_end_counts_as_the_largest_on_its_side(leads, decision):
    finite = [lead for lead in leads if math.isfinite(lead) and lead]
    assert decided(ABOVE, Pairs(finite, leads, ())) == decision


@pytest.mark.parametrize(
    ("ends", "decision", "failures"),
    [  # of the runs in turn: FedAvg and FedProx of seed 0, of 1, of 2
        ([*5 * ["finished"], NOT_FINITE], 0, "FedProx diverged 1/3"),
        (3 * ["finished", NOT_FINITE], -1, "FedProx diverged 3/3"),
        (
            ["finished", NOT_FINITE, "finished", "failed: no disk", *2 * ["finished"]],
            *(-1, "FedProx diverged 1/3, failed 1/3"),
        ),
        ([NOT_FINITE, "finished", NOT_FINITE, *3 * ["finished"]], 0, "FedAvg diver"),
    ],
)
def test_divergence_and_failure_count_against_the_claim(ends, decision, failures, tmp_path):
    recipe, _ = leave_all(tmp_path, status=ends)
    (verdict,) = verdicts_in(tmp_path, recipe)
    assert (verdict.decision, verdict.interval) == (decision, None)
    assert verdict.failures.startswith(failures)
    turned = Claim("", "FedAvg", "FedProx", is_above=False, place="result")
    (below,) = verdicts_in(tmp_path, replace(recipe, claims=[turned]))
    assert below.decision == decision


@pytest.mark.parametrize(("row", "decision"), [(0, 0), (1, 1)])
def test_a_lead_over_a_run_whose_updates_were_not_finite_is_none(row, decision, tmp_path):
    lost = {"a": "values that are not finite in 'w'", "b": "no answer"}
    runs = [lost if number == row else {} for number in range(6)]
    recipe, _ = leave_all(tmp_path, left_out=runs)
    (verdict,) = verdicts_in(tmp_path, recipe)
    assert verdict.decision == decision
    assert "updates left out: 2" in verdict.failures
    within = Claim("", "FedAvg", "FedProx", is_above=True, place="result", margin=20.0)
    (margin,) = verdicts_in(tmp_path, replace(recipe, claims=[within]))
    assert margin.decision == 0


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({}, 1),
        ({"changes": {"num-rounds": 8}}, None),  # the claim is of the last round
        ({"changes": {"source": "fashion-mnist"}}, None),
        ({"changes": {"source": "folder:/data/digits"}}, 1),
        ({"changes": {"lr": 0.5}}, 1),  # a deviation, which is named
    ],
)
def test_only_runs_of_the_recipes_setting_test_a_claim(changes, decision):
    text = A_AND_B.replace("{num-clients", "{source: digits, num-clients")
    how = replace(THREE, **changes)
    verdict = verdict_on(f"{text}claims: [A above B in result]\nseeds: 3\n", HIGH, LOW, how)
    assert verdict.decision == decision
    assert verdict.effect == pytest.approx(1.8333, abs=1e-4)
    assert any("lr" in each for each in verdict.deviations) == ("lr" in changes.get("changes", {}))


def test_a_claim_from_an_earlier_round_is_tested_by_runs_that_reach_it():
    text = f"{A_AND_B}claims: [A above B in result from round 5]\nseeds: 3\n"
    for num_rounds, decision in ((4, None), (5, 1)):
        how = replace(THREE, changes={"num-rounds": num_rounds})
        assert verdict_on(text, HIGH, LOW, how).decision == decision


@pytest.mark.parametrize(
    "differing",
    [
        {"precision": [["bf16"], *5 * [["fp32"]]]},
        {"precision": 3 * [["bf16"], ["fp32"]]},
        {"data": [*"ab", *4 * "a"]},
    ],
)
def test_runs_that_differ_in_precision_or_data_are_not_compared(differing, tmp_path):
    recipe, _ = leave_all(tmp_path, **differing)
    (verdict,) = verdicts_in(tmp_path, recipe)
    assert (verdict.decision, verdict.effect) == (None, None)


@pytest.mark.parametrize("of_each", ["{model: cnn-fedintr, ", "{image-size: 28, "])
def test_images_of_another_size_are_no_other_data(of_each, tmp_path):
    text = TWO_ROWS.replace("{method: fedprox", f"{of_each}method: fedprox")
    recipe, _ = leave_all(tmp_path, text, data=3 * ["a", "b"])
    (verdict,) = verdicts_in(tmp_path, recipe)
    assert verdict.decision == 1


def test_times_of_different_machines_are_not_compared(tmp_path):
    text = TWO_ROWS.replace("seeds: 3", "seeds: 3\ntake: seconds a round")
    text = text.replace("FedProx above", "FedProx below")
    one, other = ["cpu: one"], ["cpu: other"]
    recipe, _ = leave_all(tmp_path / "a", text, machines=[*5 * [one], other])
    assert verdicts_in(tmp_path / "a", recipe)[0].decision is None
    seconds = [seed + add for seed in range(3) for add in (5.0, 2.0)]  # FedProx: 3 s less, of 2
    recipe, _ = leave_all(tmp_path / "b", text, machines=6 * [one], cpu_seconds=seconds)
    (verdict,) = verdicts_in(tmp_path / "b", recipe)
    assert (verdict.decision, verdict.effect) == (1, pytest.approx(-1.5))


def test_seeds_that_were_added_after_a_look_decide_nothing():
    """The planned three have the interval [-0.6, 3.9]."""
    text = f"{A_AND_B}claims: [A above B in result]\nseeds: 3\n"
    a, b = by_seed(51.0, 51.3, 52.7, 52.0, 52.1), dict.fromkeys(range(5), 50.0)
    five = options(seeds=[*range(5)])
    verdict = verdict_on(text, a, b, five)
    assert (verdict.decision, verdict.seeds, verdict.on_all.decision) == (0, "3", 1)
    assert verdict.interval == pytest.approx((-0.59, 3.92), abs=0.01)
    assert any("ahead" in remark for remark in verdict.remarks)
    whole = verdict_on(text, by_seed(51.0, 51.3, 52.7), b)
    assert (whole.effect, whole.interval, whole.remarks) == (verdict.effect, verdict.interval, [])
    ours = verdict_on(text.replace("paper: P\n", ""), a, b, five)  # a sweep: those asked for
    assert (ours.decision, ours.seeds, ours.remarks) == (1, "5", [])
    assert verdict_on(text, by_seed(52.0, 53.0), b, five).seeds == "2 of 3"


@pytest.mark.parametrize(
    ("paper", "a", "b", "claim", "reading"),
    [  # the difference is 1.83 [1.12, 2.55]; with the first two seeds 2.0 [2.0, 2.0]
        (2.0, HIGH, LOW, "A above B", "holds"),
        (4.0, HIGH, LOW, "A above B", "holds, smaller"),
        (0.5, HIGH, LOW, "A above B", "holds, larger"),
        (4.0, LOW, HIGH, "A above B", "opposite sign"),
        (4.0, by_seed(52.0, 49.0, 55.0), LOW, "A above B", "undecided"),
        (4.0, by_seed(52.0, 53.0), LOW, "A above B", "holds, smaller, provisional"),
        (None, HIGH, LOW, "A above B", "ahead"),
        (None, LOW, HIGH, "A above B", "behind"),
        (0.5, HIGH, LOW, "A within 1 of B", "does not hold"),
        (0.5, HIGH, LOW, "A within 3 of B", "holds"),
        (2.0, {}, {}, "A above B", "not tested"),
    ],
)
def test_a_reading_compares_with_the_paper_and_is_provisional_with_two_seeds(
    paper, a, b, claim, reading
):
    text = A_AND_B
    if paper is not None:
        text = text.replace("fedavg}", f"fedavg, paper: [{paper}]}}")
        text = text.replace("moon}", "moon, paper: [0]}")
    assert verdict_on(f"{text}claims: [{claim} in result]\nseeds: 3\n", a, b).reading == reading


@pytest.mark.parametrize(
    ("paper", "changes", "is_outside"),
    [("[2.0]", {}, False), ("[4.0]", {}, True), ("[4.0]", {"num-rounds": 8}, False)],
)
def test_whether_the_papers_difference_is_in_the_interval(paper, changes, is_outside):
    text = A_AND_B.replace("fedavg}", f"fedavg, paper: {paper}}}").replace(
        "moon}", "moon, paper: 0}"
    )
    text += "claims: [A above B in result from round 1]\nseeds: 3\n"
    verdict = verdict_on(text, HIGH, LOW, replace(THREE, changes=changes))
    assert verdict.paper_effect == float(paper.strip("[]"))
    assert any("outside" in remark for remark in verdict.remarks) == is_outside
    assert any("round 8 instead of 9" in each for each in verdict.remarks) == bool(changes)


def test_sides_that_are_read_differently_are_named():
    text = A_AND_B.replace("fedavg}", "fedavg, take: best}") + "claims: [A above B in result]\n"
    assert "best accuracy" in verdict_on(text, HIGH, LOW).remarks[0]


# --- tuning ---------------------------------------------------------------------------------------

TUNED = """\
config: {source: digits, num-clients: 4, model: cnn-fedreco, num-rounds: 2}
rows:
  FedAvg: {method: fedavg}
  FedProx: {method: fedprox, tune: {fedprox.mu: [0.1, 1, 10]}}
claims: [FedProx above FedAvg in result]
"""


def test_the_best_of_the_first_seed_is_run_with_the_others(tmp_path):
    recipe, how, folder = recipe_of(TUNED), options(seeds=[0, 1]), folder_in(tmp_path)
    cell = recipe.cells[1]

    def needed():
        runs = (run for _, run in runs_needed([cell], how, folder))
        return [(run.keys["fedprox.mu"], run.seed) for run in runs]

    def leave(mu, accuracy, **more):
        leave_run(run_of(cell, {"fedprox.mu": mu}, 0, how, folder), accuracy, **more)

    assert needed() == [(0.1, 0), (1, 0), (10, 0)]
    leave(0.1, 0.5)
    leave(10, 0.7)
    assert needed() == [(0.1, 0), (1, 0), (10, 0)]  # one is not there yet
    leave(1, 0.9, status=NOT_FINITE)  # is the worst
    assert needed()[3:] == [(10, 1)]
    cell = recipe_of(TUNED.replace("10]}", "10]}, tuned: 1")).cells[1]  # the paper's best alone
    assert needed() == [(1, 0), (1, 1)]


def test_the_seed_that_chose_a_value_favours_its_side_and_is_not_judged(tmp_path):
    recipe, how, folder = recipe_of(TUNED), options(seeds=[0, 1, 2]), folder_in(tmp_path)
    avg, prox = recipe.cells
    for seed in range(3):
        leave_run(run_of(avg, {}, seed, how, folder), 0.5)
    for mu in (0.1, 1, 10):
        leave_run(run_of(prox, {"fedprox.mu": mu}, 0, how, folder), 0.9 if mu == 10 else 0.1)
    for seed in (1, 2):
        run = run_of(prox, {"fedprox.mu": 10}, seed, how, folder)
        leave_run(run, 0.6 + seed / 1000)
    assert best_candidate(prox, how, folder, is_final=True) == {"fedprox.mu": 10}
    result = results_in(tmp_path, recipe, how)["FedProx", "result"]
    assert result.mean == pytest.approx(60.15)
    (verdict,) = verdicts_in(tmp_path, recipe, how)
    assert (verdict.decision, verdict.num_seeds, verdict.pairs.tuned_on) == (1, 2, [0])
    failed = run_of(prox, {"fedprox.mu": 1}, 0, how, folder).directory / "summary.json"
    failed.write_text(json.dumps({"status": "failed: no disk"}))
    assert verdicts_in(tmp_path, recipe, how)[0].decision is None  # not all were tried


def test_the_best_of_times_is_the_shortest(tmp_path):
    recipe = recipe_of(TUNED.replace("rows:", "take: seconds a round\nrows:"))
    how, folder, cell = options(), folder_in(tmp_path), recipe.cells[1]
    for mu, seconds in ((0.1, 3.0), (1, 2.0), (10, 4.0)):
        leave_run(run_of(cell, {"fedprox.mu": mu}, 0, how, folder), 0.5, cpu_seconds=seconds)
    assert best_candidate(cell, how, folder, is_final=True) == {"fedprox.mu": 1}


def test_verdicts_are_counted():
    recipe = load_recipe("fedintr-table-3")
    found = judge_all(recipe, {}, THREE)
    assert tally(found) == f"not tested: {len(found)}"
    mixed = [replace(found[0], decision=0), *found[1:]]
    assert tally(mixed).startswith(f"not tested: {len(found) - 1}; undecided: 1; ")
