"""A table of results as CSV and LaTeX, by pandas, and the rank of each cell in its column."""

from collections import Counter
from collections.abc import Iterator, Mapping

import pandas as pd

from keel.experiments.recipe import Recipe
from keel.experiments.results import Result, Results
from keel.experiments.runs import incomparable
from keel.exports import harmless, latex

RANKS = ("best", "second")
STYLES = {"best": r"\textbf{%s}", "second": r"\underline{%s}"}
SMALL = r" {\scriptsize %s}"


def ranks_of(recipe: Recipe, results: Results) -> Mapping[tuple[str, str], str]:
    """`best` or `second` by the mean, of the cells that are the first or second of their column.

    Only where all means of the column are over the same seeds and may be compared.
    """
    found: dict[tuple[str, str], str] = {}
    for column in recipe.columns:
        cells = [r for (_, name), r in results.items() if name == column.name]
        cells = [r for r in cells if r.mean is not None and r.is_ranked]
        takes = {r.cell.take if r.cell.take.is_time else None for r in cells}
        if len(takes) != 1 or len({frozenset(r.counted) for r in cells}) != 1:
            continue
        is_time = None not in takes
        if incomparable([run for r in cells for run in r.finished], is_time):
            continue
        means = sorted({r.mean for r in cells if r.mean is not None}, reverse=not is_time)
        if len(means) > 1:
            for result in cells:
                place = means.index(result.mean)  # type: ignore[arg-type]
                found |= {result.cell.name: RANKS[place]} if place < len(RANKS) else {}
    return found


def records(results: Results) -> Iterator[dict[str, object]]:
    """A flat record for each cell of the table."""
    for (row, column), result in results.items():
        failures = Counter(result.failures.values())
        remarks = [result.absence] if result.mean is None else []
        yield {
            "row": row,
            "column": column,
            "paper": result.cell.paper,
            "mean": result.mean,
            "sd": result.deviation,
            "difference": result.difference,
            "seeds": len(result.counted),
            "diverged": failures["diverged"],
            "failed": failures["failed"],
            "tuned": result.tuned_value,
            "remark": "; ".join([*remarks, *result.missing]),
        }


def as_csv(results: Results) -> str:
    """A line for each cell; no text is a formula to a spreadsheet."""
    frame = pd.DataFrame(records(results), dtype=object)
    text: str = frame.map(lambda v: harmless(v) if isinstance(v, str) else v).to_csv(index=False)
    return text


def as_latex(recipe: Recipe, results: Results) -> str:
    """A booktabs table: ours ± sd, best bold, second underlined, the paper's in brackets."""
    ranks = ranks_of(recipe, results)
    parts = [tuple(map(latex, column.parts)) for column in recipe.columns]
    headings = pd.MultiIndex.from_tuples(parts) if len(parts[0]) > 1 else pd.Index(sum(parts, ()))
    frame = pd.DataFrame(
        [
            [_latex_cell(results.get((row.name, column.name)), ranks) for column in recipe.columns]
            for row in recipe.rows
        ],
        index=[latex(row.name) for row in recipe.rows],
        columns=headings,
    )
    text: str = frame.style.to_latex(
        hrules=True, multicol_align="c", column_format="l" + "r" * len(recipe.columns)
    )
    return "% \\usepackage{booktabs}\n" + text


def _latex_cell(result: Result | None, ranks: Mapping[tuple[str, str], str]) -> str:
    if result is None:
        return ""
    text = latex(result.absence)
    if result.mean is not None:
        text = STYLES.get(ranks.get(result.cell.name, ""), "%s") % f"{result.mean:.2f}"
        if result.deviation is not None:
            text += SMALL % rf"$\pm$ {result.deviation:.2f}"
    if result.cell.paper is not None:
        text += f" ({result.cell.paper:.2f})"
    if result.missing:
        text += SMALL % latex("; ".join(result.missing))
    return text
