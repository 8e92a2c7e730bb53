"""The figures of a report: accuracy curves, measures of representations, label distributions."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.plots import plot_label_distribution
from keel.experiments.measure import moving_average
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.recipe_file import Entry
from keel.experiments.results import Result, Results
from keel.experiments.runs import (
    Options,
    Run,
    history_in,
    last_round_read,
    reads_elsewhere,
    run_of,
)
from keel.views.charts import PALETTE, Curve, Figure, curves

MAX_POINTS = 240  # of a curve: a report may have hundreds
GLOBAL_MODEL = 3 * len(PALETTE)  # added to a place: the same colour, another dash
Picture = tuple[str, Path]  # of the report: title, image file
Chart = tuple[str, Figure]  # likewise, a Plotly figure


def run_charts(recipe: Recipe, results: Results) -> Iterator[Chart]:
    """For each column: the curves of its rows, and measures of representations of its runs.

    Columns of the same runs, such as those of several rounds, share their charts.
    """
    places = {row.name: place for place, row in enumerate(recipe.rows)}  # of their colours
    for columns in columns_by_runs(recipe, results):
        found = [r for (_, name), r in results.items() if name == columns[0].name]
        found = [result for result in found if result.finished and not result.incomparable]
        parts = [set(column.parts) for column in columns]
        title = ", ".join(p for p in columns[0].parts if all(p in other for other in parts))
        title = title or " and ".join(column.name for column in columns)
        decays = {r.cell.take.number for r in found if r.cell.take.how == "ema"}
        average = "".join(f", moving average {decay:g}" for decay in sorted(decays))
        lines = [
            report_curve(
                result,
                [results.get((result.cell.row.name, column.name)) for column in columns],
                places[result.cell.row.name],
            )
            for result in found
        ]
        figure = curves(lines, "round", "accuracy (%)", max_points=MAX_POINTS)
        yield f"{title}: accuracy over rounds{average}", figure
        for measure, figure in measure_figures(found, places):
            yield f"{title}: {measure}, mean over clients and of the global model", figure


def columns_by_runs(recipe: Recipe, results: Results) -> list[list[Entry]]:
    """The columns that have finished runs; those of the same runs and curves are one group."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for column in recipe.columns:
        found = [r for (_, name), r in results.items() if name == column.name]
        if names := tuple((run.name, r.cell.of) for r in found for run in r.finished):
            groups.setdefault(names, []).append(column)
    return list(groups.values())


def report_curve(result: Result, same_runs: Sequence[Result | None], place: int) -> Curve:
    """A row's mean over seeds with ± one deviation, and the paper's numbers at their rounds."""
    points = curve_of(result.cell, result.counted_runs)
    num = len(result.counted_runs)
    papers: dict[tuple[int, float], None] = {}  # (round, value), each once
    for each in same_runs:
        if not each or not each.finished:
            continue
        cell, run = each.cell, each.finished[0]
        is_on_curve = cell.of == result.cell.of and not cell.take.is_time
        if is_on_curve and cell.paper is not None and not reads_elsewhere(cell, run):
            papers[last_round_read(cell, run), cell.paper] = None
    return Curve(
        result.cell.row.name,
        [n for n, _, _ in points],
        [mean for _, mean, _ in points],
        spread=[deviation for _, _, deviation in points] if num > 1 else None,
        note=[f"± {deviation:.2f} ({num} seeds)" for *_, deviation in points] if num > 1 else None,
        references=list(papers),
        place=place,
    )


def curve_of(cell: Cell, runs: Sequence[Run]) -> list[tuple[int, float, float]]:
    """(round, mean, standard deviation) in percent over runs, at rounds that all evaluated.

    Of the moving average if the cell's number is read from it.
    """
    found = []
    for run in runs:
        points = history_in(run.directory).points(cell.of)
        if cell.take.how == "ema":
            found.append(dict(moving_average(points, cell.take.number)))
        else:
            found.append({number: 100 * value for number, value in points})
    curve = []
    for number in sorted(set.intersection(*(set(points) for points in found))):
        values = [points[number] for points in found]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        curve.append((number, statistics.fmean(values), deviation))
    return curve


def measure_figures(
    results: Sequence[Result], places: dict[str, int]
) -> Iterator[tuple[str, Figure]]:
    """(measure, chart) of each measure of representations that was taken."""
    measured = {
        result.cell.row.name: [
            each for run in result.counted_runs for each in history_in(run.directory).diagnostics
        ]
        for result in results
    }
    everything = [numbers for points in measured.values() for _, numbers in points]
    for measure in dict.fromkeys(name for numbers in everything for name in numbers):
        lines = []
        for name, points in measured.items():
            for kind, whose in (("mean", ""), ("global", ", global model")):
                by_round: dict[int, list[float]] = {}
                for number, numbers in points:
                    value = numbers.get(measure, {}).get(kind)
                    if value is not None:
                        by_round.setdefault(number, []).append(value)
                means = [statistics.fmean(by_round[number]) for number in sorted(by_round)]
                place = places[name] + (GLOBAL_MODEL if whose else 0)
                lines.append(Curve(f"{name}{whose}", sorted(by_round), means, place=place))
        yield measure, curves(lines, "round", measure, max_points=MAX_POINTS)


def run_pictures(recipe: Recipe, results: Results, output: Path, stem: str) -> Iterator[Picture]:
    """The label distribution of each column, and the pictures of its runs' diagnostics.

    Files are copied to `figures/` of the output folder; their names begin with `stem`.
    """
    for columns in columns_by_runs(recipe, results):
        is_first = True
        for row in recipe.rows:
            result = results.get((row.name, columns[0].name))
            for run in result.finished[:1] if result else ():
                found = sorted(run.directory.glob("diagnostics/*.png"))
                if is_first:
                    found = [*run.directory.glob("labels.png"), *found]  # rows share their split
                is_first = False
                for path in found:
                    copy = output / "figures" / f"{stem}-{run.name}-{path.name}"
                    copy.write_bytes(path.read_bytes())
                    what = "samples of each class by client" if path.stem == "labels" else path.stem
                    yield f"{row.name}, {columns[0].name}: {what}", copy


def label_pictures(recipe: Recipe, options: Options, output: Path, stem: str) -> Iterator[Picture]:
    """The label distribution over clients of each cell, from the split; nothing is trained."""
    from client_app.setup import client_indices, open_source  # torch takes half of the memory

    for number, cell in enumerate(recipe.cells):
        config = run_of(cell, {}, options.seeds[0], options, output).config
        source, num_clients = open_source(config), config.rounds.num_clients
        counts = [
            np.bincount(
                source.train.labels[client_indices(config, client, num_clients)[0]],
                minlength=source.num_classes,
            ).tolist()
            for client in range(num_clients)
        ]
        path = output / "figures" / f"{stem}-{number}.png"
        plot_label_distribution(counts, source.class_names, path)
        yield f"{cell.row.name}, {cell.column.name}: samples of each class by client", path
