"""Shipped recipes: all there, all runnable, the papers' numbers and settings as printed."""

import os
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from keel.experiments import recipe as recipes
from keel.experiments.recipe import Recipe, shipped_recipes
from keel.experiments.runs import Options, run_of, used_keys
from keel.run_checks import checked_config
from protocol.config import resolve_config

root = Path(__file__).parent.parent.parent
# endings of rows that the papers' tables do not have
OURS = (" eq. (5)", " alone", ", C = 0.1", " without noise", "Local training")
PAPER = Options({}, [0])
load_recipe = cache(recipes.load_recipe)

wanted = {
    "FedIntR": [
        *("Table I", "Table II", "Table III", "Table IV", "Table V"),
        *("Fig. 3", "Fig. 4", "Fig. 5"),
    ],
    "FedCKA": ["Table 1", "Table 2", "Table 3", "Table 4", "Fig. 2", "Fig. 4", "Fig. 5", "Fig. 6"],
    "FedReCo": [
        *("Table 1", "Table 2", "Table 3", "Fig. 2", "Fig. 3 (a)", "Fig. 3 (b)"),
        *("Table 1, LeNet's widths", "Table 3, LeNet's widths", "Search for lambda and eta_0"),
    ],
    "FedRCL": [
        *("Table 1", "Table 2", "Table 3", "Table 4", "Table 5"),
        *("Table A", "Table B", "Table C", "Table D"),
        *("Fig. 1", "Fig. 2", "Fig. 3", "Fig. 4", "Fig. A", "Fig. B", "Fig. C"),
    ],
}


def test_there_is_a_recipe_for_every_table_and_figure():
    there = [(r.paper, r.item) for r in map(load_recipe, shipped_recipes())]
    for paper, items in wanted.items():
        for item in items:
            of_it = [i for p, i in there if p == paper and (i == item or i.startswith(item + " "))]
            assert len(of_it) == 1, (paper, item, of_it)
    assert len(there) == sum(map(len, wanted.values()))


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_run_of_a_recipe_has_a_config_that_makes_sense(name, tmp_path):
    for cell in load_recipe(name).cells:
        for candidate in cell.candidates:
            run = run_of(cell, candidate, 0, PAPER, tmp_path)
            used = {key: run.keys[key] for key in used_keys(run.config, run.keys)}
            taken = checked_config(used).rounds  # as keel run does
            assert (taken.method, taken.num_rounds) == (run.config.rounds.method, run.rounds)


# --- the papers' numbers ----------------------------------------------------------------------

titles = {
    "FedIntR": ["Federated Learning with Intermediate Representation Regularization"],
    "FedCKA": ["Comparisons Where It Matters", "Compare Where It Matters"],  # journal, preprint
    "FedReCo": ["CONSENSUS OPTIMIZATION AT REPRESENTATION"],
    "FedRCL": ["Relaxed Contrastive Learning for Federated Learning"],
}
# columns of FedCKA's Table 2 that one version of the paper does not have
absent = {"Comparisons Where It Matters": "alpha 0.5", "Compare Where It Matters": "alpha 1"}
printed = {  # what a row is called in the text, where that differs
    "FedCKA (mu 1)": "FedCKA ($\\mu = 1$)",
    "FedCKA (mu 10)": "FedCKA ($\\mu = 10$)",
    "FedProx (mu 0.01)": "FedProx ($\\mu = 0.01$)",
    "MOON (mu 1)": "MOON $(\\mu = 1)$",
    "MOON (mu 10)": "MOON ($\\mu = 10$)",
    "FedIntR (mu 1)": "FedIntR ($\\mu = 1$)",
    "FedIntR (mu 10)": "FedIntR ($\\mu = 10$)",
    "FedAvg + FitNet": "+ FitNet",  # so alone in Table C
    "alpha_i": "α_i",
    "Average": "α_i",  # its own line is garbled; its numbers stand in the other row's
}


def papers_folder() -> Path:
    """Where the papers' texts are; skips without them: they are not ours to ship."""
    folder = Path(os.environ.get("KEEL_PAPERS") or root.parent / "shared" / "papers")
    if not folder.is_dir():
        pytest.skip(f"the papers' texts are not there: {folder} (KEEL_PAPERS says where)")
    return folder


def text_of(title: str) -> list[str]:
    """The lines of the paper whose beginning has this title."""
    texts = [path.read_text() for path in papers_folder().glob("*.txt")]
    found = [text for text in texts if title.lower() in text[:1500].lower()]
    assert len(found) == 1, title
    return found[0].splitlines()


def numbers_in(line: str) -> list[float]:
    """The numbers of a table's line: tuned values in brackets, citations and formulas left out."""
    line = re.sub(r"\$[^$]*\$|\([^)]*\)|\[[^\]]*\]", " ", line)
    return [float(n) for n in re.findall(r"\d+\.\d\d|\d+\.\d|\d+", line)]


def is_within(numbers: list[float], line: list[float]) -> bool:
    """Whether all of them are in the line, in this order."""
    rest = iter(line)
    return all(number in rest for number in numbers)


def blocks(recipe: Recipe, row: str, left_out: str) -> list[list[float]]:
    """A row's numbers as the paper prints them: one line for each data set of FedRCL's Table 1."""
    cells = [c for c in recipe.cells if c.row.name == row and c.column.name != left_out]
    cells = [c for c in cells if not c.column.name.endswith(", without cache")]  # printed once
    if (recipe.paper, recipe.item) == ("FedRCL", "Table 1"):
        sets = list(dict.fromkeys(c.column.parts[0] for c in cells))
        groups = [[c for c in cells if c.column.parts[0] == name] for name in sets]
    else:
        groups = [cells]
    return [[c.paper for c in group if c.paper is not None] for group in groups]


tables = [
    (name, title)
    for name in shipped_recipes()
    if "table" in name and "fedreco" not in name
    for title in titles[load_recipe(name).paper]
]


@pytest.mark.parametrize(("name", "title"), tables)
def test_the_papers_numbers_are_those_printed_on_the_rows_line(name, title):
    recipe, text = load_recipe(name), text_of(title)
    left_out = absent.get(title, "") if name == "fedcka-table-2" else ""
    for row in recipe.rows:
        if row.name.endswith(OURS):
            continue
        label = printed.get(row.name, row.name)
        bare = row.name == "FedAvg"  # not "FedAvg + FitNet"
        lines = [
            numbers_in(line.replace(label, " ", 1))
            for line in text
            if label in line and not (bare and "+" in line)
        ]
        if recipe.item == "Table II":  # its rows are called by a number
            lines = [numbers_in(line)[1:] for line in text if line.startswith(f"{label}\t")]
        for numbers in blocks(recipe, row.name, left_out):
            assert numbers, f"{row.name} has no number"
            assert any(is_within(numbers, line) for line in lines), (row.name, numbers)


def test_fedintrs_best_mu_are_those_printed_in_brackets():
    text = text_of(titles["FedIntR"][0])
    for name in ("fedintr-table-1", "fedintr-table-3"):
        for row in load_recipe(name).rows:
            if row.tuned:
                lines = [re.findall(r"(\d+\.\d+) \((\d[\d.]*)\)", line) for line in text]
                want = [(paper, best) for paper, best in zip(row.paper, row.tuned, strict=True)]
                assert any([(float(a), float(b)) for a, b in line] == want for line in lines), row


@pytest.mark.parametrize("method", ["FedProx", "MOON", "FedCKA"])
@pytest.mark.parametrize("title", titles["FedCKA"])
def test_fedckas_best_mu_are_those_of_its_sentences(title, method):
    text = " ".join(text_of(title))
    sentences = re.findall(rf"For {method}, the best μ is (\d[\d., and]*\d)", text)
    said = [[float(mu) for mu in re.findall(r"[\d.]*\d", each)] for each in sentences]
    found = []
    for name in ("fedcka-table-1", "fedcka-table-2"):
        recipe = load_recipe(name)
        (row,) = (row for row in recipe.rows if row.name == method)
        columns = zip(recipe.columns, row.tuned, strict=True)
        found.append([best for column, best in columns if column.name != absent[title]])
    assert found == said


def test_fedrecos_numbers_are_those_printed_in_their_tables():
    text = text_of(titles["FedReCo"][0])
    lines = {line.split("\t")[0]: line for line in text if "\t" in line}
    for name, keys in (("fedreco-table-1", "FC"), ("fedreco-table-3", ("FMNIST", "CIFAR10"))):
        recipe = load_recipe(name)
        for key, column in zip(keys, recipe.columns, strict=True):
            cells = [c for c in recipe.cells if not c.row.name.endswith(OURS)]
            ours = [c.paper for c in cells if c.column == column]
            assert numbers_in(lines[key].partition("\t")[2]) == ours
    times = next(re.findall(r"(\d+) MIN (\d+) S", line) for line in text if " MIN " in line)
    cells = load_recipe("fedreco-table-2").cells
    ours = [cell.paper for cell in cells if cell.column.name == "CIFAR-10"]
    assert [60 * int(m) + int(s) for m, s in times] == ours


# --- the papers' settings -----------------------------------------------------------------------

FEDINTRS_CODE = {
    "FedIntR": {"fedintr.first-use": "initial", "fedintr.reduction": "batch"},
    "MOON": {"moon.projection": "mlp-side", "moon.reduction": "batch", "moon.first-use": "initial"},
    "FedCKA": {"fedcka.projection": "mlp-side", "fedcka.first-use": "initial"},
    "FedProx": {"fedprox.squared": False},
}
FEDRECOS_CODE = {
    "fedreco.eta-u": 0.01,
    "fedreco.eta-v": 0.01,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "batch-size": 48,
    "clip-norm": 10.0,
    "fedreco.clip-g": 10.0,
    "fedreco.g-samples": "all",
    "fedreco.final-head-epochs": 9,
    "num-rounds": 501,
    "pool-test": True,
    "local-test-fraction": 0.3,
}
FEDRECOS_NETWORK = {"layer-widths": "4,12,1024,1024", "normalise": "half"}
FEDRCLS_CODE = {"balanced-order": "sequential", "clip-norm": 10.0, "weighting": "uniform"}
FEDCKAS_SCAFFOLD = {  # the paper's code is not public; this variant collapses as in its Table 2
    "scaffold.momentum-form": "niid-bench",
    "scaffold.control-weighting": "uniform",
}


@pytest.mark.parametrize(
    ("name", "row", "column", "form"),
    [
        *(("fedintr-table-1", row, "*", form) for row, form in FEDINTRS_CODE.items()),
        *(("fedintr-table-3", row, "*", form) for row, form in FEDINTRS_CODE.items()),
        *(("fedintr-table-4", f"{row} (*", "*", form) for row, form in FEDINTRS_CODE.items()),
        ("fedintr-table-1", "*", "CIFAR-100", {"init": "fan-in", "frozen-statistics": "batch"}),
        ("fedcka-table-2", "SCAFFOLD", "*", FEDCKAS_SCAFFOLD),
        ("fedrcl-table-1", "*", "*", FEDRCLS_CODE),
        ("fedrcl-table-1", "FedRCL", "*", {"fedrcl.mining": "hard"}),
        ("fedrcl-table-c", "*", "*", {"variant": "fedrcl", "norm": "group"}),
        ("fedintr-table-1", "FedIntR", "*", {"fedintr.decay-heads": True}),
        *((f"fedreco-table-{n}", "FedReCo*", "*", FEDRECOS_CODE) for n in (1, 2, 3)),
        ("fedreco-table-1", "*", "Fashion-MNIST", FEDRECOS_NETWORK),
        ("fedreco-table-1", "*", "CIFAR-10", {"layer-widths": "64,64,1024,1024"}),
    ],
)
def test_rows_use_the_variants_of_the_papers_tables(name, row, column, form):
    cells = load_recipe(name).cells
    found = [c for c in cells if fnmatch(c.row.name, row) and fnmatch(c.column.name, column)]
    assert found
    for cell in found:
        keys = run_of(cell, cell.candidates[0], 0, PAPER, Path()).keys
        config = resolve_config(keys).flat
        assert form == {key: config[key] for key in form}, (cell.row.name, cell.column.name)


def test_what_the_papers_time_is_timed_without_the_cache_and_with_it_and_judged_without():
    for name in ("fedcka-table-3", "fedcka-table-4", "fedreco-table-2"):
        recipe = load_recipe(name)
        timed = {c.column.name: c.keys.get("cache-mb", 512) for c in recipe.cells if c.take.is_time}
        assert sorted(timed.values()) == len(timed) // 2 * [0] + len(timed) // 2 * [512]
        for claim in recipe.claims:
            assert timed.get(claim.place, 0) == 0


def test_recipes_with_claims_have_the_seeds_to_judge_them():
    for recipe in map(load_recipe, shipped_recipes()):
        assert not recipe.claims or len(recipe.seeds) >= 3, recipe.name
