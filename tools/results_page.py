"""The page of the papers' claims, made from the archive of finished runs.

    python -m tools.results_page archive OUTPUT   copy the runs of an output directory of
                                                  `keel experiments` to docs/results/histories
    python -m tools.results_page page             write docs/results/papers.md with its curves,
                                                  and the README's table

The claims on the page are the headlines of the shipped recipes; the numbers come from the archive
alone.
"""

import argparse
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.experiments.claims import CHANCE, Verdict, judge
from keel.experiments.recipe import Claim
from keel.experiments.report import template_environment
from protocol.files import write_atomically
from tools.archived_runs import HISTORIES, archive, unpacked
from tools.claim_curves import curves_of, svg_of
from tools.headlines import (
    PICTURES,
    Evidence,
    Headline,
    evidence_in,
    headlines,
    with_dirichlet,
    without_made_up,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "results" / "papers.md", ROOT / "README.md"
BEGIN = "<!-- made by `python -m tools.results_page page`; a test compares it -->"
END = "<!-- end of the results -->"
ALONE = "Local training"  # a row that recipes of personal models have beside the paper's


@dataclass(frozen=True)
class Row:
    """A headline in the table; `letters` are those of its footnotes."""

    headline: Headline
    letters: str


def table_of(found: Sequence[Headline]) -> dict[str, Any]:
    """What the table of the claims shows: a row for each claim, its footnotes, and the counts.

    A claim that several recipes make, at different settings, has one row: that of the best tested.
    """
    claims: dict[tuple[str, str], list[Headline]] = {}
    for headline in found:
        claims.setdefault((headline.table, headline.verdict.claim.text), []).append(headline)
    notes: dict[str, str] = {}
    rows = []
    for same in claims.values():
        best = max(same, key=lambda each: (each.is_tested, -len(each.deviations)))
        words = [*best.footnotes]
        untested = [h.recipe.name for h in same if best.is_tested and not h.is_tested]
        words += [f"not tested at the settings of the authors' code (`{n}`)" for n in untested]
        for word in words:
            notes.setdefault(word, string.ascii_lowercase[len(notes)])
        rows.append(Row(best, ", ".join(sorted(notes[word] for word in words))))
    tested = [row.headline for row in rows if row.headline.is_tested]
    num_exact = sum(not headline.deviations for headline in tested)
    return {
        "rows": rows,
        "notes": {letter: word for word, letter in notes.items()},
        "num_tested": len(tested),
        "num_exact": num_exact or "none",
        "chance": CHANCE[0].upper() + CHANCE[1:],
    }


def against_training_alone(evidence: Sequence[Evidence]) -> Iterator[tuple[str, str, Verdict]]:
    """(method, column, verdict): each paper's method minus training alone, where both were run."""
    for each in evidence:
        method, planned = each.recipe.paper, each.recipe.seeds
        for column in each.recipe.columns:
            sides = [each.results.get((row, column.name)) for row in (method, ALONE)]
            if sides[0] is None or sides[1] is None:
                continue
            claim = Claim("", method, ALONE, is_above=True, place=column.name)
            verdict = judge(claim, sides[0], sides[1], planned)
            if verdict.num_seeds:
                yield method, column.name, verdict


def write_page(histories: Path = HISTORIES, page: Path = PAGE, readme: Path = README) -> list[Path]:
    """Write the page with its curves and the README's table; returns the paths."""
    head, begin, rest = readme.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: expected the lines {BEGIN} and {END}")
    pictures: dict[str, str] = {}
    environment = template_environment(Path(__file__).parent)
    environment.filters |= {"dirichlet": with_dirichlet, "source": without_made_up}
    with unpacked(histories) as outputs:
        evidence = [each for output in outputs for each in evidence_in(output)]
        found = []
        for headline in headlines(evidence):
            if headline.picture:
                curves = curves_of(headline)
                pictures[Path(headline.picture).name] = svg_of(curves, headline.text)
                has_values = any(paper is not None for _, paper in curves.values())
                headline = replace(headline, has_paper_values=has_values)
            found.append(headline)
        recipes = list({headline.recipe.name: headline.recipe for headline in found}.values())
        content = {"headlines": found, "evidence": evidence, "recipes": recipes}
        content |= table_of(found) | {"alone": list(against_training_alone(evidence))}
        text = environment.get_template("papers.md.j2").render(content)
        table = environment.get_template("claims.md.j2").render(content)
    write_atomically(page, text.replace("{claims}", table.strip()).encode())
    write_atomically(readme, f"{head}{begin}\n{table}{end}{tail}".encode())
    folder = page.parent / PICTURES
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.svg")) - {folder / name for name in pictures}:
        old.unlink()
    for name, drawn in pictures.items():
        write_atomically(folder / name, drawn.encode())
    return [page, readme, *(folder / name for name in sorted(pictures))]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="See the top of this file.")
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("archive").add_argument("output", type=Path)
    commands.add_parser("page")
    given = parser.parse_args()
    for path in archive(given.output) if given.what == "archive" else write_page():
        print(path)


if __name__ == "__main__":
    main()
