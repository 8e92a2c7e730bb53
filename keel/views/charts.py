"""Charts as Plotly figures, plain JSON, for the live pages and the report; drawn by charts.js.

Colours, markers and dashes distinguish curves for the colour-blind and in print. Text comes from
run directories: everything that is shown passes `text_of`, which leaves no markup.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.views.store import text_of
from protocol.files import digest

Figure = dict[str, Any]

# Okabe and Ito's palette, legible on white and on dark grey, without its yellow and black
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MAX_POINTS = 600  # of a curve
MAX_BARS = 250  # of a chart: each is an element of the page
MAX_MARKED = 20  # of a curve's points have a marker
MAX_NAME = 64  # characters of a client's name: rows and columns of a chart are told apart by it
MAX_LABEL = 24  # characters of a client's name beside an axis
MAX_LONG_REFERENCES = 4  # of a chart: more are drawn near their round only
MAX_WHOLE_LEGEND = 8  # curves: the legend of more scrolls if it needs more than LEGEND_SHARE
LEGEND_SHARE = 0.25  # of a chart's height; Plotly's default is half
BAND_ALPHA = 0.15
SCALE = "Cividis"  # perceptually uniform, the same for the colour-blind


@dataclass(frozen=True)
class Curve:
    """A named line. spread: half the height of the band around it, None where there is no band.

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
        import plotly

        return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return Path(__file__).parent / "static" / name


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


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    """What all charts share: axis titles, margins, one hover box for all curves."""
    return {
        "xaxis": {"title": {"text": x, "standoff": 8}, "automargin": True, **more.pop("xaxis", {})},
        "yaxis": {
            "title": {"text": y, "standoff": 6},
            "automargin": True,
            "exponentformat": "power",
            **more.pop("yaxis", {}),
        },
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "tracegroupgap": 0},
        "hovermode": "x unified",
        "hoverdistance": -1,  # the nearest round, however far the mouse is from its point
        **more,
    }


def curves(
    found: Iterable[Curve],
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    max_points: int = MAX_POINTS,
) -> Figure:
    """Lines with bands, each with its colour, marker and dash; the y-range fits the data."""
    data: list[dict[str, Any]] = []
    # counted with those that have no points yet, so that no colour changes when they get some
    placed = enumerate(found)
    shown = [(c, i if c.place is None else c.place) for i, c in placed if len(c.x)]
    names = [text_of(curve.name, 120) for curve, _ in shown]
    are_few = sum(len(curve.references) for curve, _ in shown) <= MAX_LONG_REFERENCES
    for number, (curve, place) in enumerate(shown):
        name = names[number]
        uid = uid_of(name if names.index(name) == number else f"{name} {number}")
        kept = kept_points(curve.y, max_points)
        xs, ys = ([rounded(part[i]) for i in kept] for part in (curve.x, curve.y))
        colour, dash = PALETTE[place % len(PALETTE)], DASHES[place // len(PALETTE) % len(DASHES)]
        group = f"curve {number}"
        silent = {"hoverinfo": "skip", "showlegend": False, "legendgroup": group}
        if curve.spread and any(curve.spread):
            data.append({**band(curve, kept, colour), **silent, "uid": f"{uid}-band"})
        for i, (end, value) in enumerate(curve.references):
            start = xs[0] if are_few else max(xs[0], end - (xs[-1] - xs[0]) / 8)
            reference = {
                "type": "scatter",
                "mode": "lines",
                "x": [rounded(start), rounded(end)],
                "y": [rounded(value)] * 2,
                "line": {"color": colour, "dash": "dot"},
            }
            data.append({**reference, **silent, "uid": f"{uid}-reference-{i}"})
        symbol = MARKERS[place % len(MARKERS)]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "uid": uid,
            "name": name,
            "x": xs,
            "y": ys,
            "legendgroup": group,
            "line": {"color": colour, "dash": dash, "width": 2},
            "marker": {"symbol": symbol, "size": 6, "color": colour, "maxdisplayed": MAX_MARKED},
            "hovertemplate": "%{y:.4~g}%{customdata}",
            "customdata": [""] * len(xs),
        }
        if curve.note:
            trace["customdata"] = [f" {curve.note[i]}" for i in kept]
        data.append(trace)
    xaxis: dict[str, Any] = {}
    if log_x:
        xaxis = {"type": "log"}
    elif x == "round":
        xaxis = {"tickformat": "d", "rangemode": "normal"}
        lengths = [trace["x"][-1] - trace["x"][0] for trace in data if "name" in trace]
        if 0 < max(lengths, default=0) < 8:
            xaxis["dtick"] = 1
    yaxis = {"type": "log"} if log_y else {}
    figure: Figure = {"data": data, "layout": layout(x, y, xaxis=xaxis, yaxis=yaxis)}
    figure["layout"]["showlegend"] = True  # a curve alone has a name too
    if len(shown) > MAX_WHOLE_LEGEND:
        figure["layout"]["legend"]["maxheight"] = LEGEND_SHARE
    return figure


def band(curve: Curve, kept: Sequence[int], colour: str) -> dict[str, Any]:
    """The area within `spread` of a curve, at the points `kept` that have a spread."""
    assert curve.spread is not None
    inside = [(i, s) for i in kept if (s := curve.spread[i]) is not None]
    around = [rounded(curve.x[i]) for i, _ in inside]
    edges = [rounded(curve.y[i] + s) for i, s in inside]
    edges += [rounded(curve.y[i] - s) for i, s in reversed(inside)]
    rgb = ", ".join(map(str, bytes.fromhex(colour[1:])))  # #RRGGBBAA needs Plotly 7
    return {
        "type": "scatter",
        "mode": "lines",
        "x": around + around[::-1],
        "y": edges,
        "fill": "toself",
        "fillcolor": f"rgba({rgb}, {BAND_ALPHA})",
        "line": {"width": 0},
    }


def stacked(
    x: Sequence[float | str], parts: dict[str, Sequence[float]], x_title: str, y_title: str
) -> Figure:
    """Bars over x, one colour for each part; parts that are 0 throughout are left out."""
    num_sums = math.ceil(len(x) / MAX_BARS) or 1  # rounds that share a bar
    data = [
        {
            "type": "bar",
            "name": text_of(name, 80),
            "uid": uid_of(name),
            "x": list(x[::num_sums]),
            "y": [rounded(sum(values[i : i + num_sums])) for i in range(0, len(x), num_sums)],
            "marker": {"color": PALETTE[place % len(PALETTE)], "line": {"width": 0}},
        }
        for place, (name, values) in enumerate(parts.items())
        if any(values)
    ]
    heights = [sum(each) for each in zip(*(trace["y"] for trace in data), strict=True)]
    if num_sums > 1:
        y_title += f" in {num_sums} rounds"
    more: dict[str, Any] = {
        "barmode": "stack",
        "bargap": 0.05,
        "yaxis": whole_ticks(heights),
        "showlegend": True,  # a part alone has a name too
    }
    return {"data": data, "layout": layout(x_title, y_title, **more)}


def uid_of(name: str) -> str:
    """A trace's uid, by which Plotly recognises a trace that a viewer has hidden.

    It is part of a CSS selector by which Plotly removes traces: other characters make it fail.
    """
    return digest(name.encode(errors="replace"))


def whole_ticks(heights: Sequence[float]) -> dict[str, Any]:
    """Whole-number ticks if the bars are low counts, as there are no half clients; else {}."""
    is_low_count = max(heights, default=0) <= 5 and all(float(h).is_integer() for h in heights)
    return {"dtick": 1} if is_low_count else {}


def short_labels(names: Iterable[str]) -> dict[str, str]:
    """An axis's `labelalias` that shows the beginning and the end of long names."""
    half = MAX_LABEL // 2
    return {n: f"{n[:half]}…{n[1 - half :]}" for n in names if len(n) > MAX_LABEL}


def heat_map(
    z: Sequence[Sequence[float | None]],
    x: Sequence[Any],
    y: Sequence[str],
    x_title: str,
    y_title: str,
    colours: str,
    **more: Any,
) -> Figure:
    """Colours over two axes; z[i][j] belongs to y[i] and x[j]. None has no colour."""
    names = [text_of(name, MAX_NAME) for name in y]
    trace = {
        "type": "heatmap",
        "x": list(x),
        "y": names,
        "colorscale": SCALE,
        "z": [[None if v is None else rounded(v) for v in row] for row in z],
        "colorbar": {"title": {"text": colours, "side": "right"}, "thickness": 12},
        "hovertemplate": f"%{{y}}, {x_title} %{{x}}: %{{z:.4~g}} {colours}<extra></extra>",
        **more,
    }
    yaxis = {"autorange": "reversed", "type": "category", "title": {"text": y_title}}
    yaxis["labelalias"] = short_labels(names)
    return {"data": [trace], "layout": layout(x_title, y_title, yaxis=yaxis, hovermode="closest")}


def histogram(values: Sequence[float], title: str, y_title: str, num_bins: int = 20) -> Figure:
    """How many values fall into each of equal bins; equal values are one bar around the value."""
    low, high = min(values), max(values)
    width = (high - low) / num_bins
    xaxis: dict[str, Any] = {}
    if rounded(low) == rounded(high):
        xaxis = {"tickvals": [rounded(low)], "range": [low - 5, low + 5]}
        low, width, num_bins = low - 0.5, 1.0, 1
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / width))] += 1
    centres = [rounded(low + (i + 0.5) * width) for i in range(num_bins)]
    trace = {
        "type": "bar",
        "x": centres,
        "y": counts,
        "width": [width] * num_bins,
        "marker": {"color": PALETTE[0], "line": {"width": 0}},
        "hovertemplate": "%{x:.2f}: %{y}<extra></extra>",
    }
    more = {"xaxis": xaxis, "yaxis": whole_ticks(counts), "hovermode": "closest"}
    return {"data": [trace], "layout": layout(title, y_title, **more)}


def rounded(value: float) -> float:
    """Six significant digits: more only makes a page larger."""
    return float(f"{value:.6g}")


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average, corrected for its start; weight 0 changes nothing."""
    average, total, found = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        found.append(average / total)
    return found
