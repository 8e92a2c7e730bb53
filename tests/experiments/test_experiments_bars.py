"""What the runner's bars say of a run: row, column, seed, the newest accuracy."""

from random import Random
from types import SimpleNamespace

from keel.experiments.plan import selected
from keel.experiments.recipe import load_recipe
from keel.experiments.runner import ActiveRun, labels_of, outcome
from keel.experiments.runs import Options, run_of
from keel.runs import SavedRun
from tests.tools.run_directories import append_round, line_of, make_run


def test_a_label_names_row_column_and_seed(tmp_path):
    recipe = load_recipe("fedcka-table-2")
    options = Options("paper", {}, [0, 1], False)
    labels = labels_of(recipe.cells, options, tmp_path)
    cell = selected(recipe, [])[0]
    run = run_of(cell, {}, 1, options, tmp_path)
    assert labels[run.name] == f"{cell.row.name}, {cell.column.name}, seed 1"


def test_a_bar_follows_the_newest_attempt_and_its_accuracy(tmp_path):
    first = make_run(tmp_path / "1", {"method": "fedavg"}, 9, num_written=4)
    attempts = [first]
    run = SimpleNamespace(attempts=lambda: attempts)
    process = ActiveRun(run, None, 0)
    assert (process.accuracy, process.new_rounds(), process.new_rounds()) == ("", 4, 0)
    line = line_of(5, Random(1))
    append_round(first, line)
    assert process.new_rounds() == 1
    assert process.accuracy == f"{100 * line['global']['accuracy']:.2f} %"
    attempts.append(make_run(tmp_path / "2", {"method": "fedavg"}, 9, num_written=2))
    assert (process.new_rounds(), process.rounds) == (-3, 2)  # it began again


def test_a_run_has_the_accuracy_that_keel_list_shows(tmp_path):
    """A method without personal models whose global model all clients evaluate too."""
    run = make_run(tmp_path / "1", {"method": "fedavg"}, 5, clients=["a", "b"])
    process = ActiveRun(SimpleNamespace(attempts=lambda: [run]), None, 0)
    process.new_rounds()
    shown = f"{100 * (SavedRun(run).accuracy or 0):.2f} %"
    assert process.accuracy == shown
    assert outcome(run).startswith(f"{shown} (global.accuracy)")
