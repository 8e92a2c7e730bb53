"""Checks before the first run: what can be known beforehand fails no run hours later."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from client_app.methods import method_of
from client_app.setup import client_indices, model_for, open_source
from keel.experiments.plan import last_round_read
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.runs import Options, Run, run_of
from models import StagedModel
from protocol.config import RunConfig, resolve_config
from protocol.options import ConfigError, OptionValue
from server_app.checks import keys_without_effect
from server_app.roster import check_simulated_roster
from server_app.simulated_roster import SimulatedRoster
from server_app.trackers import check_trackers
from strategies import strategy_for


def check_recipe(
    recipe: Recipe, cells: Sequence[Cell], options: Options, output: Path
) -> list[RunConfig]:
    """Check each run's config, data (read, and downloaded, once), split and model.

    Returns a config for each data set. ValueError naming the recipe's line.
    """
    refuse_overriding(cells, options.changes)
    checked: set[object] = set()
    with_data = []

    def is_new(what: object) -> bool:
        if what in checked:
            return False
        checked.add(what)
        return True

    def check(cell: Cell, runs: Sequence[Run], own_keys: Collection[str]) -> None:
        configs = [resolve_config(run.keys) for run in runs]
        if is_new(runs[0].name):
            check_trackers(configs[0].rounds)
            if lines := keys_without_effect(configs[0], own_keys):
                raise ValueError(lines[0])
        for config in configs:  # a split may be impossible for one seed only
            clients = config.rounds.num_clients
            if is_new((config.data, clients, config.rounds.seed)):
                client_indices(config, 0, clients)
            if is_new((config.data.source, config.data.data_dir)):
                with_data.append(config)
        if recipe.shows != "labels":
            check_reading(cell, runs[0], configs[0])
            if is_new((runs[0].name, "model")):
                model = model_for(configs[0], open_source(configs[0]))
                check_model(configs[0], runs[0].clients, model)

    for cell in cells:
        for candidate in cell.candidates:
            try:
                runs = [run_of(cell, candidate, s, options, output) for s in options.seeds]
                check(cell, runs, {*cell.row.keys, *candidate})
            except (ValueError, OSError) as error:
                key = "source" if isinstance(error, FileNotFoundError) else ""
                key = error.key if isinstance(error, ConfigError) else key
                place = f"{recipe.path}, {recipe.lines_of(cell, key)}"
                if key in options.changes:
                    place = "--set"
                names = f"{cell.row.name}; {cell.column.name}"
                raise ValueError(f"{place} ({names}): {error}") from error
    return with_data


def refuse_overriding(cells: Sequence[Cell], changes: Mapping[str, OptionValue]) -> None:
    """ValueError if a --set would override a key in which cells differ."""
    if not changes:
        return
    configs = [resolve_config(cell.keys).flat for cell in cells]
    for key in sorted(changes):
        tuned = {each[key] for cell in cells for each in cell.candidates if key in each}
        values = tuned | {flat.get(key) for flat in configs}
        if tuned or len(values) > 1:
            named = ", ".join(sorted(map(str, values)))
            raise ValueError(
                f"--set {key}: rows, columns or tuned values of this recipe differ in it ({named}):"
                " select those with one value with --only, and choose another --output if this one "
                "has runs of the others"
            )


def check_model(config: RunConfig, num_clients: int, model: StagedModel) -> None:
    """ValueError if the model lacks representations that the method needs.

    Also if the run would refuse its clients before round 1, as `prepare` does.
    """
    method = method_of(config)
    method.check_model(model)
    strategy = strategy_for(config, model)
    strategy.roster = roster = SimulatedRoster(config, open_source(config), num_clients)
    check_simulated_roster(roster)
    config.rounds.check_cohort(len(strategy.cohort.sample(1)))


def check_reading(cell: Cell, run: Run, config: RunConfig) -> None:
    """ValueError if the cell's number could not be read from this run."""
    if cell.at > run.paper_rounds:
        raise ConfigError(
            "at", f"at = {cell.at}: expected at most {run.paper_rounds}, the last round"
        )
    take, num_rounds = cell.take, cell.at or run.paper_rounds
    if take.how in ("mean", "median") and take.number > num_rounds:
        raise ConfigError(
            "take",
            f"take = '{take.how} {take.number:g}': expected at most {num_rounds}, as the cell is "
            f"read at round {num_rounds}",
        )
    if cell.take.is_time and config.privacy.withholds_metrics:
        raise ConfigError(
            "privacy.metrics",
            "privacy.metrics = 'withheld': clients send no seconds, but this recipe reads them; "
            "'exact' sends them, outside the guarantee",
        )
    if cell.take.how == "seconds a round":
        return
    last, every = last_round_read(cell, run), config.rounds.evaluate_every
    if last % every and last < run.rounds:
        raise ConfigError(
            "at",
            f"at = {cell.at}: corresponds to round {last} of {run.rounds}, which "
            f"evaluate-every = {every} skips: set evaluate-every to a divisor of {last}",
        )
    method = method_of(config)
    evaluates = config.evaluated_clients != "none"
    has_curve = {
        "global.accuracy": method.has_global_model and config.evaluates_global,
        "local_global.mean": method.has_global_model and evaluates,
        "personal.mean": method.is_personal and evaluates,
    }
    if not has_curve[cell.of]:
        recorded = [name for name, is_there in has_curve.items() if is_there]
        found = " and ".join(recorded) or "no accuracy"
        could = method.has_global_model and not config.privacy.withholds_metrics
        if cell.of == "local_global.mean" and could:
            found += "; it needs evaluate-clients = 'all' and a local-test-fraction above 0"
        raise ConfigError(
            "of", f"of = {cell.of!r}: with this config, {config.rounds.method} records {found}"
        )
