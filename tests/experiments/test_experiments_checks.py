"""What is refused before the first run, with the line of the recipe."""

from dataclasses import replace

import pytest
from experiment_fixtures import options, recipe_of
from test_experiments_recipe_file import GOOD

from keel.experiments import checks
from keel.experiments.checks import check_recipe, refuse_overriding
from keel.experiments.recipe import load_recipe

PAPER = options()
FEDPROX = "method: fedprox"
RECO = "method: fedreco, local-test-fraction: 0.3, of: personal.mean"


@pytest.mark.parametrize(
    ("old", "new", "where", "named"),
    [
        (FEDPROX, "method: fedprox, fedprox.mu: -1", "line 9", "fedprox.mu = -1"),
        (FEDPROX, "method: fedpox", "line 9", "fedprox"),
        ("source: digits", "source: 'npz:/nowhere/x.npz'", "line 3", "x.npz"),
        ("alpha: 0.5", "alpha: -1", "line 5", "alpha = -1"),
        ("num-clients: 4", "num-clients: 2000", "line 3", "1438"),
        ("num-clients: 4", "lr: 0.1", "lines 8 and 5", "num-clients"),
        ("two: {", "two: {tune: {fedprox.mu: [1, -2]}, ", "line 9", "fedprox.mu = -2"),
        (FEDPROX, "method: fedcka, fedcka.num-layers: 9", "lines 9 and 5", "num-layers = 9"),
        (FEDPROX, "method: fedavg, fedprox.mu: 1", "lines 9 and 5", "fedprox.mu"),
        (FEDPROX, "method: fedprox, of: personal.mean", "line 9", "personal.mean"),
        (FEDPROX, "method: fedprox, of: local_global.mean", "line 9", "evaluate-clients"),
        (FEDPROX, "method: fedrep", "lines 9 and 5", "personal.mean"),
        (FEDPROX, "aggregation: krum, num-malicious: 1", "line 9", "4"),
        (FEDPROX, "min-replies: 7", "line 9", "4 clients"),
        (FEDPROX, "method: fedprox, evaluate-clients: all", "lines 9 and 5", "client-0000"),
        (FEDPROX, f"{RECO}, fedreco.split: x", "lines 9 and 5", "fedreco"),
        ("title: x", "take: mean 9", "line 1", "mean 9"),
        ("title: x", "at: 3", "line 1", "evaluate-every = 2"),
        (
            "title: x\nseeds: 2\nconfig: {",
            "take: seconds a round\nseeds: 2\nconfig: {privacy.epsilon: 0.5, ",
            "lines 8 and 5",
            "privacy.metrics",
        ),
    ],
)
def test_runs_that_could_not_start_are_refused_before_the_first(old, new, where, named, tmp_path):
    recipe = recipe_of(GOOD.replace(old, new, 1))
    every = {"evaluate-every": 2} if "at: 3" in new else {}
    with pytest.raises(ValueError) as refused:
        check_recipe(recipe, recipe.cells, replace(PAPER, changes=every), tmp_path)
    assert str(refused.value).startswith(f"r.yaml, {where} (")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_value_that_is_set_for_all_runs_is_not_looked_for_in_the_file(tmp_path):
    recipe = recipe_of("config: {num-clients: 2, source: digits, num-rounds: 2}\nrows: {A: {}}\n")
    for key, value in (("num-rounds", -1), ("num-clients", 100_000)):
        with pytest.raises(ValueError, match=rf"^--set \(A; result\): {key} = {value}"):
            check_recipe(recipe, recipe.cells, options(changes={key: value}), tmp_path)


def test_every_seeds_split_is_tried_once(tmp_path, monkeypatch):
    recipe = recipe_of(GOOD)
    tried = []

    def split(config, partition, num_clients):
        tried.append((config.data.alpha, config.rounds.seed))
        if config.rounds.seed == 2:
            raise ValueError("a client has too few samples")

    monkeypatch.setattr(checks, "client_indices", split)
    with pytest.raises(ValueError, match=r"r\.yaml, "):
        check_recipe(recipe, recipe.cells, options(seeds=[0, 1, 2]), tmp_path)
    assert tried == [(0.5, 0), (0.5, 1), (0.5, 2)]
    tried.clear()
    check_recipe(recipe, recipe.cells, options(seeds=[0, 1]), tmp_path)
    assert tried == [(0.5, 0), (0.5, 1), (5.0, 0), (5.0, 1)]  # rows share their splits


@pytest.mark.parametrize(
    ("recipe", "key", "is_refused"),
    [
        ("fedintr-table-3", "alpha", True),  # the columns
        ("fedintr-table-3", "method", True),  # the rows
        ("fedintr-table-3", "fedintr.mu", True),  # tuned
        ("fedintr-table-1", "source", True),  # by way of the columns' presets
        ("fedintr-table-3", "lr", False),
    ],
)
def test_what_cells_differ_in_cannot_be_set_for_all_of_them(recipe, key, is_refused):
    cells = load_recipe(recipe).cells
    if is_refused:
        with pytest.raises(ValueError, match=f"--set {key}"):
            refuse_overriding(cells, {key: 1})
    else:
        refuse_overriding(cells, {key: 1})
