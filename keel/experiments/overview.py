"""The list of recipes: their size, what is finished on this machine, how long the rest takes."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from keel.experiments.plan import best_candidate, candidates_of
from keel.experiments.recipe import Recipe, load_recipe, shipped_recipes
from keel.experiments.runs import Options, Run, read_json, run_of, wall_seconds
from protocol.config import RunConfig, resolve_config
from server_app.history import duration
from server_app.run_reader import RunReader

Rates = dict[tuple[str, ...], list[float]]  # seconds for each unit of `work_of`


def overview(scale: str, output: Path) -> Iterator[tuple[str, ...]]:
    """A line for each recipe: name, paper, title, size, finished runs, time for the others."""
    rates = measured_rates(output)
    for name in shipped_recipes():
        recipe = load_recipe(name)
        runs = planned_runs(recipe, Options(scale, {}, recipe.seeds, full_grid=False), output)
        missing = [run for run in runs if not run.is_done()]
        seconds = [expected_seconds(resolve_config(run.keys), rates) for run in missing]
        size = f"{len(recipe.rows)} x {len(recipe.columns)}"
        finished = f"{len(runs) - len(missing)} of {len(runs)}" if runs else "none needed"
        yield name, f"{recipe.paper} {recipe.item}", recipe.title, size, finished, total(seconds)


def planned_runs(recipe: Recipe, options: Options, output: Path) -> list[Run]:
    """All runs of a recipe, with the first candidate where the best is not known yet."""
    runs = {}
    for cell in recipe.cells if recipe.shows != "labels" else ():
        candidates = candidates_of(cell, options)
        best = best_candidate(cell, options, output) or candidates[0]
        for seed in options.seeds:
            for candidate in candidates if seed == options.tuning_seed else [best]:
                run = run_of(cell, candidate, seed, options, output)
                runs[run.name] = run
    return list(runs.values())


def measured_rates(output: Path) -> Rates:
    """Seconds a unit of work in the finished runs of this output folder, by what was trained."""
    rates: Rates = {}
    for path in output.glob("runs/*/*/summary.json"):
        if read_json(path).get("status") == "finished":
            config = RunReader(path.parent).run_config
            rate = wall_seconds(path.parent) / work_of(config)
            for key in rate_keys(config):
                rates.setdefault(key, []).append(rate)
    return rates


def rate_keys(config: RunConfig) -> list[tuple[str, ...]]:
    """What a rate is looked up by: source, model and method, else source and model."""
    kind = "batches" if config.train.batches_per_epoch else "epochs"
    key = (kind, config.data.source, config.model.model)
    return [(*key, config.rounds.method), key]


def work_of(config: RunConfig) -> float:
    """The amount of training, up to a factor that depends on the source."""
    data, train, rounds = config.data, config.train, config.rounds
    samples = data.data_fraction
    if train.batches_per_epoch:
        samples = train.batches_per_epoch * train.batch_size * rounds.num_clients
    return rounds.num_rounds * rounds.fraction_train * max(1, train.local_epochs) * samples


def expected_seconds(config: RunConfig, rates: Rates) -> float | None:
    """How long a run takes, extrapolated from finished runs; None without a comparable one."""
    measured = next((rates[key] for key in rate_keys(config) if key in rates), None)
    return statistics.median(measured) * work_of(config) if measured else None


def total(seconds: Sequence[float | None]) -> str:
    """The sum; a lower bound if some are unknown."""
    known = [each for each in seconds if each is not None]
    if not seconds:
        return "–"
    if not known:
        return "unknown"
    return ("more than " if len(known) < len(seconds) else "") + duration(sum(known))
