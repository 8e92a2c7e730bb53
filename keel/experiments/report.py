"""report.html, one file that opens offline, and the same as report.md: the paper's numbers, ours,
what became of the claims, and pictures.
"""

import base64
import html
import io
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t as student

from client_app.setup import client_indices, open_source
from data.plots import plot_label_distribution
from keel.experiments.measure import moving_average, points_of
from keel.experiments.plan import (
    Options,
    Result,
    Run,
    history_in,
    machines_of,
    narrowed,
    read_json,
    result_of,
    run_of,
)
from keel.experiments.recipe import Cell, Claim, Recipe, parse_recipe
from protocol.config import resolve_config
from protocol.files import write_atomically
from server_app.diagnostics.plots import plot_panels
from server_app.history import duration as clock

confidence = 0.95


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a claim."""

    claim: Claim
    word: str
    detail: str


@dataclass(frozen=True)
class Picture:
    """An image file of the report."""

    title: str
    path: Path


@dataclass(frozen=True)
class Section:
    """One recipe at one scale."""

    recipe: Recipe
    options: Options
    results: Mapping[tuple[str, str], Result]
    verdicts: Sequence[Verdict]
    pictures: list[Picture] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Paper, item, title."""
        recipe = self.recipe
        return ": ".join(filter(None, [f"{recipe.paper} {recipe.item}".strip(), recipe.title]))

    @property
    def label(self) -> str:
        """Scale, changes, and which of the values under tune were tried."""
        tuned = [cell for cell in self.recipe.cells if len(cell.candidates) > 1]
        alone = [c for c in tuned if c.paper_candidate and not self.options.full_grid]
        grid = "the paper's best of what is tuned" if alone else "full grid" if tuned else ""
        if alone and len(alone) < len(tuned):
            grid += ", all values where it names none"
        return ", ".join(filter(None, [self.options.label, grid]))

    @property
    def is_scaled(self) -> bool:
        """Not the paper's setting."""
        return self.options.scale != "paper" or bool(self.options.changes)

    def result(self, cell: Cell) -> Result:
        """What came out for this cell."""
        return self.results[cell.row.name, cell.column.name]


def write_report(output: Path) -> list[Path]:
    """Write both reports of all that was run into this output folder; returns their paths."""
    jobs = sorted((output / "jobs").glob("*.json"))
    if not jobs:
        raise ValueError(f"--output {output}: nothing was run there yet")
    (output / "figures").mkdir(exist_ok=True)
    sections = [section_of(path, output) for path in jobs]
    pages = {
        "report.html": html_page(sections),
        "report.md": markdown_page(sections, output),
    }
    for name, text in pages.items():
        write_atomically(output / name, text.encode())
    return [output / name for name in pages]


def section_of(job: Path, output: Path) -> Section:
    """Read a job, and what its runs have left."""
    about = read_json(job)
    try:
        recipe = parse_recipe(about["text"], Path(about["recipe"]))
        if "cells" in about:  # the others may be alike under a --set, which is not theirs
            recipe = narrowed(recipe, about["cells"])
        options = Options(about["scale"], about["changes"], about["seeds"], about["full_grid"])
    except KeyError as error:
        raise ValueError(f"{job} is damaged: it says no {error}") from error
    results = {}
    if recipe.shows != "labels":
        for cell in recipe.cells:
            results[cell.row.name, cell.column.name] = result_of(cell, options, output)
    verdicts = [verdict_of(claim, recipe, results) for claim in recipe.claims]
    section = Section(recipe, options, results, verdicts)
    figures = output / "figures" / job.stem
    section.pictures.extend(
        split_pictures(section, figures, output)
        if recipe.shows == "labels"
        else run_pictures(section, figures, output)
    )
    return section


# --- claims -----------------------------------------------------------------------------------


def verdict_of(claim: Claim, recipe: Recipe, results: Mapping[tuple[str, str], Result]) -> Verdict:
    """Paired over seeds: held or not where a 95 % t interval of the difference leaves out 0.

    The seed that chose a side's candidate among several is left out: there it is the best of many.
    A time that is never reached is longer than any other; times of several machines are not judged.
    """
    is_rows = any(row.name == claim.left for row in recipe.rows)
    left, right = (
        results.get((name, claim.where) if is_rows else (claim.where, name))
        for name in (claim.left, claim.right)
    )
    if left is None or right is None:
        return Verdict(claim, "not run", "")
    seeds = left.by_seed.keys() & right.by_seed.keys()
    if not seeds:
        return Verdict(claim, "not run", "")
    if left.cell.take.is_time and len(machines := {*left.machines, *right.machines}) > 1:
        return Verdict(claim, "not decided", f"different machines: {', '.join(sorted(machines))}")
    tuned_on = seeds & {left.tuned_on, right.tuned_on}
    pairs = [(left.by_seed[seed], right.by_seed[seed]) for seed in seeds - tuned_on]
    said = f"{len(pairs)} seeds" if len(pairs) > 1 else "one seed" if pairs else "no other seed"
    said += "".join(f"; seed {seed} left out, it chose the tuned value" for seed in tuned_on)
    sign = 1 if claim.above else -1
    leads = [sign * (a - b) if a != b else 0.0 for a, b in pairs]  # both may be infinite
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        ours, theirs = (sum(map(math.isfinite, side)) for side in zip(*pairs, strict=True))
        detail = f"{claim.left} gets there with {ours}, {claim.right} with {theirs} of "
    else:
        spread = f" ± {statistics.stdev(leads):.2f}" if len(leads) > 1 else ""
        detail = f"{sign * statistics.fmean(leads):+.2f}{spread}, " if leads else ""
    return Verdict(claim, word_of(leads), detail + said)


def word_of(leads: Sequence[float]) -> str:
    """Whether a lead is there, by one number a seed; infinite ones count where all are alike."""
    if len(leads) < 2:
        return "not decided"
    if any(map(math.isinf, leads)):
        low, high = min(leads), max(leads)
        return "held" if low == math.inf else "not held" if high == -math.inf else "not decided"
    mean, deviation = statistics.fmean(leads), statistics.stdev(leads)
    reach = student.ppf((1 + confidence) / 2, len(leads) - 1) * deviation / math.sqrt(len(leads))
    return "held" if mean > reach else "not held" if mean < -reach else "not decided"


def tally(verdicts: Sequence[Verdict]) -> str:
    """How many claims came out how, and how often chance does that."""
    counts = Counter(verdict.word for verdict in verdicts)
    words = ("held", "not held", "not decided", "not run")
    found = ", ".join(f"{counts[word]} {word}" for word in words if counts[word])
    return f"{found}; where there is no difference, chance decides one judged claim in 20"


# --- pictures ---------------------------------------------------------------------------------


def finished_runs(section: Section, cell: Cell, output: Path) -> Iterator[Run]:
    """The finished runs of the cell's best candidate."""
    candidate = section.result(cell).candidate
    for seed in section.options.seeds if candidate is not None else ():
        assert candidate is not None
        run = run_of(cell, candidate, seed, section.options, output)
        if run.finished():
            yield run


def run_pictures(section: Section, figures: Path, output: Path) -> Iterator[Picture]:
    """For each column the curves of its rows, one split, and the runs' diagnostics."""
    drawn: set[tuple[str, ...]] = set()
    for number, column in enumerate(section.recipe.columns):
        cells = [cell for cell in section.recipe.cells if cell.column is column]
        runs = {cell.row.name: list(finished_runs(section, cell, output)) for cell in cells}
        names = tuple(run.name for each in runs.values() for run in each)
        if not names or names in drawn:  # columns may differ in what is read of the same runs
            continue
        drawn.add(names)
        curves = {c.row.name: curve_of(c, runs[c.row.name]) for c in cells if runs[c.row.name]}
        path = figures.with_name(f"{figures.name}-{number}.svg")
        plot_curves(curves, column.name, path)
        averages = {f", moving average {c.take.number:g}" for c in cells if c.take.how == "ema"}
        words = "".join(sorted(averages))
        yield Picture(f"{column.name}: accuracy over rounds{words}, {section.label}", path)
        path = figures.with_name(f"{figures.name}-{number}-measures.png")
        if plot_measures(runs, column.name, path):
            words = "mean over clients (lines) and global model (dashes)"
            yield Picture(f"{column.name}: {words}, {section.label}", path)
        for number_in_column, cell in enumerate(c for c in cells if runs[c.row.name]):
            run, name = runs[cell.row.name][0], f"{cell.row.name}, {column.name}"
            folder = run.finished()
            assert folder is not None
            own = sorted(folder.glob("diagnostics/*.png"))  # where they were asked for
            if number_in_column == 0:
                own = [*folder.glob("labels.png"), *own]  # the rows share their split
            for path in own:
                copy = figures.with_name(f"{figures.name}-{run.name}-{path.name}")
                copy.write_bytes(path.read_bytes())
                words = "samples of each class by client" if path.stem == "labels" else path.stem
                yield Picture(f"{name}: {words}, {section.label}", copy)


def curve_of(cell: Cell, runs: Sequence[Run]) -> list[tuple[int, float, float]]:
    """(round, mean, standard deviation) in percent over the runs, where all were evaluated.

    Of the moving average, where that is what the cell's number is read from.
    """
    found = []
    for run in runs:
        folder = run.finished()
        assert folder is not None
        points = points_of(history_in(folder), cell.of)
        if cell.take.how == "ema":
            shrunk = run.rounds / run.paper_rounds
            found.append(dict(moving_average(points, cell.take.number, shrunk)))
        else:
            found.append({number: 100 * value for number, value in points})
    rounds = sorted(set.intersection(*(set(points) for points in found)))
    curve = []
    for number in rounds:
        values = [points[number] for points in found]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        curve.append((number, statistics.fmean(values), spread))
    return curve


def plot_measures(runs: Mapping[str, Sequence[Run]], title: str, path: Path) -> bool:
    """Each measure of features over rounds, its rows on one axis; False if none was measured."""
    measured: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name, each in runs.items():
        folders = [folder for run in each if (folder := run.finished())]
        lines = [line for folder in folders for line in history_in(folder)]
        measured[name] = [(x["round"], x["diagnostics"]) for x in lines if "diagnostics" in x]
    everything = [numbers for points in measured.values() for _, numbers in points]

    def draw(axes: Axes, measure: str) -> None:
        for i, (name, points) in enumerate(measured.items()):
            for kind, style in (("mean", "-"), ("global", "--")):
                by_round: dict[int, list[float]] = {}
                for number, numbers in points:  # a seed after the other
                    value = numbers.get(measure, {}).get(kind)
                    if value is not None:
                        by_round.setdefault(number, []).append(value)
                means = [statistics.fmean(by_round[number]) for number in sorted(by_round)]
                label = name if kind == "mean" else f"_{name}"  # of lines alone
                axes.plot(
                    sorted(by_round), means, style, color=f"C{i}", marker="o", ms=3, label=label
                )
        axes.set_xlabel("round")

    path.unlink(missing_ok=True)
    plot_panels(everything, draw, title, path)
    return path.exists()


def plot_curves(
    curves: Mapping[str, Sequence[tuple[int, float, float]]], title: str, path: Path
) -> None:
    """One line a row, with its standard deviation over seeds as a band."""
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


def split_pictures(section: Section, figures: Path, output: Path) -> Iterator[Picture]:
    """How the classes lie over the clients, one picture a cell, from the split itself."""
    for number, cell in enumerate(section.recipe.cells):
        run = run_of(cell, {}, section.options.seeds[0], section.options, output)
        config = resolve_config(run.keys)
        source = open_source(config)
        counts = [
            np.bincount(
                source.train.labels[client_indices(config, i, run.clients)[0]],
                minlength=source.num_classes,
            ).tolist()
            for i in range(run.clients)
        ]
        path = figures.with_name(f"{figures.name}-{number}.png")
        plot_label_distribution(counts, source.class_names, path)
        what = f"{cell.row.name}, {cell.column.name}: samples of each class by client"
        yield Picture(f"{what}, {section.label}", path)


# --- the pages --------------------------------------------------------------------------------


def shown(value: float | None, sign: str = "") -> str:
    """A number with two digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.2f}"


def ours(result: Result) -> str:
    """Mean, standard deviation over seeds, the best of the tuned values, and what is missing."""
    number = "–"
    if result.mean is not None:
        spread = "" if result.deviation is None else f" ± {result.deviation:.2f}"
        tuned = ", ".join(str(value) for value in (result.candidate or {}).values())
        number = f"{result.mean:.2f}{spread}" + (f" ({tuned})" if tuned else "")
    elif result.by_seed:
        number = "not reached"
    missing = []
    if 0 < len(result.reached) < len(result.by_seed):
        missing.append(f"reached by {len(result.reached)} of {len(result.by_seed)} seeds")
    if 0 < len(result.by_seed) < result.seeds:
        missing.append(f"{len(result.by_seed)} of {result.seeds} seeds")
    if 0 < result.tried < result.candidates:
        missing.append(f"{result.tried} of {result.candidates} values tried")
    if result.outdated:
        missing.append(f"a run has other defaults: {result.outdated}")
    return "; ".join([number, *missing])


def difference(result: Result) -> float | None:
    """Ours less the paper's."""
    paper = result.cell.paper
    return None if paper is None or result.mean is None else result.mean - paper


def summary_of(section: Section) -> str:
    """What the numbers are, in one line."""
    takes = sorted({(c.take.how, c.take.number, c.of) for c in section.recipe.cells})
    said = "; ".join(f"{how}{f' {n:g}' if n else ''} of {of}" for how, n, of in takes)
    warning = "Scaled down: not the paper's setting. " if section.is_scaled else ""
    about = f"{warning}{section.label}; seeds {list(section.options.seeds)}; {said}."
    return " ".join([about, *machines_said(section)])


def machines_said(section: Section) -> Iterator[str]:
    """How many of the runs behind the numbers each machine did, and how long their rounds took."""
    results = section.results.values()
    wall: dict[str, list[float]] = {}
    for folder in {folder for result in results for folder in result.folders}:
        wall.setdefault(", then ".join(machines_of(folder)), []).append(wall_seconds(folder))
    for name, each in sorted(wall.items()):
        times = f"{clock(sum(each))} of rounds, the longest {clock(max(each))}"
        yield f"{len(each)} runs on {name}: {times}."
    if len({name for r in results if r.cell.take.is_time for name in r.machines}) > 1:
        yield "The seconds are of different machines: do not compare them."


def wall_seconds(folder: Path) -> float:
    """What all rounds of a run took, by the clock on the wall."""
    return math.fsum(s for line in history_in(folder) for s in line["seconds"].values())


def html_page(sections: Sequence[Section]) -> str:
    """The whole page, with its style, its script and its pictures in it."""
    contents = "".join(
        f'<li><a href="#s{i}">{html.escape(s.title)}</a> ({html.escape(s.label)})</li>'
        for i, s in enumerate(sections)
    )
    body = "".join(html_section(section, f"s{i}") for i, section in enumerate(sections))
    made = time.strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Keel: results</title>'
        f"<style>{style}</style><h1>Results beside the papers'</h1>"
        f"<p>Made {made}. Ours: mean ± standard deviation over seeds, in percent or seconds; in "
        "brackets the value that was best of those tuned. A click on a heading sorts.</p>"
        f"<ul>{contents}</ul>{body}<script>{script}</script></html>\n"
    )


def html_section(section: Section, anchor: str) -> str:
    """One recipe: what it is, its table, its claims, its pictures."""
    scaled = " class=scaled" if section.is_scaled else ""
    parts = [
        f"<section id={anchor}><h2>{html.escape(section.title)}</h2>",
        f"<p{scaled}>{html.escape(summary_of(section))}</p>",
    ]
    if section.recipe.note:
        parts.append(f"<p>{html.escape(section.recipe.note)}</p>")
    figures = [html_figure(picture) for picture in section.pictures]
    if section.recipe.shows == "curves":
        parts += figures
    if section.results:
        parts.append(html_table(section))
    if section.verdicts:
        parts.append("<table class=claims><tr><th>claim<th>verdict<th>difference</tr>")
        for v in section.verdicts:
            kind = v.word.replace(" ", "-")
            parts.append(
                f"<tr><td>{html.escape(v.claim.text)}<td class={kind}>{v.word}"
                f"<td>{html.escape(v.detail)}</tr>"
            )
        parts.append(f"</table><p>{tally(section.verdicts)}</p>")
    if section.recipe.shows != "curves":
        parts += figures
    return "".join(parts) + "</section>"


def html_figure(picture: Picture) -> str:
    """A picture, in the page itself."""
    kind = "svg+xml" if picture.path.suffix == ".svg" else "png"
    data = base64.b64encode(picture.path.read_bytes()).decode()
    title = html.escape(picture.title)
    return (
        f'<figure><img alt="{title}" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{title}</figcaption></figure>"
    )


def html_table(section: Section) -> str:
    """Rows of the recipe; of each column the paper's number, ours, and the difference."""
    columns = section.recipe.columns
    heads = "".join(f"<th colspan=3>{html.escape(column.name)}" for column in columns)
    kinds = ["", *(["paper", "ours", "difference"] * len(columns))]
    sorts = "".join(f"<th><button>{kind or 'row'}</button>" for kind in kinds)
    lines = []
    for row in section.recipe.rows:
        cells = [f"<td data-v='{html.escape(row.name, quote=True)}'>{html.escape(row.name)}"]
        for column in columns:
            result = section.results[row.name, column.name]
            apart = difference(result)
            for value, text in (
                (result.cell.paper, shown(result.cell.paper)),
                (result.mean, ours(result)),
                (apart, shown(apart, "+")),
            ):
                cells.append(f"<td data-v='{'' if value is None else value}'>{html.escape(text)}")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f"<div class=wide><table class=sortable><thead><tr><th>{heads}</tr><tr>{sorts}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def markdown_page(sections: Sequence[Section], output: Path) -> str:
    """The same as text: a cell is `ours (paper's; difference)`."""
    lines = ["# Results beside the papers'", ""]
    for section in sections:
        lines += [f"## {section.title}", "", summary_of(section), ""]
        if section.recipe.note:
            lines += [section.recipe.note, ""]
        figures = [
            f"![{picture.title}]({picture.path.relative_to(output).as_posix()})\n"
            for picture in section.pictures
        ]
        if section.recipe.shows == "curves":
            lines += figures
        if section.results:
            names = [column.name for column in section.recipe.columns]
            lines += [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            for row in section.recipe.rows:
                cells = [markdown_cell(section.results[row.name, name]) for name in names]
                lines.append(f"| {row.name} | {' | '.join(cells)} |")
            lines.append("")
        if section.verdicts:
            lines += ["| claim | verdict | difference |", "|---|---|---|"]
            lines += [f"| {v.claim.text} | {v.word} | {v.detail} |" for v in section.verdicts]
            lines += ["", tally(section.verdicts), ""]
        if section.recipe.shows != "curves":
            lines += figures
    return "\n".join(lines)


def markdown_cell(result: Result) -> str:
    """`ours (paper's; difference)`, less what there is not."""
    apart = difference(result)
    paper = [] if result.cell.paper is None else [f"paper {shown(result.cell.paper)}"]
    paper += [] if apart is None else [shown(apart, "+")]
    return ours(result) + (f" [{'; '.join(paper)}]" if paper else "")


style = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border: 1px solid #ccc; padding: .2em .6em; text-align: right; white-space: nowrap; }
td:first-child { text-align: left; }
th { background: #f4f4f4; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
.wide { overflow-x: auto; } .scaled { color: #8a5a00; }
.held { color: #06752d; } .not-held { color: #b00020; } .not-decided, .not-run { color: #666; }
figure { display: inline-block; margin: .5em; max-width: 46%; vertical-align: top; }
img { max-width: 100%; } figcaption { font-size: .85em; color: #555; }
"""

script = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = table.tHead.rows[table.tHead.rows.length - 1].cells;
  [...heads].forEach((head, i) => head.querySelector("button").addEventListener("click", () => {
    const falling = head.getAttribute("aria-sort") !== "descending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = row => row.cells[i].dataset.v;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return falling ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""
