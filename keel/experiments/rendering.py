"""The report: report.html, one file that opens offline, and its tables as report.md.

Every table is written to `tables/` as well, as CSV, JSON and LaTeX.
"""

import base64
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import jinja2
from markupsafe import Markup

from keel.experiments.claims import (
    JudgedClaim,
    counted,
    different_headlines,
    failed_share,
    judge_claims,
    shown_effect,
    tally,
)
from keel.experiments.figures import Chart, Picture, label_pictures, run_charts, run_pictures
from keel.experiments.measure import Take
from keel.experiments.plan import (
    Result,
    differs,
    load_job,
    paper_round_read,
    reads_elsewhere,
    results_of,
)
from keel.experiments.recipe import Recipe
from keel.experiments.runs import Options
from keel.experiments.settings import (
    Setting,
    code_sentences,
    machine_sentences,
    package_sentences,
    settings_of,
)
from keel.exports import Groups, csv_text, latex, latex_table
from keel.tables import markdown_cell
from keel.views.charts import static_file
from protocol.config import keel_version, resolve_config
from protocol.files import write_atomically
from protocol.text import num_of

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = {"csv": "text/csv", "json": "application/json", "tex": "text/plain"}


@dataclass(frozen=True)
class Section:
    """One recipe at one scale. stem: the name of its files."""

    recipe: Recipe
    options: Options
    label: str
    results: Mapping[tuple[str, str], Result]
    claims: Sequence[JudgedClaim]
    settings: Sequence[Setting] = ()
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    stem: str = ""

    @property
    def title(self) -> str:
        """Paper, item, title."""
        recipe = self.recipe
        return ": ".join(filter(None, [f"{recipe.paper} {recipe.item}".strip(), recipe.title]))

    @property
    def paper(self) -> str:
        """The paper; own sweeps by their title."""
        return self.recipe.paper or self.recipe.title

    @property
    def deviation(self) -> str:
        """Whether the setting is the paper's; empty for a sweep, which has no paper."""
        if not self.recipe.paper:
            return ""
        other = [f"{s.name} {s.ours} (paper: {s.paper})" for s in self.settings if s.paper]
        other += filter(None, [self.recipe.remark])
        if other:
            return f"Not the paper's setting: {'; '.join(other)}."
        but = "; the notes name all other choices" if self.recipe.notes else ""
        return f"The paper's setting, as far as the paper states it{but}."

    def verdict(self, claim: JudgedClaim) -> str:
        """The verdict on a claim, with its remarks and the recipe's."""
        beside = (claim.remarks, self.recipe.remark if claim.seeds else "")
        return "; ".join(filter(None, (claim.verdict, *beside)))

    @property
    def reading(self) -> str:
        """How the numbers are read from the runs, and over which seeds."""
        if self.recipe.shows == "labels":
            return f"{self.label}; the split of seed {self.options.seeds[0]}."
        read = "; ".join(sorted({cell.take.of(cell.of) for cell in self.recipe.cells}))
        seeds = f"seeds {', '.join(map(str, self.options.seeds))}"
        left_out = (result.by_seed.keys() - result.counted for result in self.results.values())
        for seed in sorted(set().union(*left_out)):
            seeds += f"; tuned cells without seed {seed}, which chose their values"
        return f"{self.label}; {seeds}; {read}."

    @property
    def scale(self) -> str:
        """The scale (of a sweep, only if it is reduced), and how many keys were changed."""
        changed, scale = len(self.options.changes), self.options.scale
        words = []
        if self.recipe.paper or scale != "paper":
            words.append(f"scale {scale}")
        if changed:
            words.append(f"{num_of('key', changed)} changed")
        return ", ".join(words)

    @property
    def origin(self) -> list[str]:
        """Code, packages, machines and wall time."""
        found = list(self.results.values())
        sentences = (code_sentences(found), package_sentences(found), machine_sentences(found))
        return [sentence for each in sentences for sentence in each]

    @property
    def headlines(self) -> list[JudgedClaim]:
        """The headline claims that were asked for."""
        return different_headlines(self.claims)

    @cached_property
    def counted(self) -> list[JudgedClaim]:
        """The claims that count."""
        return counted(self.claims)

    @cached_property
    def has_paper_numbers(self) -> bool:
        """Whether the paper states any number of the table; an own sweep has none."""
        return any(result.cell.paper is not None for result in self.results.values())

    @property
    def header(self) -> list[Groups]:
        """The rows of column headings above the last: (name, number of columns)."""
        parts = [column.parts for column in self.recipe.columns]
        rows: list[Groups] = []
        for depth in range(1, len(parts[0])):
            same = groupby(parts, key=lambda part, depth=depth: part[:depth])  # type: ignore[misc]
            rows.append([(names[-1], len(list(group))) for names, group in same])
        return rows

    @cached_property
    def mixes(self) -> str:
        """Why no cells of the table are compared: what they differ in; empty if they are."""
        results = self.results.values()
        if len({code for result in results for code in result.code}) > 1:
            return "cells of different code"
        if len({name for result in results for name in result.precision}) > 1:
            return "cells in different precision"
        return ""

    @cached_property
    def _means(self) -> dict[str, list[float]]:
        """The different means of each column, best first, of cells whose seeds all have a number.

        Empty where the table `mixes`; without columns whose cells are of different data or seeds,
        are times of different machines, or mix times with other numbers.
        """
        found: dict[str, set[float]] = {}
        results = self.results.values()
        if self.mixes:
            return {}
        times, data = dict[str, set[Take | None]](), dict[str, set[tuple[str, str]]]()
        machines: dict[str, set[str]] = {}
        seeds: dict[str, set[frozenset[int]]] = {}
        for result in results:
            name, take = result.cell.column.name, result.cell.take
            data.setdefault(name, set()).update(result.data)
            times.setdefault(name, set()).add(take if take.is_time else None)
            if take.is_time:
                machines.setdefault(name, set()).update(result.machines)
            if result.mean is not None and is_ranked(result):
                found.setdefault(name, set()).add(result.mean)
                seeds.setdefault(name, set()).add(frozenset(result.counted))
        mixed = {name for name, each in data.items() if differs(each)}
        mixed |= {name for name, each in machines.items() if len(each) > 1}
        mixed |= {name for name, each in seeds.items() if len(each) > 1}
        mixed |= {name for name, each in times.items() if len(each) > 1}
        return {
            name: sorted(each, reverse=None in times[name])
            for name, each in found.items()
            if name not in mixed
        }

    def rank(self, result: Result) -> str:
        """`best` or `second` of its column, by the mean; "" for others, and for one row alone."""
        means = self._means.get(result.cell.column.name, [])
        if result.mean is None or not is_ranked(result) or len(means) < 2:
            return ""
        return {0: "best", 1: "second"}.get(means.index(result.mean), "")

    @cached_property
    def exports(self) -> dict[str, str]:
        """The table in each of FORMATS."""
        return {"csv": as_csv(self), "json": as_json(self), "tex": as_latex(self)}


def write_report(output: Path) -> list[Path]:
    """Write both reports on everything run into this output folder; returns their paths."""
    jobs = sorted((output / "jobs").glob("*.json"))
    if not jobs:
        raise ValueError(f"--output {output}: nothing was run there yet")
    for folder in ("figures", "tables"):
        (output / folder).mkdir(exist_ok=True)
    environment = template_environment()
    sections = list(told_apart([section_of(path, output) for path in jobs]))
    papers: dict[str, list[Section]] = {}
    for section in sections:
        papers.setdefault(section.paper, []).append(section)
        for kind, text in section.exports.items() if section.results else ():
            write_atomically(
                output / "tables" / f"{section.stem}.{kind}", text.encode(errors="replace")
            )
    content = {
        "sections": sections,
        "papers": papers,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "keel_version": keel_version(),
        "output": output,
    }
    paths = [output / "report.html", output / "report.md"]
    for path in paths:
        page = environment.get_template(f"{path.name}.j2").render(content)
        # runs may come from others: a surrogate, which UTF-8 lacks, becomes a question mark
        write_atomically(path, page.encode(errors="replace"))
    return paths


def told_apart(sections: Sequence[Section]) -> Iterator[Section]:
    """The sections. If several share title and label, each label names the values that differ.

    This happens if a recipe was changed between two calls.
    """
    for section in sections:
        same = (section.title, section.label)
        others = [o for o in sections if o is not section and (o.title, o.label) == same]
        own = dict.fromkeys(w for o in others for w in own_values(section.recipe, o.recipe))
        yield replace(section, label=", ".join([section.label, *own]))


def own_values(recipe: Recipe, other: Recipe) -> Iterator[str]:
    """`lr = 0.1`, or `lr = 0.1 in FedProx`, for each key that differs in a cell of both recipes."""
    cells = {(cell.row.name, cell.column.name): cell for cell in other.cells}
    shared = [cell for cell in recipe.cells if (cell.row.name, cell.column.name) in cells]
    rows: dict[str, dict[str, None]] = {}
    for cell in shared:
        twin = cells[cell.row.name, cell.column.name]
        ours, theirs = (resolve_config(each.keys).flat for each in (cell, twin))
        for key in sorted(key for key in ours if ours[key] != theirs[key]):
            rows.setdefault(f"{key} = {ours[key]}", {})[cell.row.name] = None
    for words, names in rows.items():
        is_in_all = len(names) == len({cell.row.name for cell in shared})
        yield words if is_in_all else f"{words} in {' and '.join(names)}"


@jinja2.pass_context
def without_tags(context: jinja2.runtime.Context, value: object) -> object:
    """In Markdown, text in which nothing begins an HTML tag; else the value."""
    if isinstance(value, str) and str(context.name).endswith(".md.j2"):
        return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", value)
    return value


def template_environment() -> jinja2.Environment:
    """Jinja with the templates of this folder and the filters for numbers and pictures."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=without_tags,
    )
    environment.filters |= {
        "number": shown,
        "ours": ours,
        "absence": absence,
        "missing": missing,
        "data_uri": data_uri,
        "text_uri": text_uri,
        "effect": shown_effect,
        "tally": tally,
        "cell": markdown_cell,
    }
    environment.globals["static"] = lambda name: Markup(static_file(name).read_text())
    return environment


def section_of(job: Path, output: Path) -> Section:
    """A job (written by `runner.save_job`) with what its runs have left."""
    recipe, options = load_job(job)
    results: dict[tuple[str, str], Result] = {}
    charts: list[Chart] = []
    if recipe.shows == "labels":
        pictures = label_pictures(recipe, options, output, job.stem)
    else:
        results = results_of(recipe, options, output)
        charts = list(run_charts(recipe, results))
        pictures = run_pictures(recipe, results, output, job.stem)
    asked = [c for c in recipe.claims if all(side in results for side in recipe.sides_of(c))]
    return Section(
        recipe,
        options,
        label_of(recipe, options),
        results,
        claims=judge_claims(replace(recipe, claims=asked), results, options),
        settings=settings_of(recipe, results, options),
        charts=charts,
        pictures=list(pictures),
        stem=job.stem,
    )


def label_of(recipe: Recipe, options: Options) -> str:
    """Scale, changed keys, and which of the values under `tune` were tried.

    "As in the recipe" for a sweep, which has no paper, if nothing is changed.
    """

    tuned = [cell for cell in recipe.cells if len(cell.candidates) > 1]
    at_best = [cell for cell in tuned if cell.paper_candidate and not options.full_grid]
    grid = "full grid" if tuned else ""
    if at_best:
        grid = "the paper's best of the tuned values"
    if 0 < len(at_best) < len(tuned):
        grid += ", all values where it names none"
    label = options.label
    if not recipe.paper and options.scale == "paper":
        label = label.removeprefix("scale paper").removeprefix(", ") or "as in the recipe"
    return ", ".join(filter(None, [label, grid]))


def shown(value: float | None, sign: str = "") -> str:
    """A number with two digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.2f}"


def ours(result: Result) -> str:
    """Mean, standard deviation over seeds, the tuned value, and what is missing."""
    number = absence(result)
    if result.mean is not None:
        deviation = "" if result.deviation is None else f" ± {result.deviation:.2f}"
        tuned = f" ({tuned_value(result)})" if result.candidate else ""
        number = f"{shown(result.mean)}{deviation}{tuned}"
    return "; ".join([number, *missing(result)])


def tuned_value(result: Result) -> str:
    """The chosen values of what was tuned."""
    return ", ".join(str(value) for value in (result.candidate or {}).values())


def absence(result: Result) -> str:
    """What is shown where there is no mean."""
    return result.mixes or ("not reached" if result.by_seed else "–")


def missing(result: Result) -> Iterator[str]:
    """What a number lacks: failed runs, seeds and values to come."""
    ended = len(result.by_seed) + len(result.failures)
    if result.failures:
        yield failed_share(Counter(result.failures.values()), ended)
    if 0 < len(result.reached) < len(result.counted):
        yield f"reached by {len(result.reached)} of {len(result.counted)} seeds"
    if result.left_out:
        yield result.left_out
    if 0 < ended < result.num_seeds:
        yield f"{ended} of {result.num_seeds} seeds"
    if 0 < result.num_tried < result.num_candidates:
        failed = f", {result.num_failed} failed" if result.num_failed else ""
        yield f"{result.num_tried} of {result.num_candidates} values tried{failed}"
    for run, _ in result.finished[:1]:
        if reads_elsewhere(result.cell, run):
            yield f"at round {run.rounds} instead of {paper_round_read(result.cell, run)}"
    if result.outdated:
        yield f"a run does not count: {result.outdated}"


def is_ranked(result: Result) -> bool:
    """Whether each of its seeds has a number: none failed, and a time was always reached."""
    return not result.failures and len(result.reached) == len(result.counted)


def records(section: Section) -> Iterator[dict[str, object]]:
    """A flat record for each cell of the table."""
    for (row, column), result in section.results.items():
        failures = Counter(result.failures.values())
        remarks = [absence(result)] if result.mean is None else []
        remarks += missing(result)
        if section.mixes:
            remarks.append(f"table has {section.mixes}")
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
            "tuned": tuned_value(result),
            "remark": "; ".join(remarks),
        }


def as_csv(section: Section) -> str:
    """A line for each cell."""
    found = list(records(section))
    return csv_text([found[0] if found else (), *(record.values() for record in found)])


def as_json(section: Section) -> str:
    """The cells, the settings and the claims."""
    content = {
        "title": section.title,
        "setting": section.label,
        "origin": section.origin,
        "remark": section.recipe.remark,
        "settings": [asdict(setting) for setting in section.settings],
        "cells": list(records(section)),
        "claims": [
            {
                "claim": c.text,
                "verdict": c.verdict,
                "effect": c.effect,
                "interval": c.interval,
                "paper": c.paper_effect,
                "seeds": c.seeds,
                "detail": c.detail,
                "remarks": c.remarks,
                "failures": c.failures,
                "deviations": list(c.deviations),
            }
            for c in section.claims
        ],
    }
    return json.dumps(content, indent=1)


def as_latex(section: Section) -> str:
    """A booktabs table: ours ± sd, best bold, second underlined, the paper's in brackets."""
    styles = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
    rows = []
    for row in section.recipe.rows:
        cells = [latex(row.name)]
        for column in section.recipe.columns:
            result = section.results.get((row.name, column.name))
            text = latex(absence(result)) if result else ""
            if result and result.mean is not None:
                text = styles[section.rank(result)] % f"{result.mean:.2f}"
                if result.deviation is not None:
                    text += f" {{\\scriptsize $\\pm$ {result.deviation:.2f}}}"
            if result and result.cell.paper is not None:
                text += f" ({result.cell.paper:.2f})"
            if result and (lacks := "; ".join(missing(result))):
                text += f" {{\\scriptsize {latex(lacks)}}}"
            cells.append(text)
        rows.append(cells)
    about = " ".join(f"{section.title}. {section.deviation} {section.reading}".split())
    names = [column.parts[-1] for column in section.recipe.columns]
    table = latex_table(["", *names], rows, section.header)
    note = " In brackets: the paper's number." if section.has_paper_numbers else ""
    note += f" Not to be compared: {section.mixes}." if section.mixes else ""
    return f"% {about}{note}\n{table}"


def data_uri(path: Path) -> str:
    """The PNG as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def text_uri(text: str, kind: str) -> str:
    """The text as a data URI of one of FORMATS."""
    return f"data:{FORMATS[kind]};base64,{base64.b64encode(text.encode()).decode()}"
