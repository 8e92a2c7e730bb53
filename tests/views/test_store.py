"""Runs as pages find and read them, whatever the directories hold."""

import json
import os

import pytest

from keel.views.run_page import log_tail
from keel.views.store import Entry, Store, number, read_json
from tests.tools.run_directories import make_run


def test_runs_are_found_in_a_directory_and_in_the_output_of_experiments(tmp_path):
    make_run(tmp_path / "a", {"method": "fedavg"}, 2)
    make_run(tmp_path / "runs" / "cell" / "attempt", {"method": "moon"}, 2)
    make_run(tmp_path / "runs" / "b", {"method": "fedprox"}, 2)  # as in KEEL_HOME
    make_run(tmp_path / "table" / "runs" / "cell" / "attempt-2", {"method": "fedcka"}, 2)
    found = Store([tmp_path]).runs().values()
    assert {entry.name: entry.method for entry in found} == {
        **{"a": "fedavg", "b": "fedprox", "attempt": "moon", "attempt-2": "fedcka"}
    }


def test_a_file_that_can_be_read_now_is_read(tmp_path, monkeypatch):
    """The page showed "no permission" until the run changed or `keel ui` was started again."""
    refused = str(make_run(tmp_path / "a", {"method": "fedavg"}, 2) / "history.jsonl")
    store, access = Store([tmp_path]), os.access
    with monkeypatch.context() as patch:  # as mode 0 for who is not root
        patch.setattr(os, "access", lambda path, mode: path != refused and access(path, mode))
        (before,) = store.runs().values()
        assert before.state == "unreadable: no permission to read history.jsonl"
    (now,) = store.runs().values()
    assert now.state == "finished"


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 5, num_written=1, status="running")
    store = Store([tmp_path])
    (before,) = store.runs().values()
    assert next(iter(store.runs().values())) is before
    (run / "summary.json").write_text('{"status": "stopped", "num_rounds": 5, "rounds": 4}')
    (after,) = store.runs().values()
    assert (before.state, after.state, after.summary["rounds"]) == ("interrupted", "stopped", 4)


def test_data_that_sites_have_is_not_said_to_be_partitioned(tmp_path):
    for name in ("sites", "simulation"):
        run = make_run(tmp_path / name, {"method": "fedavg"}, 1)
        content = {"layout": 2, "simulated": name == "simulation", "files": {"model": "x"}}
        (run / "manifest.json").write_text(json.dumps(content))
    splits = {entry.name: entry.split for entry in Store([tmp_path]).runs().values()}
    assert splits == {"sites": "by site", "simulation": "dirichlet 0.5"}


def test_why_a_run_failed_is_shown_to_its_end(tmp_path):
    reason = "failed: " + "lower lr, " * 50 + "or set clip-norm"
    make_run(tmp_path / "a", {"method": "fedavg"}, 1, status=reason)
    (entry,) = Store([tmp_path]).runs().values()
    assert entry.state == reason


@pytest.mark.parametrize("name", ["outside", "roots-of-others"])
def test_a_link_out_of_the_roots_is_no_run(tmp_path, name):
    outside = make_run(tmp_path / name / "run", {"method": "fedavg"}, 1)
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "link").symlink_to(outside)
    assert Store([tmp_path / "roots"]).runs() == {}


@pytest.mark.parametrize("name", ["summary.json", "history.jsonl", "run.log", ".lock"])
def test_a_linked_file_or_a_pipe_makes_a_run_unreadable(tmp_path, name):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("/etc/passwd")
    (entry,) = Store([tmp_path]).runs().values()
    assert entry.state == f"unreadable: {name} is not a plain file"
    (run / name).unlink()
    os.mkfifo(run / name)
    (entry,) = Store([tmp_path]).runs().values()
    assert entry.state == f"unreadable: {name} is not a plain file"


def test_a_file_that_is_too_large_makes_a_run_unreadable(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 1)
    os.truncate(run / "config.json", 2**20 + 1)
    (entry,) = Store([tmp_path]).runs().values()
    assert entry.state == "unreadable: config.json has 1,048,577 bytes"


def test_runs_that_differ_in_seed_and_place_have_one_setting(tmp_path):
    for seed in (0, 1):
        keys = {"method": "fedavg", "seed": seed, "output-dir": str(tmp_path / str(seed))}
        make_run(tmp_path / f"seed-{seed}", keys, 1)
    make_run(tmp_path / "other", {"method": "fedavg", "lr": 0.5}, 1)
    settings = {entry.name: entry.setting for entry in Store([tmp_path]).runs().values()}
    assert settings["seed-0"] == settings["seed-1"] != settings["other"]


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), float("inf"), 10**400, [1], {}])
def test_only_finite_numbers_are_numbers(value):
    assert number(value) is None
    assert number(3) == 3.0


def test_a_json_file_that_is_too_large_or_a_link_is_not_read(tmp_path):
    (tmp_path / "a").write_text("[1, 2]")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_json(tmp_path / "a", 10) == [1, 2]
    assert read_json(tmp_path / "a", 5) is None
    assert read_json(tmp_path / "b", 10) is None


def test_the_tail_of_a_log_has_no_control_characters(tmp_path):
    (tmp_path / "run.log").write_text("one\n\x1b[31mtwo\x07\n" + "x" * 1000 + "\n")
    lines = log_tail(Entry("", "", tmp_path))
    assert lines[:2] == ["one", "two"]
    assert len(lines[2]) == 400
