"""The sites of a deployment: asked until a deadline, found again, and bound to their keys."""

import json
from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from roster_fixtures import config_of, entry

import server_app.exchange
import server_app.sites
from client_app.setup import dataset_spec_of, open_source
from flower_adapter import (
    SUPERLINK_NODE,
    TOO_LARGE,
    NotPushedError,
    assign_message_id,
    assign_source_node,
)
from protocol.messages import RosterRequest, request_record, roster_content
from server_app.roster import read_saved_roster
from server_app.run_reader import ROSTER_FILE
from server_app.sites import Sites

pytestmark = pytest.mark.usefixtures("task_identity")
ERRORS = {
    "gone": Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"),
    "lost": Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found"),
    "crashed": Error(ErrorCode.CLIENT_APP_CRASHED, "ended"),
    "large": Error(ErrorCode.MESSAGE_UNAVAILABLE, f"{TOO_LARGE} 10 bytes"),
    "failed": Error(1, "no data"),
}


class Fleet:
    """A grid of SuperNodes, and the clock.

    nodes: those that are connected, with their entries. script: by node, its answers to the
    messages sent to it, one after the other: a key of ERRORS, "none", or the number of seconds
    after which it answers; without an answer left, it answers at once.
    """

    def __init__(self, nodes, **script):
        self.nodes, self.now = dict(nodes), 0.0
        self.script = {int(node[1:]): list(answers) for node, answers in script.items()}
        self.sent: list[tuple[int, str]] = []
        self.open: dict[str, tuple[float, Message | None]] = {}
        self.at: dict[float, object] = {}  # called at that time
        self.pull_s = 0.0  # what the next pull takes
        self.is_away = False

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for due in [at for at in self.at if at <= self.now]:
            self.at.pop(due)()

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        if self.is_away:
            self.is_away = False
            raise NotPushedError(0, "m", "expired")
        ids = []
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            assign_message_id(message, f"m{len(self.sent)}")
            self.sent.append((node, kind))
            if node not in self.nodes:
                continue
            ids.append(message.metadata.message_id)
            answer = self.script[node].pop(0) if self.script.get(node) else 0.0
            self.open[ids[-1]] = self.answer(message, answer)
        return ids

    def answer(self, message, answer):
        node, is_query = message.metadata.dst_node_id, message.metadata.message_type == "query"
        if answer == "none":
            return self.now, None
        if isinstance(answer, str):
            reply = Message(ERRORS[answer], reply_to=message)
            if answer == "gone":
                del self.nodes[node]
                assign_source_node(reply, SUPERLINK_NODE)
            return self.now, reply
        content = RecordDict({"from": ConfigRecord({"n": node})})
        if is_query:
            content = roster_content(self.nodes[node])
        return self.now + answer, Message(content, reply_to=message)

    def pull_messages(self, message_ids):
        self.now, self.pull_s = self.now + self.pull_s, 0.0
        ready = [i for i in message_ids if self.open[i][1] and self.open[i][0] <= self.now]
        return [self.open.pop(i)[1] for i in ready]


def sites_of(monkeypatch, fleet, saved=None, **config):
    """The sites of this fleet, which live by its clock."""
    config = config_of(**config)
    monkeypatch.setattr(server_app.sites, "time", fleet)
    monkeypatch.setattr(server_app.exchange, "time", fleet)
    source = open_source(config)
    query = request_record(RosterRequest(config, dataset_spec_of(config, source)))
    return Sites(fleet, config, query, source, saved)


THREE = {1: entry("a"), 2: entry("b"), 3: entry("c")}


@pytest.fixture
def fleet():
    return Fleet(THREE)


@pytest.fixture
def sites(monkeypatch, fleet):
    """Of a run of three clients, with a limit of 100 seconds a round."""
    made = sites_of(monkeypatch, fleet, round_timeout=100.0)
    made.gather()
    fleet.sent.clear()
    return made


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Records which node has the key of which client, as `keel deploy register` does."""
    path = tmp_path / "clients.json"
    monkeypatch.setenv("KEEL_CLIENT_REGISTRY", str(path))

    def record(**nodes):
        path.write_text(json.dumps({name: {"node": str(node)} for name, node in nodes.items()}))

    record(a=1, b=2, c=3, d=4)
    return record


def train(sites, *nodes, what="round 1"):
    """(silent nodes, outcome by node: what it answered or the error's code, nodes sent again)."""
    found, resent = {}, []

    def note(reply):
        node = reply.metadata.src_node_id
        assert node not in found
        number = reply.error.code if reply.has_error() else None
        found[node] = number if reply.has_error() else reply.content.config_records["from"]["n"]

    messages = [Message(RecordDict(), node, MessageType.TRAIN) for node in nodes]
    silent = sites.ask(messages, what, note, max_bytes=1000, before_resend=resent.append)
    assert found.keys() == set(nodes)
    return silent, found, resent


# --- asking --------------------------------------------------------------------------------------


def test_a_round_ends_with_its_last_reply_or_at_the_round_timeout(sites, fleet):
    fleet.script[2] = [7.0]
    train(sites, 1, 2, 3)
    assert 7 <= fleet.now < 7.6
    fleet.script[2], fleet.script[3] = ["none"], [40.0]
    assert train(sites, 1, 2, 3) == ({2}, {1: 1, 2: ErrorCode.UNKNOWN, 3: 3}, [])
    assert fleet.now == pytest.approx(107, abs=2)


def test_a_late_reply_is_not_used(sites, fleet):
    fleet.script[2] = [130.0]
    train(sites, 1, 2)
    fleet.sleep(40)
    assert train(sites, 1, what="round 2")[:2] == (set(), {1: 1})


def test_a_site_in_backoff_returns_as_soon_as_it_answers_and_nobody_waits_for_it(sites, fleet):
    fleet.script[2] = [40.0]
    assert sites.returned({"b"}) == set()
    assert fleet.sent == [(2, "query")]
    assert sites.returned({"b"}) == set()
    assert (fleet.sent, fleet.now) == ([(2, "query")], 0)  # one at a time
    fleet.sleep(41)
    assert sites.returned({"b"}) == {"b"}
    assert sites.returned(set()) == set()
    fleet.script[2] = ["gone"]
    assert sites.returned({"b"}) == set()
    fleet.nodes[2] = entry("b")
    assert sites.returned({"b"}) == set()  # asked once more
    assert sites.returned({"b"}) == {"b"}


@pytest.mark.parametrize("answer", ["lost", "crashed"])
def test_a_reply_that_was_lost_is_asked_for_once_more(sites, fleet, answer):
    fleet.script[2] = [answer]
    assert train(sites, 1, 2) == (set(), {1: 1, 2: 2}, [2])
    fleet.script[2] = [answer, answer]
    assert train(sites, 1, 2) == (set(), {1: 1, 2: ERRORS[answer].code}, [2])


@pytest.mark.parametrize("new_node", [2, 9])
def test_a_site_that_goes_away_and_returns_is_asked_again(sites, fleet, new_node):
    """Also as another node, after a restart without a registered key."""
    fleet.script[2] = ["gone"]
    fleet.at[fleet.now + 20] = lambda: fleet.nodes.update({new_node: entry("b")})
    assert train(sites, 1, 2) == (set(), {1: 1, 2: new_node}, [2])
    assert sites.roster[new_node] == entry("b")


@pytest.mark.parametrize(("returns", "seconds", "resent"), [(5, 10, [2]), (999, 33, [])])
def test_a_site_that_stays_away_or_goes_away_twice_misses_the_round(
    sites, fleet, returns, seconds, resent
):
    fleet.script[2] = ["gone", "gone"]
    fleet.at[fleet.now + returns] = lambda: fleet.nodes.update({2: entry("b")})
    assert train(sites, 1, 2) == (set(), {1: 1, 2: ErrorCode.UNKNOWN}, resent)
    assert fleet.now < seconds


def test_messages_that_a_superlink_did_not_take_are_sent_again(sites, fleet):
    fleet.is_away = True
    assert train(sites, 1, 2, 3) == (set(), {1: 1, 2: 2, 3: 3}, [1, 2, 3])


def test_a_superlink_that_hangs_does_not_use_up_the_round(sites, fleet):
    fleet.script[2] = [110.0]
    fleet.pull_s = 40.0
    assert train(sites, 1, 2)[0] == set()
    assert fleet.now == pytest.approx(110, abs=1)


# --- who is connected ----------------------------------------------------------------------------


def test_a_site_that_is_away_misses_rounds_and_returns(sites, fleet):
    about = fleet.nodes.pop(2)
    assert [sites.absent() for _ in range(3)] == [set(), {"b"}, {"b"}]
    fleet.nodes[2] = about
    assert sites.absent() == set()
    assert fleet.sent == []  # a node of the roster is not queried


def test_roster_json_follows_a_site_to_its_new_node(sites, fleet, tmp_path):
    events = []
    sites.record_in(tmp_path, lambda event, **fields: events.append((event, fields)))
    assert read_saved_roster(tmp_path / ROSTER_FILE) == THREE
    fleet.nodes[9] = fleet.nodes.pop(2)
    sites.absent()
    assert read_saved_roster(tmp_path / ROSTER_FILE) == {
        1: entry("a"),
        3: entry("c"),
        9: entry("b"),
    }
    joined = [("joined", {"client": c, "node": n}) for c, n in [("a", 1), ("b", 2), ("c", 3)]]
    assert events == [*joined, ("joined", {"client": "b", "node": 9})]


@pytest.mark.parametrize(
    "about", [entry("d"), entry("b"), replace(entry("b"), image_shape=[3, 8, 8])]
)
def test_who_came_later_or_does_not_fit_takes_no_part(sites, fleet, tmp_path, caplog, about):
    """A new client, one whose name is taken, and b on other data once b's own node is gone."""
    events = []
    sites.record_in(tmp_path, lambda event, **fields: events.append((event, fields.get("node"))))
    if about.image_shape != [1, 32, 32]:
        del fleet.nodes[2]
    fleet.nodes[9] = about
    for _ in range(3):
        sites.absent()
    assert sites.roster == THREE
    assert events[3:] == [("refused", 9)]
    assert len([m for m in caplog.messages if "node 9" in m]) == 1


def test_a_silent_stranger_is_not_queried_in_every_round(sites, fleet):
    fleet.nodes[9] = entry("d")
    fleet.script[9] = ["none"] * 9
    for _ in range(5):
        sites.absent()
    assert fleet.now < 31
    assert fleet.sent == [(9, "query")]


# --- the start and a resume ----------------------------------------------------------------------


def test_a_run_waits_for_the_number_of_clients_that_it_needs(monkeypatch):
    fleet = Fleet({1: entry("a")})
    fleet.at[50.0] = lambda: fleet.nodes.update({2: entry("b")})
    made = sites_of(monkeypatch, fleet, num_clients=2)
    made.gather()
    assert made.roster == {1: entry("a"), 2: entry("b")}
    assert 50 <= fleet.now < 52


@pytest.mark.parametrize(
    ("fleet", "saved", "error", "named"),
    [
        (Fleet({1: THREE[1]}), None, TimeoutError, r"\bb\b"),
        (Fleet(THREE, n2=["failed"]), None, ValueError, "client b"),
        (Fleet({1: THREE[1], 4: entry("b")}), None, ValueError, "client d"),  # its key is d's
        (Fleet({1: THREE[1]}), THREE, TimeoutError, r"\bb\b"),
    ],
    ids=["missing", "cannot take part", "a wrong name", "too few for a resume"],
)
def test_who_keeps_a_run_from_starting_is_named(monkeypatch, keys, fleet, saved, error, named):
    keys(a=1, b=2, d=4)
    made = sites_of(monkeypatch, fleet, saved, num_clients=2, min_replies=2)
    with pytest.raises(error, match=named):
        made.gather()


def test_a_resumed_run_continues_with_the_sites_that_are_connected(monkeypatch, caplog):
    fleet = Fleet({1: THREE[1], 3: THREE[3]})
    made = sites_of(monkeypatch, fleet, THREE, min_replies=2)
    made.gather()
    assert made.roster == THREE
    assert made.missing == {"b"}
    assert fleet.now < 95
    fleet.nodes[2] = THREE[2]
    assert made.absent() == set()


# --- identity ------------------------------------------------------------------------------------


def test_a_name_goes_with_its_key(keys, monkeypatch, caplog):
    """Registered as d, a node calls itself b while b is away."""
    fleet = Fleet(THREE)
    made = sites_of(monkeypatch, fleet, num_clients=3)
    made.gather()
    del fleet.nodes[2]
    fleet.nodes[4] = entry("b")
    made.absent()
    assert made.roster == THREE
    assert [m for m in caplog.messages if "node 4" in m and "'b'" in m and "'d'" in m]
    del fleet.nodes[4]
    keys(a=1, b=9, c=3)  # b has a new key
    fleet.nodes[9] = entry("b")
    made.absent()
    assert made.roster[9] == entry("b")


def test_a_registry_that_cannot_be_read_is_named(keys, monkeypatch, tmp_path):
    (tmp_path / "clients.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"clients\.json"):
        sites_of(monkeypatch, Fleet(THREE))
