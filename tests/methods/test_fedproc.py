"""FedProc: its contrast in loops, its schedule, and the class sums it sends."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_same_bits,
    initial,
    make_config,
    make_round,
)
from method_fixtures import random

from client_app.methods import method_of
from client_app.setup import build_network
from protocol.messages import TrainReply
from strategies.fedproc import FedProcServer


def test_fedproc_sends_the_class_sums_of_the_model_it_ends_with():
    config = make_config(method="fedproc", flip=True)  # not of augmented images
    now = dataclasses.replace(make_round(config), extra={"prototypes": torch.ones(3, 256)})
    update = method_of(config).train(now)
    network = build_network(config, SHAPE, NUM_CLASSES).eval()
    network.load_state_dict(update.arrays)
    sums, counts = torch.zeros(3, 256), [0, 0, 0]
    for x, y in now.train_samples.in_order(1):
        z = network.extract(x, "projection").detach()[0]
        assert z.norm().item() == pytest.approx(1, rel=1e-5)
        sums[int(y)] += z
        counts[int(y)] += 1
    assert update.extra["counts"].tolist() == counts
    torch.testing.assert_close(update.extra["sums"], sums, rtol=1e-4, atol=1e-5)


# --- the server half ------------------------------------------------------------------------------


def fedproc_server(max_weight_share=1.0):
    config = make_config(method="fedproc", max_weight_share=max_weight_share)
    return FedProcServer(config, build_network(config, SHAPE, NUM_CLASSES))


def proc_reply(client, seed, counts):
    arrays = initial(make_config(method="fedproc"), seed=seed)
    extra = {"sums": random(3, 256, seed=seed).float(), "counts": torch.tensor(counts)}
    extra["sums"][extra["counts"] == 0] = 0
    return TrainReply(client, 1, arrays, extra, {"num-examples": sum(counts)})


def test_the_servers_prototypes_are_means_over_all_samples_of_a_class():
    server, replies = (
        fedproc_server(),
        [proc_reply("a", 1, [4.0, 0, 2]), proc_reply("b", 2, [1.0, 0, 5])],
    )
    assert replies[0].extra.keys() == server.expected_extra().keys()
    server.current = server.sent = initial(make_config(method="fedproc"))
    following = server.next_arrays(server.current, replies)
    for name, array in following.items():  # both have six samples
        torch.testing.assert_close(array, (replies[0].arrays[name] + replies[1].arrays[name]) / 2)
    found = server.extra()["prototypes"]
    (a, b) = (reply.extra["sums"] for reply in replies)
    torch.testing.assert_close(found[0], (a[0] + b[0]) / 5)
    torch.testing.assert_close(found[2], (a[2] + b[2]) / 7)
    assert (found[1] == 0).all()
    server.roster = {1: SimpleNamespace(client="a", label_counts=[4, 0, 2])}
    torch.testing.assert_close(server.checked_extra(replies[0])["means"][0], a[0] / 4)
    other = fedproc_server()
    other.load(server.state())
    assert_same_bits(other.extra(), server.extra())


def test_the_server_rejects_sums_of_classes_without_samples():
    """They would move the prototype of a class that the client does not have."""
    server, reply = fedproc_server(), proc_reply("a", 1, [4.0, 0, 2])
    server.roster = {1: SimpleNamespace(client="a", label_counts=[4, 0, 2])}
    with pytest.raises(ValueError, match="'counts'"):
        server.checked_extra(proc_reply("a", 1, [4.0, 1, 2]))
    reply.extra["sums"][1, 7] = 1e-3
    with pytest.raises(ValueError, match="'sums'"):
        server.checked_extra(reply)
    server.roster[1].label_counts[0] = 2**24 + 1  # float32 has no such number
    server.checked_extra(proc_reply("a", 1, [2.0**24 + 1, 0, 2]))
