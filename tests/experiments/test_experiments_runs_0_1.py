"""Runs finished with Keel 0.1 are found, counted and reported: output_0_1 holds two of them."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keel.cli.experiments import list_command, parse_changes
from keel.experiments import runner
from keel.experiments.overview import (
    expected_seconds,
    measured_rates,
    overview,
    planned_runs,
    total,
)
from keel.experiments.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from keel.experiments.rendering import write_report
from keel.experiments.runs import Options, Run, hash_of, identity, machines_of, run_of
from protocol.config import app_folder, default_config, resolve_config
from tests.tools.run_directories import make_run as make_run_directory

PAPER = Options("paper", {}, [0], full_grid=True, any_code=True)
RECIPE = """\
seeds: 1
config:
  {source: digits, model: cnn-fedreco, num-clients: 4, num-rounds: 2, lr: 0.05,
  evaluate-clients: cohort, backoff-after: 3, local-test-fraction: 0.2}
rows:
  FedAvgM: {server-optimizer: fedavgm, method: fedavg}
  FedAvg: {method: fedavg}
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A copy of the output folder that 0.1 left."""
    return Path(shutil.copytree(Path(__file__).parent / "output_0_1", tmp_path / "output"))


def runs_of(recipe: Recipe, output: Path) -> list[Run]:
    return [run_of(cell, {}, 0, PAPER, output) for cell in recipe.cells]


def test_a_run_of_0_1_is_found_under_todays_names_and_is_of_other_code(output):
    recipe = parse_recipe(RECIPE, Path("renamed.yaml"))
    runs = runs_of(recipe, output)
    assert [run.outdated() for run in runs] == ["", ""]
    assert [machines_of(run.finished()) for run in runs] == [["cpu: a processor"]] * 2
    for run in runs:  # for the runner, they do not count
        assert replace(run, any_code=False).outdated().startswith("sources 4d127a943b46ae00, ")


def test_what_0_1_ran_is_in_the_report(output, caplog):
    page = write_report(output)[1].read_text()
    histories = output.glob("runs/*/*/history.jsonl")
    lasts = [json.loads(path.read_text().splitlines()[-1]) for path in histories]
    for last in lasts:
        assert f" {100 * last['global']['accuracy']:.2f} |" in page
    assert not caplog.records  # the old names are not this user's doing


def test_another_default_is_named_as_today(output):
    for path in output.glob("runs/*/*/config.json"):
        path.write_text(path.read_text().replace('"rest-after": 3', '"rest-after": 4'))
    run, *_ = runs_of(parse_recipe(RECIPE, Path("renamed.yaml")), output)
    assert run.outdated() == "backoff-after = 4, today 3"


def test_the_name_of_a_run_is_that_of_0_1():
    """Computed with 0.1; the key is `server` there."""
    recorded = json.loads((Path(__file__).parent / "recipes_0_1.json").read_text())
    cell = load_recipe("fedrcl-table-5").cell("FedADAM + FedRCL", "CIFAR-10")
    then = {"balanced-order": "interleaved", "precision": "fp32"}  # those of 0.1
    run = run_of(cell, then, 0, PAPER, Path())
    assert run.name == recorded["example"]


def test_keys_that_change_no_result_are_no_part_of_the_name():
    flat = default_config() | {"method": "fedprox"}
    same = flat | {"output-dir": "/x", "device": "cuda", "moon.mu": 3.0, "run-name": "a"}
    assert identity(flat) == identity(same)
    assert identity(flat) == identity(flat | {"tracker": "mlflow"})
    kept = {"keep-state": True, "checkpoint-every": 4}
    assert identity(flat) == identity(flat | kept)
    for key, value in (("fedprox.mu", 3.0), ("privacy.epsilon", 1.0), ("seed", 3)):
        assert identity(flat) != identity(flat | {key: value})


def test_a_run_whose_name_had_what_it_kept_is_found(tmp_path):
    (cell, _) = parse_recipe(RECIPE, Path("r.yaml")).cells
    how = replace(PAPER, changes={"keep-state": True, "checkpoint-every": 2, "lr": 1})
    run = run_of(cell, {}, 0, how, tmp_path)
    was = hash_of(run.identity | {"keep-state": True, "checkpoint-every": 2})
    make_run_directory(
        tmp_path / "runs" / f"fedavg-digits-seed0-{was}" / "attempt",
        resolve_config(run.keys).flat,
        run.rounds,
    )
    assert was not in run.name
    assert run.finished()


def test_changes_need_no_quotes_and_may_have_old_names(caplog):
    assignments = ["lr=1", "source=folder:/a b", 'model="resnet20"', "flip=true", "server=fedadam"]
    assert parse_changes([*assignments, "diagnostics=1"]) == {
        "lr": 1,
        "source": "folder:/a b",
        "model": "resnet20",
        "flip": True,
        "server-optimizer": "fedadam",
        "diagnostics": "1",
    }
    assert "server is now called server-optimizer" in caplog.text


def test_a_job_is_continued_wherever_its_recipe_was(output):
    (job,) = output.glob("jobs/*.json")
    about = json.loads(job.read_text())
    job.write_text(json.dumps(about | {"recipe": "/old/place/renamed.yaml", "seeds": [5]}))
    recipe = parse_recipe(about["text"], Path("renamed.yaml"))
    assert runner.save_job(recipe, PAPER, output) == [5, 0]
    assert list(output.glob("jobs/*.json")) == [job]


# --- keel experiments list --------------------------------------------------------------------


def test_the_list_counts_finished_runs_and_extrapolates_their_time(output):
    recipe = parse_recipe(RECIPE, Path("renamed.yaml"))
    rates = measured_rates(output)
    first, second = (run.finished() for run in runs_of(recipe, output))
    shutil.rmtree(second)
    lines = [json.loads(x) for x in (first / "history.jsonl").read_text().splitlines()]
    seconds = sum(sum(line["seconds"].values()) for line in lines)
    rates = measured_rates(output)
    (run,) = [r for r in planned_runs(recipe, PAPER, output) if not r.finished()]
    assert expected_seconds(resolve_config(run.keys), rates) == pytest.approx(seconds)
    longer = resolve_config({**run.keys, "num-rounds": 20, "local-epochs": 3})
    assert expected_seconds(longer, rates) == pytest.approx(30 * seconds)
    other_method = resolve_config({**run.keys, "method": "fedprox"})
    assert expected_seconds(other_method, rates) == pytest.approx(seconds)
    assert expected_seconds(resolve_config({**run.keys, "model": "resnet20"}), rates) is None


@pytest.mark.end_to_end
def test_the_list_has_every_recipe_and_is_printed(output, monkeypatch, capsys):
    found = list(overview("hour", output))
    lines = {line[0]: line for line in found}
    assert list(lines) == list(shipped_recipes())
    assert lines["fedintr-table-1"][3:] == ("5 x 4", "0 of 60", "unknown")
    assert lines["fedintr-figure-3"][4:] == ("none needed", "–")
    assert lines["fedintr-table-1"][1] == "FedIntR Table I"
    answers = {("hour", output): found}
    monkeypatch.setattr(
        "keel.experiments.overview.overview", lambda *asked: answers[asked]
    )  # going through all recipes takes a second
    list_command("hour", output)
    printed = capsys.readouterr().out
    assert all(name in printed for name in shipped_recipes())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([], "–"),
        ([None], "unknown"),
        ([30.0, 60.0], "1 min 30 s"),
        ([3600.0, 5400.0], "2 h 30 min"),
        ([3600.0 * 36], "1 d 12 h"),
        ([3600.0, None], "more than 1 h 0 min"),
    ],
)
def test_the_total_time_is_in_a_readable_unit(seconds, text):
    assert total(seconds) == text


@pytest.mark.end_to_end
def test_the_command_imports_neither_torch_nor_matplotlib():
    script = (
        "import sys, keel.cli.experiments, keel.experiments.overview; "
        "print([n for n in ('torch', 'matplotlib', 'scipy') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=app_folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
