"""The headline claims of the shipped recipes, with the archived runs that test them."""

import math
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keel.experiments.claims import Verdict, half_width_of, judge_all
from keel.experiments.jobs import folder_of, load_job
from keel.experiments.recipe import Claim, Recipe, load_recipe, shipped_recipes
from keel.experiments.results import Results, results_of
from keel.experiments.runs import Options, history_in
from keel.experiments.settings import directories_of, origin_of
from protocol.config import resolve_config
from protocol.text import num_of

PICTURES = "curves"  # folder beside the page
MAX_SEEDS = 1000  # where the search for a sufficient number ends
DATA_NAMES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "tiny-imagenet": "Tiny ImageNet",
}


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
        return [v for v in self.claims if v.claim.is_headline and v.num_seeds]

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
        clocks = [history_in(path).clocks for path in directories_of(results)]
        cpu = sum(sum(each.get("client_cpu_seconds", ())) for each in clocks) / 3600
        return " ".join([*origin_of(results), f"Processor time of clients: {cpu:.1f} core hours."])


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
        return self.verdict.decision is not None

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
        yield from self.verdict.with_all_seeds
        if self.is_contradicted:
            yield "other runs decide the opposite"


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


def headlines(evidence: Sequence[Evidence]) -> Iterator[Headline]:
    """Each headline of the shipped recipes, with the evidence that there is."""
    for recipe in map(load_recipe, shipped_recipes()):
        own = [each for each in evidence if each.recipe.name == recipe.name]
        empty = judge_all(recipe, {}, Options({}, recipe.seeds))
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
                    found = replace(found, picture=f"{PICTURES}/{recipe.name}-{number}.svg")
            yield found


def with_evidence(
    found: Headline, judged: Sequence[tuple[Verdict, Evidence]], words: Sequence[str]
) -> Headline:
    """The headline with the best of these verdicts, and the command for the seeds that it lacks.

    What was tested at all is best, then the paper's own setting, then the number of seeds.
    """

    def weight(pair: tuple[Verdict, Evidence]) -> tuple[bool, bool, int]:
        verdict = pair[0]
        return verdict.decision is not None, not verdict.deviations, verdict.num_seeds

    best, evidence = max(judged, key=weight)
    decide = what_decides(best.on_all or best, {*evidence.options.seeds, *found.recipe.seeds})
    if needed := re.fullmatch(r"(\d+) seeds", decide):  # beside those that are there
        words = [*words, *evidence.change_words(without="source"), "--seeds", needed[1]]
    decided = {verdict.decision for verdict, _ in judged} & {1, -1}
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
    if verdict.decision is None:
        return "runs of both sides at the paper's setting"
    if verdict.decision:
        return f"{len(asked)} seeds" if verdict.num_seeds < len(asked - tuned_on) else ""
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
