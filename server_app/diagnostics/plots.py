"""Figures of the numbers of `Comparison.numbers`: CKA over layers, the others over rounds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from data.plots import save_png
from server_app.diagnostics.comparison import SIMILARITIES, Numbers

MAX_CURVES = 5  # rounds in one figure of CKA: the first, the last, and some between
DESCRIPTIONS = {
    "cka-global": "local and global models",
    "cka-clients": "clients, pair by pair",
    "effective-rank": "effective rank of features",
    "vci": "variability collapse index",
    "within-class-trace": "trace of $\\Sigma_W$ (within classes)",
    "between-class-trace": "trace of $\\Sigma_B$ (between classes)",
    "deviation-bound": "deviation bound $D(x)$, median",
    "deviating-share": "share of samples with $D(x) < 1$",
    "drift": "drift $||w_i - w||$",
    "relative-drift": "relative drift $||w_i - w|| / ||w||$",
}


def plot_rounds(history: Sequence[Mapping[str, Any]], title: str, folder: Path) -> None:
    """Draw cka.png and features.png of a run's rounds in `folder`; overwrites them.

    history: its lines. Rounds and measures without a value are left out.
    """
    measured = [line for line in history if "diagnostics" in line]
    if not measured:
        return
    step = max(1, (len(measured) - 1) / (MAX_CURVES - 1))
    chosen = {min(len(measured) - 1, round(i * step)) for i in range(MAX_CURVES)}
    plot_similarities(
        {f"round {measured[i]['round']}": measured[i]["diagnostics"] for i in sorted(chosen)},
        title,
        folder / "cka.png",
    )
    rounds = [line["round"] for line in measured]
    everything = [line["diagnostics"] for line in measured]

    def draw(axes: Axes, name: str) -> None:
        points = [(r, n[name]) for r, n in zip(rounds, everything, strict=True) if name in n]
        marker = "o" if len(points) < 40 else None
        of_clients = [(r, about) for r, about in points if about.get("mean") is not None]
        if of_clients:
            x = [r for r, _ in of_clients]
            means = [about["mean"] for _, about in of_clients]
            [line] = axes.plot(x, means, marker=marker, ms=3, label="clients: mean")
            lows, highs = ([about[end] for _, about in of_clients] for end in ("lowest", "highest"))
            band = "clients: lowest to highest"
            axes.fill_between(x, lows, highs, alpha=0.2, color=line.get_color(), label=band)
        of_global = [(r, a["global"]) for r, a in points if a.get("global") is not None]
        if of_global:
            values = [value for _, value in of_global]
            label = "global model, as the round began"
            axes.plot([r for r, _ in of_global], values, "k--", marker=marker, ms=3, label=label)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    plot_panels(everything, draw, title, folder / "features.png")


def plot_models(numbers: Numbers, title: str, folder: Path) -> None:
    """Draw cka.png and features.png of saved models in `folder`."""
    plot_similarities({"": numbers}, title, folder / "cka.png")

    def draw(axes: Axes, name: str) -> None:
        about = numbers[name]
        values = about.get("clients", {}).items()
        each = {c: v for c, v in values if v is not None and math.isfinite(v)}
        axes.plot(range(len(each)), list(each.values()), "o", ms=4, label="each model")
        if about.get("mean") is not None:
            axes.axhline(about["mean"], lw=1, label="mean of them")
        if about.get("global") is not None:
            axes.axhline(about["global"], color="black", ls="--", lw=1, label="global model")
        axes.set_xlabel("model")
        # a client's name without `client-`; a file's name without directories and suffix
        stems = [Path(name).stem.removeprefix("client-")[:16] for name in each]
        labels = stems if len(each) <= 20 else []
        axes.set_xticks(range(len(labels)), labels, rotation=90, size=7)

    plot_panels([numbers], draw, title, folder / "features.png")


def plot_similarities(series: Mapping[str, Numbers], title: str, path: Path) -> None:
    """CKA over layers, input to output: mean and variance, one row per kind of pair.

    series: label to numbers; one curve each, from dark to light.
    """
    kinds = [kind for kind in SIMILARITIES if any(numbers.get(kind) for numbers in series.values())]
    if not kinds:
        return
    figure = Figure(figsize=(11, 1 + 3.4 * len(kinds)), layout="constrained")
    figure.suptitle(title)
    rows = figure.subplots(len(kinds), 2, squeeze=False)
    for kind, (left, right) in zip(kinds, rows, strict=True):
        for i, (label, numbers) in enumerate(series.items()):
            layers = numbers.get(kind, {})
            for axes, figure_of in ((left, "mean"), (right, "variance")):
                values = [about[figure_of] for about in layers.values()]
                colour = colormaps["viridis"](0.9 * i / max(1, len(series) - 1))
                axes.plot(list(layers), values, marker="o", ms=4, color=colour, label=label)
        left.set(ylabel="linear CKA, mean", ylim=(0, 1.05), title=DESCRIPTIONS[kind])
        right.set(ylabel="linear CKA, variance", title=DESCRIPTIONS[kind])
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.set_xlabel("layer, input to output")
            axes.tick_params(axis="x", rotation=30)
            axes.grid(alpha=0.3)
            if any(series):
                axes.legend(frameon=False)
    save_png(figure, path)


def plot_panels(everything: Sequence[Numbers], draw: Any, title: str, path: Path) -> None:
    """One panel for each measure with one number per model; draw(axes, name) fills it."""
    names = [n for n in DESCRIPTIONS if n not in SIMILARITIES and any(n in m for m in everything)]
    if not names:
        return
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns, 0.6 + 3.2 * rows), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    entries: dict[str, Any] = {}
    for axes, name in zip(panels, names, strict=False):
        draw(axes, name)
        axes.set_title(DESCRIPTIONS[name], size=10)
        axes.grid(alpha=0.3)
        if name == "deviation-bound" and axes.dataLim.ymax > 10 * axes.dataLim.ymin > 0:
            axes.set_yscale("log")  # of some clients it is a million times that of others
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    save_png(figure, path)
