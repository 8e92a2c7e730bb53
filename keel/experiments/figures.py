"""The figures of a report: accuracy curves, measures of representations, label distributions."""

import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from client_app.setup import client_indices, open_source
from data.plots import plot_label_distribution
from keel.experiments.measure import moving_average, points_of
from keel.experiments.plan import Result
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.runs import Options, Run, history_in, run_of
from protocol.config import resolve_config
from protocol.files import write_atomically
from server_app.diagnostics.plots import plot_panels

Finished = tuple[Run, Path]  # with the run directory that counts


@dataclass(frozen=True)
class Picture:
    """An image file of the report."""

    title: str
    path: Path


def run_pictures(
    recipe: Recipe, results: Mapping[tuple[str, str], Result], output: Path, stem: str
) -> Iterator[Picture]:
    """For each column: the curves of its rows, one split, and the diagnostics of its runs.

    Files are written to `figures/` of the output folder; their names begin with `stem`.
    """
    figures = output / "figures"
    drawn: set[tuple[str, ...]] = set()
    for number, column in enumerate(recipe.columns):
        cells = [cell for cell in recipe.cells if cell.column.name == column.name]
        finished = {c.row.name: results[c.row.name, column.name].finished for c in cells}
        cells = [cell for cell in cells if finished[cell.row.name]]
        names = tuple(run.name for runs in finished.values() for run, _ in runs)
        if not names or names in drawn:  # columns may differ only in how they read the same runs
            continue
        drawn.add(names)
        curves = {cell.row.name: curve_of(cell, finished[cell.row.name]) for cell in cells}
        path = figures / f"{stem}-{number}.svg"
        plot_curves(curves, column.name, path)
        decays = {f", moving average {c.take.number:g}" for c in cells if c.take.how == "ema"}
        yield Picture(f"{column.name}: accuracy over rounds{''.join(sorted(decays))}", path)
        path = figures / f"{stem}-{number}-measures.png"
        if plot_measures(finished, column.name, path):
            what = "mean over clients (lines) and global model (dashes)"
            yield Picture(f"{column.name}: {what}", path)
        for i, cell in enumerate(cells):
            run, directory = finished[cell.row.name][0]
            found = sorted(directory.glob("diagnostics/*.png"))
            if i == 0:
                found = [*directory.glob("labels.png"), *found]  # rows share their split
            for path in found:
                copy = figures / f"{stem}-{run.name}-{path.name}"
                copy.write_bytes(path.read_bytes())
                what = "samples of each class by client" if path.stem == "labels" else path.stem
                yield Picture(f"{cell.row.name}, {column.name}: {what}", copy)


def curve_of(cell: Cell, runs: Sequence[Finished]) -> list[tuple[int, float, float]]:
    """(round, mean, standard deviation) in percent over runs, at rounds that all evaluated.

    Of the moving average if the cell's number is read from it.
    """
    found = []
    for run, directory in runs:
        points = points_of(history_in(directory), cell.of)
        if cell.take.how == "ema":
            shrink = run.rounds / run.paper_rounds
            found.append(dict(moving_average(points, cell.take.number, shrink)))
        else:
            found.append({number: 100 * value for number, value in points})
    curve = []
    for number in sorted(set.intersection(*(set(points) for points in found))):
        values = [points[number] for points in found]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        curve.append((number, statistics.fmean(values), deviation))
    return curve


def plot_curves(
    curves: Mapping[str, Sequence[tuple[int, float, float]]], title: str, path: Path
) -> None:
    """One line a row, with a band of one standard deviation over seeds."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        if not curve:
            continue
        rounds, means, deviations = (np.array(part) for part in zip(*curve, strict=True))
        (line,) = axes.plot(rounds, means, label=name, marker="o" if len(rounds) < 25 else "", ms=3)
        axes.fill_between(
            rounds, means - deviations, means + deviations, color=line.get_color(), alpha=0.15
        )
    axes.set(xlabel="round", ylabel="accuracy (%)", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, fontsize="small")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())


def plot_measures(runs: Mapping[str, Sequence[Finished]], title: str, path: Path) -> bool:
    """One panel a measure of representations, one line a row; False if nothing was measured."""
    measured: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name, each in runs.items():
        lines = [line for _, directory in each for line in history_in(directory)]
        measured[name] = [(x["round"], x["diagnostics"]) for x in lines if "diagnostics" in x]

    def draw(axes: Axes, measure: str) -> None:
        for i, (name, points) in enumerate(measured.items()):
            for kind, style in (("mean", "-"), ("global", "--")):
                by_round: dict[int, list[float]] = {}
                for number, numbers in points:
                    value = numbers.get(measure, {}).get(kind)
                    if value is not None:
                        by_round.setdefault(number, []).append(value)
                rounds = sorted(by_round)
                means = [statistics.fmean(by_round[number]) for number in rounds]
                label = name if kind == "mean" else f"_{name}"  # not in the legend
                axes.plot(rounds, means, style, color=f"C{i}", marker="o", ms=3, label=label)
        axes.set_xlabel("round")

    path.unlink(missing_ok=True)
    everything = [numbers for points in measured.values() for _, numbers in points]
    plot_panels(everything, draw, title, path)
    return path.exists()


def label_pictures(recipe: Recipe, options: Options, output: Path, stem: str) -> Iterator[Picture]:
    """The label distribution over clients of each cell, from the split; nothing is trained."""
    for number, cell in enumerate(recipe.cells):
        run = run_of(cell, {}, options.seeds[0], options, output)
        config = resolve_config(run.keys)
        source = open_source(config)
        counts = [
            np.bincount(
                source.train.labels[client_indices(config, i, run.clients)[0]],
                minlength=source.num_classes,
            ).tolist()
            for i in range(run.clients)
        ]
        path = output / "figures" / f"{stem}-{number}.png"
        plot_label_distribution(counts, source.class_names, path)
        title = f"{cell.row.name}, {cell.column.name}: samples of each class by client"
        yield Picture(title, path)
