"""Runs as the table of `keel ui` shows them."""

import json
from random import Random

from keel.views.store import Store
from tests.tools.run_directories import append_round, line_of, make_run


def test_runs_are_found_in_a_directory_and_in_the_output_of_experiments(tmp_path):
    make_run(tmp_path / "a", {"method": "fedavg"}, 2)
    make_run(tmp_path / "runs" / "cell" / "attempt", {"method": "moon"}, 2)
    make_run(tmp_path / "table" / "runs" / "code" / "cell" / "attempt-2", {"method": "fedcka"}, 2)
    assert {row["name"]: row["method"] for row in Store([tmp_path]).rows()} == {
        **{"a": "fedavg", "attempt": "moon", "attempt-2": "fedcka"}
    }
    assert [row["name"] for row in Store([tmp_path / "a"]).rows()] == ["a"]


def test_a_row_has_the_runs_numbers_and_follows_it(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 5, num_written=2, status="running")
    store = Store([tmp_path])
    [before] = store.rows()
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    accuracies = [line["global"]["accuracy"] for line in lines]
    assert (before["accuracy"], before["best"]) == (accuracies[-1], max(accuracies))
    assert (before["done"], before["total"], before["state"]) == (2, "5", "interrupted")
    assert store.rows()[0] is before
    append_round(run, line_of(3, Random(0)))
    assert store.rows()[0]["done"] == 3
    found = store.find(before["id"])
    assert found is not None
    assert found.directory == run
    assert store.find("0123") is None


def test_runs_that_differ_in_seed_and_place_have_one_setting(tmp_path):
    for seed in (0, 1):
        keys = {"method": "fedavg", "seed": seed, "output-dir": str(tmp_path / str(seed))}
        make_run(tmp_path / f"seed-{seed}", keys, 1)
    make_run(tmp_path / "other", {"method": "fedavg", "lr": 0.5}, 1)
    make_run(tmp_path / "unused", {"method": "fedavg", "seed": 2, "moon.mu": 7.0}, 1)
    settings = {row["name"]: row["setting"] for row in Store([tmp_path]).rows()}
    assert settings["seed-0"] == settings["seed-1"] == settings["unused"] != settings["other"]
