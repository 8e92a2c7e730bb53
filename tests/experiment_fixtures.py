"""Recipes in a few lines, and run directories as their runs leave them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.experiments.jobs import save_job
from keel.experiments.recipe import Recipe, parse_recipe
from keel.experiments.results import Result, results_of, runs_needed
from keel.experiments.runs import Options, Run, code_folder, run_of
from protocol.code import code_version
from server_app.record import split
from server_app.run_reader import CLIENTS_FILE, HISTORY_FILE, LAYOUT

NOT_FINITE = "failed: round 7: the server update gave values that are not finite"
# the last round alone evaluates; FedAvg and FedProx in one column called result
TWO_ROWS = """\
config: {source: digits, num-clients: 4, model: cnn-fedreco, num-rounds: 2}
rows:
  FedAvg: {method: fedavg}
  FedProx: {method: fedprox}
seeds: 3
claims: [FedProx above FedAvg in result]
"""


def options(**changed: Any) -> Options:
    """One seed and the recipe's setting, unless `changed` says otherwise."""
    return Options(**{"changes": {}, "seeds": [0], **changed})


THREE = options(seeds=[0, 1, 2])


def folder_in(output: Path) -> Path:
    """Where the runs of today's code are."""
    return output / "runs" / code_folder()


def recipe_of(text: str) -> Recipe:
    """The recipe in the text."""
    return parse_recipe(text, Path("r.yaml"))


def leave_run(
    run: Run,
    accuracy: float,
    status: str = "finished",
    left_out: Mapping[str, str] | None = None,
    cpu_seconds: float = 1.0,
    **manifest: Any,
) -> Path:
    """Leave the directory of a run that ended so; accuracy and time are the last round's."""
    run.directory.mkdir(parents=True)
    config = {"config": dict(run.config.flat), "overrides": {}}
    manifest = {"layout": LAYOUT, "code": [code_version()], "machines": ["cpu: made up"]} | manifest
    contents = {"config": config, "summary": {"status": status}, "manifest": manifest}
    for name, content in contents.items():
        (run.directory / f"{name}.json").write_text(json.dumps(content))
    none = {"losses": {}, "client_seconds": 0.0, "client_cpu_seconds": 0.0, "seconds": {}}
    lines: list[dict[str, Any]] = [
        {"round": n, "left_out": {}} | none for n in range(1, run.rounds + 1)
    ]
    lines[-1] |= {"global": {"accuracy": accuracy}, "left_out": left_out or {}}
    lines[-1] |= {"client_seconds": 60.0, "client_cpu_seconds": cpu_seconds, "seconds": {"all": 90}}
    divided = [split(line) for line in lines]
    for name, part in ((HISTORY_FILE, 0), (CLIENTS_FILE, 1)):
        text = "".join(json.dumps(each[part]) + "\n" for each in divided)
        (run.directory / name).write_text(text)
    return run.directory


def leave_all(
    output: Path, text: str = TWO_ROWS, how: Options = THREE, **of: Sequence[Any]
) -> tuple[Recipe, list[Run]]:
    """A recipe with finished runs: FedAvg 50, FedProx 60 %, and 1 more for each seed.

    of: arguments of `leave_run` for each run in turn: both rows of seed 0, of seed 1, of seed 2.
    """
    recipe = recipe_of(text)
    save_job(recipe, how, output, recipe.cells)
    runs = [run for _, run in runs_needed(recipe.cells, how, folder_in(output))]
    for i, run in enumerate(runs):
        accuracy = (0.5 if run.keys["method"] == "fedavg" else 0.6) + 0.01 * run.seed
        leave_run(run, **{"accuracy": accuracy} | {name: values[i] for name, values in of.items()})
    return recipe, runs


def results_in(output: Path, recipe: Recipe, how: Options = THREE) -> dict[tuple[str, str], Result]:
    """The outcome of each cell by the runs there."""
    return results_of(recipe, how, folder_in(output))


def result_with(
    recipe: Recipe, row: str, by_seed: Mapping[int, float], how: Options, **more: Any
) -> Result:
    """A cell of the first column with these numbers, without files."""
    cell = recipe.cell(row, recipe.columns[0].name)
    candidate = cell.candidates[0]
    runs = [run_of(cell, candidate, seed, how, Path("/nowhere")) for seed in how.seeds]
    return Result(cell, candidate, runs, by_seed, **more)
