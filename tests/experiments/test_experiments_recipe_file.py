"""A recipe's file: what it says, and that a mistake is refused with its line."""

from pathlib import Path

import pytest
from experiment_fixtures import recipe_of

from keel.experiments.jobs import selected
from keel.experiments.recipe import load_recipe

GOOD = """\
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
TWO = "two: {method: fedprox}"


@pytest.mark.parametrize(
    ("old", "new", "line", "named"),
    [
        ("title: x", "titel: x", 1, "title"),
        ("seeds: 2", "seeds: 0", 2, "seeds"),
        ("seeds: 2", "seeds: [1, 1]", 2, "seeds"),
        ("num-clients: 4", "num-client: 4", 3, "num-clients"),
        ("num-clients: 4", "seed: 4", 3, "seed"),
        ("alpha: 0.5", "alpha: [0.5, 1]", 5, "alpha"),
        ("  b: {", "  a: {", 6, "'a'"),
        ("{alpha: 0.5}", "{alpha: 0.5, alpha: 1}", 5, "'alpha'"),
        ("method: fedavg", "method: fedavg, alpha: 0.1", 8, "alpha"),
        ("[1.5, null]", "[1.5]", 8, "paper of one"),
        ("[1.5, null]", "[1.5, high]", 8, "rows.one.paper"),
        ("[1.5, null]", "[1.5, .nan]", 8, "rows.one.paper"),
        (TWO, "two: {take: middle}", 9, "rows.two.take"),
        ("title: x", "take: mean 1.5", 1, "take"),
        (TWO, "two: {of: accuracy}", 9, "rows.two.of"),
        ("title: x", "shows: tables", 1, "shows"),
        (TWO, "two: {at: -1}", 9, "rows.two.at"),
        (TWO, "two: {tune: {lr: 1}}", 9, "rows.two.tune.lr"),
        ("a: {alpha: 0.5}", "a: {paper: 3}", 5, "paper of a"),
        (TWO, "two: {lr: 0.3, tune: {lr: [0.1, 0.2]}}", 9, "lr of two"),
        (TWO, "two: {tune: {mu: [1]}}", 9, "'mu'"),
        (TWO, "two: fedprox", 9, "rows.two"),
        (TWO, "two: {take: seconds a round}", 11, "seconds a round"),
        ("two above one in a", "two beats one in a", 11, "two beats one in a"),
        ("two above one in a", "two above three in a", 11, "three"),
        ("two above one in a", "two within 0 of one in a", 11, "two within 0 of one in a"),
        ("two above one in a", "two above two in a", 11, "two above two in a"),
        ("two above one in a", "every row above one in a", 11, "every row"),
        ("  - two above one in a", "  - two above one in a\nheadlines: [z]", 12, "'z'"),
        ("  one:", "  one: [", 9, ""),
        ("  one:", "\tone:", 8, ""),
        ("title: x", "title: 2020-13-45", 1, "2020-13-45"),
        ("title: x", "title: \x07", 1, ""),
        ("  one:", "  [one]:", 8, ""),
        ("  one:", "  '':", 8, ""),
    ],
)
def test_a_mistake_is_refused_with_its_line(old, new, line, named):
    recipe_of(GOOD)
    with pytest.raises(ValueError) as refused:
        recipe_of(GOOD.replace(old, new, 1))
    assert str(refused.value).startswith(f"r.yaml, line {line}: ")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("grid", "line", "named"),
    [
        ("lr: 0.1", 6, "grid.lr"),
        ("lr: []", 6, "grid.lr"),
        ("lrr: [0.1]", 6, "lrr"),
        ("alpha: [1.0, 2.0]", 6, "alpha"),
        ("lr: [0.1, 0.1]", 6, "lr = 0.1"),
    ],
)
def test_an_impossible_grid_is_refused_with_its_line(grid, line, named):
    head = "title: x\nconfig: {source: digits, num-clients: 4}\ncolumns:\n  a: {alpha: 0.5}\n"
    with pytest.raises(ValueError, match=rf"^r\.yaml, line {line}: .*{named}"):
        recipe_of(f"{head}grid:\n  {grid}\n")


@pytest.mark.parametrize("name", ["off", "on", "010", "0.10", "12:30", "~", "1e-2"])
def test_a_row_is_called_as_it_is_written(name):
    text = GOOD.replace("  one:", f"  {name}:").replace("above one", f"above {name}")
    assert recipe_of(text).rows[0].name == name


def test_values_are_those_of_yaml_1_2():
    text = GOOD.partition("columns")[0] + "grid: {norm-bound: [off, median], lr: [1e-2, 2E2]}\n"
    cells = recipe_of(text).cells
    assert [cell.keys["norm-bound"] for cell in cells] == ["off", "off", "median", "median"]
    assert [cell.keys["lr"] for cell in cells] == [0.01, 200.0] * 2
    assert cells[0].row.name == "norm-bound = off, lr = 0.01"


def test_a_mapping_may_be_merged_into_another():
    text = GOOD.replace("a: {", "a: &a {").replace("b: {alpha: 5.0}", "b: {<<: *a, lr: 0.5}")
    keys = recipe_of(text).cell("one", "b").keys
    assert (keys["alpha"], keys["lr"]) == (0.5, 0.5)


def test_the_product_of_axes_has_each_of_their_keys():
    product = "  - {a: {alpha: 0.5}, b: {alpha: 5.0}}\n  - {c: {lr: 0.1}}\n"
    text = GOOD.replace("  a: {alpha: 0.5}\n  b: {alpha: 5.0}\n", product).partition("claims")[0]
    recipe = recipe_of(text)
    assert [column.parts for column in recipe.columns] == [("a", "c"), ("b", "c")]
    assert (recipe.cells[1].keys["alpha"], recipe.cells[1].keys["lr"]) == (5.0, 0.1)


def test_a_claim_may_name_its_round_and_be_made_of_every_column():
    text = GOOD.replace("one in a", "one in every column from round 3")
    first, second = recipe_of(f"{text}headlines: [two above one in b]\n").claims
    assert (first.text, first.place, first.from_round) == ("two above one in a", "a", 3)
    assert (second.text, second.is_headline, first.is_headline) == (
        *("two above one in b", True, False),
    )


def test_names_may_contain_the_words_of_a_claim():
    text = """\
config: {source: digits, num-clients: 4}
rows: {SGD in fp32: {}, SGD in bf16: {lr: 0.1}}
columns: {a: {alpha: 1.0}, b from round 2: {alpha: 2.0}}
claims: [SGD in fp32 above SGD in bf16 in b from round 2]
"""
    (claim,) = recipe_of(text).claims
    assert (claim.left, claim.right) == ("SGD in fp32", "SGD in bf16")
    assert (claim.place, claim.from_round) == ("b from round 2", 0)


def test_a_name_under_only_is_a_row_a_column_or_a_part_of_one():
    recipe = load_recipe("fedintr-table-3")
    cells = selected(recipe, ["FedIntR", "CIFAR-10", "beta 5", "beta 0.1"])
    assert [cell.name for cell in cells] == [
        ("FedIntR", "CIFAR-10, beta 5"),
        ("FedIntR", "CIFAR-10, beta 0.1"),
    ]
    assert len(selected(recipe, ["CIFAR-100, beta 5"])) == 5
    with pytest.raises(ValueError, match="FedAvgg"):
        selected(recipe, ["FedAvgg"])


@pytest.mark.parametrize("name", ["fedcka", "mine.txt", "none.yaml", "folder.yaml", "utf16.yaml"])
def test_what_is_no_recipe_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(GOOD)
    Path("folder.yaml").mkdir()
    Path("utf16.yaml").write_text(GOOD, "utf-16")
    with pytest.raises(ValueError, match=name):
        load_recipe(name)
