"""The archive of finished runs, and the page of the papers' claims that is made from it.

    python tools/results_page.py archive OUTPUT    copy the runs of an output directory of
                                                   `keel experiments` to docs/results/histories
    python tools/results_page.py page              write docs/results/papers.md with its curves,
                                                   and the README's table

An archive is one zip a table, an output directory in small: of each run the config, how it ended,
its code and machines, and each round's accuracies and times. Unpacked, `keel experiments report
--output` judges it again. The claims on the page are the headlines of the shipped recipes; the
numbers come from the archive alone.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import string
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from keel.experiments.claims import (
    CHANCE,
    NOT_REPRODUCED,
    NOT_TESTED,
    REPRODUCED,
    Verdict,
    half_width_of,
    judge,
    judge_all,
)
from keel.experiments.figures import curve_of
from keel.experiments.jobs import folder_of, job_name, load_job, read_job
from keel.experiments.measure import CLOCKS, DIVERGENCE, is_divergence
from keel.experiments.recipe import Claim, Recipe, load_recipe, parse_recipe, shipped_recipes
from keel.experiments.report import template_environment
from keel.experiments.results import Results, results_of, runs_needed
from keel.experiments.runs import (
    Options,
    history_in,
    identity,
    last_round_read,
    name_of,
    reads_elsewhere,
)
from keel.experiments.settings import (
    code_sentences,
    directories_of,
    machine_sentences,
    package_sentences,
)
from protocol.config import resolve_config
from protocol.files import digest, write_atomically
from protocol.text import num_of
from server_app.history import CURVES, Line
from server_app.run_reader import CLIENTS_FILE, HISTORY_FILE, RunReader

ROOT = Path(__file__).resolve().parents[1]
HISTORIES = ROOT / "docs" / "results" / "histories"
PAGE, README = ROOT / "docs" / "results" / "papers.md", ROOT / "README.md"
BEGIN = "<!-- made by `python tools/results_page.py page`; a test compares it -->"
END = "<!-- end of the results -->"
PICTURES = "curves"  # folder beside the page
WIDTH, HEIGHT, MARGIN = 420, 150, 40
COLOURS = ("#0b6e99", "#c2571a")
MAX_SEEDS = 1000  # where the search for a sufficient number ends

# --- the archive --------------------------------------------------------------------------------

MANIFEST = ("layout", "code", "data", "keel", "machines", "precision", "simulated", "versions")
MAX_STATUS = 200  # characters
PATH = re.compile(r"(?<!\w)/\S+")  # in a status


def archive(output: Path, histories: Path = HISTORIES) -> list[Path]:
    """Copy every job of an output directory that has runs into a zip; returns the zips.

    ValueError, before anything is written, if a zip that is there has a run that this one lacks.
    """
    zips: dict[Path, dict[str, str]] = {}
    for path in sorted((output / "jobs").glob("*.json")):
        recipe, options = load_job(path)
        folder = folder_of(recipe, options, output)
        files: dict[str, str] = {}
        for cell, run in runs_needed(recipe.cells, options, folder):
            if run.status and run.directory.is_dir():
                name = name_of(resolve_config(without_folders(run.keys)), cell.is_timed)
                for file, text in copies(run.directory):
                    files[f"runs/{folder.name}/{name}/{file}"] = text
        if files:
            job = read_job(path)
            changes = without_folders(options.changes)
            about = job.model_copy(update={"recipe": recipe.path.name, "changes": changes})
            whole = parse_recipe(job.text, recipe.path)  # cells added later keep the name
            name = job_name(whole, replace(options, changes=changes))
            files[f"jobs/{name}.json"] = about.model_dump_json(indent=1)
            zips[histories / f"{name}.zip"] = files
    for path, files in zips.items():
        before = set(zipfile.ZipFile(path).namelist()) if path.exists() else set()
        if lost := sorted(before - files.keys()):
            raise ValueError(f"{path} has {lost[0]}, which {output} lacks: unpack it there first")
    for path, files in zips.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as written:
            for name, text in sorted(files.items()):  # the same files give the same bytes
                written.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return list(zips)


def without_folders(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys without the places of files on this machine; of the source, the name stays."""
    kept = {k: v for k, v in keys.items() if k not in ("output-dir", "data-dir", "run-name")}
    kind, _, path = str(kept.get("source", "")).partition(":")
    if "/" in path:
        name = path.rstrip("/").rpartition("/")[2]
        kept["source"] = f"{kind}:/data/{digest(path.encode())[:6]}/{name}"  # never one of others
    return kept


def copies(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the small copies of a run directory's files.

    ValueError if a file is damaged, the history lacks a round, or it was changed after the run.
    """
    history_in(directory)  # raises
    run = RunReader(directory)
    flat = without_folders(identity(run.config, is_timed=True))
    yield "config.json", json.dumps({"config": flat, "overrides": {}})
    status = str(run.summary["status"])
    short = PATH.sub("…", status)[:MAX_STATUS]
    if is_divergence(status) and not is_divergence(short):  # a reader has to see that it diverged
        short += ": " + next(sign for sign in DIVERGENCE if sign in status)
    yield "summary.json", json.dumps({"status": short})
    kept = {key: run.manifest[key] for key in MANIFEST if key in run.manifest}
    yield "manifest.json", json.dumps(kept)
    yield HISTORY_FILE, "".join(json.dumps(line) + "\n" for line in lines(run.history))
    yield CLIENTS_FILE, "".join(json.dumps(line) + "\n" for line in reasons(run.clients()))


def lines(history: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """The accuracies and times of each round, rounded."""
    for line in history:
        kept = ("round", "num_left_out", "num_evaluation_left_out")
        small: dict[str, Any] = {key: line[key] for key in kept if key in line} | {"losses": {}}
        small |= {key: round(line[key], 4) for key in CLOCKS if key in line}
        small["seconds"] = {"all": round(sum(line["seconds"].values()), 4)}
        for key, name, _ in CURVES:
            if key in line:
                small.setdefault(key, {})[name] = round(line[key][name], 5)
        if line.get("global", {}).get("loss", 0.0) is None:  # the sign of divergence
            small["global"]["loss"] = None
        yield small


def reasons(clients: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """Why clients were left out, numbered instead of named, in the rounds in which one was."""
    for line in clients:
        small = {"round": line["round"]}
        for key in ("left_out", "evaluation_left_out"):
            if found := line.get(key, {}).values():
                diverged = ("not finite" if is_divergence(reason) else "" for reason in found)
                small[key] = {str(n): reason for n, reason in enumerate(diverged)}
        if len(small) > 1:
            yield small


@contextmanager
def unpacked(histories: Path = HISTORIES) -> Iterator[list[Path]]:
    """An output directory for each zip, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = []
        for path in sorted(histories.glob("*.zip")):
            outputs.append(Path(folder) / path.stem)
            with zipfile.ZipFile(path) as file:
                file.extractall(outputs[-1])
        yield outputs


# --- the page -----------------------------------------------------------------------------------

DATA_NAMES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "tiny-imagenet": "Tiny ImageNet",
}
ALONE = "Local training"  # a row that recipes of personal models have beside the paper's
Curve = Sequence[tuple[int, float, float]]
Curves = Mapping[str, tuple[Curve, float | None]]  # by side; with the paper's value


@dataclass(frozen=True)
class Evidence:
    """One archived job of a shipped recipe, under today's claims."""

    recipe: Recipe
    options: Options
    results: Results
    claims: Sequence[Verdict]

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
        axes = ((whole.rows, rows), (whole.columns, columns))
        only = [name for every, some in axes if len(some) < len(every) for name in some]
        words = [*command(self.recipe, only), *self.change_words()]
        if self.options.full_grid:
            words += ["--grid", "full"]
        if list(self.options.seeds) != list(whole.seeds):
            words += ["--seeds", str(len(self.options.seeds))]
        return shlex.join(words)

    def change_words(self, without: str = "") -> list[str]:
        """The changes on the command line, except that of the key `without`."""
        changes = sorted(self.options.changes.items())
        return [w for key, value in changes if key != without for w in ("--set", f"{key}={value}")]

    @property
    def headlines(self) -> list[Verdict]:
        """The headline claims that were judged."""
        return [verdict for verdict in self.claims if verdict.claim.is_headline and verdict.seeds]

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
        paths = directories_of(results)
        cpu = sum(sum(history_in(path).clocks.get("client_cpu_seconds", ())) for path in paths)
        words = [*code_sentences(results, paths), *package_sentences(paths)]
        words += machine_sentences(paths)
        return " ".join([*words, f"Processor time of the clients: {cpu / 3600:.1f} core hours."])


@dataclass(frozen=True)
class Headline:
    """A headline claim with the best evidence there is: None where nothing is archived.

    text: the difference that the claim is about. decide: what an open claim lacks. command: runs
    its two sides at the paper's setting, or, if only seeds are missing, at that of the evidence,
    whose source is left out: its path differs between machines. picture: empty for a claim about
    seconds, of which a curve of accuracies shows nothing. has_paper_values: in the picture.
    is_contradicted: other archived runs decide the opposite.
    """

    recipe: Recipe
    verdict: Verdict
    text: str
    command: str
    decide: str = "runs of both sides at the paper's setting"
    evidence: Evidence | None = None
    picture: str = ""
    has_paper_values: bool = False
    is_contradicted: bool = False

    @property
    def paper(self) -> str:
        """The paper's name and the table's."""
        return f"{self.recipe.paper} {self.recipe.item}"

    @property
    def table(self) -> str:
        """The paper's name and the table's, without the setting that `item` may name after it."""
        return self.paper.partition(",")[0]

    @property
    def is_tested(self) -> bool:
        """Whether runs test it."""
        return self.verdict.word != NOT_TESTED

    @property
    def decision(self) -> Verdict:
        """The verdict on the planned seeds."""
        return self.verdict.on_planned or self.verdict

    @property
    def reading(self) -> str:
        """The decision in two or three words."""
        return self.decision.reading

    @property
    def seeds(self) -> str:
        """`2 of 3`: judged and planned."""
        judged, planned = self.decision.seeds, self.verdict.num_planned
        if not judged:
            return "–"
        return f"{judged} of {planned}" if judged < planned else str(judged)

    @property
    def deviations(self) -> list[str]:
        """How the runs depart from the paper, in words."""
        words = [*self.verdict.read_otherwise, *self.verdict.deviations]
        return [*words, self.recipe.remark] if self.recipe.remark and self.is_tested else words

    @property
    def footnotes(self) -> Iterator[str]:
        """What to know beside the row."""
        yield from self.deviations
        if self.verdict.failures:
            yield self.verdict.failures
        if self.is_tested and self.verdict.paper_effect is None:
            yield "the paper has no number for this difference"
        if self.verdict.on_planned:
            every = self.verdict
            yield (
                f"with {every.seeds} seeds instead of the planned {every.num_planned}: "
                f"{every.shown_effect}, {every.reading}"
            )
        if self.is_contradicted:
            yield "other runs decide the opposite"


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
            verdict = judge(claim, sides[0], sides[1], planned, each.options.seeds)
            if verdict.seeds:
                yield method, column.name, verdict


def command(recipe: Recipe, only: Sequence[str]) -> list[str]:
    """The words of the command that runs these rows and columns."""
    words = ["keel", "experiments", "run", recipe.name]
    return [*words, "--only", ";".join(only)] if only else words


def evidence_in(output: Path) -> list[Evidence]:
    """Every job there whose recipe is shipped, with the rows, columns and claims of today."""
    found = []
    for path in sorted((output / "jobs").glob("*.json")):
        then, options = load_job(path)
        if then.name in shipped_recipes():
            whole = load_recipe(then.name)
            recipe = whole.narrowed([cell.name for cell in then.cells])
            results = results_of(recipe, options, folder_of(recipe, options, output))
            found.append(Evidence(recipe, options, results, judge_all(recipe, results, options)))
    return found


def headlines(evidence: Sequence[Evidence], pictures: dict[str, str]) -> Iterator[Headline]:
    """Each headline of the shipped recipes; its curves are put into `pictures`, by file name."""
    for recipe in map(load_recipe, shipped_recipes()):
        own = [each for each in evidence if each.recipe.name == recipe.name]
        empty = judge_all(recipe, {}, Options("paper", {}, recipe.seeds, full_grid=False))
        for number, verdict in enumerate(empty):
            claim = verdict.claim
            if not claim.is_headline:
                continue
            cells = dict.fromkeys(name for side in recipe.sides_of(claim) for name in side)
            words = command(recipe, list(cells))
            found = Headline(recipe, verdict, difference(claim, recipe), shlex.join(words))
            judged = [
                (v, each) for each in own for v in each.headlines if v.claim.text == claim.text
            ]
            if judged:
                found = with_evidence(found, judged, words)
                if not recipe.cell(*recipe.sides_of(claim)[0]).take.is_time:
                    name, curves = f"{recipe.name}-{number}.svg", curves_of(found)
                    pictures[name] = svg_of(curves, found.text)
                    has_values = any(paper is not None for _, paper in curves.values())
                    found = replace(
                        found, picture=f"{PICTURES}/{name}", has_paper_values=has_values
                    )
            yield found


def with_evidence(
    found: Headline, judged: Sequence[tuple[Verdict, Evidence]], words: Sequence[str]
) -> Headline:
    """The headline with the best of these verdicts, and the command for the seeds that it lacks.

    What was tested at all is best, then the paper's own setting, then the number of seeds.
    """

    def weight(pair: tuple[Verdict, Evidence]) -> tuple[bool, bool, int]:
        verdict = pair[0]
        return verdict.word != NOT_TESTED, not verdict.deviations, verdict.seeds

    best, evidence = max(judged, key=weight)
    decide = what_decides(best, {*evidence.options.seeds, *found.recipe.seeds})
    if needed := re.fullmatch(r"(\d+) seeds", decide):  # beside those that are there
        words = [*words, *evidence.change_words(without="source"), "--seeds", needed[1]]
    decided = {verdict.word for verdict, _ in judged} & {REPRODUCED, NOT_REPRODUCED}
    return replace(
        found,
        verdict=best,
        command=shlex.join(words),
        decide=decide,
        evidence=evidence,
        is_contradicted=len(decided) > 1,
    )


def what_decides(verdict: Verdict, asked: set[int]) -> str:
    """What a claim lacks: runs that finish, or seeds, at the spread found; "" if nothing.

    asked: the seeds of the recipe and those that were asked for. The number of seeds is that with
    which the smaller of our effect and the paper's would lie outside the interval.
    """
    differences, tuned_on = verdict.pairs.differences, set(verdict.pairs.tuned_on)
    if verdict.word == NOT_TESTED:
        return "runs of both sides at the paper's setting"
    if verdict.word in (REPRODUCED, NOT_REPRODUCED):
        return f"{len(asked)} seeds" if verdict.seeds < len(asked - tuned_on) else ""
    if verdict.failures:
        return f"runs that finish: {verdict.failures}"
    if len(differences) < 2:
        return "more seeds"
    effects = [abs(verdict.effect or 0.0)]
    if verdict.claim.margin:
        effects = [abs(verdict.claim.margin - each) for each in effects]
    elif verdict.paper_effect is not None:
        effects.append(abs(verdict.paper_effect))
    deviation = statistics.stdev(differences)
    more = range(len(differences) + 1, MAX_SEEDS)
    seeds = next((n for n in more if half_width_of(deviation, n) < min(effects)), math.inf)
    return f"{seeds + len(tuned_on)} seeds" if seeds < math.inf else f"more than {MAX_SEEDS} seeds"


def difference(claim: Claim, recipe: Recipe) -> str:
    """The difference that a claim is about: `FedCKA − FedAvg, CIFAR-10, Dir(5)`."""
    sides = recipe.sides_of(claim)
    cell = recipe.cell(*sides[0])
    data = DATA_NAMES[resolve_config(cell.keys).data.source]
    text = f"{claim.left} − {claim.right}"
    if sides[0][0] == claim.place:
        text = f"{claim.place}: {text}, {data}"
    else:
        place = re.sub(r"\b(\d+)R\b", r"\1 rounds", claim.place).replace("FMNIST", "Fashion-MNIST")
        text += f", {place}" if data in place else f", {data}, {place}"
    if cell.take.is_time:
        text += f", {cell.take.of('')}"
    if claim.margin:
        text += f", within {num_of('point', claim.margin)}"
    return with_dirichlet(text)


def with_dirichlet(text: str) -> str:
    """The text with `Dir(0.1)` for `alpha 0.1` and `beta 0.1`, as recipes call it."""
    return re.sub(r"\b(?:alpha|beta) (\d+(?:\.\d+)?)\b", r"Dir(\1)", text)


def without_made_up(text: str) -> str:
    """The text with `folder:NAME` for the made-up paths of an archive."""
    return re.sub(r"folder:/data/[0-9a-f]{6}/", "folder:", text)


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
        found = list(headlines(evidence, pictures))
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
