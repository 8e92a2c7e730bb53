"""FedPAC, both halves: statistics, prototypes and the mix of heads, by formula and by solver."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    assert_same_bits,
    initial,
    make_config,
    make_round,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from method_fixtures import HEAD, body_part, extra_for, head_part, random

from client_app.methods import method_of
from client_app.setup import build_network
from protocol.messages import TrainReply
from strategies.fedpac import FedPACServer, head_mix


def features_by_class(config, weights, now):
    """{class: features [n_k, d]} of this client's samples, one image at a time."""
    network = build_network(config, SHAPE, NUM_CLASSES).double().eval()
    network.load_state_dict(weights)
    found = {}
    for x, y in now.train_samples.in_order(1):
        found.setdefault(int(y), []).append(network.extract(x.double(), "fc2").detach()[0])
    return {k: torch.stack(rows) for k, rows in found.items()}


def statistics_in_loops(features):
    """(h [C, d], v): h[k] = p(k) mu_k; v the official per-class expression over n."""
    n = sum(map(len, features.values()))
    h = torch.zeros(NUM_CLASSES, 84, dtype=torch.float64)
    v = 0.0
    for k, f in features.items():
        p, mean = len(f) / n, f.mean(0)
        h[k] = p * mean
        v += p * f.square().sum(1).mean().item() - p**2 * mean.square().sum().item()
    return h, v / n


def pac(**keys):
    base = {"momentum": 0.0, "weight_decay": 0.0, "fedpac__lambda": 3.0, "fedpac__head_lr": 0.2}
    return make_config(method="fedpac", **base | keys)


def test_fedpacs_statistics_are_of_the_received_body_and_its_means_of_the_trained_one():
    """Rows of a class that the client lacks are zeros."""
    config = pac(partition="classes", classes_per_client=2, flip=True)
    w = initial(config, seed=5)
    now = make_round(config, received=body_part(w))
    update = method_of(config).train(now)
    before = features_by_class(config, initial(config) | body_part(w), now)
    assert len(before) == 2
    h, v = statistics_in_loops(before)
    torch.testing.assert_close(update.extra["h"].double(), h, rtol=1e-4, atol=1e-6)
    assert update.extra["v"].shape == (1,)
    assert update.extra["v"].item() == pytest.approx(v, rel=1e-3)
    after = features_by_class(config, update.arrays | update.state["head"], now)
    for k in range(NUM_CLASSES):
        mean = after[k].mean(0) if k in after else torch.zeros(84, dtype=torch.float64)
        torch.testing.assert_close(update.extra["means"][k].double(), mean, rtol=1e-4, atol=1e-5)
        assert update.extra["counts"][k] == len(after.get(k, []))
    assert_same_bits({n: update.extra[f"head.{n}"] for n in HEAD}, update.state["head"])


@pytest.mark.parametrize("known", [None, [1.0, 0.0, 1.0]])
def test_a_fedpac_round_is_head_then_body_towards_the_prototypes(known):
    """One full batch for each: the head by CE at head-lr, the body by CE + lambda MSE at lr."""
    config = pac(batch_size=100)
    w, prototypes = initial(config, seed=5), random(3, 84, seed=2).float()
    extra = {f"head.{n}": a for n, a in head_part(w).items()}
    if known:
        extra |= {"prototypes": prototypes, "is-known": torch.tensor(known)}
    now = make_round(
        config, number=2, received=body_part(w), state={"head": head_part(initial(config))}
    )
    now = dataclasses.replace(now, extra=extra)
    update = method_of(config).train(now)

    network = build_network(config, SHAPE, NUM_CLASSES).double().eval()
    network.load_state_dict(w)
    (x, y) = next(now.train_samples.in_order())
    x = x.double()
    own = {k: f.mean(0) for k, f in features_by_class(config, w, now).items()}
    loss = F.cross_entropy(network(x), y)
    head = list(network.classifier.parameters())
    for p, g in zip(head, torch.autograd.grad(loss, head), strict=True):
        p.data -= 0.2 * g
    logits, (f,) = network.run(x, ["features"])
    loss = F.cross_entropy(logits, y)
    if known:
        wanted = [prototypes[k] if known[k] else own[k] for k in y.tolist()]
        penalty = (
            3.0 * sum(((a - t) ** 2).sum() for a, t in zip(f, wanted, strict=True)) / f.numel()
        )
        assert update.terms["penalty"] == pytest.approx(penalty.item(), rel=1e-4)
        loss = loss + penalty
    else:
        assert "penalty" not in update.terms
    body = list(network.stages.parameters())
    for p, g in zip(body, torch.autograd.grad(loss, body), strict=True):
        p.data -= 0.05 * g
    result = network.state_dict()
    assert_close(update.arrays, result, rtol=0, atol=1e-6)
    assert_close(update.state["head"], result, rtol=0, atol=1e-6)
    assert update.num_steps == 2


def programme(i, h, v):
    """diag(v) + G_i, entry by entry."""
    m = len(v)
    g = [[float((h[i] - h[j]) @ (h[i] - h[k])) for k in range(m)] for j in range(m)]
    return np.diag(v) + np.array(g)


def best_mix(q):
    """The minimum of a'qa over the simplex by trying every set of non-zero entries."""
    m = len(q)
    best, value = None, math.inf
    for size in range(1, m + 1):
        for chosen in itertools.combinations(range(m), size):
            part = q[np.ix_(chosen, chosen)]
            x = np.linalg.solve(part, np.ones(size))
            if (x / x.sum() < 0).any():
                continue
            a = np.zeros(m)
            a[list(chosen)] = x / x.sum()
            if a @ q @ a < value:
                best, value = a, a @ q @ a
    return best


def without_crumbs(a):
    kept = np.where(a > 1e-3, a, 0)
    return kept / kept.sum()


def random_programme(m, width, spread, seed):
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(m, width)) * 10 ** rng.uniform(-1, 0.5, size=(m, 1)) / width**0.5
    return h, rng.uniform(0.1, 2, size=m) * 10.0**spread


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    m=st.integers(1, 7),
    width=st.integers(1, 30),
    spread=st.integers(-8, 1),
    seed=st.integers(0, 10**6),
)
def test_the_mix_of_heads_is_the_best_one(m, width, spread, seed):
    h, v = random_programme(m, width, spread, seed)
    for i in range(m):
        a, q = head_mix(i, h, v), programme(i, h, v)
        assert a.shape == (m,)
        assert (a >= 0).all()
        assert a.sum() == pytest.approx(1)
        assert ((a == 0) | (a > 1e-3)).all()
        best = best_mix(q)
        # at the best mix every head in it is worth the same, and none outside would help
        slope = 2 * q @ best
        assert slope.min() == pytest.approx(slope @ best, rel=1e-6)
        if (abs(best - 1e-3) > 1e-5).all():  # not a matter of which side of the line
            assert a == pytest.approx(without_crumbs(best), abs=1e-4)
        value = a @ q @ a
        slack = 1 + 1e-2  # crumbs that are dropped cost a little
        assert value <= slack * min(q[i, i], np.full(m, 1 / m) @ q @ np.full(m, 1 / m))


def pac_server():
    config = pac(max_weight_share=1.0)
    return FedPACServer(config, build_network(config, SHAPE, NUM_CLASSES))


def pac_reply(client, seed, counts):
    w = initial(pac(), seed=seed)
    extra = {f"head.{n}": a for n, a in head_part(w).items()}
    extra |= {
        "h": random(3, 84, seed=seed).float() / 9,
        "v": torch.tensor([0.3 + seed]),
        "means": random(3, 84, seed=seed + 50).float(),
        "counts": torch.tensor(counts),
    }
    return TrainReply(client, 1, body_part(w), extra, {"num-examples": sum(counts)})


def test_fedpacs_server_mixes_each_clients_head_and_weighs_means_by_class_counts():
    server = pac_server()
    assert extra_for(server, "a") == {}
    replies = [
        pac_reply("a", 1, [5.0, 0, 5]),
        pac_reply("b", 2, [1.0, 0, 3]),
        pac_reply("c", 3, [0.0, 0, 9]),
    ]
    assert replies[0].extra.keys() == server.expected_extra().keys()
    server.current = server.sent = body_part(initial(pac()))
    following = server.next_arrays(server.current, replies)
    shares = [10 / 23, 4 / 23, 9 / 23]
    for name, array in following.items():
        mean = sum(p * r.arrays[name].double() for p, r in zip(shares, replies, strict=True))
        torch.testing.assert_close(array.double(), mean, rtol=0, atol=1e-6)
    h = np.stack([r.extra["h"].double().flatten().numpy() for r in replies])
    v = np.array([1.3, 2.3, 3.3])
    for i, client in enumerate("abc"):
        sent = extra_for(server, client)
        a = without_crumbs(best_mix(programme(i, h, v)))
        assert (a > 0.01).sum() > 1
        for name in HEAD:
            mixed = sum(s * r.extra[f"head.{name}"] for s, r in zip(a, replies, strict=True))
            torch.testing.assert_close(
                sent[f"head.{name}"].double(), mixed.double(), rtol=0, atol=1e-4
            )
        assert sent["is-known"].tolist() == [1, 0, 1]
        means = [r.extra["means"] for r in replies]
        torch.testing.assert_close(sent["prototypes"][0], ((5 * means[0] + means[1]) / 6)[0])
        torch.testing.assert_close(
            sent["prototypes"][2], ((5 * means[0] + 3 * means[1] + 9 * means[2]) / 17)[2]
        )
    assert extra_for(server, "newcomer").keys() == {"prototypes", "is-known"}
