"""Runs of cells: scales, names and directories, what is executed, how they ended."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_fixtures import NOT_FINITE, leave_all, leave_run, options, recipe_of
from own_fixtures import file

from keel.experiments.jobs import seeds_for
from keel.experiments.recipe import load_recipe
from keel.experiments.results import differing
from keel.experiments.runs import code_folder, history_in, run_of

PAPER = options()


def test_fedprocs_schedule_is_of_the_papers_rounds():
    cell = load_recipe("fedrcl-table-1").cell("FedProc", "CIFAR-10, alpha 0.05, 1000R")
    run = run_of(cell, {}, 0, options(changes={"num-rounds": 200}), Path())
    assert run.config.flat["fedproc.schedule-rounds"] == 1000
    assert [key for key, *_ in differing(cell, {}, run)] == ["num-rounds"]


@pytest.mark.parametrize(
    ("recipe", "row", "every"),
    [
        ("fedreco-table-1", "FedAvg-FT", 501),
        ("fedreco-table-1", "FedRep", 1),  # keeps its head: nothing is tuned
        ("fedreco-figure-3a", "FedAvg-FT", 1),  # curves
        ("fedreco-table-2", "FedBABU", 1),  # seconds to an accuracy
    ],
)
def test_fine_tuning_is_evaluated_after_the_last_round_where_only_that_is_read(recipe, row, every):
    (cell, *_) = [c for c in load_recipe(recipe).cells if c.row.name == row]
    run = run_of(cell, {}, 0, PAPER, Path())
    assert run.config.rounds.evaluate_every == every
    run = run_of(cell, {}, 0, options(changes={"evaluate-every": 10}), Path())
    assert run.config.rounds.evaluate_every == 10


def test_runs_of_one_setting_have_one_name_and_others_another():
    table, figure = load_recipe("fedintr-table-1"), load_recipe("fedintr-figure-5")
    cell = table.cell("FedAvg", "CIFAR-10")
    a = run_of(cell, {}, 0, PAPER, Path())
    assert a.name == run_of(figure.cell("FedAvg", "E = 10"), {}, 0, PAPER, Path()).name
    assert a.name == run_of(cell, {"moon.mu": 0.3}, 0, PAPER, Path()).name  # not FedAvg's
    other = [
        run_of(cell, {}, 1, PAPER, Path()),
        run_of(cell, {}, 0, options(changes={"lr": 0.5}), Path()),
    ]
    assert len({a.name, *(run.name for run in other)}) == 3
    fedintr = table.cell("FedIntR", "CIFAR-10")
    ten = [run_of(fedintr, {"fedintr.mu": mu}, 0, PAPER, Path()).name for mu in (10, 10.0, 10.5)]
    assert ten[0] == ten[1] != ten[2]


def test_an_edited_own_method_is_another_run(tmp_path):
    path = file(tmp_path)
    keys = f"method: '{path}:FedPull', source: digits, num-clients: 2"
    cell = recipe_of(f"rows: {{A: {{{keys}, fedpull.mu: 0.5}}}}\n").cells[0]
    before = run_of(cell, {}, 0, PAPER, tmp_path)
    assert f"method={path}:FedPull" in before.prepare()
    assert "fedpull.mu=0.5" in before.prepare()
    path.write_text(path.read_text().replace("SCALE = 1.0", "SCALE = 2.0"))
    assert run_of(cell, {}, 0, PAPER, tmp_path).name != before.name


def test_cache_and_device_are_part_of_a_run_where_seconds_are_read():
    for name, number in (("fedcka-table-4", 3), ("fedcka-table-1", 1)):
        cell = load_recipe(name).cells[0]
        changes = ({}, {"cache-mb": 0}, {"device": "cuda"})
        runs = [run_of(cell, {}, 0, replace(PAPER, changes=each), Path()) for each in changes]
        assert len({run.name for run in runs}) == number


def test_values_that_are_tried_leave_five_seeds_beside_the_one_that_chooses():
    table = load_recipe("fedcka-table-2")
    assert seeds_for(table, table.cells) == [0, 1, 2]
    tuned = replace(table.cells[0], candidates=[{"fedprox.mu": mu} for mu in (0.1, 1.0)])
    assert seeds_for(table, [tuned]) == [0, 1, 2, 3, 4, 5]


def test_runs_of_different_code_have_different_folders():
    assert code_folder("sources 0123456789abcdef, torch 2.11.0") == "0123456789abcdef-torch-2.11.0"
    assert code_folder() != code_folder("sources 0123456789abcdef, torch 2.11.0")


def test_a_run_is_begun_with_the_keys_that_it_uses_and_resumed_from_a_checkpoint(tmp_path):
    text = (
        "config: {num-clients: 2, source: digits, fedprox.mu: 1, flip: true}\n"
        "rows: {A: {method: fedavg}, B: {method: fedprox}}\n"
    )
    recipe = recipe_of(text)
    a, b = (run_of(cell, {}, 0, PAPER, tmp_path / "code") for cell in recipe.cells)
    common = ["num-clients=2", "source=digits"]
    place = [f"output-dir={tmp_path / 'code'}"]
    assert a.prepare() == [
        *("run", *common, "flip=true", "method=fedavg", "seed=0", *place, f"run-name={a.name}")
    ]
    assert "fedprox.mu=1" in b.prepare()
    leave_run(a, 0.5, status="running")
    (a.directory / "checkpoints").mkdir()
    (a.directory / "checkpoints" / "round-00001-0123456789abcdef.safetensors").touch()
    a.note_failure("killed")
    assert a.status == "failed"
    assert a.prepare() == ["resume", str(a.directory)]
    assert (a.status, a.reason) == ("", "")
    shutil.rmtree(a.directory / "checkpoints")
    assert a.prepare()[0] == "run"
    assert not a.directory.exists()


@pytest.mark.parametrize(
    ("status", "found", "reason"),
    [
        ("finished", "finished", ""),
        ("failed: no disk", "failed", "no disk"),
        (NOT_FINITE, "diverged", ""),
        ("stopped", "", ""),
    ],
)
def test_how_a_run_ended(status, found, reason, tmp_path):
    _, (run, *_) = leave_all(tmp_path, status=[status] * 6)
    assert (run.status, run.reason) == (found, reason)
    assert run.is_done == (found in ("finished", "diverged"))


@pytest.mark.parametrize("damage", ["lost", "twice"])
def test_a_damaged_history_is_named(damage, tmp_path):
    _, (run, *_) = leave_all(tmp_path)
    path = run.directory / "history.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text({"lost": second, "twice": first + first}[damage])
    with pytest.raises(ValueError, match=str(path)):
        history_in(run.directory)
