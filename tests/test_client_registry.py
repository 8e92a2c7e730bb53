"""Which client is which node: gathered before round 1, kept current when SuperNodes restart."""

import json
import logging
import time

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from roster_fixtures import config_of, entry

import server_app.client_registry
from client_app.setup import dataset_spec_of, open_source
from flower_adapter import (
    CLIENT_FAILED,
    SUPERLINK_NODE,
    assign_message_id,
    assign_source_node,
)
from protocol.messages import RosterRequest, request_record, roster_content
from server_app.client_registry import ClientRegistry, ask, gather_roster


def query_for(config):
    return request_record(RosterRequest(config, dataset_spec_of(config, open_source(config))))


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
            assign_message_id(each, f"m{len(self.asked)}")
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
    query = query_for(config)
    return grid, roster, ClientRegistry(grid, config, query, open_source(config), roster)


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


def test_a_client_that_has_moved_since_it_was_asked_is_found_by_the_node_that_was_asked(fleet):
    """It moved while another was looked for, or restarted twice in one round."""
    grid, roster, registry = fleet
    grid.nodes[9] = grid.nodes.pop(2)
    assert registry.returned([1]) == {1: 1}
    assert registry.returned([2]) == {2: 9}
    grid.nodes[10] = grid.nodes.pop(9)
    assert registry.returned([2]) == {2: 10}
    assert {node: e.client for node, e in roster.items()} == {1: "a", 3: "c", 10: "b"}


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


def test_who_joins_and_who_is_refused_is_noted_for_the_audit_log(fleet):
    grid, _, registry = fleet
    notes = []
    registry.note = lambda event, **fields: notes.append((event, fields))
    grid.nodes[8] = None
    registry.refresh()
    grid.nodes[9] = grid.nodes.pop(2)
    registry.refresh()
    assert notes == [
        ("refused", {"node": 8, "reason": "no data"}),
        ("joined", {"client": "b", "node": 9}),
    ]


@pytest.mark.parametrize("text", [None, "", "\n \u202e"])
def test_a_refusal_without_a_printable_reason_is_named_by_its_code(fleet, monkeypatch, text):
    grid, _, registry = fleet
    refuse = lambda message: Message(Error(50, text), reply_to=message)  # noqa: E731
    monkeypatch.setattr(grid, "reply", refuse)
    assert ask(grid, [2], registry.query, time.monotonic() + 10).rejected == {2: "error 50"}


def test_a_node_that_had_little_time_to_answer_is_asked_again(fleet, monkeypatch):
    """One that had all of it is not, for ten minutes."""
    grid, _roster, registry = fleet
    grid.nodes[9] = grid.nodes.pop(2)
    with monkeypatch.context() as silent:
        silent.setattr(grid, "pull_messages", lambda ids: [])
        assert registry.returned([2], 0.1) == {}
    assert registry.returned([2], 0.5) == {2: 9}
    grid.nodes[10] = grid.nodes.pop(9)
    with monkeypatch.context() as silent:
        silent.setattr(grid, "pull_messages", lambda ids: [])
        silent.setattr(server_app.client_registry, "QUERY_TIMEOUT_S", 0.1)
        assert registry.returned([9]) == {}
    assert registry.returned([9]) == {}


def resumed(grid, monkeypatch, **given):
    """The registry of a resumed run of a, b and c."""
    config = config_of(**given)
    monkeypatch.setattr(server_app.client_registry, "RETURN_TIMEOUT_S", 0.6)
    monkeypatch.setattr(server_app.client_registry, "SETTLE_S", 0.01)
    source = open_source(config)
    query = query_for(config)
    saved = {21: entry("a"), 22: entry("b"), 23: entry("c")}
    return ClientRegistry(grid, config, query, source, saved)


def test_a_resumed_run_goes_on_without_a_client_and_takes_it_back(
    task_identity, monkeypatch, caplog
):
    grid = Fleet({21: entry("a"), 13: entry("c"), 14: entry("d")})
    registry = resumed(grid, monkeypatch)
    with caplog.at_level(logging.INFO, logger="keel.server"):
        registry.gather()
    waits = [text for text in caplog.messages if text.startswith("waiting ")]
    assert waits == ["waiting 1 s for clients: not connected: b"]
    assert "the run continues without b until they return" in caplog.messages
    assert "client d came after round 1 and does not take part" in caplog.messages
    by_name = {e.client: node for node, e in registry.roster.items()}
    assert by_name == {"a": 21, "b": 22, "c": 13}
    assert 21 not in grid.asked  # with keys a SuperNode keeps its id: who it is, is known
    assert registry.absent(registry.refresh()) == {"b"}
    grid.nodes[12] = entry("b")
    assert registry.absent(registry.refresh()) == set()
    assert registry.returned([12]) == {12: 12}


def test_a_resumed_run_goes_on_as_soon_as_all_are_back(task_identity, monkeypatch):
    grid = Fleet({21: entry("a"), 22: entry("b")})
    registry, waits = resumed(grid, monkeypatch, start_timeout=30.0), []

    def come_back(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            grid.nodes[23] = entry("c")

    monkeypatch.setattr(server_app.client_registry, "RETURN_TIMEOUT_S", 30.0)
    monkeypatch.setattr(server_app.client_registry.time, "sleep", come_back)
    registry.gather()
    assert (len(waits), registry.missing) == (3, set())


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
        "min-replies = 2: 1 client of this run is connected; missing: b, c"
    )


def test_other_samples_after_a_resume_are_warned_of(task_identity, monkeypatch, caplog):
    grid = Fleet({11: entry("a"), 12: entry("b", (9,) * 10), 13: entry("c")})
    registry = resumed(grid, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        registry.gather()
    assert caplog.messages[1:] == ["client b: its training samples have changed"]
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
    monkeypatch.setitem(registry.unusable, 9, 0.0)  # a minute later
    registry.refresh()
    assert roster[9].client == "b"
    assert registry.has_changed


def test_a_silent_stranger_costs_a_tenth_of_a_round_s_limit_and_then_nothing_for_a_minute(
    fleet, monkeypatch, caplog
):
    grid, _, registry = fleet
    registry.config = config_of(round_timeout=2.0)
    monkeypatch.setattr(grid, "pull_messages", lambda ids: [])
    grid.nodes[9] = entry("b")
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        for _ in range(3):
            assert registry.refresh() == {1, 2, 3, 9}
    assert "node 9 is new and cannot be used: no answer within 0.2 seconds" in caplog.messages
    assert grid.asked == [9]
    monkeypatch.setitem(registry.unusable, 9, 0.0)  # a minute later
    registry.refresh()
    assert grid.asked == [9, 9]


def test_a_new_node_that_was_slow_is_asked_again_once_its_client_is_missing(fleet, monkeypatch):
    """A SuperNode that restarted: its old node stays in the list for a while."""
    grid, roster, registry = fleet
    registry.config = config_of(round_timeout=2.0)
    grid.nodes[9] = entry("b")
    with monkeypatch.context() as slow:
        slow.setattr(grid, "pull_messages", lambda ids: [])
        registry.refresh()
    assert roster.keys() == {1, 2, 3}
    del grid.nodes[2]
    registry.refresh()
    assert roster.keys() == {1, 3, 9}


@pytest.mark.parametrize(("deaths", "is_usable"), [(2, True), (3, False)])
def test_a_client_app_that_dies_on_the_query_is_asked_three_times(task_identity, deaths, is_usable):
    grid = Fleet({1: entry("a"), 2: entry("b")})
    grid.dying[2] = deaths
    config = config_of(num_clients=2)
    source = open_source(config)
    query = query_for(config)
    if is_usable:
        assert gather_roster(grid, config, query, source).keys() == {1, 2}
    else:
        with pytest.raises(ValueError, match=r"node 2\): its ClientApp crashed on the query 3"):
            gather_roster(grid, config, query, source)


def test_simulated_nodes_are_not_listed_again(fleet, monkeypatch):
    grid, _, registry = fleet
    monkeypatch.setattr(server_app.client_registry, "is_in_process_grid", lambda grid: True)
    grid.nodes.clear()
    assert registry.refresh() == {1, 2, 3}


@pytest.mark.parametrize(("simulated", "most"), [(True, 2), (False, 5)])
def test_simulated_clients_are_asked_a_few_at_a_time(task_identity, monkeypatch, simulated, most):
    """As many messages live at once as keep workers busy, and every client is asked, once."""
    monkeypatch.setattr(server_app.client_registry, "is_in_process_grid", lambda grid: simulated)
    monkeypatch.setattr(server_app.client_registry, "MAX_QUERIES", 2)
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


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Records which node has the key of which client, as `keel deploy register` does."""
    path = tmp_path / "clients.json"
    monkeypatch.setenv("KEEL_CLIENT_REGISTRY", str(path))

    def record(**nodes):
        path.write_text(json.dumps({name: {"node": str(node)} for name, node in nodes.items()}))

    record(a=1, b=2, c=3, d=4)
    return record


@pytest.mark.parametrize("state", ["away", "hung", "back"])
def test_another_key_with_a_known_name_is_refused(keys, fleet, caplog, state):
    """Registered as d, it calls itself b: the review's impostor took the place of a client away."""
    grid, roster, registry = fleet
    real = grid.nodes.pop(2)
    grid.nodes[4] = entry("b")
    if state == "hung":
        grid.nodes[2] = None
    registry.refresh()
    assert roster == {1: entry("a"), 2: entry("b"), 3: entry("c")}
    assert registry.returned([2]) == ({2: 2} if state == "hung" else {})
    if state == "back":
        grid.nodes[2] = real
        assert registry.returned([2]) == {2: 2}
    refused = "node 4 is new and cannot be used: it calls itself 'b', but its key is registered as"
    remedy = "deploy it with the credentials of 'b', or under the name 'd'"
    assert [m for m in caplog.messages if "node 4" in m] == [f"{refused} 'd': {remedy}"]


def test_a_client_with_a_new_key_continues_once_that_is_registered(keys, fleet, caplog):
    grid, roster, registry = fleet
    grid.nodes[9] = grid.nodes.pop(2)
    registry.refresh()
    assert "its key has no name: add its public key" in caplog.text
    assert 9 not in roster
    keys(a=1, b=9, c=3)
    registry.unusable.clear()  # a minute later
    assert registry.returned([2]) == {2: 9}
    assert roster[9].client == "b"


def test_a_saved_roster_with_another_key_s_name_is_not_believed(keys, task_identity, monkeypatch):
    keys(a=21, d=22, c=23)  # b's place had been taken
    grid = Fleet({21: entry("a"), 22: entry("b"), 23: entry("c")})
    registry = resumed(grid, monkeypatch)
    registry.gather()
    assert registry.missing == {"b"}


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"node": "x"}}', None])
def test_without_a_readable_registry_nobody_takes_part(keys, fleet, tmp_path, content):
    path = tmp_path / "clients.json"
    path.write_text(content) if content is not None else path.unlink()
    if content == "[]":
        path.write_text("[1]")
    grid, _, registry = fleet
    with pytest.raises(ValueError, match=r"clients.json': missing or damaged .*keel deploy regis"):
        gather_roster(grid, registry.config, registry.query, registry.source)


def test_names_at_the_start_are_those_of_the_keys(keys, fleet):
    grid, _, registry = fleet
    about = (registry.config, registry.query, registry.source)
    assert gather_roster(grid, *about).keys() == {1, 2, 3}
    grid.nodes[4] = entry("b")
    with pytest.raises(ValueError, match=r"^client d cannot take part: it calls itself 'b', but"):
        gather_roster(grid, *about)


def test_a_missing_client_is_named_at_once_again_later_and_in_the_error(
    keys, fleet, caplog, monkeypatch
):
    grid, _, registry = fleet
    del grid.nodes[2], grid.nodes[3]
    monkeypatch.setattr(server_app.client_registry, "WAITING_EVERY_S", 0.1)
    monkeypatch.setattr(server_app.client_registry, "SETTLE_S", 0)
    config = config_of(num_clients=2, start_timeout=2.0)
    with (
        caplog.at_level(logging.INFO, logger="keel.server"),
        pytest.raises(
            TimeoutError, match=r"^num-clients = 2: 1 of 2 connected; not connected: b, c"
        ) as error,
    ):
        gather_roster(grid, config, registry.query, registry.source)
    assert "federation-config" not in str(error.value)
    assert len(caplog.messages) > 1
    assert set(caplog.messages) == {"waiting for clients: 1 of 2 connected; not connected: b, c, d"}


@pytest.mark.parametrize(
    ("code", "answer", "reason"),
    [
        (ErrorCode.NODE_UNAVAILABLE, "I am not here", "I am not here"),
        (ErrorCode.UNKNOWN, "I am not here", "I am not here"),
        (CLIENT_FAILED, "client b: no data", "no data"),  # it names itself too
    ],
)
def test_a_client_that_says_it_is_not_there_is_named_and_asked_once(
    keys, fleet, code, answer, reason
):
    grid, _, registry = fleet
    reply = grid.reply

    def denied(message):
        if message.metadata.dst_node_id != 2:
            return reply(message)
        return Message(Error(code, answer), reply_to=message)

    grid.reply = denied
    with pytest.raises(ValueError, match=rf"^client b cannot take part: {reason}$"):
        gather_roster(grid, registry.config, registry.query, registry.source)
    assert sorted(grid.asked) == [1, 2, 3]


def test_a_client_that_says_nothing_at_the_start_is_named(keys, fleet):
    grid, _, registry = fleet
    reply = grid.pull_messages
    grid.pull_messages = lambda ids: [m for m in reply(ids) if m.metadata.src_node_id != 2]
    config = config_of(start_timeout=0.5)
    with pytest.raises(TimeoutError, match=r"start-timeout = 0.5: no answer in time from b$"):
        gather_roster(grid, config, registry.query, registry.source)


def test_a_client_that_restarts_before_all_are_there_is_counted_once(task_identity, monkeypatch):
    config = config_of(num_clients=2)
    grid = Fleet({1: entry("a"), 2: entry("b")})
    reply = grid.reply

    def restart(message):
        answer = reply(message)
        if message.metadata.dst_node_id == 2 and 1 in grid.nodes:  # b is gone when it is queried
            grid.nodes = {3: entry("a"), 4: entry("b")}
            answer = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
            assign_source_node(answer, SUPERLINK_NODE)
        return answer

    monkeypatch.setattr(grid, "reply", restart)
    roster = gather_roster(grid, config, query_for(config), open_source(config))
    assert {node: e.client for node, e in roster.items()} == {3: "a", 4: "b"}


def test_without_keys_it_is_said_once_that_names_are_the_clients_word(
    task_identity, monkeypatch, caplog
):
    registry = resumed(Fleet({21: entry("a"), 22: entry("b"), 23: entry("c")}), monkeypatch)
    registry.gather()
    registry.refresh()
    assert caplog.text.count("clients' names are not verified") == 1


def test_a_client_that_claims_to_be_one_of_many_is_named_and_not_waited_for(task_identity):
    """Its word alone would be waited for, and its partition counted as checked."""
    grid = Fleet({1: entry("a"), 2: entry("b"), 3: entry("c", num_partitions=10**12)})
    config = config_of(start_timeout=5.0)
    with pytest.raises(ValueError, match=r"client c: num-partitions = 1000000000000, the others"):
        gather_roster(grid, config, query_for(config), open_source(config))


def test_a_registry_damaged_during_a_run_leaves_names_bound_as_they_were(
    fleet, tmp_path, monkeypatch, caplog
):
    grid, _, _ = fleet
    path = tmp_path / "clients.json"
    path.write_text(json.dumps({name: {"node": str(n)} for n, name in enumerate("abc", 1)}))
    monkeypatch.setenv("KEEL_CLIENT_REGISTRY", str(path))
    config = config_of()
    registry = ClientRegistry(grid, config, query_for(config), open_source(config), fleet[1])
    path.write_text("{")
    del grid.nodes[3]
    grid.nodes[4] = entry("c")  # another key
    assert registry.refresh() == {1, 2, 4}
    assert {e.client for e in registry.roster.values()} == {"a", "b", "c"}
    assert 3 in registry.roster
    assert "missing or damaged" in caplog.text
    assert "its key has no name" in caplog.text
