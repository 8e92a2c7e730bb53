"""Accuracy over rounds, drawn alike in run directories and by `keel compare`; needs no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MAX_MARKED = 40  # points with a marker each


def accuracy_figure(
    curves: Iterable[tuple[str, Sequence[tuple[int, float]]]], title: str = ""
) -> Figure:
    """One line for each curve: its label, and (round, accuracy in [0, 1]) of evaluated rounds."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, points in curves:
        if points:
            rounds, values = zip(*points, strict=True)
            percents = [100 * value for value in values]
            marker = "o" if len(points) < MAX_MARKED else None
            axes.plot(rounds, percents, label=label, marker=marker, ms=3)
    axes.set(xlabel="round", ylabel="accuracy (%)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=150)
    part.replace(path)
