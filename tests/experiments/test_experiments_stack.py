"""Which runs of a recipe train together, and what resumes them."""

from dataclasses import replace
from pathlib import Path

import pytest
from run_fixtures import history_of, without_pictures

from keel.experiments.plan import runs_needed
from keel.experiments.recipe import load_recipe
from keel.experiments.runs import Options, Run
from keel.experiments.stack import directories_of, interrupted_group, run_together, stack_of
from keel.experiments.tasks import claimed, execute_all
from protocol.code import code_version
from server_app.summary import read_manifest, read_summary

sweep = Path(__file__).parent.parent.parent / "docs" / "sweep.yaml"


def runs_of(output, **changes):
    """The sweep's runs, of a fifth of the digits: two values of mu, two of alpha, two seeds."""
    recipe = load_recipe(str(sweep))
    changes = {"num-rounds": 2, "stacked-runs": 8, "data-fraction": 0.2} | changes
    options = Options("paper", changes, [0, 1], full_grid=True)
    return list(runs_needed(recipe, recipe.cells, options, output, ()))


def settings(runs):
    return [(run.keys["alpha"], run.keys["fedprox.mu"], run.keys["seed"]) for run in runs]


def test_runs_that_differ_in_seed_and_mu_train_together(tmp_path):
    runs = runs_of(tmp_path)
    first = stack_of(runs[0], runs)
    assert sorted(settings(first)) == [(0.5, mu, seed) for mu in (0.01, 1.0) for seed in (0, 1)]
    left = [run for run in runs if run not in first]
    assert sorted(stack_of(left[0], left), key=lambda run: run.name) == sorted(
        left, key=lambda run: run.name
    )


@pytest.mark.parametrize(("num", "expected"), [(1, 1), (3, 3)])
def test_no_more_than_stacked_runs_train_together(num, expected, tmp_path):
    runs = runs_of(tmp_path, **{"stacked-runs": num})
    assert len(stack_of(runs[0], runs)) == expected
    assert stack_of(runs[0], runs)[0] == runs[0]


def test_a_run_of_another_number_of_clients_or_interruption_trains_apart(tmp_path, monkeypatch):
    first, *others = runs_of(tmp_path)
    others = [run for run in stack_of(first, others) if run != first]
    assert stack_of(first, [replace(others[0], clients=2), *others[1:]]) == [first, *others[1:]]
    group_of = {others[0].name: "a group"}
    monkeypatch.setattr(
        "keel.experiments.stack.interrupted_group", lambda run: group_of.get(run.name, "")
    )
    assert stack_of(first, others) == [first, *others[1:]]


def test_stacked_runs_are_other_runs(tmp_path):
    names = [{run.name for run in runs_of(tmp_path, **{"stacked-runs": n})} for n in (1, 8)]
    assert not names[0] & names[1]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The first stack of the sweep, interrupted after round 1."""
    runs = runs_of(tmp_path_factory.mktemp("output"))
    stack = stack_of(runs[0], runs)
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setattr("server_app.stacked_runs.trained_together", stopping_after(4))
        with pytest.raises(KeyboardInterrupt):
            run_together(stack)
    return runs, stack


def stopping_after(num):
    """`trained_together`, which is interrupted after this many calls; a round has 4."""
    from server_app.stacked_runs import trained_together

    calls = []

    def trained(requests):
        calls.append(1)
        if len(calls) > num:
            raise KeyboardInterrupt
        return trained_together(requests)

    return trained


@pytest.mark.end_to_end
def test_an_interrupted_stack_resumes_in_its_own_directories(interrupted):
    runs, stack = interrupted
    group = interrupted_group(stack[0])
    assert group
    paths = directories_of(group, stack[0].folder.parent)
    assert [path.parent for path in paths] == [run.folder for run in stack]
    assert stack_of(runs[0], runs) == stack  # and not with runs that start anew
    for difference in ("other_code", "other_default"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, difference, lambda run, attempt: "it has changed")
            assert interrupted_group(stack[0]) == ""
    with without_pictures():
        assert run_together(stack) == paths
    for run, path in zip(stack, paths, strict=True):
        assert run.finished() == path
        assert [line["round"] for line in history_of(path)] == [1, 2]
        assert read_manifest(path)["stacked"]["group"] == group
        assert interrupted_group(run) == ""


@pytest.mark.end_to_end
def test_a_stack_that_cannot_be_resumed_starts_anew(tmp_path, capsys):
    runs = runs_of(tmp_path, **{"num-rounds": 3})
    stack = stack_of(runs[0], runs)[:2]
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setattr("server_app.stacked_runs.trained_together", stopping_after(8))
        with pytest.raises(KeyboardInterrupt):
            run_together(stack)
    (before,) = stack[0].attempts()
    for checkpoint in stack[1].attempts()[0].glob("checkpoints/*"):
        checkpoint.unlink()
    with without_pictures():
        outcomes = run_together(stack)
    assert (
        "restarted from round 1: stacked-runs: there is no round of which all"
        in capsys.readouterr().out
    )
    assert [read_summary(path)["status"] for path in outcomes] == ["finished"] * 2
    assert before not in outcomes
    assert interrupted_group(stack[0]) == ""  # its newest attempt has finished


@pytest.mark.end_to_end
def test_a_worker_executes_a_stack_and_says_what_became_of_each_run(tmp_path):
    runs = runs_of(tmp_path, **{"num-rounds": 1, "fedprox.half": True})
    stack = stack_of(runs[0], runs)[:2]
    for run in stack:
        run.folder.mkdir(parents=True)
    with claimed(stack[1]):
        assert execute_all(stack, code_version()) == [None, None]
    assert not stack[0].attempts()
    with without_pictures():
        assert execute_all(stack, code_version()) == ["", ""]
        assert execute_all(stack, code_version()) == ["", ""]  # both are done
    assert [len(run.attempts()) for run in stack] == [1, 1]
    assert (stack[0].folder / "log.txt").exists()


def test_a_stack_that_cannot_train_together_fails_with_the_reason(tmp_path):
    runs = runs_of(tmp_path, **{"num-rounds": 1, "compile": True})
    stack = stack_of(runs[0], runs)[:2]
    for run in stack:
        run.folder.mkdir(parents=True)
    for reason in execute_all(stack, code_version()):
        assert reason.startswith("stacked-runs = 8: compile = true compiles the network of one")
