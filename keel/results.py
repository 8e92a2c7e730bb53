"""Results of several runs in Python: a table of runs, a sweep's tables, and curves with a band.

runs = keel.runs(method=["fedavg", "fedcka"])
keel.compare(runs, by="method", of="personal.mean").savefig("fig.pdf")
keel.load_sweep("sweep").table()
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.cli.list_runs import row_of
from keel.curve_names import CURVES, check_curve_name
from keel.saved_runs import (
    DATA_DIGEST,
    NOT_A_SETTING,
    SITE_COUNTS,
    SavedRun,
    all_runs,
    differing_keys,
    find_run,
    setting_of,
    uses,
)
from protocol.config import default_config, refuse_unknown
from protocol.options import typed
from protocol.text import shortened
from server_app.history import CURVES as ACCURACIES
from server_app.history import curve, results_of, score_curves

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from server_app.plots import Band

log = logging.getLogger("keel.results")

BANDS = ("std", "range", "none")


def runs(folder: str | Path = "", **keys: Any) -> "pd.DataFrame":
    """A row for each run in a folder ("": $KEEL_HOME/runs, or a sweep's), the last changed first.

    keys: config keys, with underscores for hyphens, that a run has to have: a value, or a list of
    values. Columns: name, directory, method, source, model, state, rounds, seed, the last value of
    each curve, such as `personal.mean` and `global.macro-f1`, and the config keys and the
    digests of data and own code that differ.
    """
    import pandas as pd

    if folder and not Path(folder).expanduser().is_dir():
        raise ValueError(f"{folder}: no such folder")
    wanted: dict[str, list[Any]] = {}
    for name, value in keys.items():
        key = name if name in default_config() else name.replace("_", "-")
        refuse_unknown("config key", key, list(default_config()))
        wanted[key] = list(value) if isinstance(value, list | tuple | set | range) else [value]
    found = [run for run in all_runs(Path(folder).expanduser() if folder else None)]
    found = [
        run
        for run in found
        if not run.fault and all(run.config.get(key) in values for key, values in wanted.items())
    ]
    settings = [setting_of(run) for run in found]
    shown = {"run", "directory", "method", "source", "model", "state", "rounds"}
    differing = differing_keys(settings, NOT_A_SETTING | shown | {"num-rounds"})
    rows = []
    for run, setting in zip(found, settings, strict=True):
        row = {key: value for key, value in row_of(run).items() if key in shown}
        row |= {"seed": run.config["seed"], **last_values(run)}
        row |= {key: setting[key] for key in differing if key in setting}
        rows.append(row)
    return pd.DataFrame(rows)


def last_values(run: SavedRun) -> dict[str, float]:
    """The last value of each curve that was measured: accuracies in [0, 1], and scores."""
    curves = [*ACCURACIES, *score_curves(run.history)]
    return {name: found["final"] for name, found in results_of(run.history, curves, 1).items()}


def saved(found: Any) -> list[SavedRun]:
    """The runs in a table of `runs`, or in a list of Runs, paths or names."""
    each: Iterable[Any] = found["directory"] if hasattr(found, "columns") else found
    if isinstance(each, str | Path) or hasattr(each, "directory"):
        each = [each]
    result = [find_run(getattr(run, "directory", run)) for run in each]
    if not result:
        raise ValueError("runs: expected at least one run")
    return result


def bands(found: Sequence[SavedRun], by: Sequence[str], of: str, band: str) -> "Iterator[Band]":
    """The curve `of` of each group of runs with equal values of the keys `by` and one data set."""
    import pandas as pd

    from server_app.plots import Band

    key, _, name = of.partition(".")
    groups: dict[str, list[SavedRun]] = {}
    for run in found:
        groups.setdefault(label_of(run, by), []).append(run)
    for label, group in [each for item in groups.items() for each in by_data(*item)]:
        parts = {str(run.directory): dict(curve(run.history, key, name)) for run in group}
        table = pd.DataFrame({k: pd.Series(v) for k, v in parts.items() if v}).sort_index()
        if not len(table):
            continue
        mean, low, high = table.mean(axis=1), table.min(axis=1), table.max(axis=1)
        if band != "range":
            spread = table.std(axis=1).fillna(0) if band == "std" else 0
            low, high = mean - spread, mean + spread
        yield Band(label, list(table.index), list(mean), list(low), list(high))


def label_of(run: SavedRun, by: Sequence[str]) -> str:
    """The values of the keys that the run uses, such as `fedprox, fedprox.mu=0.1`."""
    values = {key: typed(run.config[key]) for key in by if uses(run.config, key)}
    return ", ".join(v if key == "method" else f"{key}={v}" for key, v in values.items())


def by_data(label: str, group: Sequence[SavedRun]) -> list[tuple[str, list[SavedRun]]]:
    """The group, or its runs on each of several data sets, with the digest in the label."""
    parts: dict[str, list[SavedRun]] = {}
    for run in group:
        setting = setting_of(run)
        digests = [str(setting[k]) for k in (DATA_DIGEST, SITE_COUNTS) if setting.get(k)]
        parts.setdefault(" ".join(digests), []).append(run)
    return [(f"{label}, data {k}" if len(parts) > 1 else label, runs) for k, runs in parts.items()]


def compare(
    runs: Any,
    by: str | Sequence[str] = "method",
    of: str | Sequence[str] = "",
    band: str = "std",
) -> "Figure":
    """Curves of runs as a matplotlib figure: the mean of each group, with a band.

    Parameters
    ----------
    runs
        A table of `keel.runs`, or a list of Runs, paths or names.
    by
        The config keys whose values make a group, whose runs, such as other seeds, are averaged.
        Runs on different data are groups of their own.
    of
        The curves: `global.accuracy`, `local_global.mean`, `personal.mean`, or a score such as
        `personal.macro-f1`. Each kind of score has its own axis. Default: the runs' accuracy.
        Runs that have not measured a curve are not drawn; a warning in the log names them.
    band
        "std": one standard deviation over the runs; "range": lowest to highest; "none".
    """
    from server_app.plots import band_figure  # imports matplotlib

    found, keys = saved(runs), [by] if isinstance(by, str) else list(by)
    for key in keys:
        known = {key for run in found for key in run.config}
        refuse_unknown("by", key, sorted(known))
    refuse_unknown("band", band, list(BANDS))
    chosen: dict[str, list[SavedRun]] = {}
    if of:
        chosen = dict.fromkeys([of] if isinstance(of, str) else of, found)
    else:
        for run in found:
            chosen.setdefault(".".join(run.headline), []).append(run)
    panels: dict[str, list[Band]] = {}
    for each, measured in chosen.items():
        try:
            check_curve_name(each)
        except ValueError as error:
            raise ValueError(f"of = {each!r}: {error}") from error
        kind = "accuracy" if each in CURVES else each.partition(".")[2]
        lines = list(bands(measured, keys, each, band))
        if not lines and of:
            raise ValueError(f"of = {each!r}: none of the runs has measured it")
        key, _, name = each.partition(".")
        if missing := [run.name for run in measured if not curve(run.history, key, name)]:
            log.warning("not drawn, as %s was not measured: %s", each, shortened(missing))
        shown = f", {each}" if len(chosen) > 1 else ""
        panels.setdefault(kind, []).extend(
            replace(line, label=line.label + shown) for line in lines
        )
    return band_figure(panels)


@dataclass(frozen=True)
class Sweep:
    """The tables of an output folder of `keel experiments run`, by the name of their recipe."""

    folder: Path
    sections: Mapping[str, Any]

    def frame(self) -> "pd.DataFrame":
        """A row for each run: recipe, row, column, seed, the number that is read, its directory."""
        import pandas as pd

        return pd.DataFrame(
            {
                "recipe": name,
                "row": row,
                "column": column,
                "seed": run.seed,
                "of": result.cell.of,
                "value": result.by_seed.get(run.seed),
                "status": run.status or "not run",
                "directory": str(run.directory),
            }
            for name, results in self.sections.items()
            for (row, column), result in results.items()
            for run in result.runs
        )

    def table(self, recipe: str = "") -> "pd.DataFrame":
        """Mean ± standard deviation over seeds: the recipe's rows and columns.

        recipe: its name, where the folder has several. ValueError for an unknown one.
        """
        import pandas as pd

        name = recipe or next(iter(self.sections))
        refuse_unknown("recipe", name, list(self.sections))
        results = self.sections[name]
        rows, columns = (list(dict.fromkeys(pair[i] for pair in results)) for i in (0, 1))
        cells = [
            [str(results[row, column]) if (row, column) in results else "" for column in columns]
            for row in rows
        ]
        return pd.DataFrame(cells, index=rows, columns=columns)


def load_sweep(folder: str | Path) -> Sweep:
    """What `keel experiments run --output FOLDER` has left. ValueError if nothing was run there."""
    from keel.experiments.jobs import folder_of, load_job
    from keel.experiments.results import results_of as results_of_recipe

    output = Path(folder).expanduser().absolute()
    jobs = [load_job(path) for path in sorted((output / "jobs").glob("*.json"))]
    found = {
        recipe.name: results_of_recipe(recipe, options, folder_of(recipe, options, output))
        for recipe, options in jobs
        if recipe.shows != "labels"
    }
    if not found:
        raise ValueError(f"{output}: nothing was run there yet; `keel experiments run` does")
    return Sweep(output, found)
