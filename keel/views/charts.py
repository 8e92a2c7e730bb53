"""Charts as Plotly figures, plain JSON, for the live pages and the report; drawn by charts.js.

Colours, markers and dashes distinguish curves for the colour-blind and in print. Text comes from
run directories: everything that is shown passes `in_one_line`, which leaves no markup.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly
import plotly.graph_objects as go

from protocol.text import in_one_line

Figure = dict[str, Any]

# Okabe and Ito's palette, legible on white and on dark grey, without its yellow and black
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MAX_POINTS = 600  # of a curve
MAX_BARS = 250  # of a chart: each is an element of the page
MAX_MARKED = 20  # of a curve's points have a marker
MAX_LABEL = 24  # characters of a client's name beside an axis
MAX_LONG_REFERENCES = 4  # of a chart: more are drawn near their round only
MAX_WHOLE_LEGEND = 8  # curves: the legend of more scrolls
BAND_ALPHA = 0.15
SCALE = "Cividis"  # perceptually uniform, the same for the colour-blind


@dataclass(frozen=True)
class Curve:
    """A named line. spread: half the height of the band around it; None where there is no band.

    note: of each point, on hover.
    references: (x, value) of a paper, drawn as dotted lines up to x.
    place: selects colour, marker and dash, from 0; None: its place among the chart's curves.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float | None] | None = None
    note: Sequence[str] | None = None
    references: Sequence[tuple[float, float]] = ()
    place: int | None = None


def static_file(name: str) -> Path:
    """A stylesheet or script of Keel's, or Plotly's own script from its package."""
    if name == "plotly.js":
        return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return Path(__file__).parent / "static" / name


def figure_of(traces: Iterable[Any], x: str, y: str, **layout: Any) -> Figure:
    """The traces with axis titles; ValueError for what Plotly does not know."""
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="none",
        showlegend=True,  # a curve alone has a name too
        margin={"l": 56, "r": 12, "t": 12, "b": 44},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "tracegroupgap": 0},
        hovermode="x unified",
        hoverdistance=-1,  # the nearest round, however far the mouse is from its point
    )
    axis = {"automargin": True, "title_standoff": 8}
    figure.update_xaxes(title_text=x, **axis)
    figure.update_yaxes(title_text=y, exponentformat="power", **axis)
    figure.update_layout(**layout)
    found: Figure = figure.to_dict()
    del found["layout"]["template"]  # charts.js has the page's colours
    return found


def kept_points(y: Sequence[float], max_points: int = MAX_POINTS) -> list[int]:
    """Indices of at most about `max_points` points that keep a curve's shape.

    The first, the last, and of each of `max_points` / 2 equal parts the lowest and the highest.
    """
    if len(y) <= max_points:
        return list(range(len(y)))
    kept = {0, len(y) - 1}
    num_parts = max_points // 2
    for part in range(num_parts):
        start, end = part * len(y) // num_parts, (part + 1) * len(y) // num_parts
        kept.add(min(range(start, end), key=y.__getitem__))
        kept.add(max(range(start, end), key=y.__getitem__))
    return sorted(kept)


def curves(
    found: Iterable[Curve],
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    max_points: int = MAX_POINTS,
) -> Figure:
    """Lines with bands, each with its colour, marker and dash; the y-range fits the data."""
    # places count curves without points, so that no colour changes when these get some
    placed = enumerate(found)
    shown = [(c, i if c.place is None else c.place) for i, c in placed if len(c.x)]
    are_few = sum(len(curve.references) for curve, _ in shown) <= MAX_LONG_REFERENCES
    traces = [
        trace
        for number, (curve, place) in enumerate(shown)
        for trace in traces_of(curve, place, f"curve {number}", max_points, are_few)
    ]
    figure = figure_of(traces, x, y)
    xaxis, yaxis, legend = (figure["layout"][key] for key in ("xaxis", "yaxis", "legend"))
    if x == "round":
        longest = max((max(c.x) - min(c.x) for c, _ in shown), default=0)
        xaxis |= {"tickformat": "d", "rangemode": "normal"}
        xaxis |= {"dtick": 1} if 0 < longest < 8 else {}
    xaxis |= {"type": "log"} if log_x else {}
    yaxis |= {"type": "log"} if log_y else {}
    legend |= {"maxheight": 0.25} if len(shown) > MAX_WHOLE_LEGEND else {}
    return figure


def traces_of(
    curve: Curve, place: int, group: str, max_points: int, has_long_references: bool
) -> list[Any]:
    """A curve's band, its references, and its line last."""
    kept = kept_points(curve.y, max_points)
    xs, ys = ([rounded(part[i]) for i in kept] for part in (curve.x, curve.y))
    colour, dash = PALETTE[place % len(PALETTE)], DASHES[place // len(PALETTE) % len(DASHES)]
    silent = {"hoverinfo": "skip", "showlegend": False, "legendgroup": group, "mode": "lines"}
    traces = []
    if curve.spread:
        inside = [(i, s) for i in kept if (s := curve.spread[i]) is not None]
        around = [rounded(curve.x[i]) for i, _ in inside]
        edges = [rounded(curve.y[i] + s) for i, s in inside]
        edges += [rounded(curve.y[i] - s) for i, s in reversed(inside)]
        rgb = ", ".join(map(str, bytes.fromhex(colour[1:])))
        fill = {"fill": "toself", "fillcolor": f"rgba({rgb}, {BAND_ALPHA})", "line_width": 0}
        traces.append(go.Scatter(x=around + around[::-1], y=edges, **fill, **silent))
    for end, value in curve.references:
        start = xs[0] if has_long_references else max(xs[0], end - (xs[-1] - xs[0]) / 8)
        ends = {"x": [rounded(start), rounded(end)], "y": [rounded(value)] * 2}
        traces.append(go.Scatter(**ends, line={"color": colour, "dash": "dot"}, **silent))
    line = go.Scatter(
        x=xs,
        y=ys,
        name=in_one_line(curve.name, 120),
        legendgroup=group,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 2},
        marker={
            "symbol": MARKERS[place % len(MARKERS)],
            "size": 6,
            "color": colour,
            "maxdisplayed": MAX_MARKED,
        },
        hovertemplate="%{y:.4~g}%{customdata}",
        customdata=[f" {curve.note[i]}" for i in kept] if curve.note else [""] * len(xs),
    )
    return [*traces, line]


def stacked(parts: pd.DataFrame, y: str) -> Figure:
    """Stacked bars by round, a colour for each column; columns that are 0 throughout have none."""
    size = -(-len(parts) // MAX_BARS) or 1  # rounds that share a bar
    sums = parts.fillna(0).groupby(pd.RangeIndex(len(parts)) // size).sum()
    traces = [
        go.Bar(
            x=list(parts.index[::size]),
            y=[rounded(value) for value in sums.iloc[:, place]],
            name=in_one_line(name, 80),
            marker={"color": PALETTE[place % len(PALETTE)], "line": {"width": 0}},
        )
        for place, name in enumerate(parts)
        if sums.iloc[:, place].any()
    ]
    title = f"{y} in {size} rounds" if size > 1 else y
    are_few = sums.sum(axis="columns").max() <= 5 and y == "clients"  # there are no half clients
    figure = figure_of(traces, "round", title, barmode="stack", bargap=0.05)
    figure["layout"]["yaxis"] |= {"dtick": 1} if are_few else {}
    return figure


def heat_map(table: pd.DataFrame, x: str, y: str, colours: str, **layout: Any) -> Figure:
    """Colours of a table of numbers, its first row at the top; what is missing has no colour."""
    names, columns = ([in_one_line(name, 64) for name in labels] for labels in table.axes)
    trace = go.Heatmap(
        z=[[None if pd.isna(v) else rounded(v) for v in row] for row in table.to_numpy()],
        x=columns,
        y=names,
        colorscale=SCALE,
        colorbar={"title": {"text": colours, "side": "right"}, "thickness": 12},
        hovertemplate=f"%{{y}}, %{{x}}: %{{z:.4~g}} {colours}<extra></extra>",
    )
    figure = figure_of([trace], x, y, hovermode="closest", **layout)
    labels = {"xaxis": columns, "yaxis": names}
    for axis, texts in labels.items():
        figure["layout"][axis] |= {"type": "category", "labelalias": short_labels(texts)}
    figure["layout"]["xaxis"]["nticks"] = 12
    figure["layout"]["yaxis"]["autorange"] = "reversed"
    return figure


def short_labels(names: Iterable[str]) -> dict[str, str]:
    """An axis's `labelalias` that shows the beginning and the end of long names."""
    half = MAX_LABEL // 2
    return {n: f"{n[:half]}…{n[1 - half :]}" for n in names if len(n) > MAX_LABEL}


def histogram(values: Iterable[float], x: str, y: str) -> Figure:
    """How many values fall into each bin."""
    bins = go.Histogram(
        x=[rounded(value) for value in values],
        nbinsx=20,
        marker={"color": PALETTE[0], "line": {"width": 0}},
        hovertemplate="%{x}: %{y}<extra></extra>",
    )
    return figure_of([bins], x, y, hovermode="closest", showlegend=False)


def rounded(value: float) -> float:
    """Six significant digits: more only makes a page larger."""
    return float(f"{value:.6g}")
