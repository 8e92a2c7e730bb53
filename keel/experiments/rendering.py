"""The report: report.html, one file that opens offline, and the same content as report.md."""

import base64
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from keel.experiments.claims import JudgedClaim, failed_share, judge_claims, tally
from keel.experiments.figures import Picture, label_pictures, run_pictures
from keel.experiments.plan import Result, load_job, results_of
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.runs import Options, machines_of, wall_seconds
from protocol.files import write_atomically
from server_app.history import duration

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """One recipe at one scale."""

    recipe: Recipe
    options: Options
    label: str
    results: Mapping[tuple[str, str], Result]
    claims: Sequence[JudgedClaim]
    pictures: Sequence[Picture]

    @property
    def title(self) -> str:
        """Paper, item, title."""
        recipe = self.recipe
        return ": ".join(filter(None, [f"{recipe.paper} {recipe.item}".strip(), recipe.title]))

    @property
    def is_scaled(self) -> bool:
        """The setting differs from the paper's."""
        return self.options.scale != "paper" or bool(self.options.changes)

    @property
    def summary(self) -> str:
        """What the numbers are, and where they were computed."""
        takes = sorted({(c.take.how, c.take.number, c.of) for c in self.recipe.cells})
        read = "; ".join(f"{how}{f' {n:g}' if n else ''} of {of}" for how, n, of in takes)
        warning = "Scaled down: not the paper's setting. " if self.is_scaled else ""
        about = f"{warning}{self.label}; seeds {list(self.options.seeds)}; {read}."
        results = list(self.results.values())
        return " ".join([about, *code_sentences(results), *machine_sentences(results)])

    @property
    def has_paper_numbers(self) -> bool:
        """Whether the paper states any number of the table; an own sweep has none."""
        return any(result.cell.paper is not None for result in self.results.values())

    def rank(self, result: Result) -> str:
        """`best` or `second` of its column, by the mean; "" for others, and for one row alone."""
        column = [r for (_, name), r in self.results.items() if name == result.cell.column.name]
        means = sorted({r.mean for r in column if r.mean is not None}, reverse=True)
        if result.cell.take.is_time:
            means.reverse()
        if result.mean is None or len(means) < 2:
            return ""
        return {0: "best", 1: "second"}.get(means.index(result.mean), "")

    @property
    def tally(self) -> str:
        """The verdicts, counted."""
        return tally(self.claims)


def write_report(output: Path) -> list[Path]:
    """Write both reports on everything run into this output folder; returns their paths."""
    jobs = sorted((output / "jobs").glob("*.json"))
    if not jobs:
        raise ValueError(f"--output {output}: nothing was run there yet")
    (output / "figures").mkdir(exist_ok=True)
    environment = template_environment()
    content = {
        "sections": [section_of(path, output) for path in jobs],
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "output": output,
    }
    paths = [output / "report.html", output / "report.md"]
    for path in paths:
        page = environment.get_template(f"{path.name}.j2").render(content)
        write_atomically(path, page.encode())
    return paths


def template_environment() -> jinja2.Environment:
    """Jinja with the templates of this folder and the filters for numbers and pictures."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": shown, "ours": ours, "data_uri": data_uri}
    return environment


def section_of(job: Path, output: Path) -> Section:
    """A job (written by `runner.save_job`) with what its runs have left."""
    recipe, options = load_job(job)
    if recipe.shows == "labels":
        results = {}
        pictures = label_pictures(recipe, options, output, job.stem)
    else:
        results = results_of(recipe, options, output)
        pictures = run_pictures(recipe, results, output, job.stem)
    label = label_of(recipe, options)
    return Section(
        recipe,
        options,
        label,
        results,
        claims=judge_claims(recipe, results, options),
        pictures=[replace(each, title=f"{each.title}, {label}") for each in pictures],
    )


def label_of(recipe: Recipe, options: Options) -> str:
    """Scale, changed keys, and which of the values under `tune` were tried."""

    def only_papers_best(cell: Cell) -> bool:
        return bool(cell.paper_candidate) and not options.full_grid

    tuned = [cell for cell in recipe.cells if len(cell.candidates) > 1]
    grid = "full grid" if tuned else ""
    if any(map(only_papers_best, tuned)):
        grid = "the paper's best of the tuned values"
        if not all(map(only_papers_best, tuned)):
            grid += ", all values where it names none"
    return ", ".join(filter(None, [options.label, grid]))


def code_sentences(results: Sequence[Result]) -> Iterator[str]:
    """Which code the runs are of; several versions are never compared."""
    found = sorted({code for result in results for code in result.code})
    if len(found) > 1:
        yield f"Runs of different code, never averaged or judged together: {'; '.join(found)}."
    elif found:
        yield f"Code: {found[0]}."


def machine_sentences(results: Sequence[Result]) -> Iterator[str]:
    """How many runs each machine did, and how long they took."""
    seconds: dict[str, list[float]] = {}
    for directory in {path for result in results for _, path in result.finished}:
        name = ", then ".join(machines_of(directory))
        seconds.setdefault(name, []).append(wall_seconds(directory))
    for name, each in sorted(seconds.items()):
        times = f"{duration(sum(each))} of rounds, the longest {duration(max(each))}"
        yield f"{len(each)} runs on {name}: {times}."
    if len({name for r in results if r.cell.take.is_time for name in r.machines}) > 1:
        yield "The seconds are from different machines and cannot be compared."


def shown(value: float | None, sign: str = "") -> str:
    """A number with two digits, or a dash."""
    return "–" if value is None else f"{value:{sign}.2f}"


def ours(result: Result) -> str:
    """Mean, standard deviation over seeds, the tuned value, and what is missing."""
    number = "–"
    if result.mean is not None:
        spread = "" if result.deviation is None else f" ± {result.deviation:.2f}"
        tuned = ", ".join(str(value) for value in (result.candidate or {}).values())
        number = f"{result.mean:.2f}{spread}" + (f" ({tuned})" if tuned else "")
    elif len(result.code) > 1:
        number = "runs of different code"
    elif result.by_seed:
        number = "not reached"
    missing = []
    ended = len(result.by_seed) + len(result.failures)
    if result.failures:
        missing.append(failed_share(Counter(result.failures.values()), ended))
    if 0 < len(result.reached) < len(result.by_seed):
        missing.append(f"reached by {len(result.reached)} of {len(result.by_seed)} seeds")
    if 0 < ended < result.num_seeds:
        missing.append(f"{ended} of {result.num_seeds} seeds")
    if 0 < result.num_tried < result.num_candidates:
        missing.append(f"{result.num_tried} of {result.num_candidates} values tried")
    if result.outdated:
        missing.append(f"a run does not count: {result.outdated}")
    return "; ".join([number, *missing])


def data_uri(path: Path) -> str:
    """The image as a data URI."""
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
