"""Update validation in whole runs: a bad update costs its client that round, and nobody else."""

import math
from dataclasses import replace

import pytest
import torch
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

import client_app.handlers
from protocol.array_records import tensors
from protocol.messages import read_reply, reply_content
from server_app.inline import run_inline

NUM_CLIENTS, BAD, BAD_CLIENT, BAD_ROUND = 4, 1, "client-0001", 2
KEYS = SMALL | {"image-size": "32", "data-fraction": 0.4, "num-rounds": 3, "norm-bound": "median"}


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with without_pictures():
        yield


def first(arrays, change):
    """The arrays, one of them changed."""
    name = min(arrays)
    return arrays | {name: change(arrays[name])}


def change_arrays(change):
    """A spoiler that changes one array of the model."""
    return lambda reply, sent: replace(reply, arrays=first(reply.arrays, change))


def thousandfold(reply, sent):
    """The update is a thousand times as long."""
    arrays = {name: sent[name] + 1000 * (a - sent[name]) for name, a in reply.arrays.items()}
    return replace(reply, arrays=arrays)


def miscounted(reply, sent):
    """It says that it trained on ten times its samples."""
    count = {"num-examples": 10 * reply.metrics["num-examples"]}
    return replace(reply, metrics=reply.metrics | count)


KINDS = {
    "NaN": change_arrays(lambda a: a * math.nan),
    "enormous": change_arrays(lambda a: torch.full_like(a, 3e38)),
    "wrong shape": change_arrays(lambda a: a[None]),
    "wrong dtype": change_arrays(torch.Tensor.double),
    "unknown array": lambda r, sent: replace(r, arrays=r.arrays | {"more": torch.ones(3)}),
    "too large": lambda r, sent: replace(r, extra={"more": torch.zeros(2**19)}),
    "norm x 1000": thousandfold,
    "wrong count": miscounted,
    "replay": lambda r, sent: replace(r, round=1),
}


def run_with(spoil, output, rounds=(BAD_ROUND,), **keys):
    """The directory of a run in which client-0001's reply is spoilt; None: it fails."""

    def spoilt(message, context):
        number = message.content.config_records["round"]["round"]
        if context.node_config["partition-id"] != BAD or number not in rounds:
            return train(message, context)
        if spoil is None:
            raise ValueError("no power")
        content = train(message, context)
        good = read_reply(Message(content, dst_node_id=1, message_type=MessageType.TRAIN))
        return reply_content(spoil(good, tensors(message.content.array_records["arrays"])))

    train = client_app.handlers.handlers["train"]
    own = {name.replace("_", "-"): value for name, value in keys.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(client_app.handlers.handlers, "train", spoilt)
        return run_inline(KEYS | {"output-dir": str(output)} | own, NUM_CLIENTS)


@pytest.fixture
def run(tmp_path):
    """`run_with` in a folder of the test's own."""
    return lambda spoil, **how: run_with(spoil, tmp_path, **how)


def left_out(folder):
    return [list(line["left_out"]) for line in history_of(folder)]


def test_a_bad_update_is_left_out_and_the_run_is_as_without_it(tmp_path):
    """One of each kind, in a round each; then as in a run in which the client fails there."""

    def spoil(reply, sent):
        return list(KINDS.values())[reply.round - 2](reply, sent)

    rounds = range(2, 2 + len(KINDS))
    bad, without = (
        run_with(spoiler, tmp_path / name, rounds, num_rounds=rounds.stop)
        for name, spoiler in (("bad", spoil), ("without", None))
    )
    for folder in (bad, without):
        assert left_out(folder) == [[], *[[BAD_CLIENT]] * len(KINDS), []]
    assert [summary_of(each)["rejected"] for each in (bad, without)] == [len(KINDS), 0]
    assert accuracy_of(without) > 0.3  # it has learnt something that could be lost
    assert same_bits(final_model(bad), final_model(without))


@pytest.mark.parametrize(
    ("method", "value"),
    [("scaffold", math.nan), ("fedproc", 3e38), ("fedpac", math.nan), ("fedcr", 3e38)],
)
def test_what_travels_beside_the_model_is_held_to_the_same(method, value, run):
    def spoil(reply, sent):
        return replace(reply, extra=first(reply.extra, lambda a: torch.full_like(a, value)))

    folder = run(spoil, method=method, local_test_fraction=0.2)
    assert left_out(folder) == [[], [BAD_CLIENT], []]
    assert all(array.isfinite().all() for array in final_model(folder).values())


def test_a_control_variate_of_a_hundred_times_the_median_is_rejected(run):
    def spoil(reply, sent):
        return replace(reply, extra={name: 100 * a for name, a in reply.extra.items()})

    folder = run(spoil, method="scaffold", norm_bound_value=1e6)
    assert list(history_of(folder)[BAD_ROUND - 1]["left_out"]) == [BAD_CLIENT]


def test_an_accuracy_of_a_model_that_the_method_does_not_have_counts_for_nothing(run):
    def spoil(reply, sent):
        return replace(reply, metrics=reply.metrics | {"personal-accuracy": 1.0})

    folder = run(spoil, rounds=range(1, 4))
    assert not [n for n in summary_of(folder)["results"] if n.startswith("personal")]
