"""Update validation in whole runs: a bad update costs its client that round, and nobody else."""

import logging
import math

import pytest
from bad_updates import BAD_CLIENT, BAD_NODE, KINDS, FaultyGrid, run_with
from flwr.app import Message, MessageType
from run_fixtures import (
    SMALL,
    accuracy_of,
    final_model,
    history_of,
    same_bits,
    summary_of,
    without_pictures,
)

from protocol.messages import TrainReply, read_reply, reply_content
from server_app.federation import run_federation
from server_app.inline import InlineGrid, run_inline, simulated_nodes

rounds, bad_round = 4, 3
keys = SMALL | {"data-fraction": 0.4, "num-rounds": rounds, "batch-size": 16}
others = ["client-0000", "client-0002", "client-0003"]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def without_it(tmp_path_factory):
    """The run in which the client does not answer at all in that round."""
    output = {"output-dir": str(tmp_path_factory.mktemp("without"))}
    return run_with("no reply", [bad_round], keys | output)


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


@pytest.mark.parametrize("method", ["fedreco", "fedrep", "local"])
def test_a_bound_serves_every_strategy(method, tmp_path):
    given = {"method": method, "norm-bound": "median", "norm-bound-value": 50.0, "num-rounds": 2}
    own = {"batch-size": 64, "local-test-fraction": 0.2, "output-dir": str(tmp_path)}
    history = history_of(run_inline(keys | given | own, 4))
    assert [line["rejected"] for line in history] == [0, 0]
    assert all(len(line["participants"]) == 4 for line in history)
