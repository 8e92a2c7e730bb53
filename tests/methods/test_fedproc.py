"""FedProc: its contrast in loops, its schedule, and the class sums it sends."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_same_bits,
    batch_of,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import cross_entropy, labels, random, unit

from client_app.method import ModelParts
from client_app.methods import method_of
from client_app.methods.fedavg import FedAvg
from client_app.methods.fedproc import FedProc, prototype_contrast, schedule
from client_app.setup import build_network
from protocol.messages import TrainReply
from strategies.fedproc import FedProcServer


def contrast_in_loops(z, y, c):
    """Mean of -log( e^{z.c_y} / sum_k e^{z.c_k} ) over known prototypes, scaled to length 1."""
    known = {k: row for k, row in enumerate(c.tolist()) if any(row)}
    directions = {k: [v / math.sqrt(sum(u * u for u in r)) for v in r] for k, r in known.items()}
    losses = []
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        dots = {k: sum(a * b for a, b in zip(row, d, strict=True)) for k, d in directions.items()}
        if label in dots:
            total = sum(math.exp(v) for v in dots.values())
            losses.append(-math.log(math.exp(dots[label]) / total))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("unknown", [[], [1], [0, 3], [1, 2, 3], [0, 1, 2, 3, 4]])
def test_fedprocs_contrast_is_the_formula_in_loops(unknown):
    z, c = unit(random(7, 3, seed=1)), random(5, 3, seed=2, scale=5)
    c[unknown] = 0
    y = torch.tensor([0, 1, 2, 3, 1, 2, 2])
    z.requires_grad_()
    loss = prototype_contrast(z, y, c)
    assert loss.item() == pytest.approx(contrast_in_loops(z, y, c), rel=1e-12)
    loss.backward()
    assert z.grad.isfinite().all()
    if unknown:  # nothing pulls the samples of a class without a prototype
        assert z.grad[[n for n in range(7) if int(y[n]) in unknown]].abs().max() == 0


def test_fedprocs_known_numbers():
    c = torch.eye(10, dtype=torch.float64)
    y = labels(6, 10)
    assert prototype_contrast(c[y], y, 4 * c).item() == pytest.approx(1.461150, abs=5e-7)
    z = unit(random(6, 10, seed=1)).requires_grad_()
    loss = prototype_contrast(z, y, c[:1].expand(10, 10))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(10), rel=1e-12)
    assert z.grad.abs().max() < 1e-15


def test_fedprocs_prototypes_are_constants_and_pull():
    z, c = unit(random(5, 3, seed=1)).requires_grad_(), random(4, 3, seed=2).requires_grad_()
    y = labels(5, 4)
    prototype_contrast(z, y, c).backward()
    assert c.grad is None
    moved = z.detach() - 0.1 * z.grad
    towards = (moved * unit(c.detach())[y]).sum() - (z.detach() * unit(c.detach())[y]).sum()
    assert towards > 0


@pytest.mark.parametrize(("t", "value"), [(0, 1.0), (1, 0.1), (5, 0.5), (10, 1.0), (25, 1.0)])
def test_fedprocs_schedule(t, value):
    assert schedule(t, 10) == pytest.approx(value)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_fedprocs_loss_moves_from_contrast_to_cross_entropy(number):
    z, c, y = unit(random(5, 3, seed=1)), random(4, 3, seed=2), labels(5, 4)
    logits = random(5, 4, seed=3)
    ctx = SimpleNamespace(
        round=number,
        config=SimpleNamespace(rounds=SimpleNamespace(num_rounds=8)),
        model=SimpleNamespace(classifier=SimpleNamespace(weight=c)),
        extra={"prototypes": c},
    )
    a_t = 1.0 if number == 1 else (number - 1) / 8
    method = FedProc(schedule_rounds=0)
    batch = batch_of([z], y=y, logits=logits, ctx=ctx, prepared=method.begin_round(ctx))
    supervised = a_t * cross_entropy(logits, y)
    assert method.supervised(batch).item() == pytest.approx(supervised, rel=1e-12)
    penalty = (1 - a_t) * contrast_in_loops(z, y, c)
    assert method.penalty(batch).item() == pytest.approx(penalty, rel=1e-12)


@pytest.mark.parametrize("rounds", [1, 100])
def test_fedprocs_schedule_may_be_shorter_or_longer_than_the_run(rounds):
    """T = 100 in the authors' code; with T = 1 every round is cross entropy alone, the control."""
    config = make_config(method="fedproc", num_rounds=5, fedproc__schedule_rounds=rounds)
    method = method_of(config)
    ctx = dataclasses.replace(make_round(config, 3), extra={"prototypes": torch.ones(3, 256)})
    assert method.begin_round(ctx) == pytest.approx(2 / 100 if rounds == 100 else 1.0)
    assert not method.depends_on_num_rounds()
    assert (method.train(ctx).terms["penalty"] > 0) == (rounds == 100)


def test_fedprocs_first_round_is_fedavgs_on_the_same_network(monkeypatch):
    config = make_config(method="fedproc", num_rounds=5)
    now = make_round(config)
    now = dataclasses.replace(now, extra={"prototypes": torch.ones(3, 256)})
    update = method_of(config).train(now)
    monkeypatch.setattr(FedAvg, "model_parts", lambda self: ModelParts("mlp-normalised"))
    plain = train(make_config(num_rounds=5))
    assert_same_bits(update.arrays, plain.arrays)


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
    following = server.next_arrays(initial(make_config(method="fedproc")), replies)
    for name, array in following.items():  # both have six samples
        torch.testing.assert_close(array, (replies[0].arrays[name] + replies[1].arrays[name]) / 2)
    found = server.extra()["prototypes"]
    (a, b) = (reply.extra["sums"] for reply in replies)
    torch.testing.assert_close(found[0], (a[0] + b[0]) / 5)
    torch.testing.assert_close(found[2], (a[2] + b[2]) / 7)
    assert (found[1] == 0).all()
    torch.testing.assert_close(server.beside_model(replies[0])["means"][0], a[0] / 4)
    other = fedproc_server()
    other.load(server.state())
    assert_same_bits(other.extra(), server.extra())


def test_a_client_whose_count_is_capped_counts_as_little_in_the_prototypes():
    server = fedproc_server(max_weight_share=0.5)
    replies = [proc_reply("a", 1, [4.0, 0, 2]), proc_reply("b", 2, [1e6, 0, 5])]
    server.next_arrays(initial(make_config(method="fedproc")), replies)
    (a, b), scale = (reply.extra["sums"] for reply in replies), 6 / (1e6 + 5)
    expected = (a[0] + scale * b[0]) / (4 + scale * 1e6)
    torch.testing.assert_close(server.extra()["prototypes"][0], expected)


def test_the_server_rejects_counts_that_are_not_the_rosters():
    server = fedproc_server()
    server.roster = {1: SimpleNamespace(client="a", label_counts=[4, 0, 2])}
    assert server.extra_reason(proc_reply("a", 1, [4.0, 0, 2])) == ""
    assert "array 'counts' is not [4, 0, 2]" in server.extra_reason(proc_reply("a", 1, [4.0, 1, 2]))
    server.roster[1].label_counts[0] = 2**24 + 1  # float32 has no such number
    assert server.extra_reason(proc_reply("a", 1, [2.0**24 + 1, 0, 2])) == ""


def test_the_server_rejects_sums_of_classes_without_samples():
    """They would move the prototype of a class that the client does not have."""
    server, reply = fedproc_server(), proc_reply("a", 1, [4.0, 0, 2])
    server.roster = {1: SimpleNamespace(client="a", label_counts=[4, 0, 2])}
    reply.extra["sums"][1, 7] = 1e-3
    assert server.extra_reason(reply) == "array 'sums' is not 0 for a class without samples"
