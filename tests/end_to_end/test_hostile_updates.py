"""Whole runs with a hostile site, which lies about its samples or sends absurd arrays."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import (
    SMALL,
    accuracy_of,
    audit_of,
    final_model,
    history_of,
    same_bits,
    summary_of,
    without_pictures,
)

import client_app.app
from data.sources import load_source
from flower_adapter import SUPERLINK_NODE, assign_source_node
from protocol.messages import (
    Arrays,
    TrainReply,
    read_reply,
    read_roster,
    reply_content,
    roster_content,
    tensors,
)
from server_app.federation import run_federation
from server_app.inline import InlineGrid, run_inline
from strategies.aggregation import capped_counts
from strategies.average import TooFewRepliesError

HOSTILE, NODE = "site-1", 3
HONEST = ["site-0", "site-2", "site-3"]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """The node configs of four sites, each with an eighth of the digits in a file of its own."""
    folder = tmp_path_factory.mktemp("sites")
    source = load_source("digits", folder / "data", folder / "cache")
    images, labels = np.asarray(source.train.images), np.asarray(source.train.labels)
    parts = np.array_split(np.random.default_rng(0).permutation(len(labels) // 2), 4)
    configs = []
    for number, part in enumerate(parts):
        path = folder / f"{number}.npz"
        x, y = images[part], labels[part]
        np.savez(path, x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
        configs.append({"name": f"site-{number}", "source": f"npz:{path}"})
    return configs


class HostileGrid(InlineGrid):
    """A grid in which site-1 claims `claim` samples and sends what `spoil` makes of its reply."""

    is_in_process = False  # sites take no paths from a server

    def __init__(self, sites, spoil=None, claim=None, rounds=range(1, 1000)):
        super().__init__(client_app.app.app, sites)
        self.spoil, self.claim, self.rounds = spoil, claim, rounds

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        about = message.metadata
        if about.dst_node_id != NODE or reply.has_error():
            return reply
        if about.message_type == MessageType.QUERY and self.claim:
            entry = read_roster(reply)
            counts = list(entry.label_counts)
            counts[0] += self.claim - sum(counts)
            return Message(roster_content(replace(entry, label_counts=counts)), reply_to=message)
        if about.message_type == MessageType.TRAIN:
            good = read_reply(reply)
            if self.claim:
                good = replace(good, metrics=good.metrics | {"num-examples": self.claim})
            number = message.content.config_records["round"]["round"]
            if self.spoil and number in self.rounds:
                sent = tensors(message.content.array_records["arrays"])
                good = self.spoil(good, sent)
            return Message(reply_content(good), reply_to=message)
        return reply


def reversed_update(reply: TrainReply, sent: Arrays) -> TrainReply:
    """The update with its sign reversed: its norm is an honest one."""
    arrays = {
        name: sent[name] - (array - sent[name]) if array.is_floating_point() else array
        for name, array in reply.arrays.items()
    }
    return replace(reply, arrays=arrays)


def run(grid, tmp_path, **keys):
    own = {key.replace("_", "-"): value for key, value in keys.items()}
    # a name of its own: these sites have state of the runs of other tests, by run name
    where = {"output-dir": str(tmp_path), "run-name": tmp_path.name}
    return run_federation(grid, SMALL | where | own).path


# --- a lying sample count -------------------------------------------------------------------------

LONG = {"num_rounds": 30, "batch_size": 16, "lr": 0.02, "evaluate_every": 30, "image_size": 28}


@pytest.fixture(scope="module")
def honest(sites, tmp_path_factory):
    """The accuracy of the run in which nobody lies."""
    return accuracy_of(run(HostileGrid(sites), tmp_path_factory.mktemp("honest"), **LONG))


@pytest.mark.parametrize(
    "key",
    [
        {},
        pytest.param({"norm_bound": "median"}, marks=pytest.mark.slow),
        pytest.param({"aggregation": "median"}, marks=pytest.mark.slow),
    ],
)
def test_a_billion_claimed_samples_and_a_reversed_update_cost_at_most_two_points(
    key, honest, sites, tmp_path, caplog
):
    grid = HostileGrid(sites, reversed_update, claim=10**9)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run(grid, tmp_path, **LONG | key)
    found = accuracy_of(folder)
    print(f"{key or 'default'}: {found:.1%}, nobody lies: {honest:.1%}")
    assert found >= honest - 0.02
    [line] = [m for m in caplog.messages if "declares 1000000000" in m]
    assert line.startswith("client site-1 declares 1000000000 training samples, 100.0% of all (the")
    assert "it weighs at most max-weight-share = 0.25 of a round, and not at all" in line
    assert "points against the others' (median cosine -0." in str(history_of(folder)[0]["left_out"])


def test_a_claimed_billion_does_not_make_its_loss_the_round_s(sites, tmp_path):
    def spoil(reply: TrainReply, sent: Arrays) -> TrainReply:
        return replace(reply, metrics=reply.metrics | {"loss.supervised": 1000.0})

    first, _ = history_of(run(HostileGrid(sites, spoil, claim=10**9), tmp_path))
    assert 250 <= first["losses"]["supervised"] < 253  # a quarter of it, and the others' 2.3


@pytest.mark.parametrize("key", [{}, {"norm_bound": "median"}, {"aggregation": "multi-krum"}])
def test_a_claimed_billion_gives_the_weights_of_a_uniform_mean(key, sites, tmp_path):
    """Of four sites none weighs more than a quarter; with a bound or robust rule, ever."""
    key = key | ({"num_malicious": 0} if "aggregation" in key else {})
    lying = run(HostileGrid(sites, claim=10**9), tmp_path / "lying", **key)
    uniform = run(HostileGrid(sites), tmp_path / "uniform", weighting="uniform", **key)
    assert same_bits(final_model(lying), final_model(uniform))


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.booleans()), min_size=1, max_size=12),
    st.floats(0.05, 1),
)
def test_no_unchecked_count_is_above_its_share_and_no_more_is_cut_than_needed(pairs, share):
    counts, is_checked = zip(*pairs, strict=True)
    capped = capped_counts(counts, is_checked, share)
    limit = max(share, 1 / len(counts))
    total = sum(capped)
    for before, after, known in zip(counts, capped, is_checked, strict=True):
        assert 0 < after <= before
        assert not known or after == before
        assert known or after <= limit * total * (1 + 1e-6)
        assert after == before or after >= limit * total * (1 - 1e-6)  # just at its share


def test_simulated_clients_keep_their_counts_and_their_bits(tmp_path):
    """Their partition says what they hold, so the cap changes nothing, however small it is."""
    both = [
        run_inline(
            SMALL | {"alpha": 0.3, "max-weight-share": share, "output-dir": str(tmp_path / name)}, 4
        )
        for name, share in (("capped", 0.01), ("free", 1.0))
    ]
    assert same_bits(*map(final_model, both))


# --- absurd values --------------------------------------------------------------------------------


def enormous(value):
    """One number of the update is `value`."""

    def spoil(reply: TrainReply, sent: Arrays) -> TrainReply:
        name = min(reply.arrays)
        array = reply.arrays[name].clone()
        array.view(-1)[3] = value
        return replace(reply, arrays=reply.arrays | {name: array})

    return spoil


def enormous_beside(reply: TrainReply, sent: Arrays) -> TrainReply:
    """One number alongside the model is."""
    name = max(reply.extra, key=lambda k: reply.extra[k].numel())
    array = reply.extra[name].clone()
    array.view(-1)[3] = 3e38
    return replace(reply, extra=reply.extra | {name: array})


@pytest.mark.parametrize(
    ("method", "optimizer", "spoil"),
    [
        ("fedavg", "fedavg", enormous(3e38)),
        ("fedavg", "fedavg", enormous(-3e38)),
        ("fedavg", "fedadam", enormous(3e38)),
        ("scaffold", "fedavg", enormous(3e38)),
        ("scaffold", "fedavg", enormous_beside),
        ("fedreco", "fedavg", enormous(3e38)),
        ("fedproc", "fedavg", enormous_beside),
        ("fedpac", "fedavg", enormous_beside),
        ("fedcr", "fedavg", enormous_beside),
    ],
)
def test_one_enormous_number_costs_its_sender_the_round_and_nobody_else(
    method, optimizer, spoil, sites, tmp_path
):
    grid = HostileGrid(sites, spoil, rounds=[1])
    keys = {"method": method, "server_optimizer": optimizer, "local_test_fraction": 0.2}
    first, second = history_of(run(grid, tmp_path, **keys))
    assert first["participants"] == HONEST
    assert "the bound on values is" in first["left_out"][HOSTILE]
    assert second["participants"] == ["site-0", "site-1", "site-2", "site-3"]


# --- the norm bound -------------------------------------------------------------------------------


def no_change(reply: TrainReply, sent: Arrays) -> TrainReply:
    """Trained on nothing."""
    return replace(reply, arrays={name: sent[name] for name in reply.arrays})


@pytest.mark.parametrize("number", [2, 4])
def test_a_client_that_sends_no_change_gets_no_honest_client_rejected(number, sites, tmp_path):
    grid = HostileGrid(sites[:number], no_change)
    for line in history_of(run(grid, tmp_path, norm_bound="median", norm_bound_value=2.0)):
        assert line["left_out"] == {}
        assert len(line["participants"]) == number


def test_a_control_variate_of_a_hundred_times_the_median_is_rejected(sites, tmp_path):
    def spoil(reply: TrainReply, sent: Arrays) -> TrainReply:
        return replace(reply, extra={name: 100 * a for name, a in reply.extra.items()})

    grid = HostileGrid(sites, spoil)
    for line in history_of(run(grid, tmp_path, method="scaffold", norm_bound="median")):
        assert line["participants"] == HONEST
        assert "its arrays alongside the model" in line["left_out"][HOSTILE]


def test_counts_beside_the_model_are_those_of_the_roster(sites, tmp_path):
    def spoil(reply: TrainReply, sent: Arrays) -> TrainReply:
        return replace(reply, extra=reply.extra | {"counts": 10 * reply.extra["counts"]})

    first, _ = history_of(run(HostileGrid(sites, spoil), tmp_path, method="fedproc"))
    assert first["left_out"][HOSTILE].startswith("array 'counts' is not [")


# --- the audit log --------------------------------------------------------------------------------


def test_an_update_that_ends_the_run_is_in_the_audit_log(sites, tmp_path):
    def spoil(reply: TrainReply, sent: Arrays) -> TrainReply:
        return replace(reply, arrays={n: a * torch.nan for n, a in reply.arrays.items()})

    with pytest.raises(TooFewRepliesError):
        run(HostileGrid(sites, spoil), tmp_path, min_replies=4)
    [line] = audit_of(tmp_path / tmp_path.name, "rejected")
    assert list(line["clients"]) == [HOSTILE]
    assert "not finite" in line["clients"][HOSTILE]


class CrashingGrid(InlineGrid):
    """A grid in which site-1's ClientApp dies once on a train message."""

    is_in_process = False

    def answer(self, message: Message) -> Message:
        about = message.metadata
        if about.message_type == MessageType.TRAIN and about.dst_node_id == NODE:
            self.num_sent = getattr(self, "num_sent", 0) + 1
            if self.num_sent == 1:
                return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "killed"), reply_to=message)
        return super().answer(message)


def test_what_is_sent_again_is_in_the_audit_log_and_in_the_traffic(sites, tmp_path):
    folder = run(CrashingGrid(client_app.app.app, sites), tmp_path, num_rounds=1)
    first, again = [line for line in audit_of(folder, "sent") if line["kind"] == "train"]
    assert (first["clients"], again["clients"]) == (sorted([HOSTILE, *HONEST]), [HOSTILE])
    assert first["bytes"] == pytest.approx(4 * again["bytes"], rel=0.01)
    assert history_of(folder)[0]["bytes_down"] == first["bytes"] + again["bytes"]


class MovingGrid(InlineGrid):
    """A grid in which site-1's SuperNode restarts in round 1, and has another node id since."""

    is_in_process = False

    def answer(self, message: Message) -> Message:
        about = message.metadata
        if about.message_type == MessageType.TRAIN and about.dst_node_id == NODE:
            self.contexts[99] = self.contexts.pop(NODE)
            reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
            assign_source_node(reply, SUPERLINK_NODE)
            return reply
        return super().answer(message)


def test_a_private_client_that_returns_as_another_node_is_asked_again_and_noted(sites, tmp_path):
    """Its old node is no longer in the roster then."""
    privacy = {"privacy.epsilon": 0.5, "privacy.clip_norm": 1e-3}
    folder = run(MovingGrid(client_app.app.app, sites), tmp_path, num_rounds=1, **privacy)
    assert history_of(folder)[0]["participants"] == sorted([HOSTILE, *HONEST])
    first, again = audit_of(folder, "released")
    assert (first["clients"], again["clients"]) == (sorted([HOSTILE, *HONEST]), [HOSTILE])


# --- metrics that the method does not have --------------------------------------------------------


class BoastingGrid(InlineGrid):
    """A grid in which site-1 adds a metric of 1 to all that it sends."""

    is_in_process = False

    def __init__(self, sites, metric):
        super().__init__(client_app.app.app, sites)
        self.metric = metric

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        about = message.metadata
        if about.dst_node_id != NODE or about.message_type == MessageType.QUERY:
            return reply
        sent = read_reply(reply)
        more = replace(sent, metrics=sent.metrics | {self.metric: 1.0})
        return Message(reply_content(more), reply_to=message)


@pytest.mark.parametrize(
    ("method", "metric", "curves"),
    [
        ("fedavg", "personal-accuracy", {"global.accuracy", "local_global.mean"}),
        ("fedreco", "global-accuracy", {"personal.mean"}),
    ],
)
def test_the_accuracy_of_a_model_that_a_method_does_not_have_counts_for_nothing(
    method, metric, curves, sites, tmp_path
):
    grid = BoastingGrid(sites, metric)
    folder = run(grid, tmp_path, method=method, evaluate_clients="all", num_rounds=1)
    found = summary_of(folder)["results"]
    assert {name for name in found if "decile" not in name} == curves


# --- sizes and texts ------------------------------------------------------------------------------


def test_a_reply_with_two_megabytes_more_than_expected_is_rejected(sites, tmp_path):
    def spoil(reply: TrainReply, sent: Arrays) -> TrainReply:
        return replace(reply, extra={"more": torch.zeros(2**19)})

    first, _ = history_of(run(HostileGrid(sites, spoil), tmp_path))
    assert "bytes, more than the bound of" in first["left_out"][HOSTILE]


def test_a_name_that_breaks_the_rule_ends_the_run_before_round_1(sites, tmp_path):
    nodes = [sites[0], sites[1] | {"name": "../../x\x1b[31m"}]
    with pytest.raises(ValueError, match=r"client name '../../x': expected 1 to 64 letters"):
        run(InlineGrid(client_app.app.app, nodes), tmp_path)
