"""Roster entries: what is rejected before round 1, what is warned of, what is saved."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, RecordDict
from roster_fixtures import config_of, entry, versions

from client_app.setup import open_source
from protocol.config import keel_version
from protocol.messages import protocol_version, read_roster
from server_app.roster import (
    check_roster,
    clients_of,
    read_saved_roster,
    roster_warnings,
    save_roster,
)


def rejected(entries, **given):
    config = config_of(**given)
    with pytest.raises(ValueError) as caught:
        check_roster(config, dict(enumerate(entries)), open_source(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def warnings_of(config, entries):
    return roster_warnings(config, clients_of(config, dict(enumerate(entries, start=2))))


def test_clients_that_fit_are_accepted():
    config = config_of()
    check_roster(config, {1: entry("a"), 2: entry("b", (0, 1) * 5)}, open_source(config))
    assert warnings_of(config, [entry("a"), entry("b")]) == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("b"), entry("a"), entry("b")], "2 clients are named 'b' (nodes 0, 2): give each"),
        ([entry("a"), entry("b", (0,) * 10)], "client b has no training samples"),
        (
            [entry("a"), entry("b", image_shape=[3, 32, 32])],
            "client b (cnn-fedreco): image shape [3, 32, 32], the run's source digits has [1, 32,",
        ),
        ([entry("a"), entry("b", (5,) * 9)], "client b (cnn-fedreco): number of classes 9, the"),
        (
            [entry("a", image_shape=[3, 32, 32]), entry("b", image_shape=[3, 32, 32])],
            "client a (cnn-fedreco): image shape [3, 32, 32], the run's source digits has [1, 32,",
        ),
        ([entry("a", (5,) * 9)], "client a (cnn-fedreco): number of classes 9, the run's source"),
        (
            [entry("a"), entry("b", model="resnet20")],
            "client b trains resnet20, the run cnn-fedreco",
        ),
        ([entry("a", (1,) * 9 + (0,))], "no client has samples of the class '9'"),
        (
            [entry("a"), entry("b"), entry("c", num_partitions=10**9)],
            "client c: num-partitions = 1000000000, the others have 0 (0: data of its own)",
        ),
    ],
)
def test_clients_that_do_not_fit_are_refused_by_name(entries, words):
    assert rejected(entries).startswith(words)


@pytest.mark.parametrize("num_partitions", [0, 1])
def test_only_a_client_with_data_of_its_own_can_add_a_test_part(num_partitions):
    site = entry("a", test_label_counts=[], num_partitions=num_partitions)
    line = rejected([site], evaluate_clients="all")
    assert line.startswith("client a has no local test part (evaluate-clients = 'all'): set local")
    assert ("test/" in line) == (num_partitions == 0)
    line = rejected([site], evaluate_clients="all", local_test_fraction=0.5)
    remedy = ["add samples, or put images under test/", "raise min-samples or alpha, or lower"]
    why = "it has one sample of each of its classes: "
    assert f"(evaluate-clients = 'all'): {why}{remedy[num_partitions]}" in line
    line = rejected([site], evaluate_clients="all", local_test_fraction=0.5, partition="iid")
    assert ("lower the number of clients" in line) == num_partitions
    assert "alpha" not in line


def test_counts_of_other_classes_are_refused_where_counts_are_withheld():
    """They would reach the split's picture and the method's checks."""
    entries = [entry("a", (), num_train=5), entry("b", (1,) * 100_000)]
    words = rejected(entries, **{"privacy.epsilon": 0.5})
    assert words.startswith("client b (cnn-fedreco): number of classes 100000, the run's source")


def test_other_versions_are_a_warning_that_names_who_has_them():
    odd = "flwr 1.39.2, torch 2.15.0"
    entries = [entry("a"), entry("b"), entry("c", versions=odd), entry("d", keel="0.0.9")]
    first, second = warnings_of(config_of(), entries)
    assert first.startswith(
        f"versions of flwr and torch differ: c has {odd}; the others have {versions}"
    )
    assert second.startswith(
        f"versions of keel differ: d has 0.0.9; the others have {keel_version()}"
    )


# --- what a client says ---------------------------------------------------------------------------


def message(said):
    return SimpleNamespace(
        content=RecordDict({"roster": ConfigRecord({"entry": json.dumps(said)})})
    )


@pytest.mark.parametrize("spoken", [protocol_version + 1, None])
def test_another_protocol_is_refused_with_the_clients_name_and_both_versions(spoken):
    said = asdict(entry("site-a", keel="0.0.9")) | {"protocol": spoken}
    if spoken is None:
        del said["protocol"]  # a client from before there was one
    with pytest.raises(ValueError) as caught:
        read_roster(message(said))
    text = str(caught.value)
    assert all(word in text for word in ("site-a", str(spoken), "0.0.9", keel_version()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_counts", "abc"),
        ("label_counts", None),
        ("label_counts", [1.5] * 10),
        ("label_counts", [-1] * 10),
        ("label_counts", [10] * 9),
        ("image_shape", [10] * 100_000),
        ("test_label_counts", None),
        ("client", ["a"]),
        ("image_shape", 32),
        ("num_partitions", "2"),
        ("num_partitions", [2]),
        ("representation_width", True),
        ("model", 5),
    ],
)
def test_an_entry_of_odd_values_is_refused_by_name(name, value):
    said = asdict(entry("site-a")) | {name: value}
    with pytest.raises(ValueError, match=name):
        read_roster(message(said))


@pytest.mark.parametrize("odd", ["missing", "unknown"])
def test_an_odd_entry_is_refused_by_name(odd):
    said = asdict(entry("site-a"))
    if odd == "missing":
        del said["label_counts"]
    else:
        said["surprise"] = 1
    with pytest.raises(ValueError, match="label_counts" if odd == "missing" else "surprise"):
        read_roster(message(said))


# --- what a method asks of the clients ------------------------------------------------------------


@pytest.mark.parametrize(("norm", "warns"), [("", True), ("group", False)])
def test_fedmlb_warns_of_a_network_without_norm(norm, warns):
    config = config_of(method="fedmlb", model="cnn-fedreco", norm=norm)
    lines = warnings_of(config, [entry("a"), entry("b")])
    assert bool(lines) == warns
    assert all("cnn-fedreco, which has no norm layer" in line for line in lines)
    assert warnings_of(config_of(method="fedmlb", model="resnet18"), [entry("a")]) == []


def test_scaffold_warns_of_clients_with_few_steps():
    entries = [entry("a", (90,) * 10), entry("b", (2,) * 10)]
    config = {"method": "scaffold", "batch-size": 10}
    *_, line = warnings_of(config_of(**config), entries)
    assert line.startswith("scaffold: the steps of a round range from 2 (b) to 90 (a)")
    lines = warnings_of(config_of(**config, **{"batches-per-epoch": 5}), entries)
    assert not any("scaffold" in line for line in lines)


def test_a_saved_roster_comes_back_and_a_damaged_one_is_named(tmp_path):
    path, entries = tmp_path / "roster.json", {7: entry("a"), 5: entry("b")}
    save_roster(path, entries)
    assert read_saved_roster(path) == entries
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"roster\.json: missing, damaged or of"):
        read_saved_roster(path)


def test_very_many_sites_are_all_saved_and_shown(tmp_path, monkeypatch):
    """Only of simulated clients can each be computed again."""
    monkeypatch.setattr("server_app.roster.MAX_LISTED", 1)
    roster = {node: entry(f"site-{node:04d}") for node in range(2, 1003)}
    save_roster(tmp_path / "roster.json", roster)
    assert read_saved_roster(tmp_path / "roster.json") == roster
    assert clients_of(config_of(), roster).shown == list(roster.values())
