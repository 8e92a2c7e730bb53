"""Accuracy over rounds, of one run or of several."""

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keel.runs import SavedRun
from server_app.history import CURVES, curve

MAX_LABEL = 60  # characters; a run whose label would be longer is shown by its name
MAX_MARKED = 40  # points with a marker each


def accuracy_figure(runs: Sequence[SavedRun], keys: Sequence[str] = ()) -> Figure:
    """All curves of a single run, or the headline curve of each of several.

    keys: the config keys whose values name the runs.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if len(runs) == 1:
        lines = [(text, curve(runs[0].history, key, name)) for key, name, text in CURVES]
        axes.set_title(f"{runs[0].config['method']}, {runs[0].source}, {runs[0].config['model']}")
    else:
        lines = [(label_of(run, keys), curve(run.history, *run.headline)) for run in runs]
    for label, points in lines:
        if points:
            rounds, values = zip(*points, strict=True)
            percents = [100 * value for value in values]
            marker = "o" if len(points) < MAX_MARKED else None
            axes.plot(rounds, percents, label=label, marker=marker, ms=3)
    axes.set(xlabel="round", ylabel="accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    return figure


def label_of(run: SavedRun, keys: Sequence[str]) -> str:
    """What distinguishes the run from the others, if that is short, else its name."""
    label = ", ".join(f"{key} {run.config.get(key)}" for key in keys)
    return label if 0 < len(label) <= MAX_LABEL else run.name
