"""The summary of all papers: a page and the README's table, from archived runs and the recipes.

The claims are the headlines of the shipped recipes; the numbers come from the archive alone.
"""

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from keel.experiments.archive import unpacked
from keel.experiments.claims import (
    NOT_REPRODUCED,
    NOT_TESTED,
    REPRODUCED,
    JudgedClaim,
    Results,
    different_headlines,
    judge_claims,
)
from keel.experiments.figures import curve_of
from keel.experiments.plan import last_round_read, load_job, narrowed, reads_elsewhere, results_of
from keel.experiments.recipe import Claim, Recipe, load_recipe, shipped_recipes
from keel.experiments.rendering import template_environment
from keel.experiments.runs import Options, history_in
from keel.experiments.settings import code_sentences, ended_in, machine_sentences, package_sentences
from protocol.config import resolve_config
from protocol.files import write_atomically
from protocol.text import num_of

BEGIN = "<!-- made by `keel experiments summary`; a test compares it -->"
END = "<!-- end of the results -->"
PICTURES = "curves"  # folder beside the page
WIDTH, HEIGHT, MARGIN = 420, 150, 40
COLOURS = ("#0b6e99", "#c2571a")

DATA_NAMES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "tiny-imagenet": "Tiny ImageNet",
}

Curve = Sequence[tuple[int, float, float]]
Curves = Mapping[str, tuple[Curve, float | None]]  # by side; with the paper's value


@dataclass(frozen=True)
class Evidence:
    """One archived job of a shipped recipe, under today's claims."""

    recipe: Recipe
    options: Options
    results: Results
    claims: Sequence[JudgedClaim]

    @property
    def commands(self) -> list[str]:
        """The commands that run it: one for each set of columns that rows of it have."""
        columns: dict[str, list[str]] = {}
        for row, column in self.results:
            columns.setdefault(row, []).append(column)
        rows: dict[tuple[str, ...], list[str]] = {}
        for row, names in columns.items():
            rows.setdefault(tuple(names), []).append(row)
        return [self._command(some, names) for names, some in rows.items()]

    def _command(self, rows: Sequence[str], columns: Sequence[str]) -> str:
        whole = load_recipe(self.recipe.name)
        words = ["keel", "experiments", "run", self.recipe.name, *self.scale_words()]
        axes = ((whole.rows, rows), (whole.columns, columns))
        only = [name for every, some in axes if len(some) < len(every) for name in some]
        if only:
            words += ["--only", ";".join(only)]
        words += self.change_words()
        if self.options.full_grid:
            words += ["--grid", "full"]
        if list(self.options.seeds) != list(whole.seeds):
            words += ["--seeds", str(len(self.options.seeds))]
        return shlex.join(words)

    def scale_words(self) -> list[str]:
        """The scale on the command line, unless it is the paper's."""
        return ["--scale", self.options.scale] if self.options.scale != "paper" else []

    def change_words(self, without: str = "") -> list[str]:
        """The changes on the command line, except that of the key `without`."""
        changes = sorted(self.options.changes.items())
        return [w for key, value in changes if key != without for w in ("--set", f"{key}={value}")]

    @property
    def headlines(self) -> list[JudgedClaim]:
        """Judged headline claims; only the first of those that read the same runs at one round."""
        return [claim for claim in different_headlines(self.claims) if claim.seeds]

    @property
    def about_seeds(self) -> Iterator[str]:
        """Sentences on seeds that are missing, and the means over those that all rows have."""
        num_asked, num_planned = len(self.options.seeds), len(self.recipe.seeds)
        if num_asked < num_planned:
            yield f"These are {num_asked} of the recipe's {num_planned} seeds."
        for column in self.recipe.columns:
            rows = {
                row: result.counted
                for (row, name), result in self.results.items()
                if name == column.name and result.mean is not None and not result.cell.take.is_time
            }
            common = set[int]().union(*rows.values()).intersection(*rows.values())
            if any(numbers.keys() != common for numbers in rows.values()) and common:
                means = (
                    f"{row} {statistics.fmean(numbers[seed] for seed in common):.2f}"
                    for row, numbers in rows.items()
                )
                noun = "seeds" if len(common) > 1 else "seed"
                listed = ", ".join(map(str, sorted(common)))
                yield (
                    f"{column.name}, over the {noun} that all rows have ({listed}): "
                    f"{', '.join(means)}."
                )

    @property
    def about(self) -> str:
        """Code, with Keel's commit, machines, wall time and processor time."""
        results = list(self.results.values())
        cores = sum(
            sum(history_in(path).clocks.get("client_cpu_seconds", ())) for path in ended_in(results)
        )
        words = [*code_sentences(results), *package_sentences(results)]
        words += machine_sentences(results)
        return " ".join([*words, f"Processor time of the clients: {cores / 3600:.1f} core hours."])


@dataclass(frozen=True)
class Headline:
    """A headline claim with the best evidence there is: None where nothing is archived.

    text: the claim with the data set that it is about. command: runs its two sides at the paper's
    setting, or, if only seeds are missing, at that of the evidence, whose source is left out: its
    path differs between machines. verdict: with remarks. picture: empty for a claim about seconds,
    of which a curve of accuracies shows nothing. has_paper_values: in the picture.
    """

    claim: JudgedClaim
    text: str
    command: str
    evidence: Evidence | None = None
    verdict: str = NOT_TESTED
    picture: str = ""
    has_paper_values: bool = False


def evidence_in(output: Path) -> list[Evidence]:
    """Every job there whose recipe is shipped, with the rows, columns and claims of today."""
    found = []
    for job in sorted((output / "jobs").glob("*.json")):
        then, options = load_job(job)
        if then.name in shipped_recipes():
            names = [[cell.row.name, cell.column.name] for cell in then.cells]
            recipe = narrowed(load_recipe(then.name), names)
            results = results_of(recipe, options, output)
            found.append(Evidence(recipe, options, results, judge_claims(recipe, results, options)))
    return found


def headlines(evidence: Sequence[Evidence], pictures: dict[str, str]) -> Iterator[Headline]:
    """Each headline of the shipped recipes; its curves are put into `pictures`, by file name."""
    for recipe in map(load_recipe, shipped_recipes()):
        own = [each for each in evidence if each.recipe.name == recipe.name]
        bare = judge_claims(recipe, {}, Options("paper", {}, recipe.seeds, full_grid=False))
        for number, (claim, empty) in enumerate(zip(recipe.claims, bare, strict=True)):
            if not claim.is_headline:
                continue
            judged = [(c, each) for each in own for c in each.headlines if c.text == claim.text]
            cells = ";".join(dict.fromkeys(n for side in recipe.sides_of(claim) for n in side))
            words = ["keel", "experiments", "run", recipe.name, "--only", cells]
            if not judged:
                yield Headline(empty, in_full(claim, recipe), shlex.join(words))
                continue
            best, each = max(judged, key=lambda pair: weight(pair[0]))
            if needed := re.fullmatch(r"(\d+) seeds", best.decide):  # beside those that are there
                words += [*each.scale_words(), *each.change_words(without="source")]
                words += ["--seeds", needed[1]]
            command = shlex.join(words)
            verdict = "; ".join(verdict_of(best, [c for c, _ in judged], recipe))
            found = Headline(best, in_full(claim, recipe), command, each, verdict)
            if not recipe.cell(*recipe.sides_of(claim)[0]).take.is_time:
                name, curves = f"{recipe.name}-{number}.svg", curves_of(claim, each)
                pictures[name] = svg_of(curves, claim.text)
                has_paper_values = any(paper is not None for _, paper in curves.values())
                found = replace(
                    found, picture=f"{PICTURES}/{name}", has_paper_values=has_paper_values
                )
            yield found


def verdict_of(best: JudgedClaim, judged: Sequence[JudgedClaim], recipe: Recipe) -> Iterator[str]:
    """The verdict on the best of these, a headline of the recipe, and what to know beside it."""
    yield best.verdict
    yield from filter(None, (best.failures, best.remarks, recipe.remark))
    if best.deviations:
        yield "not the paper's setting"
    decided = {claim.verdict for claim in judged} & {REPRODUCED, NOT_REPRODUCED}
    if len(decided) > 1:
        yield "contradicted by other runs"
    elif best.verdict not in decided:
        yield from (f"{verdict} by other runs" for verdict in decided)


def weight(claim: JudgedClaim) -> tuple[bool, bool, float, int]:
    """Sort key: of several jobs with the same claim, the largest is the best evidence.

    What was tested at all counts first, then the paper's own setting, then the number of local
    steps, up to the paper's, then that of seeds.
    """
    return claim.verdict != NOT_TESTED, not claim.deviations, min(claim.share, 1.0), claim.seeds


def in_full(claim: Claim, recipe: Recipe) -> str:
    """The claim with its data set: `FedCKA above FedAvg on CIFAR-10, alpha 5`."""
    sides = recipe.sides_of(claim)
    cell = recipe.cell(*sides[0])
    data = DATA_NAMES[resolve_config(cell.keys).data.source]
    above, below = ("slower than", "faster than") if cell.take.is_time else ("above", "below")
    word = above if claim.is_above else below
    if claim.margin:
        margin = f"{claim.margin:g} s" if cell.take.is_time else num_of("point", claim.margin)
        word = f"within {margin} of"
    compared = f"{claim.left} {word} {claim.right}"
    if sides[0][0] == claim.place:
        return f"{claim.place}: {compared} on {data}"
    place = re.sub(r"\b(\d+)R\b", r"\1 rounds", claim.place).replace("FMNIST", "Fashion-MNIST")
    return f"{compared} on {place if data in place else f'{data}, {place}'}"


def curves_of(claim: Claim, evidence: Evidence) -> Curves:
    """The curves of a claim's two sides up to the round that it reads, over the seeds of both.

    Each with the paper's value there, if the runs are read at that round.
    """
    curves: dict[str, tuple[Curve, float | None]] = {}
    sides = [evidence.results[name] for name in evidence.recipe.sides_of(claim)]
    seeds = set.intersection(*({*side.counted} for side in sides))
    for name, side in zip((claim.left, claim.right), sides, strict=True):
        curve: Curve = []
        paper = side.cell.paper
        runs = [pair for pair in side.counted_runs if pair[0].keys["seed"] in seeds]
        if runs and not side.mixes:
            run = runs[0][0]
            last = last_round_read(side.cell, run)
            curve = [p for p in curve_of(side.cell, runs) if p[0] <= last]
            paper = None if reads_elsewhere(side.cell, run) else paper
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


def write_summary(archive: Path, page: Path, readme: Path) -> list[Path]:
    """Write the page with its curves and the README's table; returns the paths.

    ValueError if the README lacks the markers, or if the archive has no runs.
    """
    head, begin, rest = readme.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: expected the lines {BEGIN} and {END}")
    if not archive.is_dir():
        raise ValueError(f"--histories {archive} is not a directory")
    pictures: dict[str, str] = {}
    environment = template_environment()
    with unpacked(archive) as outputs:
        evidence = [each for output in outputs for each in evidence_in(output)]
        if not evidence:  # every headline would become one without runs
            raise ValueError(
                f"--histories {archive}: no zip there has runs of Keel's own recipes; "
                "`keel experiments archive` writes them"
            )
        found = list(headlines(evidence, pictures))
        recipes = [load_recipe(name) for name in dict.fromkeys(h.claim.recipe for h in found)]
        content = {"headlines": found, "evidence": evidence, "recipes": recipes}
        text = environment.get_template("papers.md.j2").render(content)
        table = environment.get_template("claims.md.j2").render(content)
        text = text.replace("{claims}", table.strip())
    write_atomically(page, text.encode())
    write_atomically(readme, f"{head}{begin}\n{table}{end}{tail}".encode())
    folder = page.parent / PICTURES
    for old in set(folder.glob("*.svg")) - {folder / name for name in pictures}:
        old.unlink()
    for name, drawn in pictures.items():
        folder.mkdir(exist_ok=True)
        write_atomically(folder / name, drawn.encode())
    return [page, readme, *(folder / name for name in sorted(pictures))]
