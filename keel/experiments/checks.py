"""Checks before the first run: what can be known beforehand fails no run hours later."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from client_app.methods import method_of
from client_app.setup import client_indices, model_for, open_source
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.runs import Options, Run, last_round_read, paper_round_read, run_of
from models import StagedModel
from protocol.config import RunConfig, resolve_config
from protocol.options import ConfigError, OptionValue
from server_app.checks import keys_without_effect
from server_app.roster import check_simulated_roster
from server_app.simulated_roster import SimulatedRoster
from server_app.trackers import check_trackers
from strategies import strategy_for


def check_recipe(
    recipe: Recipe, cells: Sequence[Cell], options: Options, folder: Path
) -> list[RunConfig]:
    """Check each run's config, data (read, and downloaded, once), partition and model.

    Returns a config for each data set. ValueError naming the recipe's line.
    """
    refuse_overriding(cells, options.changes)
    checks = Checks(recipe.shows == "labels")
    for cell in cells:
        for candidate in cell.candidates:
            try:
                runs = [run_of(cell, candidate, seed, options, folder) for seed in options.seeds]
                checks.check(cell, candidate, runs)
            except (ValueError, OSError) as error:
                key = "source" if isinstance(error, FileNotFoundError) else ""
                key = error.key if isinstance(error, ConfigError) else key
                place = f"{recipe.path}, {recipe.lines_of(cell, key)}"
                if key in options.changes:
                    place = "--set"
                raise ValueError(f"{place} ({'; '.join(cell.name)}): {error}") from error
    return list(checks.with_data.values())


class Checks:
    """The checks of the runs of each cell; what several share is checked once."""

    def __init__(self, is_only_labels: bool) -> None:
        self.is_only_labels = is_only_labels
        self.with_data: dict[tuple[str, str], RunConfig] = {}
        self._checked: set[object] = set()

    def _is_new(self, *what: object) -> bool:
        is_new = what not in self._checked
        self._checked.add(what)
        return is_new

    def check(self, cell: Cell, candidate: Mapping[str, OptionValue], runs: Sequence[Run]) -> None:
        """Check the runs of one cell and candidate, one a seed."""
        first, own_keys = runs[0].config, frozenset([*cell.row.keys, *candidate])
        if self._is_new(runs[0].name, own_keys):
            check_trackers(first.rounds)
            if lines := keys_without_effect(first, own_keys):
                raise ValueError(lines[0])
        for config in (run.config for run in runs):  # a split may be impossible for one seed only
            clients = config.rounds.num_clients
            if self._is_new(config.data, clients, config.rounds.seed):
                client_indices(config, 0, clients)
            self.with_data.setdefault((config.data.source, config.data.data_dir), config)
        if not self.is_only_labels:
            check_reading(cell, runs[0], first)
            if self._is_new(runs[0].name):
                check_model(first, model_for(first, open_source(first)))


def refuse_overriding(cells: Sequence[Cell], changes: Mapping[str, OptionValue]) -> None:
    """ValueError if a --set would override a key in which cells differ."""
    configs = [resolve_config(cell.keys).flat for cell in cells] if changes else []
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


def check_model(config: RunConfig, model: StagedModel) -> None:
    """ValueError if the model lacks representations that the method needs.

    Also if the run would refuse its clients before round 1.
    """
    method_of(config).check_model(model)
    strategy = strategy_for(config, model)
    roster = SimulatedRoster(config, open_source(config), config.rounds.num_clients)
    strategy.roster = roster
    check_simulated_roster(roster)
    config.rounds.check_cohort(len(strategy.cohort.sample(1)))


def check_reading(cell: Cell, run: Run, config: RunConfig) -> None:
    """ValueError if the cell's number could not be read from this run."""
    take, num_rounds = cell.take, paper_round_read(cell, run)
    if take.how in ("mean", "median") and take.number > num_rounds:
        raise ConfigError(
            "take", f"take = '{take.how} {take.number:g}': expected at most {num_rounds} rounds"
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
    check_curve(cell, config)


def check_curve(cell: Cell, config: RunConfig) -> None:
    """ConfigError if the run does not record the accuracy or score that the cell reads."""
    method = method_of(config)
    evaluates = config.evaluated_clients != "none"
    has_curve = {
        "global.accuracy": method.has_global_model and config.evaluates_global,
        "local_global.mean": method.has_global_model and evaluates,
        "personal.mean": method.is_personal and evaluates,
    }
    kinds = {curve.partition(".")[0] for curve, is_there in has_curve.items() if is_there}
    kind, _, name = cell.of.partition(".")
    if has_curve.get(cell.of) or (kind in kinds and name in config.scores):
        return
    found = " and ".join(curve for curve, is_there in has_curve.items() if is_there)
    hint = ""
    if kind == "local_global" and method.has_global_model:
        hint = "; it needs evaluate-clients = 'all' and a local-test-fraction above 0"
    raise ConfigError(
        "of",
        f"of = {cell.of!r}: with this config, {config.rounds.method} records "
        f"{found or 'no accuracy'}{hint}",
    )
