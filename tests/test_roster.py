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
    ("entries", "named"),
    [
        ([entry("b"), entry("a"), entry("b")], ["'b'"]),
        ([entry("a"), entry("b", (0,) * 10)], ["client b"]),
        ([entry("a"), entry("b", image_shape=[3, 32, 32])], ["client b", "[3, 32, 32]", "digits"]),
        ([entry("a", image_shape=[3, 32, 32])], ["client a", "[3, 32, 32]", "digits"]),
        ([entry("a"), entry("b", (5,) * 9)], ["client b", "9"]),
        ([entry("a"), entry("b", model="resnet20")], ["client b", "resnet20", "cnn-fedreco"]),
        ([entry("a", (1,) * 9 + (0,))], ["'9'"]),
        ([entry("a"), entry("b"), entry("c", num_partitions=10**9)], ["client c", f"{10**9}"]),
    ],
)
def test_clients_that_do_not_fit_are_refused_by_name(entries, named):
    line = rejected(entries)
    assert all(word in line for word in named)


def test_counts_of_other_classes_are_refused_where_counts_are_withheld():
    """They would reach the split's picture and the method's checks."""
    entries = [entry("a", (), num_train=5), entry("b", (1,) * 100_000)]
    line = rejected(entries, **{"privacy.epsilon": 0.5})
    assert "client b" in line
    assert "100000" in line


def test_a_site_with_more_than_ten_times_the_median_of_samples_is_named():
    entries = [entry("a", (10_000,) * 10), entry("b", (500,) * 10), entry("c", (100,) * 10)]
    [line] = warnings_of(config_of(), entries)  # the median is 5,000
    assert "client a" in line
    assert "5000" in line
    assert warnings_of(config_of(), [entry("a", (5000,) * 10), *entries[1:]]) == []
    [capped] = warnings_of(config_of(**{"max-weight-share": 0.5}), entries)
    assert "client a" in capped
    assert "0.5" in capped


def test_other_versions_are_a_warning_that_names_who_has_them():
    odd = "flwr 1.39.2, torch 2.15.0"
    entries = [entry("a"), entry("b"), entry("c", versions=odd), entry("d", keel="0.0.9")]
    first, second = warnings_of(config_of(), entries)
    assert all(word in first for word in ("c has", odd, versions))
    assert all(word in second for word in ("d has", "0.0.9", keel_version()))


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


def test_a_saved_roster_comes_back_and_a_damaged_one_is_named(tmp_path):
    path, entries = tmp_path / "roster.json", {7: entry("a"), 5: entry("b")}
    save_roster(path, entries)
    assert read_saved_roster(path) == entries
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"roster\.json"):
        read_saved_roster(path)
