"""The update firewall in whole runs: a bad update costs its client that round, and nobody else."""

import logging
import math

import pytest
import torch
from bad_updates import BAD_CLIENT, BAD_NODE, KINDS, FaultyGrid, run_with
from conftest import SMALL, final_model, history_of, same_bits, summary_of
from flwr.app import Message, MessageType

import server_app.report
from protocol.config import resolve_config
from protocol.messages import TrainReply, read_reply, reply_content
from server_app.federation import run_federation
from server_app.inline import InlineGrid, run_inline, simulated_nodes
from strategies.validation import (
    ExpectedReply,
    NormReference,
    beyond_bound,
    beyond_median,
    norm,
    rejection_reason,
)

rounds, bad_round = 4, 3
keys = SMALL | {"num-rounds": rounds, "batch-size": 16}
others = ["client-0000", "client-0002", "client-0003"]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        for picture in ("plot_accuracy", "plot_label_distribution"):
            patch.setattr(server_app.report, picture, lambda *what: None)
        yield


@pytest.fixture(scope="module")
def without_it(tmp_path_factory):
    """The run in which the client does not answer at all in that round."""
    output = {"output-dir": str(tmp_path_factory.mktemp("without"))}
    return run_with("no reply", [bad_round], keys | output)


def accuracy_of(folder):
    return summary_of(folder)["results"]["global.accuracy"]["final"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "no reply"])
def test_a_bad_update_is_left_out_and_named_and_the_run_is_as_without_it(
    kind, without_it, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run_with(kind, [bad_round], keys | {"output-dir": str(tmp_path)})
    assert summary_of(folder)["status"] == "finished"
    history = history_of(folder)
    left_out = [line["left_out"] for line in history]
    assert [list(each) for each in left_out] == [
        [BAD_CLIENT] if number == bad_round else [] for number in range(1, rounds + 1)
    ]
    reason = left_out[bad_round - 1][BAD_CLIENT]
    assert KINDS[kind].reason in reason
    assert history[bad_round - 1]["participants"] == others
    line, *more = caplog.messages
    assert line == f"round {bad_round}: left out client {BAD_CLIENT}: {reason}"
    is_late = kind == "late"
    assert [m["rejected"] for m in history][bad_round - 1] == summary_of(folder)["rejected"]
    assert summary_of(folder)["rejected"] == (0 if is_late else 1)
    too_late = f"client {BAD_CLIENT}'s reply to round {bad_round} came too late and is not used"
    assert more == ([too_late] if is_late else [])
    late = [row["late"] for row in history_of(folder) if row["late"]]
    assert late == ([[f"client {BAD_CLIENT}'s reply to round {bad_round}"]] if is_late else [])
    assert accuracy_of(without_it) > 0.5  # it has learnt something that could be lost
    assert accuracy_of(folder) == accuracy_of(without_it)
    assert same_bits(final_model(folder), final_model(without_it))


def test_without_a_bound_a_long_update_is_taken_and_spoils_the_model(without_it, tmp_path):
    """Or the bound would not be what refuses it."""
    grid = FaultyGrid("norm x 1000", [bad_round])
    try:
        folder = run_federation(grid, keys | {"output-dir": str(tmp_path)}).path
    except RuntimeError:
        return  # the model is not even finite any more
    assert history_of(folder)[bad_round - 1]["left_out"] == {}
    assert accuracy_of(folder) < accuracy_of(without_it) - 0.1


def test_a_reply_that_comes_twice_counts_once(tmp_path):
    class Twice(InlineGrid):
        def pull_messages(self, message_ids):
            return [r for reply in super().pull_messages(message_ids) for r in (reply, reply)]

    short = keys | {"num-rounds": 1, "output-dir": str(tmp_path)}
    folder = run_federation(Twice(_app(), simulated_nodes(4)), short).path
    once = run_inline(short, 4)
    assert same_bits(final_model(folder), final_model(once))
    assert [line["rejected"] for line in history_of(folder)] == [0]


def _app():
    import client_app.app

    return client_app.app.app


@pytest.mark.parametrize("method", ["scaffold", "fedproc", "fedpac", "fedcr"])
def test_what_travels_beside_the_model_is_held_to_the_same(method, tmp_path):
    class Spoilt(InlineGrid):
        def answer(self, message: Message) -> Message:
            reply = super().answer(message)
            about = message.metadata
            if (about.dst_node_id, about.message_type) != (BAD_NODE, MessageType.TRAIN):
                return reply
            good = read_reply(reply)
            name = min(good.extra)
            extra = good.extra | {name: good.extra[name] * math.nan}
            arrays = good.arrays
            bad = TrainReply(good.client, good.round, arrays, extra, good.metrics)
            return Message(reply_content(bad), reply_to=message)

    few = {"method": method, "num-rounds": 2, "local-test-fraction": 0.2, "batch-size": 64}
    given = keys | few | {"output-dir": str(tmp_path)}
    folder = run_federation(Spoilt(_app(), simulated_nodes(4)), given).path
    for line in history_of(folder):
        assert line["participants"] == others
        assert "values that are not finite" in line["left_out"][BAD_CLIENT]
    assert all(array.isfinite().all() for array in final_model(folder).values())


# --- the checks themselves ------------------------------------------------------------------------


def reply_of(client="a", round_=3, count=10.0, arrays=None, extra=None):
    arrays = {"w": torch.zeros(2)} if arrays is None else arrays
    return TrainReply(client, round_, arrays, extra or {}, {"num-examples": count})


want = ExpectedReply(3, {"w": torch.zeros(2)}, {}, {"a": 10, "b": 5})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (reply_of(), ""),
        (reply_of("b", count=5.0), ""),
        (reply_of("b"), "num-examples is 10, the roster says 5"),
        (reply_of("c"), "it was not asked in round 3"),
        (reply_of(round_=2), "it answers round 2"),
        (reply_of(round_=4), "it answers round 4"),
        (reply_of(count=math.nan), "num-examples is nan, the roster says 10"),
        (reply_of(extra={"c": torch.ones(1)}), "array 'c' is unknown (1 too many)"),
        (reply_of(arrays={}), "array 'w' is missing (1 of 1)"),
    ],
)
def test_why_a_reply_is_refused(reply, reason):
    assert rejection_reason(reply, want) == reason


def test_the_norm_is_over_all_arrays_in_double_precision():
    big = torch.tensor([3e25, -4e25])  # its square is beyond float32
    assert norm({"a": big, "b": torch.zeros(4)}) == pytest.approx(5e25)
    assert norm({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[2.0]])}) == pytest.approx(3)
    assert norm({}) == 0


def rounds_config(**given):
    return resolve_config({k.replace("_", "-"): v for k, v in given.items()}).rounds


def test_a_fixed_bound_is_the_norm_itself_and_inclusive():
    found = beyond_bound(
        {"a": 1.0, "b": 2.0, "c": 2.5},
        rounds_config(norm_bound="fixed", norm_bound_value=2.0),
        NormReference(),
    )
    assert found == {"c": "its update's norm is 2.5, more than 2 (norm-bound-value)"}


@pytest.mark.parametrize(
    "norms", [{"a": 1.0, "b": 1e3}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0, "c": 0.0}]
)
def test_without_three_changes_the_median_bound_is_not_applied_and_says_so_once(norms, caplog):
    bound, reference = rounds_config(norm_bound="median"), NormReference()
    for _ in range(2):
        assert beyond_bound(norms, bound, reference) == {}
    [line] = caplog.messages
    assert "needs at least 3 replies that change something, this round has" in line


def test_clients_that_send_no_change_or_hardly_any_do_not_lower_the_median():
    bound = rounds_config(norm_bound="median", norm_bound_value=5.0)
    still = {"a": 1.0, "b": 1.1, "c": 1.2, "d": 0.0, "e": 0.0}
    assert beyond_bound(still, bound, NormReference()) == {}
    assert beyond_bound(still | {"d": 1e-30, "e": 1e-30}, bound, NormReference()) == {}


def test_the_norm_reference_falls_by_at_most_half_a_round_and_is_restored():
    bound, reference = rounds_config(norm_bound="median", norm_bound_value=3.0), NormReference()
    assert beyond_bound({"a": 4.0, "b": 4.0, "c": 4.0}, bound, reference) == {}
    resumed = NormReference()
    resumed.load(reference.state())
    for each in (reference, resumed):  # a cohort in which the hostile are many
        assert beyond_bound({"a": 4.0, "b": 1e-9, "c": 1e-9}, bound, each) == {}
        assert each.value == 2.0
    resumed.load({})  # of a checkpoint of an earlier version
    assert resumed.value == 0.0


def test_arrays_beside_the_model_are_bounded_by_ten_times_the_median():
    norms = {"a": 1.0, "b": 2.0, "c": 20.0, "d": 20.1}
    assert beyond_median(norms) == {
        "d": "the norm of its arrays beside the model is 20.1, more than 20 (10 times the round's "
        "median)"
    }
    assert beyond_median({"a": 1.0, "b": 1e9, "c": 0.0}) == {}


def test_a_median_bound_is_relative_to_the_round():
    bound = rounds_config(norm_bound="median", norm_bound_value=3.0)
    found = beyond_bound({"a": 1.0, "b": 2.0, "c": 3.0, "d": 7.6}, bound, NormReference())
    assert found == {"d": "its update's norm is 7.6, more than 6 (3 times the round's median of 2)"}
    assert beyond_bound({"a": 0.0, "b": 0.0}, bound, NormReference()) == {}
    assert beyond_bound({}, bound, NormReference()) == {}


def test_no_bound_by_default():
    assert beyond_bound({"a": 1.0, "b": 1e9}, rounds_config(), NormReference()) == {}


def test_the_update_is_measured_from_what_was_sent_also_when_the_server_looks_ahead(tmp_path):
    """FedACG broadcasts w + lambda m: a client that does not move has an update of norm 0."""
    given = {
        "server-optimizer": "fedacg",
        "norm-bound": "fixed",
        "norm-bound-value": 1e-5,
        "num-rounds": 3,
    }
    idle = keys | given | {"local-epochs": 0, "output-dir": str(tmp_path)}
    assert [line["rejected"] for line in history_of(run_inline(idle, 4))] == [0, 0, 0]


@pytest.mark.parametrize("method", ["fedreco", "fedrep", "local"])
def test_a_bound_serves_every_strategy(method, tmp_path):
    given = {"method": method, "norm-bound": "median", "norm-bound-value": 50.0, "num-rounds": 2}
    own = {"batch-size": 64, "local-test-fraction": 0.2, "output-dir": str(tmp_path)}
    history = history_of(run_inline(keys | given | own, 4))
    assert [line["rejected"] for line in history] == [0, 0]
    assert all(len(line["participants"]) == 4 for line in history)
