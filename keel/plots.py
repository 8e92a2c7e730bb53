"""Accuracy over rounds, of one run or of several."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from keel.saved_runs import SavedRun, setting_of
from protocol.options import typed
from server_app.history import CURVES, curve
from server_app.plots import accuracy_figure, scores_of

MAX_LABEL = 60  # characters; a run with a longer label is shown by its name


def figure_of(runs: Sequence[SavedRun], keys: Sequence[str] = ()) -> Figure:
    """All curves of a single run, or the headline curve of each of several.

    keys: the config keys whose values name the runs.
    """
    if len(runs) > 1:
        curves = (curve(run.history, *run.headline) for run in runs)
        return accuracy_figure(list(zip(labels_of(runs, keys), curves, strict=True)))
    [run] = runs
    pairs = [(text, curve(run.history, key, name)) for key, name, text in CURVES]
    title = f"{run.config['method']}, {run.source}, {run.config['model']}"
    return accuracy_figure(pairs, title, scores=scores_of(run.history))


def labels_of(runs: Sequence[SavedRun], keys: Sequence[str]) -> list[str]:
    """A label for each run: the values that distinguish it if short and unique, else its name."""
    labels = [
        ", ".join(f"{key} {typed(setting[key])}" for key in keys if key in setting)
        for setting in (setting_of(run, with_seed=True) for run in runs)
    ]
    return [
        label if 0 < len(label) <= MAX_LABEL and labels.count(label) == 1 else shown_name(run.name)
        for run, label in zip(runs, labels, strict=True)
    ]


def shown_name(name: str) -> str:
    """A run's name in a legend; of a long one the beginning and the end."""
    half = MAX_LABEL // 2
    return name if len(name) <= MAX_LABEL else f"{name[:half]}…{name[1 - half :]}"
