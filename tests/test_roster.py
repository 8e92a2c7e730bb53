"""Who takes part: what is refused before round 1, what is warned of, and who comes back as whom."""

import json
import logging
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from conftest import SMALL
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

import server_app.roster
from client_app.setup import dataset_spec_of, open_source
from protocol.config import keel_version, resolve_config
from protocol.messages import (
    RosterEntry,
    TrainRequest,
    protocol_version,
    read_roster,
    roster_content,
)
from server_app.roster import (
    ClientRegistry,
    ask,
    check_roster,
    gather_roster,
    read_saved_roster,
    roster_warnings,
    save_roster,
)

versions = "flwr 1.39.0, torch 2.11.0"


def entry(name, counts=(10,) * 10, **about):
    made = RosterEntry(
        name, list(counts), [1] * 10, [1, 32, 32], "cnn-fedreco", 64, versions, num_partitions=0
    )
    return replace(made, **about)


def config_of(**given):
    return resolve_config(SMALL | {k.replace("_", "-"): v for k, v in given.items()})


def rejected(entries, **given):
    config = config_of(**given)
    with pytest.raises(ValueError) as caught:
        check_roster(config, entries, open_source(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_clients_that_fit_are_accepted():
    config = config_of()
    check_roster(config, [entry("a"), entry("b", (0, 1) * 5)], open_source(config))
    assert roster_warnings(config, [entry("a"), entry("b")]) == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("b"), entry("a"), entry("b")], "two clients are named 'b'"),
        ([entry("a"), entry("b", (0,) * 10)], "client b has no training samples"),
        (
            [entry("a"), entry("b", image_shape=[3, 32, 32])],
            "client b (cnn-fedreco): image shape [3, 32, 32], client a (cnn-fedreco) has",
        ),
        ([entry("a"), entry("b", (5,) * 9)], "client b (cnn-fedreco): number of classes 9, client"),
        (
            [entry("a", image_shape=[3, 32, 32]), entry("b", image_shape=[3, 32, 32])],
            "client a: image shape [3, 32, 32], the run's source digits has [1, 32, 32]",
        ),
        ([entry("a", (5,) * 9)], "client a: number of classes 9, the run's source digits has 10"),
        (
            [entry("a"), entry("b", model="resnet20")],
            "client b trains resnet20, the run cnn-fedreco",
        ),
        ([entry("a", (1,) * 9 + (0,))], "class 9 is held by no client"),
    ],
)
def test_clients_that_do_not_fit_are_refused_by_name(entries, words):
    assert rejected(entries).startswith(words)


def test_other_versions_are_a_warning_that_names_who_has_them():
    odd = "flwr 1.39.2, torch 2.15.0"
    entries = [entry("a"), entry("b"), entry("c", versions=odd), entry("d", keel="0.0.9")]
    first, second = roster_warnings(config_of(), entries)
    assert first.startswith(
        f"versions of flwr and torch differ: c has {odd}; the others {versions}"
    )
    assert second.startswith(f"versions of keel differ: d has 0.0.9; the others {keel_version()}")


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
    assert text.startswith(f"client site-a speaks version {spoken or 0} of the protocol")
    assert f"the client's is 0.0.9, the server's {keel_version()}" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_counts", "abc"),
        ("label_counts", None),
        ("label_counts", [1.5] * 10),
        ("label_counts", [-1] * 10),
        ("label_counts", [10] * 9),
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
    with pytest.raises(ValueError, match="its roster entry is odd: '"):
        read_roster(message(said))


@pytest.mark.parametrize("odd", ["missing", "unknown"])
def test_an_odd_entry_is_refused_by_name(odd):
    said = asdict(entry("site-a"))
    if odd == "missing":
        del said["label_counts"]
    else:
        said["surprise"] = 1
    with pytest.raises(ValueError, match="client site-a: its roster entry is odd: "):
        read_roster(message(said))


# --- what a method asks of the clients ------------------------------------------------------------


def test_fedlc_in_the_papers_form_refuses_clients_of_one_class():
    entries = [entry("a"), entry("c", (0, 7) + (0,) * 8), entry("b", (7,) + (0,) * 9)]
    given = {"method": "fedlc"}
    text = rejected(entries, **given, **{"fedlc.exclude-true": True})
    assert text.startswith(
        "fedlc.exclude-true = true: 2 clients hold one class only, the first is b"
    )
    config = config_of(**given)
    check_roster(config, entries, open_source(config))


def test_fedpac_says_which_clients_lack_classes():
    entries = [entry("a"), entry("b", (0, 1) * 5), entry("c", (1,) * 9 + (0,))]
    [line] = roster_warnings(config_of(method="fedpac"), entries)
    assert line.startswith("fedpac: 2 of 3 clients lack classes: b (5), c (1). ")
    assert roster_warnings(config_of(method="fedpac"), [entry("a")]) == []


# --- SuperNodes that are restarted ----------------------------------------------------------------


class Fleet:
    """A grid of SuperNodes that answer the query with their entry, as long as they are there."""

    def __init__(self, nodes):
        self.nodes = dict(nodes)  # id: entry
        self.asked: list[int] = []
        self.open: dict[str, Message] = {}
        self.dying: dict[int, int] = {}  # node: how many of its ClientApps die on the query yet

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for each in messages:
            each.metadata.__dict__["_message_id"] = f"m{len(self.asked)}"
            self.asked.append(each.metadata.dst_node_id)
            assert each.metadata.message_type == MessageType.QUERY
            self.open[each.metadata.message_id] = each
        return list(self.open)

    def pull_messages(self, ids):
        return [self.reply(self.open.pop(i)) for i in list(ids) if i in self.open]

    def reply(self, message):
        node = message.metadata.dst_node_id
        if self.dying.get(node, 0):
            self.dying[node] -= 1
            return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "killed"), reply_to=message)
        if self.nodes[node] is None:  # it has no data
            return Message(Error(1, "no data"), reply_to=message)
        return Message(roster_content(self.nodes[node]), reply_to=message)


@pytest.fixture
def fleet(task_identity):
    config = config_of()
    grid = Fleet({1: entry("a"), 2: entry("b"), 3: entry("c")})
    roster = dict(grid.nodes)
    hello = TrainRequest(config, dataset_spec_of(config, open_source(config)), 0, 0, False, "")
    return grid, roster, ClientRegistry(grid, config, hello, open_source(config), roster)


def test_nothing_is_asked_while_nobody_is_new(fleet):
    grid, roster, registry = fleet
    assert registry.refresh() == {1, 2, 3}
    del grid.nodes[2]
    assert registry.refresh() == {1, 3}
    assert registry.returned([2]) == {}
    assert roster.keys() == {1, 2, 3}
    assert grid.asked == []


def test_a_node_with_a_new_id_takes_its_clients_place(fleet):
    grid, roster, registry = fleet
    grid.nodes[9] = grid.nodes.pop(2)
    assert registry.returned([1, 2]) == {1: 1, 2: 9}
    assert {node: e.client for node, e in roster.items()} == {1: "a", 3: "c", 9: "b"}
    registry.refresh()
    assert grid.asked == [9]


def test_no_node_takes_the_place_of_a_client_that_is_connected(fleet):
    """Else anybody could become any client by its name."""
    grid, roster, registry = fleet
    grid.nodes[9] = entry("b")
    registry.refresh()
    assert roster.keys() == {1, 2, 3}
    del grid.nodes[2]  # the old one is gone: now it may
    registry.refresh()
    assert roster.keys() == {1, 3, 9}
    assert grid.asked == [9]


def test_a_stranger_and_one_that_does_not_fit_are_named_once_and_left_out(fleet, caplog):
    grid, roster, registry = fleet
    grid.nodes |= {8: entry("d"), 9: entry("b", (5,) * 9, test_label_counts=[1] * 9)}
    del grid.nodes[2]
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        registry.refresh()
        registry.refresh()
    stranger, unfit = caplog.messages
    assert stranger == "client d came after round 1 and does not take part"
    assert unfit.startswith("node 9 is new and cannot be used: client b (cnn-fedreco): number of")
    assert roster.keys() == {1, 2, 3}


def resumed(grid, monkeypatch, **given):
    """The attendees of a resumed run of a, b and c."""
    config = config_of(**given)
    monkeypatch.setattr(server_app.roster, "return_s", 0.2)
    monkeypatch.setattr(server_app.roster, "settle_s", 0.01)
    source = open_source(config)
    hello = TrainRequest(config, dataset_spec_of(config, source), 0, 0, False, "")
    saved = {21: entry("a"), 22: entry("b"), 23: entry("c")}
    return ClientRegistry(grid, config, hello, source, saved)


def test_a_resumed_run_goes_on_without_a_client_and_takes_it_back(
    task_identity, monkeypatch, caplog
):
    grid = Fleet({21: entry("a"), 13: entry("c"), 14: entry("d")})
    registry = resumed(grid, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        registry.gather()
    assert "the run goes on without b until they are back" in caplog.messages
    assert "client d came after round 1 and does not take part" in caplog.messages
    by_name = {e.client: node for node, e in registry.roster.items()}
    assert by_name == {"a": 21, "b": 22, "c": 13}
    assert 21 not in grid.asked  # with keys a SuperNode keeps its id: who it is, is known
    assert registry.absent(registry.refresh()) == {"b"}
    grid.nodes[12] = entry("b")
    assert registry.absent(registry.refresh()) == set()
    assert registry.returned([12]) == {12: 12}


def test_a_name_goes_to_the_node_that_had_it(task_identity, monkeypatch):
    grid = Fleet({11: entry("b"), 21: entry("a"), 22: entry("b"), 23: entry("c")})
    registry = resumed(grid, monkeypatch)
    registry.gather()
    assert {e.client: node for node, e in registry.roster.items()}["b"] == 22


def test_one_that_has_just_gone_is_waited_for_once(fleet):
    grid, _, registry = fleet
    del grid.nodes[2]
    assert registry.absent(registry.refresh()) == set()
    assert registry.absent(registry.refresh()) == {"b"}


def test_waiting_for_all_takes_no_longer_than_it_says(task_identity, monkeypatch):
    grid = Fleet({21: entry("a"), 12: entry("b"), 23: entry("c")})
    grid.pull_messages = lambda ids: []  # b says nothing
    registry = resumed(grid, monkeypatch, start_timeout=30.0)
    started = time.monotonic()
    registry.gather()
    assert time.monotonic() - started < 10
    assert registry.missing == {"b"}


def test_a_resumed_run_needs_as_many_clients_as_a_round(task_identity, monkeypatch):
    grid = Fleet({21: entry("a"), 12: None})
    with pytest.raises(TimeoutError) as caught:
        resumed(grid, monkeypatch, min_replies=2).gather()
    assert str(caught.value) == (
        "min-replies = 2: 1 clients of this run are connected; missing: b, c"
    )


def test_other_samples_after_a_resume_are_warned_of(task_identity, monkeypatch, caplog):
    grid = Fleet({11: entry("a"), 12: entry("b", (9,) * 10), 13: entry("c")})
    registry = resumed(grid, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        registry.gather()
    assert caplog.messages == ["client b: its training samples are not those of before"]
    assert registry.roster[12].num_examples == 90


def test_a_node_that_could_not_be_used_is_asked_again_later(fleet, monkeypatch):
    grid, roster, registry = fleet
    del grid.nodes[2]
    grid.nodes[9] = None  # its data is not there
    registry.refresh()
    registry.refresh()
    assert grid.asked == [9]
    grid.nodes[9] = entry("b")  # its data is mounted
    registry.refresh()
    assert grid.asked == [9]
    monkeypatch.setitem(registry.useless, 9, 0.0)  # a minute later
    registry.refresh()
    assert roster[9].client == "b"
    assert registry.has_changed


@pytest.mark.parametrize(("deaths", "is_usable"), [(2, True), (3, False)])
def test_a_client_app_that_dies_on_the_query_is_asked_three_times(task_identity, deaths, is_usable):
    grid = Fleet({1: entry("a"), 2: entry("b")})
    grid.dying[2] = deaths
    config = config_of(num_clients=2)
    source = open_source(config)
    hello = TrainRequest(config, dataset_spec_of(config, source), 0, 0, False, "")
    if is_usable:
        assert gather_roster(grid, config, hello, source).keys() == {1, 2}
    else:
        with pytest.raises(ValueError, match=r"node 2\): its ClientApp died on the query three"):
            gather_roster(grid, config, hello, source)


def test_a_saved_roster_comes_back_and_a_damaged_one_is_named(tmp_path):
    path, entries = tmp_path / "roster.json", {7: entry("a"), 5: entry("b")}
    save_roster(path, entries)
    assert read_saved_roster(path) == entries
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"roster\.json: not the roster of a run"):
        read_saved_roster(path)


def test_simulated_nodes_are_not_listed_again(fleet, monkeypatch):
    grid, _, registry = fleet
    monkeypatch.setattr(server_app.roster, "is_simulation", lambda grid: True)
    grid.nodes.clear()
    assert registry.refresh() == {1, 2, 3}


@pytest.mark.parametrize(("simulated", "most"), [(True, 2), (False, 5)])
def test_simulated_clients_are_asked_a_few_at_a_time(task_identity, monkeypatch, simulated, most):
    """As many messages live at once as keep workers busy, and every client is asked, once."""
    monkeypatch.setattr(server_app.roster, "is_simulation", lambda grid: simulated)
    monkeypatch.setattr(server_app.roster, "at_once", 2)
    grid = Fleet({node: entry(f"client-{node}") for node in (5, 3, 9, 4, 7)})
    pushed: list[int] = []
    push = grid.push_messages

    def counted(messages):
        pushed.append(len(messages))
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", counted)
    request = ConfigRecord({"config": ""})
    entries = ask(grid, [5, 3, 9, 4, 7], request, time.monotonic() + 10).entries
    assert {node: e.client for node, e in entries.items()} == {n: f"client-{n}" for n in grid.nodes}
    assert list(entries) == grid.asked == [5, 3, 9, 4, 7]
    assert max(pushed) == most
    assert sum(pushed) == 5
