"""The curves of a claim's two sides, as a small SVG."""

from collections.abc import Mapping, Sequence
from html import escape

from keel.experiments.figures import curve_of
from keel.experiments.runs import last_round_read, reads_elsewhere
from tools.headlines import Headline

WIDTH, HEIGHT, MARGIN = 420, 150, 40
COLOURS = ("#0b6e99", "#c2571a")
Curve = Sequence[tuple[int, float, float]]
Curves = Mapping[str, tuple[Curve, float | None]]  # by side; with the paper's value


def curves_of(headline: Headline) -> Curves:
    """The curves of a claim's two sides up to the round that it reads, over the seeds of both.

    Each with the paper's value there, if the runs are read at that round.
    """
    claim, evidence = headline.verdict.claim, headline.evidence
    assert evidence is not None
    curves: dict[str, tuple[Curve, float | None]] = {}
    sides = [evidence.results[name] for name in evidence.recipe.sides_of(claim)]
    seeds = set.intersection(*({*side.counted} for side in sides))
    for name, side in zip((claim.left, claim.right), sides, strict=True):
        runs = [run for run in side.counted_runs if run.seed in seeds]
        curve: Curve = []
        paper = side.cell.paper
        if runs and not side.incomparable:
            last = last_round_read(side.cell, runs[0])
            curve = [point for point in curve_of(side.cell, runs) if point[0] <= last]
            paper = None if reads_elsewhere(side.cell, runs[0]) else paper
        curves[name] = curve, paper
    return curves


def svg_of(curves: Curves, title: str) -> str:
    """A small SVG: accuracy in percent over rounds, the paper's values as dashed lines.

    What is below the lowest value after the first tenth of the rounds is left out, so that the
    ends, which are compared, lie apart.
    """
    points = [(n, mean) for curve, _ in curves.values() for n, mean, _ in curve]
    last = max((n for n, _ in points), default=1)
    values = [mean for n, mean in points if n >= last / 10]
    values += [p for _, p in curves.values() if p is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = (high - low) or 1.0

    def place(number: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * number / last
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (1 - (value - low) / span)
        return f"{x:.1f},{y:.1f}"

    def text(number: float, value: float, words: str, more: str = "") -> str:
        x, y = place(number, value).split(",")
        return f'<text x="{x}" y="{y}" {more}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="10" fill="none">',
        f"<title>{escape(title)}</title>",
    ]
    for (name, (curve, paper)), colour in zip(curves.items(), COLOURS, strict=True):
        places = [place(n, mean) for n, mean, _ in curve if mean >= low]
        line = " ".join(places)
        parts.append(f'<polyline points="{line}" stroke="{colour}"><title>{escape(name)}</title>')
        parts.append("</polyline>")
        if len(places) == 1:  # a line through one point cannot be seen
            cx, cy = places[0].split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
        if paper is not None:
            ends = f"M{place(0, paper)} L{place(last, paper)}"
            parts.append(f'<path d="{ends}" stroke="{colour}" stroke-dasharray="4 3"/>')
    for i, (name, colour) in enumerate(zip(curves, COLOURS, strict=True)):
        at = MARGIN + i * (WIDTH - 2 * MARGIN) / 2
        parts.append(f'<text x="{at:.0f}" y="14" fill="{colour}">{escape(name)}</text>')
    more = 'fill="#555" text-anchor="end" dx="-4"'
    parts += [text(0, low, f"{low:.1f} %", more), text(0, high, f"{high:.1f} %", more)]
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" {more}>round {last}</text></svg>\n')
    return "\n".join(parts)
