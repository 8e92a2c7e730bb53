"""Recipes: all there, all runnable, the papers' numbers as printed; bad ones refused by line."""

import math
import os
import re
import statistics
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from client_app.methods import method_of
from data.partitions import partition_indices, stratified_share
from keel.experiments import plan, preflight
from keel.experiments.claims import (
    JudgedClaim,
    elsewhere_of,
    judge_claims,
    share_of_steps,
    what_decides,
)
from keel.experiments.figures import report_curve
from keel.experiments.measure import History, measure, parse_take
from keel.experiments.plan import (
    Result,
    differing,
    job_name,
    last_round_read,
    number_of,
    result_of,
    seeds_for,
    selected,
)
from keel.experiments.preflight import check_reading, check_recipe, refuse_overriding
from keel.experiments.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from keel.experiments.rendering import ours
from keel.experiments.runs import Options, run_of
from keel.experiments.scale import SCALES, Keys, scaled, steps_per_round
from keel.experiments.settings import settings_of
from protocol.config import resolve_config
from tests.tools.run_directories import make_run as make_run_directory

root = Path(__file__).parent.parent.parent
# endings of rows that the papers' tables do not have
OURS = (" eq. (5)", " alone", ", C = 0.1", " without noise", "Local training")
PAPER = Options("paper", {}, [0], full_grid=True)
TENS = [10, 10.0, 10.5]

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


@pytest.mark.parametrize(
    ("recipes", "words"),
    [
        ("fedreco-lenet-*", "LeNet 64 0.9 0.1 0.003 tuned 20_% oyhah/FedReCo"),
        ("fedreco-table-* fedreco-figure-3*", "oyhah/FedReCo 0.1 0.001 fedreco-search 501 30_%"),
        ("fedreco-figure-2 fedreco-search", "oyhah/FedReCo"),
        ("fedreco-table-1", "Ditto FedAvg-FT FedBABU 0.001"),
        ("fedreco-table-2", "fine-tuning cache-mb"),
        ("fedreco-table-3 fedreco-figure-3b", "norm_C 10"),
        ("fedrcl-table-* fedrcl-figure-[1234ab]", "clipping decay rotation precision"),
        ("fedrcl-table-[1235bcd] fedrcl-figure-1", "FedADAM 0.01 MOON's_tau FedProc FedCL"),
        ("fedrcl-table-1", "mining 1.59 1.62"),
        ("fedrcl-table-c", "biases 1x1_stem grouped"),
        ("fedintr-table-3", "decay"),
        ("fedrcl-table-[12345bcd] fedrcl-figure-*", "sequential"),
        ("fedcka-table-3 fedcka-figure-6", "mu_=_3"),
        ("fedcka-table-3", "Frobenius negative_mean_square cache-mb"),
        ("fedcka-table-4", "cache-mb"),
        ("fedcka-figure-5", "alpha_5"),
        ("fedintr-table-5", "89.03 85.62 64.20 40.33"),
        ("fedintr-table-4 fedintr-figure-4", "first_participation initial"),
        ("fedintr-table-[134] fedintr-figure-[45]", "projection projected squared"),
        ("fedintr-table-[13]", "fan-in training_mode"),
        ("fedcka-table-[124]", "SCAFFOLD niid-bench uniformly"),
        ("fedcka-table-1", "round_41 40_and_20_rounds"),
        ("fedcka-table-* fedcka-figure-[256]", "MOON's 0.1 0.01"),
        ("fedrcl-table-[1235bcd] fedrcl-figure-[1a]", "MOON's_tau 1,000_rounds code:_100"),
    ],
)
def test_what_the_papers_leave_open_is_in_the_notes(recipes, words):
    """`_` stands for a space."""
    names = [n for n in shipped_recipes() if any(fnmatch(n, each) for each in recipes.split())]
    assert names
    for name in names:
        notes = " ".join(load_recipe(name).notes)
        for word in words.replace(" ", "\n").replace("_", " ").splitlines():
            assert word in notes, (name, word)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_run_of_a_recipe_has_a_config_that_makes_sense(name, tmp_path):
    recipe = load_recipe(name)
    checked = set()
    for cell in recipe.cells:
        for candidate in cell.candidates:
            keys = {**cell.keys, **candidate}
            for scale in ("paper", "hour") if candidate == cell.candidates[0] else ("paper",):
                if (key := repr((keys, scale))) not in checked:
                    checked.add(key)
                    options = Options(scale, {}, [0], full_grid=True)
                    method_of(resolve_config(run_of(cell, candidate, 0, options, tmp_path).keys))
    assert checked


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


# --- bad recipes ------------------------------------------------------------------------------

good = """\
title: x
seeds: 2
config: {source: digits, num-clients: 4, model: cnn-fedreco}
columns:
  a: {alpha: 0.5}
  b: {alpha: 5.0}
rows:
  one: {method: fedavg, paper: [1.5, null]}
  two: {method: fedprox}
claims:
  - two above one in a
"""


many = [*range(400)]
# a thousand million values in a few lines
laughs = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 11)
)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("title: x", laughs + "title: *a10", 1, "its aliases stand for more than 1,000,000 values"),
        ("title: x", "title: x\n" + laughs + "notes: *a10", 1, "stand for more than 1,000,000"),
        ("title: x", "title: &a [*a]", 1, "not YAML: found unconstructable recursive node"),
        ("title: x", "titel: x", 1, "did you mean title?"),
        ("seeds: 2", "seeds: 0", 2, "from 1 to 10,000"),
        ("seeds: 2", "seeds: [1, 1]", 2, "different seeds"),
        ("seeds: 2", "seeds: 20261128", 2, "seeds = 20261128: expected the number of seeds, from "),
        (
            "two: {method: fedprox}",
            f"two: {{tune: {{lr: {many}, momentum: {many}}}}}",
            9,
            "160,000 combinations",
        ),
        ("num-clients: 4", "num-client: 4", 3, "did you mean num-clients?"),
        ("num-clients: 4", "seed: 4", 3, "seed is set by the runner"),
        ("alpha: 0.5", "alpha: [0.5, 1]", 5, "a list belongs under grid"),
        ("  b: {", "  a: {", 6, "'a' is a duplicate of line 5"),
        ("method: fedavg", "method: fedavg, alpha: 0.1", 8, "alpha is set by 'a' (line 5)"),
        ("[1.5, null]", "[1.5]", 8, "1 numbers for 2 columns"),
        ("[1.5, null]", "[1.5, high]", 8, "rows.one.paper = 'high': expected a valid number"),
        ("[1.5, null]", "[1.5, .nan]", 8, "rows.one.paper = nan: expected a finite number"),
        ("[1.5, null]", "[.inf, null]", 8, "rows.one.paper = inf: expected a finite number"),
        (
            "two: {method: fedprox}",
            "two: {take: middle}",
            9,
            "rows.two.take = 'middle': expected final, best",
        ),
        ("title: x", "take: mean 1.5", 1, "take = 'mean 1.5': expected final, best"),
        (
            "two: {method: fedprox}",
            "two: {of: accuracy}",
            9,
            "rows.two.of = 'accuracy': expected 'global.accuracy",
        ),
        (
            "title: x",
            "shows: tables",
            1,
            "shows = 'tables': expected 'table', 'curves' or 'labels'",
        ),
        ("title: x", "title: 3", 1, "title = 3: expected a valid string"),
        ("two: {method: fedprox}", "two: {at: -1}", 9, "rows.two.at = -1: expected"),
        ("two: {method: fedprox}", "two: {tune: {lr: 1}}", 9, "rows.two.tune.lr = 1: expected"),
        ("a: {alpha: 0.5}", "a: {paper: 3}", 5, "paper of a: expected in rows only"),
        (
            "two: {method: fedprox}",
            "two: {lr: 0.3, tune: {lr: [0.1, 0.2]}}",
            9,
            "lr of two: it is also under tune, which sets it",
        ),
        (
            "two: {method: fedprox}",
            "two: {tune: {lr: [0.1, 0.2, 1e-1]}}",
            9,
            "tune.lr of two = [0.1, 0.2, 0.1]: a value occurs twice",
        ),
        ("two: {method: fedprox}", "two: {tune: {mu: [1]}}", 9, "config key = 'mu' is unknown"),
        ("two: {method: fedprox}", "two: fedprox", 9, "rows.two = 'fedprox': expected a mapping"),
        ("two above one in a", "two beats one in a", 11, "ROW above ROW in COLUMN"),
        ("two above one in a", "two above three in a", 11, "'three' is none of the rows"),
        ("two above one in a", "two within 0 of one in a", 11, "expected a margin above 0"),
        ("two above one in a", "two above two in a", 11, "expected two different rows"),
        ("two above one in a", "a within 1 of a in two", 11, "expected two different columns"),
        ("two above one in a", "every row above one in a", 11, "'every row' is none of the rows"),
        ("two above one in a", "Two above one in a", 11, "one, two; did you mean two"),
        ("  one:", "  one: [", 9, "not YAML"),
        ("  one:", "\tone:", 8, "start any token; indent with spaces, not with tabs"),
        ("title: x", "title: 2020-13-45", 1, "not YAML: month must be in 1..12"),
        ("title: x", "title: !!timestamp soon", 1, "not YAML: 'soon' is not a valid !!timestamp"),
        ("title: x", "title: !!bool maybe", 1, "not YAML: 'maybe' is not a valid !!bool"),
        ("seeds: 2", "seeds: !!int ''", 2, "not YAML: '' is not a valid !!int"),
        ("title: x", "title: \x07", 1, "the character '\\x07' is not allowed"),
        ("  one:", "  [one]:", 8, "expected a name before the colon"),
        ("  one:", "  '':", 8, "expected a name before the colon"),
        ("  two: ", "  1: {alpha: 1}\n  '1': ", 10, "'1' is a duplicate of line 9"),
        ("num-clients: 4", "4: num-clients", 3, "config key = '4' is unknown"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_line(old, new, line, words):
    parse_recipe(good, Path("r.yaml"))
    with pytest.raises(ValueError) as rejected:
        parse_recipe(good.replace(old, new, 1), Path("r.yaml"))
    assert str(rejected.value).startswith(f"r.yaml, line {line}: ")
    assert words in str(rejected.value)


@pytest.mark.parametrize("name", ["off", "on", "010", "0.10", "12:30", "~", "1e-2"])
def test_a_row_is_called_as_it_is_written(name):
    """YAML reads `off` as False and 010 as 8."""
    text = good.replace("  one:", f"  {name}:").replace("above one", f"above {name}")
    assert parse_recipe(text, Path("r.yaml")).rows[0].name == name


def test_off_is_text_in_a_text_key():
    """YAML reads it as False, which was refused."""
    text = good.replace("config: {", "config: {norm-bound: off, flip: off, ", 1)
    text = text.partition("claims")[0] + "grid: {norm-bound: [off, median]}\n"
    recipe = parse_recipe(text, Path("r.yaml"))
    assert recipe.cells[0].keys["norm-bound"] == "off"
    assert recipe.cells[0].keys["flip"] is False
    assert [row.parts[-1] for row in recipe.rows[:2]] == ["norm-bound = off", "norm-bound = median"]


@pytest.mark.parametrize(("number", "taken"), [("010", 8), ("1:30", 90)])
def test_a_number_that_yaml_reads_as_another_is_refused_with_its_line(number, taken):
    text = good.replace("num-clients: 4", f"num-clients: {number}")
    with pytest.raises(ValueError, match=f"^r.yaml, line 3: YAML takes {number} for {taken}:"):
        parse_recipe(text, Path("r.yaml"))


RECO = "method: fedreco, local-test-fraction: 0.3, of: personal.mean"


def test_no_name_is_no_directory():
    with pytest.raises(ValueError, match=r"^recipe = '' is unknown\. Allowed: fedcka-figure-2"):
        load_recipe("")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_recipe_in_another_encoding_is_refused_with_its_line(encoding, tmp_path):
    """Python's words were all that was said."""
    path = tmp_path / "r.yaml"
    path.write_bytes("rows: {A: {}}\ntitle: Größe\n".encode(encoding))
    line = 1 if encoding == "utf-16" else 2
    with pytest.raises(ValueError, match=f"^{path}, line {line}: not UTF-8: .*save it as UTF-8$"):
        load_recipe(str(path))


def test_a_recipe_is_read_as_utf_8_wherever_it_is(tmp_path, monkeypatch):
    path, read = tmp_path / "r.yaml", Path.read_text
    path.write_bytes("rows: {A: {}}\ntitle: Größe\n".encode())

    def read_in_latin_1(path: Path, encoding: str = "latin-1") -> str:
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", read_in_latin_1)  # as of such a locale
    assert load_recipe(str(path)).title == "Größe"


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ("method: fedprox", "method: fedprox, fedprox.mu: -1", "line 9", "fedprox.mu = -1"),
        ("method: fedprox", "method: fedpox", "line 9", "did you mean fedprox?"),
        ("source: digits", "source: 'npz:/nowhere/x.npz'", "line 3", "x.npz"),
        ("alpha: 0.5", "alpha: -1", "line 5", "alpha = -1"),
        ("num-clients: 4", "num-clients: 2000", "line 3", "1 to 1438"),
        ("num-clients: 4", "lr: 0.1", "lines 8 and 5", "num-clients = 0"),
        ("two: {", "two: {tune: {fedprox.mu: [1, -2]}, ", "line 9", "fedprox.mu = -2"),
        (
            "method: fedprox",
            "method: fedcka, fedcka.num-layers: 9",
            "lines 9 and 5",
            "num-layers = 9",
        ),
        (
            "method: fedprox",
            "method: fedprox, of: personal.mean",
            "line 9",
            "of = 'personal.mean': with this config, fedprox records global.accuracy",
        ),
        (
            "method: fedprox",
            "method: fedprox, local-test-fraction: 0.2, of: local_global.mean",
            "line 9",
            "fedprox records global.accuracy; it needs evaluate-clients = 'all'",
        ),
        ("method: fedprox", "method: fedrep", "lines 9 and 5", "fedrep records personal.mean"),
        ("method: fedprox", "aggregation: krum, num-malicious: 1", "line 9", "there are 4"),
        ("method: fedprox", "min-replies: 7", "line 9", "only 4 clients train in a round"),
        (
            "method: fedprox",
            "method: fedprox, evaluate-clients: all",
            "lines 9 and 5",
            "client-0000 has no local test part",
        ),
        ("method: fedprox", f"{RECO}, fedreco.split: x", "lines 9 and 5", "has the stages"),
        (
            "method: fedprox",
            f"{RECO}, client-models: 'cnn-fedreco,resnet20'",
            "line 9",
            "representation widths differ",
        ),
        ("alpha: 5.0", "alpha: 5.0, at: 6", "line 6", "at = 6: expected at most 5, the last round"),
        ("title: x", "take: mean 9", "line 1", "take = 'mean 9': expected at most 5, as"),
        ("title: x", "at: 3", "line 1", "round 3 of 5, which evaluate-every = 2 skips"),
        (
            "title: x\nseeds: 2\nconfig: {",
            "take: seconds a round\nseeds: 2\nconfig: {privacy.epsilon: 0.5, ",
            "lines 8 and 5",
            "privacy.metrics = 'withheld': clients send no seconds, but this recipe reads",
        ),
    ],
)
def test_runs_that_could_not_start_are_refused_before_the_first(old, new, where, words, tmp_path):
    recipe = parse_recipe(good.replace(old, new, 1), Path("r.yaml"))
    every = {"evaluate-every": 2} if "at: 3" in new else {}
    with pytest.raises(ValueError) as rejected:
        check_recipe(recipe, recipe.cells, replace(PAPER, changes=every), tmp_path)
    assert str(rejected.value).startswith(f"r.yaml, {where} (")
    assert words in str(rejected.value)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ("lr: 0.1", "line 6: grid.lr = 0.1: expected a list of values"),
        ("lr: []", "line 6: grid.lr = []: expected a list of values"),
        ("lrr: [0.1]", "line 6: config key = 'lrr' is unknown; did you mean lr?"),
        ("lr: [0.1, fast]", "line 6 (lr = fast; a): lr = 'fast': "),
        ("lr: [0.1, -1.0]", "line 6 (lr = -1.0; a): lr = -1.0: "),
        ("fedprox.mu: [0.1, 1]", "lines 6 and 4 (fedprox.mu = 0.1; a): fedprox.mu has no effect"),
        ("alpha: [1.0, 2.0]", "line 6: alpha is set by 'a' (line 4)"),
        ("lr: [0.1, 0.1]", "line 6: two rows are called 'lr = 0.1'"),
        (f"lr: {many}\n  momentum: {many}", "line 7: 160,000 combinations of values: expected at"),
    ],
)
def test_an_impossible_grid_is_refused_with_its_line(grid, words, tmp_path):
    def check():
        recipe = parse_recipe(f"{head}grid:\n  {grid}\n", Path("r.yaml"))
        check_recipe(recipe, recipe.cells, PAPER, tmp_path)

    head = "title: x\nconfig: {source: digits, num-clients: 4}\ncolumns:\n  a: {alpha: 0.5}\n"
    with pytest.raises(ValueError) as rejected:
        check()
    assert str(rejected.value).startswith(f"r.yaml, {words}")
    assert "\n" not in str(rejected.value)


def test_a_number_with_an_exponent_needs_no_point():
    """YAML 1.1 takes 1e-2 for text."""
    recipe = parse_recipe(good.partition("columns")[0].strip() + "\n" + GRID, Path("r.yaml"))
    assert [cell.keys["lr"] for cell in recipe.cells] == [0.01, 200.0, 0.003]


GRID = "columns:\n  a: {alpha: 0.5}\ngrid:\n  lr: [1e-2, 2E2, +3.e-3]\n"


def test_a_value_that_is_set_for_all_runs_is_not_looked_for_in_the_file(tmp_path):
    """The error named the line of the file that sets the key to a good value."""
    text = "config: {num-clients: 2, source: digits, num-rounds: 2}\nrows: {A: {}}\n"
    recipe = parse_recipe(text, tmp_path / "r.yaml")
    for key, value in (("num-rounds", -1), ("num-clients", 100_000)):
        options = replace(PAPER, changes={key: value})
        with pytest.raises(ValueError, match=rf"^--set \(A; result\): {key} = {value}: expected"):
            check_recipe(recipe, recipe.cells, options, tmp_path)


def test_a_key_of_a_product_is_refused_with_its_own_line(tmp_path):
    product = "  - {a: {alpha: 0.5}, b: {alpha: -5.0}}\n  - {c: {lr: 0.1}}\n"
    text = good.replace("  a: {alpha: 0.5}\n  b: {alpha: 5.0}\n", product).partition("claims")[0]
    recipe = parse_recipe(text, Path("r.yaml"))
    with pytest.raises(ValueError, match=r"r\.yaml, line 5 \(one; b, c\): alpha = -5"):
        check_recipe(recipe, recipe.cells, PAPER, tmp_path)


def test_every_seeds_split_is_tried_before_the_first_run(tmp_path, monkeypatch):
    recipe = parse_recipe(good, Path("r.yaml"))
    tried = []

    def split(config, partition, num_clients):
        tried.append((config.data.alpha, config.rounds.seed))
        if config.rounds.seed == 2:
            raise ValueError("a client has too few samples")

    monkeypatch.setattr(preflight, "client_indices", split)
    with pytest.raises(ValueError, match="too few samples"):
        check_recipe(recipe, recipe.cells, replace(PAPER, seeds=[0, 1, 2]), tmp_path)
    assert tried == [(0.5, 0), (0.5, 1), (0.5, 2)]
    tried.clear()
    check_recipe(recipe, recipe.cells, replace(PAPER, seeds=[0, 1]), tmp_path)
    assert tried == [(0.5, 0), (0.5, 1), (5.0, 0), (5.0, 1)]  # rows share their splits


def test_a_name_under_only_is_a_row_a_column_or_a_part_of_one():
    recipe = load_recipe("fedintr-table-3")
    cells = selected(recipe, ["FedIntR", "CIFAR-10", "beta 5", "beta 0.1"])
    assert [(c.row.name, c.column.name) for c in cells] == [
        ("FedIntR", "CIFAR-10, beta 5"),
        ("FedIntR", "CIFAR-10, beta 0.1"),
    ]
    assert len(selected(recipe, ["CIFAR-100, beta 5"])) == 5
    with pytest.raises(ValueError, match="--only 'FedAvgg': fedintr-table-3 has"):
        selected(recipe, ["FedAvgg"])


# --- scales and measures ----------------------------------------------------------------------


def test_scales_shrink_by_their_stated_factors():
    keys = {"preset": "fedintr-table1-fmnist"}  # 100 rounds, 10 epochs, batches of 512
    assert scaled(keys, SCALES["paper"]) == {}
    assert scaled(keys, SCALES["hour"]) == {
        "num-rounds": 20,
        "local-epochs": 2,
        "data-fraction": 0.25,
        "batch-size": 128,
        "batches-per-epoch": 0,
        "min-samples": 2,
        "evaluate-every": 1,
    }
    small = {"preset": "fedcka-table1-cifar10"}  # batches of 128
    assert scaled(small, SCALES["minutes"])["batch-size"] == 128
    short = {"preset": "fedcka-table1-tiny-imagenet", "local-epochs": 1, "batch-size": 8}
    minutes = scaled(short, SCALES["minutes"])  # the floors hold: 7 * ceil(100,000 / 20 / 10 / 8)
    assert (minutes["num-rounds"], minutes["local-epochs"], minutes["batch-size"]) == (7, 1, 8)


@pytest.mark.parametrize(
    ("keys", "rounds"),
    [
        # 60,000 / 20 / 10 clients in batches of 128: 3 steps, 2 epochs
        ({"preset": "fedintr-table1-fmnist"}, 67),
        # 1 batch an epoch, 2 epochs
        ({"preset": "fedrcl-table1-cifar10"}, 200),
        # 50,000 / 20 / 10 = 250 samples: 2 steps; 40 rounds are all the paper's: 5 epochs
        ({"preset": "fedcka-table1-cifar100"}, 40),
        # four fifths of 60,000 / 20 / 50 samples in batches of 64: 1 step, 2 epochs
        ({"preset": "fedreco-lenet-table1-fmnist"}, 200),
        # 70 % of 70,000 / 20 / 50 samples, test images among them, in batches of 48: 2 steps
        ({"preset": "fedreco-table1-fmnist"}, 100),
        # of unknown size: a twentieth
        ({"preset": "fedreco-lenet-table1-fmnist", "source": "folder:/data/mine"}, 25),
        ({"preset": "fedrcl-table1-cifar10", "source": "folder:/data/mine"}, 200),
    ],
)
def test_scale_minutes_has_rounds_for_400_steps_or_the_papers(keys, rounds):
    assert scaled(keys, SCALES["minutes"])["num-rounds"] == rounds


def num_steps(keys):
    config = resolve_config(keys)
    return config.rounds.num_rounds * steps_per_round(config, config.data.source)


@pytest.mark.parametrize("name", shipped_recipes())
def test_scale_minutes_has_at_least_400_steps_and_at_most_the_papers(name):
    for cell in load_recipe(name).cells:
        keys = scaled(cell.keys, SCALES["minutes"])
        assert num_steps({**cell.keys, **keys}) >= min(400, num_steps(cell.keys))
        paper = resolve_config(cell.keys).flat
        for key in ("num-rounds", "local-epochs", "data-fraction"):
            assert keys[key] <= paper[key]


def test_an_epoch_has_at_most_a_batch_for_each_sample():
    config = resolve_config({"preset": "fedrcl-table1-cifar10", "batches-per-epoch": 100_000})
    assert steps_per_round(config, "cifar10") == 5 * 500  # 50,000 samples, 100 clients


def test_a_run_without_local_epochs_is_scaled_as_one_with_an_epoch():
    keys = [{"preset": "fedcka-table1-cifar100", "local-epochs": n} for n in (0, 1)]
    none, one = (scaled(each, SCALES["minutes"]) for each in keys)
    assert none == one | {"local-epochs": 0}


@pytest.mark.parametrize(
    ("changes", "share"),
    [({}, 1.0), ({"fraction-train": 0.1}, 0.1), ({"num-clients": 20, "fraction-train": 0.5}, 0.5)],
)
def test_seconds_a_round_are_judged_by_the_samples_of_the_whole_cohort(tmp_path, changes, share):
    recipe = load_recipe("fedcka-table-4")
    (claim, *_) = [c for c in recipe.claims if c.is_headline]
    cell = recipe.cell(*recipe.sides_of(claim)[0])
    options = Options("paper", changes, [0], full_grid=False)
    found = result_of(cell, options, tmp_path)
    run = run_of(cell, found.candidate or {}, 0, options, tmp_path)
    assert share_of_steps(claim, found, run) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize(
    ("scale", "changes", "elsewhere"),
    [
        ("paper", {}, []),
        ("paper", {"num-rounds": 45}, ["at round 45 instead of 100"]),
        ("paper", {"num-rounds": 200}, ["at round 200 instead of 100"]),
        (
            "day",
            {"num-rounds": 50, "local-epochs": 10, "data-fraction": 1.0},
            ["at 50% of the local steps"],
        ),
    ],
)
def test_runs_read_at_another_round_than_the_papers_are_named(tmp_path, scale, changes, elsewhere):
    """Also where the recipe names no round, as the paper reads the last one."""
    cells = selected(load_recipe("fedcka-table-2"), ["FedAvg", "FedCKA", "alpha 5"])
    options = Options(scale, changes, [0], full_grid=False)
    sides = [result_of(cell, options, tmp_path) for cell in cells]
    runs = [run_of(s.cell, s.candidate or {}, 0, options, tmp_path) for s in sides]
    assert elsewhere_of(sides, runs) == elsewhere


RCL = {"preset": "fedrcl-table1-cifar10"}  # 5 epochs of 10 batches


@pytest.mark.parametrize(
    ("keys", "epochs", "batches", "fraction"),
    [
        ({"preset": "fedcka-table1-cifar100"}, 5, 0, 1 / 20),
        # 5 rounds of 4 epochs of 20 steps; on all the data an epoch has 40
        ({"preset": "fedcka-table1-cifar100", "num-rounds": 5, "local-epochs": 4}, 4, 0, 1 / 2),
        # all that the paper has: 2 rounds, 1 epoch
        ({"preset": "fedcka-table1-cifar100", "num-rounds": 2, "local-epochs": 1}, 1, 0, 1.0),
        (RCL | {"num-rounds": 100}, 4, 1, 1 / 20),
        (RCL | {"num-rounds": 40}, 5, 2, 1 / 20),
        (RCL | {"num-rounds": 5}, 5, 10, 1 / 20),
    ],
)
def test_scale_minutes_has_more_epochs_then_more_data_where_rounds_are_few(
    keys, epochs, batches, fraction
):
    minutes = scaled(keys, SCALES["minutes"])
    assert (minutes["local-epochs"], minutes["batches-per-epoch"]) == (epochs, batches)
    assert minutes["data-fraction"] == pytest.approx(fraction)
    min_samples = resolve_config(keys).data.min_samples
    assert minutes["min-samples"] == max(1, round(min_samples * fraction))


def test_ten_and_ten_point_zero_are_one_job(tmp_path):
    path = tmp_path / "mine.yaml"
    rows = [f"config: {{method: fedintr, fedintr.mu: {mu}}}\nrows: {{A: {{}}}}\n" for mu in TENS]
    names = [job_name(parse_recipe(text, path), PAPER) for text in rows]
    assert names[0] == names[1] != names[2]


def test_the_job_of_a_recipe_with_a_long_name_in_any_script_fits_in_a_file_name(tmp_path):
    path = tmp_path / f"{'實' * 83}.yaml"  # as long as file systems allow
    recipe = parse_recipe("config: {method: fedintr}\nrows: {A: {}}\n", path)
    assert len(f"{job_name(recipe, PAPER)}.json".encode()) < 255


def test_ten_and_ten_point_zero_are_one_run(tmp_path):
    cell = load_recipe("fedintr-table-1").cell("FedIntR", "CIFAR-10")
    runs = [run_of(cell, {"fedintr.mu": mu}, 0, PAPER, tmp_path) for mu in TENS]
    assert runs[0].name == runs[1].name != runs[2].name


def test_cache_and_device_are_part_of_a_run_where_seconds_are_read(tmp_path):
    for name, is_timed in (("fedcka-table-4", True), ("fedcka-table-1", False)):
        cell = load_recipe(name).cells[0]
        names = {
            run_of(cell, {}, 0, replace(PAPER, changes=changes), tmp_path).name
            for changes in ({}, {"cache-mb": 0}, {"device": "cuda"})
        }
        assert len(names) == (3 if is_timed else 1)
        for changes in ({}, {"threads": 2}):
            names.add(run_of(cell, {}, 0, replace(PAPER, changes=changes), tmp_path).name)
        assert len(names) == (4 if is_timed else 2)


def test_what_the_papers_time_is_timed_without_the_cache_and_with_it_and_judged_without():
    for name in ("fedcka-table-3", "fedcka-table-4", "fedreco-table-2"):
        recipe = load_recipe(name)
        timed = {c.column.name: c.keys.get("cache-mb", 512) for c in recipe.cells if c.take.is_time}
        assert sorted(timed.values()) == len(timed) // 2 * [0] + len(timed) // 2 * [512]
        for claim in recipe.claims:
            assert timed.get(claim.place, 0) == 0


@pytest.mark.parametrize(
    ("recipe", "row", "scale", "every"),
    [
        ("fedreco-table-1", "FedAvg-FT", "paper", 501),
        ("fedreco-table-1", "FedBABU", "hour", 100),
        ("fedreco-table-1", "FedRep", "paper", 1),  # keeps its head: nothing is tuned
        ("fedreco-figure-3a", "FedAvg-FT", "paper", 1),  # curves
        ("fedreco-table-2", "FedBABU", "paper", 1),  # seconds to an accuracy
    ],
)
def test_fine_tuning_is_evaluated_after_the_last_round_where_only_that_is_read(
    recipe, row, scale, every, tmp_path
):
    (cell, *_) = [c for c in load_recipe(recipe).cells if c.row.name == row]
    run = run_of(cell, {}, 0, Options(scale, {}, [0], full_grid=False), tmp_path)
    assert resolve_config(run.keys).rounds.evaluate_every == every
    changed = Options(scale, {"evaluate-every": 10}, [0], full_grid=False)
    keys = run_of(cell, {}, 0, changed, tmp_path).keys
    assert keys["evaluate-every"] == 10


def test_values_that_are_tried_leave_five_seeds_beside_the_one_that_chooses():
    table = load_recipe("fedcka-table-2")
    assert seeds_for(table, table.cells, full_grid=False) == [0, 1, 2]
    assert seeds_for(table, table.cells, full_grid=True) == [0, 1, 2, 3, 4, 5]
    plain = [cell for cell in table.cells if cell.row.name == "FedAvg"]
    assert seeds_for(table, plain, full_grid=True) == [0, 1, 2]


def test_a_report_looks_once_at_what_the_runs_of_a_cell_have_in_common(monkeypatch, tmp_path):
    looks: list[Path] = []
    monkeypatch.setattr(plan, "data_of", lambda path: looks.append(path) or "a digest")
    table = load_recipe("fedcka-table-2")
    options = Options("paper", {}, [0, 1], full_grid=False)
    runs = [run_of(table.cells[0], {}, seed, options, tmp_path) for seed in options.seeds]
    finished = [(run, tmp_path / run.name) for run in runs]
    result = Result(table.cells[0], {}, {0: 60.0, 1: 61.0}, 2, finished)
    assert [(result.mean, result.deviation is None, result.mixes) for _ in range(5)] == (
        5 * [(60.5, False, "")]
    )
    assert looks == [path for _, path in finished]


# --- from which round a paper makes its claim -------------------------------------------------


def first_claim(name: str, start: str, scale: str, changes: Keys) -> JudgedClaim:
    """The first claim of this recipe that begins so, with made-up numbers for all cells."""
    recipe, how = load_recipe(name), Options(scale, changes, [0, 1, 2], full_grid=False)
    results = {
        (c.row.name, c.column.name): Result(
            c,
            c.paper_candidate,
            {s: 60.0 + ("Avg" not in c.row.name) + 0.1 * s for s in range(3)},
            3,
        )
        for c in recipe.cells
    }
    claim = next(c for c in recipe.claims if c.text.startswith(start))
    return judge_claims(replace(recipe, claims=[claim]), results, how)[0]


@pytest.mark.parametrize(
    ("name", "start", "scale", "changes", "share"),
    [
        # FedRCL: from round 140 of 5 x 10 steps = 7,000
        ("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-100, alpha 0.05, 500R", "paper", {}, None),
        # day: at round 250 of 2 x 10 = 5,000; at the last 500: 10,000
        ("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-10, alpha 0.05, 500R", "day", {}, "71%"),
        ("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-10, alpha 0.05, 1000R", "day", {}, None),
        # what was run before: 30 rounds of 2 x 10 = 600
        (
            *("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-10, alpha 0.6, 1000R"),
            *("day", {"num-rounds": 30}, "9%"),
        ),
        # a quarter of the rounds, the paper's steps in each: round 250 instead of 140
        (
            *("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-10, alpha 0.05, 1000R"),
            *("paper", {"num-rounds": 250}, None),
        ),
        # read at its round 250 as well, not 125
        (
            *("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-10, alpha 0.05, 500R"),
            *("paper", {"num-rounds": 250}, None),
        ),
        # round 500 of 500 is the paper's; 300 are too few
        (
            *("fedrcl-table-2", "FedRCL above FedAvg in CIFAR-10, 100 clients, 500R"),
            *("paper", {"num-rounds": 500}, None),
        ),
        (
            *("fedrcl-table-2", "FedRCL above FedAvg in CIFAR-10, 100 clients, 500R"),
            *("paper", {"num-rounds": 300}, "60%"),
        ),
        # FedCKA: from round 41 of 10 x 40; hour: 20 rounds of 2 x 10 steps = 400 of 16,400
        ("fedcka-table-2", "FedCKA above FedAvg in alpha 5", "hour", {}, "2%"),
        ("fedcka-table-2", "FedCKA above FedAvg in alpha 5", "paper", {"num-rounds": 40}, "98%"),
        ("fedcka-table-2", "FedCKA above FedAvg in alpha 5", "paper", {"num-rounds": 41}, None),
        # 1 of 140 rounds
        (
            *("fedrcl-table-1", "FedRCL above FedAvg in CIFAR-10, alpha 0.05, 1000R"),
            *("paper", {"num-rounds": 1}, "under 1%"),
        ),
        # 60,000 * 0.8 / 50 / 64: an epoch is 15 steps
        (
            *("fedreco-lenet-table-1", "FedReCo above FedAvg in Fashion-MNIST", "paper"),
            *({"fedreco.k-u": "1 step", "fedreco.k-v": "1 step"}, "7%"),
        ),
        (
            *("fedreco-lenet-table-1", "FedReCo above FedAvg in Fashion-MNIST", "paper"),
            *({"fedreco.k-u": "15 steps"}, None),
        ),
        # which epochs that it does not train do not make up for
        (
            *("fedreco-lenet-table-1", "FedReCo above FedAvg in Fashion-MNIST", "paper"),
            *({"num-rounds": 250, "local-epochs": 4}, "50%"),
        ),
        # without a round: from the one at which the paper reads it
        ("fedintr-table-1", "FedIntR above FedAvg in Fashion", "paper", {"num-rounds": 99}, "99%"),
        ("fedcka-table-1", "FedCKA above FedAvg in Tiny ImageNet", "paper", {}, None),
        ("fedintr-table-4", "FedIntR (mu 10) above FedAvg in N = 50, T = 800", "paper", {}, None),
    ],
)
def test_below_the_local_steps_from_which_the_paper_makes_it_a_claim_is_not_tested(
    name, start, scale, changes, share
):
    claim = first_claim(name, start, scale, changes)
    assert claim.verdict == ("not tested" if share else "reproduced")
    assert claim.effect == pytest.approx(1.0)
    if share:
        assert claim.detail.startswith(f"at {share} of the paper's local steps; +1.00")


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("digits", "no verdict on runs on digits; +1.00"),
        ("cifar100", "no verdict on runs on cifar100; +1.00"),
        ("folder:/data/cifar10-jpg", "+1.00"),  # the paper's data from a folder: a deviation
    ],
)
def test_runs_on_another_data_set_say_nothing_of_a_papers_claim(source, detail):
    changes = {"source": source}
    claim = first_claim("fedcka-table-2", "FedCKA above FedAvg in alpha 5", "paper", changes)
    assert claim.detail.startswith(detail)
    if detail == "+1.00":
        assert (claim.verdict, claim.decide) == ("reproduced", "")
    else:
        assert (claim.verdict, claim.decide) == ("not tested", "runs on cifar10")
    assert any(each.startswith("source ") for each in claim.deviations)


def test_a_claim_of_ones_own_recipe_below_its_local_steps_speaks_of_no_paper():
    sweep = str(root / "docs" / "sweep.yaml")
    claim = first_claim(sweep, "homogeneous above", "paper", {"num-rounds": 2})
    assert claim.detail.startswith("at 67% of the recipe's local steps; ")


def test_a_judged_claim_says_what_it_rests_on():
    claim = first_claim("fedcka-table-2", "FedCKA above FedAvg in alpha 0.1", "hour", {"lr": 0.05})
    assert (claim.paper, claim.recipe) == ("FedCKA Table 2", "fedcka-table-2")
    assert (claim.seeds, claim.scale, claim.is_headline) == (3, "hour", True)
    assert claim.interval == pytest.approx((1.0, 1.0))
    assert claim.paper_effect == pytest.approx(52.35 - 50.43)
    assert "num-rounds 20 (paper: 100)" in claim.deviations
    assert "lr 0.05 (paper: 0.01)" in claim.deviations
    assert claim.decide == "41 times the local steps"  # 16,400 / 400
    almost = first_claim(
        "fedcka-table-2", "FedCKA above FedAvg in alpha 0.1", "paper", {"num-rounds": 30}
    )
    assert almost.decide == "1.4 times the local steps"  # 41 / 30
    decided = first_claim("fedcka-table-2", "FedCKA above FedAvg in alpha 0.1", "paper", {})
    assert (decided.deviations, decided.decide) == ([], "")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"threads": 2, "keep-state": True}, []),
        ({"cuda-graphs": True}, []),
        ({"precision": "fp32"}, []),  # the paper states none; the preset: auto
        ({"precision": "bf16"}, ["precision bf16 (paper: auto)"]),
        ({"width": 16}, ["width 16 (paper: 64)"]),
        ({"width": 64}, []),
    ],
)
def test_how_a_run_is_computed_is_no_deviation_and_widths_are_those_of_the_models(changes, found):
    start = "FedRCL above FedAvg in CIFAR-10, alpha 0.05, 500R"
    claim = first_claim("fedrcl-table-1", start, "paper", changes)
    assert claim.deviations == found
    recipe, how = load_recipe("fedrcl-table-1"), Options("paper", changes, [0], full_grid=False)
    differing = [s for s in settings_of(recipe, {}, how) if s.paper]
    assert [f"{s.name} {s.ours} (paper: {s.paper})" for s in differing] == found


def test_threads_and_how_steps_run_are_deviations_where_seconds_are_read():
    changes = {"threads": 2, "cuda-graphs": True}
    claim = first_claim("fedcka-table-4", "FedCKA below MOON in 50", "paper", changes)
    assert claim.deviations == ["cuda-graphs True (paper: False)", "threads 2 (paper: 1)"]


@pytest.mark.parametrize(
    ("name", "start", "found"),
    [
        (
            "fedintr-table-3",
            "FedIntR above FedAvg in CIFAR-10, beta 0.1",
            True,
        ),  # median of the last ten
        ("fedreco-table-1", "FedReCo above FedAvg in Fashion-MNIST", False),  # the last round
    ],
)
def test_evaluations_left_out_are_a_deviation_where_they_are_read(name, start, found):
    claim = first_claim(name, start, "paper", {"evaluate-every": 100})
    assert ("evaluate-every 100 (paper: 1)" in claim.deviations) == found


def test_the_seeds_that_would_decide_are_computed_from_the_spread():
    """FedIntR, +0.25: t(0.975, 22) = 2.074, and 2.074 * 0.57 / 23**0.5 < 0.25."""

    def decides(differences, paper, *more, **others):
        effects = [abs(statistics.fmean(differences)), abs(paper)] if differences else []
        return what_decides(differences, effects, *more, **others)

    spread = [0.03, 0.6, 1.17]
    assert statistics.stdev(spread) == pytest.approx(0.57)
    assert decides(spread, 0.25) == "23 seeds"
    assert decides(spread, -0.25) == "23 seeds"
    assert decides([x - 0.35 for x in spread], 0.6) == decides(spread, 0.25)
    # at the paper's effect three seeds would be enough, and there are three
    assert int(decides([-0.5, 0.5, 1.5], 7.71).split()[0]) > 3
    assert decides(spread, 0.25, num_tuning=1) == "24 seeds"  # `--seeds` counts it too
    assert decides([4.31], 7.71) == "a second seed, to know the spread"
    assert decides([], 0.25) == decides([], 0.25, "", 0) == "more seeds"
    assert decides(spread, 0.25, "FedIntR diverged 1/4") == (
        "runs that finish: FedIntR diverged 1/4"
    )


@pytest.mark.parametrize(
    ("scale", "changes", "detail"),
    [
        ("paper", {}, "+0.00"),
        ("day", {}, "at 50% of the paper's samples a round"),
        ("minutes", {}, "at 3% of"),  # half the epochs, a twentieth of the data
        ("paper", {"data-fraction": 0.01, "batch-size": 1}, "at under 1% of"),
        ("paper", {"num-rounds": 1}, "+0.00"),  # seconds a round
    ],
)
def test_seconds_are_judged_where_a_round_has_as_much_work_as_the_papers(scale, changes, detail):
    claim = first_claim("fedcka-table-4", "FedCKA below MOON in 50", scale, changes)
    assert claim.detail.startswith(detail)
    assert (claim.verdict == "not tested") == (detail != "+0.00")
    assert "outside the interval" not in claim.remarks  # the paper's are of another machine


def test_a_claim_may_name_its_round_and_a_headline_is_one_of_the_claims():
    recipe = parse_recipe(good.replace("one in a", "one in a from round 3"), Path("r.yaml"))
    (claim,) = recipe.claims
    assert (claim.text, claim.place, claim.from_round) == ("two above one in a", "a", 3)
    text = good + "headlines: [two above one in b]\n"
    with pytest.raises(
        ValueError, match="line 12: 'two above one in b': expected one of the claims"
    ):
        parse_recipe(text, Path("r.yaml"))


def test_names_may_contain_the_words_of_a_claim():
    text = """\
config: {source: digits, num-clients: 4}
rows: {SGD in fp32: {}, SGD in bf16: {lr: 0.1}}
columns: {a: {alpha: 1.0}, b from round 2: {alpha: 2.0}}
claims: [SGD in fp32 above SGD in bf16 in b from round 2]
"""
    (claim,) = parse_recipe(text, Path("r.yaml")).claims
    assert (claim.left, claim.right) == ("SGD in fp32", "SGD in bf16")
    assert (claim.place, claim.from_round) == ("b from round 2", 0)


def test_fedprocs_schedule_is_of_the_papers_rounds_and_shrinks_with_them():
    cells = [c for c in load_recipe("fedrcl-table-1").cells if c.row.name.startswith("FedProc")]
    for cell in (cells[0], cells[-1]):
        is_control = cell.row.name != "FedProc"
        for scale, changes, length in (
            ("paper", {}, 1000),
            ("paper", {"num-rounds": 200}, 1000),
            ("day", {}, 500),
        ):
            run = run_of(cell, {}, 0, Options(scale, changes, [0], full_grid=False), Path())
            found = resolve_config(run.keys).flat["fedproc.schedule-rounds"]
            assert found == (1 if is_control else length), (scale, changes)


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


@pytest.mark.parametrize("scale", SCALES)
def test_a_fedproc_run_with_a_schedule_of_its_own_length_counts_as_one_without(scale, tmp_path):
    cell = load_recipe("fedrcl-table-1").cell("FedProc", "CIFAR-10, alpha 0.05, 1000R")
    how = Options(scale, {}, [0], full_grid=False, any_code=True)
    run = run_of(cell, {}, 0, how, tmp_path)
    length = {"fedproc.schedule-rounds": 0}
    before = run_of(cell, length, 0, how, tmp_path)
    assert run.name == before.name
    config = resolve_config({**run.keys, **length}).flat
    attempt = make_run_directory(run.folder / "attempt", config, run.rounds)
    assert run.finished() == attempt
    shorter = Options("paper", {"num-rounds": 200}, [0], full_grid=False)
    run = run_of(cell, {}, 0, shorter, tmp_path)
    assert [key for key, *_ in differing(cell, {}, run)] == ["num-rounds"]  # T is the paper's


def test_where_the_number_of_batches_rules_it_shrinks_and_their_size_does_not():
    keys = {"preset": "fedrcl-table1-cifar10"}  # 10 batches an epoch
    assert [scaled(keys, SCALES[s])["batches-per-epoch"] for s in ("hour", "minutes")] == [2, 1]


@pytest.mark.parametrize("scale", SCALES)
def test_every_round_that_a_cell_is_read_at_is_evaluated(scale, tmp_path):
    options = Options(scale, {}, [0], full_grid=False)
    for name in ("fedintr-table-4", "fedrcl-table-1", "fedrcl-table-2"):
        for cell in load_recipe(name).cells:
            run = run_of(cell, {}, 0, options, tmp_path)
            check_reading(cell, run, resolve_config(run.keys))
            expected = cell.at * run.rounds / run.paper_rounds
            assert abs(last_round_read(cell, run) - expected) <= 0.5, cell.column.name


def test_round_500_of_a_shorter_run_with_the_papers_rounds_is_the_papers_round_500(tmp_path):
    """The same curve, once for 1,000 rounds and once cut after 500: the same moving average."""
    recipe = load_recipe("fedrcl-table-1")
    early, late = (recipe.cell("FedAvg", f"CIFAR-10, alpha 0.05, {n}R") for n in (500, 1000))
    found = []
    for changes in ({}, {"num-rounds": 500}):
        how = Options("paper", changes, [0], full_grid=False, any_code=True)
        run = run_of(early, {}, 0, how, tmp_path)
        make_run_directory(run.folder / "attempt", resolve_config(run.keys).flat, run.rounds)
        found.append(number_of(early, run))
    assert found[0] == found[1] is not None
    assert last_round_read(late, run) == 500  # its last
    result = result_of(late, how, tmp_path)
    assert ours(result).endswith("; at round 500 instead of 1000")
    first = result_of(early, how, tmp_path)
    assert "instead" not in ours(first)
    assert report_curve(first, [first, result], 0).references == [(500, early.paper)]
    assert result.difference is None
    assert first.difference == pytest.approx(first.mean - early.paper)


def test_what_the_notes_say_of_shards_at_minutes_is_so(tmp_path):
    recipe = load_recipe("fedrcl-table-a")
    options = Options("minutes", {}, [0], full_grid=True)
    labels = np.repeat(np.arange(100), 500)  # CIFAR-100's
    for gamma, fits in ((20, True), (50, False)):
        cell = recipe.cell("FedRCL", f"CIFAR-100, gamma {gamma}, 1000R")
        config = resolve_config(run_of(cell, {}, 0, options, tmp_path).keys)
        share = labels[stratified_share(labels, config.data.data_fraction, 0)]
        with nullcontext() if fits else pytest.raises(ValueError, match="shards-per-client"):
            partition_indices(
                config.data.partition,
                share,
                config.rounds.num_clients,
                alpha=config.data.alpha,
                classes_per_client=config.data.classes_per_client,
                shards_per_client=config.data.shards_per_client,
                min_size=config.data.min_samples,
                seed=0,
            )


def test_recipes_with_claims_have_the_seeds_to_judge_them():
    for recipe in map(load_recipe, shipped_recipes()):
        assert not recipe.claims or len(recipe.seeds) >= 3, recipe.name


def test_no_more_rounds_are_evaluated_than_have_to_be():
    keys = {"num-rounds": 1150, "num-clients": 4}  # 230 rounds: each 11th, and the last anyway
    read_at = {(): 11, (1150,): 11, (500,): 10, (500, 1150): 10, (30, 500): 2}
    for read, every in read_at.items():
        assert scaled(keys, SCALES["hour"], read)["evaluate-every"] == every


def test_diagnostics_stay_as_many_in_a_scaled_run():
    keys = {"num-rounds": 1000, "num-clients": 4, "diagnostics": "vci", "diagnostics-every": 50}
    assert scaled(keys, SCALES["hour"])["diagnostics-every"] == 10
    assert "diagnostics-every" not in scaled({**keys, "diagnostics": ""}, SCALES["hour"])


@pytest.mark.parametrize(
    ("recipe", "key", "values"),
    [
        ("fedintr-table-3", "alpha", "0.1, 0.5, 5.0"),  # the columns
        ("fedintr-table-3", "method", "fedavg, "),  # the rows
        ("fedintr-table-3", "fedintr.mu", "0.1, 0.5, 1, 10"),  # tuned
        ("fedintr-table-1", "source", "cifar10, "),  # by way of the columns' presets
        ("fedintr-table-3", "lr", ""),
    ],
)
def test_what_cells_differ_in_cannot_be_set_for_all_of_them(recipe, key, values):
    cells = load_recipe(recipe).cells
    if values:
        with pytest.raises(ValueError, match=rf"--set {key}: rows, columns or tuned .*\({values}"):
            refuse_overriding(cells, {key: 1})
    else:
        refuse_overriding(cells, {key: 1})


def test_runs_of_one_setting_have_one_folder_and_a_scaled_one_another(tmp_path):
    table, figure = load_recipe("fedintr-table-1"), load_recipe("fedintr-figure-5")
    cell = table.cell("FedAvg", "CIFAR-10")
    a = run_of(cell, {}, 0, PAPER, tmp_path)
    b = run_of(figure.cell("FedAvg", "E = 10"), {}, 0, PAPER, tmp_path)
    assert a.folder == b.folder
    hour = Options("hour", {}, [0], full_grid=True)
    changed = Options("paper", {"lr": 0.5}, [0], full_grid=True)
    others = [run_of(cell, {}, 0, hour, tmp_path), run_of(cell, {}, 1, PAPER, tmp_path)]
    others += [run_of(cell, {}, 0, changed, tmp_path)]
    assert len({a.folder, *(other.folder for other in others)}) == 4
    # another method's option is none of this run's business
    same = run_of(cell, {"moon.mu": 0.3}, 0, PAPER, tmp_path)
    assert same.folder == a.folder


accuracies = [0.10, 0.40, 0.20, 0.80, 0.60]
history = [
    {"round": i, "client_seconds": 10.0 * i, "global": {"accuracy": value}}
    for i, value in enumerate(accuracies, start=1)
]


def test_a_report_says_in_words_what_is_read():
    assert [parse_take(text).of("global.accuracy") for text in ("final", "mean 2", "ema 0.9")] == [
        "final global.accuracy, in %",
        "mean over the last 2 rounds of global.accuracy, in %",
        "moving average (0.9) of global.accuracy, in %",
    ]
    assert parse_take("seconds to 80").of("personal.mean") == "seconds to 80 % of personal.mean"
    assert parse_take("seconds a round").of("global.accuracy") == "seconds a round"


@pytest.mark.parametrize(
    ("take", "at", "shrink", "expected"),
    [
        ("final", 5, 1.0, 60.0),
        ("final", 3, 1.0, 20.0),
        ("best", 5, 1.0, 80.0),
        ("median 3", 5, 1.0, 60.0),
        ("mean 2", 5, 1.0, 70.0),
        ("mean 4", 5, 0.5, 70.0),  # a window of 4 of the paper's rounds is 2 of half as many
        ("median 10", 5, 0.05, 60.0),  # never less than the last
        ("ema 0.5", 3, 1.0, 22.5),  # ((0.5 * 10 + 0.5 * 40) + 20) / 2
        ("ema 0.25", 3, 0.5, 21.1328125),  # two of the paper's rounds each: 0.0625 is kept
        ("seconds to 40", 5, 1.0, 30.0),
        ("seconds to 90", 5, 1.0, math.inf),
        ("seconds a round", 5, 1.0, 30.0),
        ("final", 6, 1.0, None),  # not there yet
    ],
)
def test_measures_of_a_history(take, at, shrink, expected):
    found = measure(History(history), "global.accuracy", parse_take(take), at, shrink)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_clients_that_could_not_be_evaluated_are_not_left_out_of_a_mean():
    """A client's model is not finite in round 2: the mean of the others says too much."""
    lines = [
        {"round": n, "personal": {"mean": mean}, "num_evaluation_left_out": num}
        for n, mean, num in ((1, 0.5, 0), (2, 0.9, 1), (3, 0.6, 1))
    ]
    clients = [
        {"round": 2, "evaluation_left_out": {"a": "personal-loss is nan, not finite"}},
        {"round": 3, "evaluation_left_out": {"a": "no answer"}},
    ]
    found = History(lines, clients)
    assert (found.num_not_evaluated, found.rounds_partial) == (2, 1)
    assert measure(found, "personal.mean", parse_take("best"), 3, 1.0) == pytest.approx(60)
    for take in ("final", "best", "mean 2", "ema 0.5"):
        assert measure(found, "personal.mean", parse_take(take), 2, 1.0) is None


def test_a_moving_average_is_the_same_of_a_scaled_run_and_of_rarer_evaluations():
    """An accuracy that rises evenly from 0 to 100: the average lags by 9 of the paper's rounds."""
    found = []
    for rounds, every in ((1000, 1), (1000, 10), (200, 10), (50, 25)):
        evaluated = range(every, rounds + 1, every)
        curve = [{"round": r, "global": {"accuracy": r / rounds}} for r in evaluated]
        shrink = rounds / 1000
        found.append(
            measure(History(curve), "global.accuracy", parse_take("ema 0.9"), rounds, shrink)
        )
    assert found[0] == pytest.approx(99.1)
    assert found[1:] == pytest.approx([100] * 3, abs=0.6)


def test_a_recipe_whose_name_has_another_ending_is_not_taken_for_a_shipped_one(tmp_path):
    (tmp_path / "mine.txt").write_text(good)
    with pytest.raises(ValueError, match=r"mine\.txt: expected a file whose name ends in \.yaml"):
        load_recipe(str(tmp_path / "mine.txt"))


def test_a_recipe_that_never_ends_is_refused(tmp_path):
    """It ended in a MemoryError."""
    path = tmp_path / "a.yaml"
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"^recipe {path}: it is not a plain file$"):
        load_recipe(str(path))
