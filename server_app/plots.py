"""Accuracies and losses over rounds, in run directories and `keel compare`; needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protocol.text import in_one_line, printable
from server_app.history import WHOSE, Line, curve, score_curves

MAX_MARKED = 40  # points; a longer curve has no markers
MAX_LABEL = 60  # characters, in the legend of a comparison
DASHES = ("-", "--", ":", "-.")  # for each ten curves the next, as there are ten colours


Curves = Iterable[tuple[str, Sequence[tuple[int, float]]]]  # label, (round, value)


def accuracy_figure(
    curves: Curves,
    title: str = "",
    losses: Curves = (),
    scores: Mapping[str, Curves] | None = None,
) -> Figure:
    """One line for each curve: its label, and (round, accuracy in [0, 1]) of evaluated rounds.

    losses: likewise, in a panel of their own. scores: likewise, a panel for each name.
    """
    percents = [(label, [(r, 100 * value) for r, value in points]) for label, points in curves]
    drawn: list[tuple[Curves, str]] = [(percents, "accuracy (%)")]
    losses = [(label, points) for label, points in losses if points]
    drawn += [(losses, "loss")] if losses else []
    drawn += [(lines, name) for name, lines in (scores or {}).items()]
    figure = Figure(figsize=(7, max(4.2, 3.5 * len(drawn))), layout="constrained")
    panels = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    for axes, (lines, name) in zip(panels, drawn, strict=True):
        colors = list(TABLEAU_COLORS.values())
        dashes = [each for each in DASHES for _ in colors]
        axes.set_prop_cycle(color=colors * len(DASHES), linestyle=dashes)
        for label, points in lines:
            if points:
                marker = "o" if len(points) < MAX_MARKED else None
                text = printable(label)
                # matplotlib leaves out labels that begin with an underscore
                text = f" {text}" if text.startswith("_") else text
                axes.plot(*zip(*points, strict=True), label=text, marker=marker, ms=3)
        axes.set(ylabel=printable(name))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.lines:
            for entry in axes.legend(frameon=False).get_texts():
                entry.set_parse_math(False)  # "$" is a character
    panels[0].set_title(printable(title), parse_math=False)
    panels[-1].set(xlabel="round")
    return figure


def scores_of(history: Sequence[Line]) -> dict[str, Curves]:
    """The curves of each score of `metrics`, by its name, labelled with the models."""
    found: dict[str, list[tuple[str, Sequence[tuple[int, float]]]]] = {}
    for key, name, _ in score_curves(history):
        found.setdefault(name, []).append((WHOSE[key], curve(history, key, name)))
    return dict(found)


@dataclass(frozen=True)
class Band:
    """A group's curve by round: the mean over its runs, and what is drawn around it."""

    label: str
    x: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band_figure(panels: Mapping[str, Sequence[Band]]) -> Figure:
    """A panel for each kind of score, with a line and a band for each label, the legend beside it.

    Accuracies are drawn in percent. A label has the same colour in all panels.
    """
    labels = list(dict.fromkeys(line.label for lines in panels.values() for line in lines))
    height = len(panels) * max(3.5, 0.2 * len(labels))  # of a panel, and of its legend
    figure = Figure(figsize=(9, max(4.2, height)), layout="constrained")
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    colors = list(TABLEAU_COLORS.values())
    for axes, (kind, lines) in zip(rows, panels.items(), strict=True):
        factor, unit = (100, " (%)") if kind == "accuracy" else (1, "")
        for line in lines:
            place = labels.index(line.label)
            color, dash = colors[place % len(colors)], DASHES[place // len(colors) % len(DASHES)]
            mean, low, high = (
                [factor * v for v in part] for part in (line.mean, line.low, line.high)
            )
            label = f" {in_one_line(line.label, MAX_LABEL)}"
            axes.plot(line.x, mean, color=color, linestyle=dash, label=label)
            axes.fill_between(line.x, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set(ylabel=printable(kind) + unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if not lines:  # no run has been evaluated
            continue
        legend = axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        for entry in legend.get_texts():
            entry.set_parse_math(False)  # "$" is a character
    rows[-1].set(xlabel="round")
    return figure
