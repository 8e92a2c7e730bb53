"""The report: report.html, one file that opens offline, and its tables as report.md.

Every table is written to `tables/` as well, as CSV and LaTeX.
"""

import base64
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import jinja2
from markupsafe import Markup

from keel.experiments.claims import Verdict, judge_all, tally
from keel.experiments.figures import Chart, Picture, label_pictures, run_charts, run_pictures
from keel.experiments.jobs import folder_of, load_job
from keel.experiments.recipe import Recipe
from keel.experiments.results import Results, results_of
from keel.experiments.runs import Options
from keel.experiments.settings import Setting, origin_of, settings_of
from keel.experiments.tables import as_csv, as_latex, ranks_of
from keel.tables import markdown_cell
from keel.views.charts import static_file
from protocol.config import keel_version
from protocol.files import write_atomically

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = {"csv": "text/csv", "tex": "text/plain"}


@dataclass(frozen=True)
class Section:
    """One recipe with its options. stem: the name of its files."""

    recipe: Recipe
    options: Options
    results: Results
    claims: Sequence[Verdict] = ()
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
    def label(self) -> str:
        """The changed keys."""
        return self.options.label or "as in the recipe"

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

    def verdict(self, claim: Verdict) -> str:
        """The verdict on a claim, with its remarks and the recipe's."""
        remark = [self.recipe.remark] if self.recipe.remark and claim.num_seeds else []
        return "; ".join([claim.reading, *claim.remarks, *remark])

    @property
    def reading(self) -> str:
        """How the numbers are read from the runs, and over which seeds."""
        if self.recipe.shows == "labels":
            return f"The split of seed {self.options.seeds[0]}."
        read = "; ".join(sorted({cell.take.of(cell.of) for cell in self.recipe.cells}))
        seeds = f"Seeds {', '.join(map(str, self.options.seeds))}"
        left_out = (result.by_seed.keys() - result.counted for result in self.results.values())
        for seed in sorted(set().union(*left_out)):
            seeds += f"; tuned cells without seed {seed}, which chose their values"
        return "; ".join(filter(None, [seeds, read, self.options.label])) + "."

    @property
    def origin(self) -> list[str]:
        """Code, packages, machines and wall time."""
        return origin_of(list(self.results.values()))

    @property
    def headlines(self) -> list[Verdict]:
        """The headline claims that were asked for."""
        return [verdict for verdict in self.claims if verdict.claim.is_headline]

    @cached_property
    def has_paper_numbers(self) -> bool:
        """Whether the paper states any number of the table; an own sweep has none."""
        return any(result.cell.paper is not None for result in self.results.values())

    @property
    def header(self) -> list[list[tuple[str, int]]]:
        """The rows of column headings above the last: (name, number of columns)."""
        parts = [column.parts for column in self.recipe.columns]
        rows = []
        for depth in range(1, len(parts[0])):
            same = groupby(parts, key=lambda part, depth=depth: part[:depth])  # type: ignore[misc]
            rows.append([(names[-1], len(list(group))) for names, group in same])
        return rows

    @cached_property
    def ranks(self) -> Mapping[tuple[str, str], str]:
        """`best` or `second` of its column, of the cells that are."""
        return ranks_of(self.recipe, self.results)

    @cached_property
    def exports(self) -> dict[str, str]:
        """The table in each of FORMATS."""
        about = " ".join(f"{self.title}. {self.deviation} {self.reading}".split())
        about += " In brackets: the paper's number." if self.has_paper_numbers else ""
        return {
            "csv": as_csv(self.results),
            "tex": f"% {about}\n{as_latex(self.recipe, self.results)}",
        }


def write_report(output: Path) -> list[Path]:
    """Write both reports on everything run into this output folder; returns their paths."""
    jobs = sorted((output / "jobs").glob("*.json"))
    if not jobs:
        raise ValueError(f"--output {output}: nothing was run there yet")
    for folder in ("figures", "tables"):
        (output / folder).mkdir(exist_ok=True)
    sections = [section_of(path, output) for path in jobs]
    papers: dict[str, list[Section]] = {}
    for section in sections:
        papers.setdefault(section.paper, []).append(section)
        for kind, text in section.exports.items() if section.results else ():
            write_atomically(output / "tables" / f"{section.stem}.{kind}", text.encode())
    content = {
        "sections": sections,
        "papers": papers,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "keel_version": keel_version(),
        "output": output,
    }
    environment = template_environment()
    paths = [output / "report.html", output / "report.md"]
    for path in paths:
        page = environment.get_template(f"{path.name}.j2").render(content)
        # runs may come from others: a surrogate, which UTF-8 lacks, becomes a question mark
        write_atomically(path, page.encode(errors="replace"))
    return paths


def section_of(job: Path, output: Path) -> Section:
    """A job with what its runs have left."""
    recipe, options = load_job(job)
    results: Results = {}
    charts: list[Chart] = []
    if recipe.shows == "labels":
        pictures = label_pictures(recipe, options, output, job.stem)
    else:
        results = results_of(recipe, options, folder_of(recipe, options, output))
        charts = list(run_charts(recipe, results))
        pictures = run_pictures(recipe, results, output, job.stem)
    return Section(
        recipe,
        options,
        results,
        claims=judge_all(recipe, results, options) if results else (),
        settings=settings_of(recipe, results, options),
        charts=charts,
        pictures=list(pictures),
        stem=job.stem,
    )


@jinja2.pass_context
def without_tags(context: jinja2.runtime.Context, value: object) -> object:
    """In Markdown, text in which nothing begins an HTML tag; else the value."""
    if isinstance(value, str) and str(context.name).endswith(".md.j2"):
        return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", value)
    return value


def template_environment(folder: Path = TEMPLATES) -> jinja2.Environment:
    """Jinja with the templates of this folder and the filters for numbers and pictures."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=without_tags,
    )
    environment.filters |= {
        "number": shown,
        "data_uri": data_uri,
        "text_uri": text_uri,
        "tally": tally,
        "cell": markdown_cell,
    }
    environment.globals["static"] = lambda name: Markup(static_file(name).read_text())
    return environment


def shown(value: float | None, sign: str = "") -> str:
    """A number with two digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.2f}"


def data_uri(path: Path) -> str:
    """The PNG as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def text_uri(text: str, kind: str) -> str:
    """The text as a data URI of one of FORMATS."""
    return f"data:{FORMATS[kind]};base64,{base64.b64encode(text.encode()).decode()}"
