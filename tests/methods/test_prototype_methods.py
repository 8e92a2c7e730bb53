"""FedPAC, FedCR and the class prototypes: clients' statistics, servers' mixtures and products."""

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
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from client_app.methods import fedcr, method_of
from client_app.methods.fedcr import Product, Sampled, divergence, gaussian, sampled_cross_entropy
from client_app.methods.fedpac import head_statistics, targets
from client_app.prototypes import class_means, class_sums
from client_app.setup import build_network
from client_app.split_model import train_part
from client_app.trainer import copy_of
from protocol.messages import TrainReply
from strategies.fedcr import FedCRServer, product_of_gaussians
from strategies.fedpac import FedPACServer, head_mix
from strategies.prototypes import Prototypes

HEAD = {"classifier.weight", "classifier.bias"}


def body_part(weights):
    return {n: a for n, a in weights.items() if n not in HEAD}


def head_part(weights):
    return {n: weights[n] for n in HEAD}


def extra_for(server, client):
    """All that this client is sent beside the model."""
    return server.extra() | server.own_extra(client)


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- prototypes -----------------------------------------------------------------------------------


def test_prototypes_are_means_over_all_samples_and_stay_where_nobody_reports():
    kept = Prototypes(3, 2)
    assert not kept.is_known.any()
    sums = [torch.tensor([[2.0, 4], [0, 0], [3, 3]]), torch.tensor([[4.0, 0], [0, 0], [0, 0]])]
    kept.update(sums, [torch.tensor([1.0, 0, 3]), torch.tensor([3.0, 0, 0])])
    assert kept.values.tolist() == [[1.5, 1], [0, 0], [1, 1]]
    assert kept.is_known.tolist() == [1, 0, 1]
    kept.update([torch.tensor([[0.0, 0], [9, 6], [0, 0]])], [torch.tensor([0.0, 3, 0])])
    assert kept.values.tolist() == [[1.5, 1], [3, 2], [1, 1]]
    assert kept.is_known.tolist() == [1, 1, 1]


def test_class_sums_are_of_the_model_in_eval_mode_and_leave_its_mode():
    config = make_config(model="resnet20")
    now = make_round(config)
    now.model.train()
    statistics = {n: b.clone() for n, b in now.model.named_buffers()}
    sums, counts = class_sums(now.model, now.train_samples)
    assert now.model.training
    assert_same_bits(dict(now.model.named_buffers()), statistics)
    (x, y) = next(now.train_samples.in_order())
    with torch.no_grad():
        f = now.model.eval().extract(x, now.model.stage_names[-1])
    for k in range(3):
        torch.testing.assert_close(sums[k], f[y == k].sum(0), rtol=1e-4, atol=1e-4)
        assert counts[k] == (y == k).sum()


# --- FedPAC, client -------------------------------------------------------------------------------


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


def test_h_and_v_as_printed():
    means, counts = random(3, 4, seed=1), torch.tensor([2.0, 0, 6])
    means[1] = 0
    h, v = head_statistics(means, counts, torch.tensor(9.0))
    assert_close({"h": h}, {"h": means * torch.tensor([[0.25], [0], [0.75]])}, rtol=1e-6, atol=0)
    assert v.item() == pytest.approx((9 - h.square().sum().item()) / 8, rel=1e-6)
    assert class_means(torch.tensor([[4.0], [0]]), torch.tensor([2.0, 0])).tolist() == [[2], [0]]


@pytest.mark.parametrize("partition", ["iid", "classes"])
def test_fedpacs_statistics_are_of_the_received_body_and_its_means_of_the_trained_one(partition):
    """With the classes partition the client lacks one: its rows are zeros."""
    config = pac(partition=partition, classes_per_client=2, flip=True)
    w = initial(config, seed=5)
    now = make_round(config, received=body_part(w))
    update = method_of(config).train(now)
    before = features_by_class(config, initial(config) | body_part(w), now)
    assert len(before) == (3 if partition == "iid" else 2)
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


def test_a_class_without_a_global_prototype_has_the_clients_own_mean():
    t = targets(torch.ones(3, 2), torch.tensor([1.0, 0, 1]), torch.full((3, 2), 7.0))
    assert t.tolist() == [[1, 1], [7, 7], [1, 1]]


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


def test_fedpac_without_lambda_and_with_its_own_head_is_fedrep_to_the_bit():
    keys = {"momentum": 0.5, "weight_decay": 0.01}
    one = pac(**keys, fedpac__lambda=0.0, fedpac__head_lr=0.05, fedpac__extractor_epochs=2)
    two = make_config(method="fedrep", fedrep__extractor_epochs=2, **keys)
    body, state = body_part(initial(one, seed=5)), {}
    for number in (1, 2):
        now = make_round(one, number=number, received=body, state=state)
        if number == 2:
            head = {f"head.{n}": a for n, a in state["head"].items()}
            prototypes = {"prototypes": torch.ones(3, 84), "is-known": torch.ones(3)}
            now = dataclasses.replace(now, extra=head | prototypes)
        update = method_of(one).train(now)
        other = train(two, number=number, received=body, state=state)
        assert_same_bits(update.arrays, other.arrays)
        assert_same_bits(update.state["head"], other.state["head"])
        body, state = update.arrays, update.state


# --- FedPAC, server -------------------------------------------------------------------------------


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


def slsqp_mix(i, h, v):
    """The same by a general solver, from the own head; scaled, as its tolerance is absolute."""
    q = programme(i, h, v) / v[i]
    m = len(v)
    found = minimize(
        lambda a: float(a @ q @ a),
        np.eye(m)[i],
        jac=lambda a: 2 * q @ a,
        bounds=[(0.0, 1.0)] * m,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(m)},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    return found.x


@pytest.mark.parametrize("m", [2, 10, 40])
def test_the_mix_is_no_worse_than_a_general_solvers(m):
    h, v = random_programme(m, 60, 0, seed=m)
    for i in range(0, m, 7):
        a, q = head_mix(i, h, v), programme(i, h, v)
        other = slsqp_mix(i, h, v)
        assert a == pytest.approx(without_crumbs(other), abs=2e-3)  # crumbs on either side of 1e-3
        assert a @ q @ a <= without_crumbs(other) @ q @ without_crumbs(other) * (1 + 1e-6)


def test_alike_heads_are_mixed_by_their_precision():
    h, v = np.tile([[1.0, -2, 3]], (4, 1)), np.array([1.0, 2, 4, 0.5])
    for i in range(4):
        assert head_mix(i, h, v) == pytest.approx((1 / v) / (1 / v).sum(), abs=1e-5)
        assert head_mix(i, h, np.full(4, 0.3)) == pytest.approx([0.25] * 4, abs=1e-5)


@pytest.mark.parametrize("far", [1e2, 1e4])
def test_a_client_far_from_all_others_keeps_its_own_head(far):
    h, v = random_programme(5, 8, 0, seed=3)
    h[2] += far
    assert head_mix(2, h, v) == pytest.approx(np.eye(5)[2], abs=1e-9)
    for i in (0, 1, 3, 4):  # and the others have no use for it
        assert head_mix(i, h, v)[2] == 0


def test_many_clients_do_not_break_the_mix(caplog):
    h, v = random_programme(30, 40, -1, seed=4)
    a = head_mix(7, h, v)
    q = programme(7, h, v)
    support, slope = a > 0, 2 * q @ a
    assert 1 < support.sum() < 30
    assert slope[support] == pytest.approx(slope @ a, rel=0.05)
    assert slope.min() > 0.9 * (slope @ a)
    assert not caplog.records


def test_a_client_without_variance_keeps_its_own_head():
    assert head_mix(0, np.eye(3), np.array([0.0, 1, 1])).tolist() == [1, 0, 0]


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
    following = server.next_arrays(body_part(initial(pac())), replies)
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


def test_fedpacs_server_goes_on_from_its_state():
    server, other = pac_server(), pac_server()
    server.next_arrays(
        body_part(initial(pac())),
        [pac_reply("a", 1, [5.0, 0, 5]), pac_reply("b/c", 2, [1.0, 0, 3])],
    )
    other.load(server.state())
    for client in ("a", "b/c", "newcomer"):
        assert_same_bits(extra_for(other, client), extra_for(server, client))


# --- FedCR, client --------------------------------------------------------------------------------


def cr(**keys):
    base = {"momentum": 0.0, "weight_decay": 0.0, "fedcr__beta": 0.3, "fedcr__samples": 4}
    return make_config(method="fedcr", **base | keys)


def test_the_divergence_of_two_gaussians_in_loops_and_known_numbers():
    mu_1, mu_2 = random(3, 4, seed=1), random(3, 4, seed=2)
    s_1, s_2 = random(3, 4, seed=3).exp(), random(3, 4, seed=4).exp()
    for b, got in enumerate(divergence(mu_1, s_1, mu_2, s_2).tolist()):
        rows = (t[b].tolist() for t in (mu_1, s_1, mu_2, s_2))
        total = 0.0
        for m, s, n, t in zip(*rows, strict=True):
            total += math.log(t / s) + (s * s + (m - n) ** 2) / (2 * t * t) - 0.5
        assert got == pytest.approx(total, rel=1e-11)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    assert divergence(zero, one, zero, one).item() == 0
    assert divergence(zero, one, one, 2 * one).item() == pytest.approx(0.443147, abs=5e-7)
    assert divergence(one, 2 * one, zero, one).item() == pytest.approx(1.306853, abs=5e-7)


def test_mean_and_deviation_are_the_two_halves():
    raw = torch.tensor([[1.0, -2.0, 0.0, -100.0]])
    mu, s = gaussian(raw)
    assert mu.tolist() == [[1, -2]]
    assert s[0, 0].item() == pytest.approx(math.log(2))
    assert s[0, 1].item() == pytest.approx(1e-8)


def test_the_sampled_loss_is_a_mean_over_samples_and_draws():
    head = torch.nn.Linear(3, 4)
    mu, s, y = (
        random(5, 3, seed=1).float(),
        random(5, 3, seed=2).exp().float(),
        torch.tensor([0, 3, 1, 2, 2]),
    )
    torch.manual_seed(7)
    got = sampled_cross_entropy(head, mu, s, y, 6)
    torch.manual_seed(7)
    eps = torch.randn(6, 5, 3)
    losses = []
    for r in range(6):
        for b in range(5):
            logits = head((mu[b] + s[b] * eps[r, b])[None])
            losses.append(F.cross_entropy(logits, y[b : b + 1]).item())
    assert got.item() == pytest.approx(sum(losses) / 30, rel=1e-5)
    sure = sampled_cross_entropy(head, mu, 0 * s, y, 6)
    assert sure.item() == pytest.approx(F.cross_entropy(head(mu), y).item(), rel=1e-6)


def test_the_product_of_posteriors():
    product = Product(3, 2, torch.device("cpu"))
    mu, s = random(7, 2, seed=1).float(), random(7, 2, seed=2).exp().float()
    y = torch.tensor([0, 2, 0, 0, 2, 0, 0])
    product.add(mu[:3], s[:3], y[:3])
    product.add(mu[3:], s[3:], y[3:])
    read = product.read()
    assert read["seen"].tolist() == [1, 0, 1]
    assert read["M"][1].tolist() == [0, 0]
    assert read["S"][1].tolist() == [1, 1]
    for k in (0, 2):
        precision = sum(1 / s[b] ** 2 for b in range(7) if y[b] == k)
        mean = sum(mu[b] / s[b] ** 2 for b in range(7) if y[b] == k) / precision
        torch.testing.assert_close(read["M"][k], mean)
        torch.testing.assert_close(read["S"][k], precision**-0.5)


def test_q_copies_of_one_posterior_are_q_times_as_sure():
    product = Product(1, 1, torch.device("cpu"))
    product.add(torch.full((5, 1), 3.0), torch.full((5, 1), 0.7), torch.zeros(5, dtype=torch.int64))
    read = product.read()
    assert read["M"].item() == pytest.approx(3)
    assert read["S"].item() ** 2 == pytest.approx(0.49 / 5)


def cr_round(config, weights, m=None, s=None, **about):
    extra = {
        "M": torch.zeros(3, 256) if m is None else m,
        "S": torch.ones(3, 256) if s is None else s,
    }
    now = make_round(
        config, received=body_part(weights), state={"head": head_part(weights)}, **about
    )
    return dataclasses.replace(now, extra=extra)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_step_of_fedcr_is_the_formula(reverse):
    config = cr(batch_size=100, fedcr__reverse=reverse)
    w = initial(config, seed=5)
    m, s = random(3, 256, seed=1).float(), random(3, 256, seed=2).exp().float()
    now = cr_round(config, w, m, s)
    update = method_of(config).train(now)
    network = build_network(config, SHAPE, NUM_CLASSES).double()
    network.load_state_dict(w)
    (batch,) = now.steps("batches", 1)
    _, (raw,) = network.run(batch.x.double(), ["projection"], to_logits=False)
    mu, dev = raw[:, :256], F.softplus(raw[:, 256:])
    with torch.random.fork_rng():
        torch.manual_seed(now.seed("dropout", "batches"))
        eps = torch.randn(4, 30, 256)
    ce = sum(F.cross_entropy(network.classifier(mu + dev * eps[r]), batch.y) for r in range(4)) / 4
    g_m, g_s = m[batch.y], s[batch.y]
    local, of_global = (torch.distributions.Normal(*about) for about in ((mu, dev), (g_m, g_s)))
    pair = (local, of_global) if reverse else (of_global, local)
    penalty = 0.3 * torch.distributions.kl_divergence(*pair).sum(1).mean()
    assert update.terms["supervised"] == pytest.approx(ce.item(), rel=1e-4)
    assert update.terms["penalty"] == pytest.approx(penalty.item(), rel=1e-4)
    (ce + penalty).backward()
    wanted = {n: p.detach() - 0.05 * p.grad for n, p in network.named_parameters()}
    assert_close(update.arrays | update.state["head"], wanted, rtol=1e-4, atol=1e-6)
    assert update.arrays.keys() == wanted.keys() - HEAD


def test_fedcrs_product_is_of_the_last_epoch_alone():
    """With a rate of zero: of every sample once."""
    config = cr(lr=0.0, local_epochs=3, partition="classes", classes_per_client=2)
    w = initial(config, seed=5)
    now = cr_round(config, w)
    update = method_of(config).train(now)
    network = build_network(config, SHAPE, NUM_CLASSES).double()
    network.load_state_dict(w)
    (x, y) = next(now.train_samples.in_order())
    _, (raw,) = network.run(x.double(), ["projection"], to_logits=False)
    mu, s = raw[:, :256].detach(), F.softplus(raw[:, 256:]).detach()
    assert update.extra["seen"].tolist() == [float(k in y) for k in range(3)]
    assert update.extra["seen"].sum() == 2
    for k in set(y.tolist()):
        precision = (1 / s[y == k] ** 2).sum(0)
        wanted = {"S": precision**-0.5, "M": (mu[y == k] / s[y == k] ** 2).sum(0) / precision}
        assert_close({"S": wanted["S"]}, {"S": update.extra["S"][k]}, rtol=1e-4, atol=0)
        assert_close({"M": wanted["M"]}, {"M": update.extra["M"][k]}, rtol=1e-3, atol=1e-5)


def test_fedcr_without_beta_and_deviation_trains_head_and_body_on_the_means(monkeypatch):
    """FedPer: cross entropy on the whole network, the head kept."""
    config = cr(fedcr__beta=0.0, fedcr__samples=1, local_epochs=2, momentum=0.5)
    monkeypatch.setattr(
        fedcr, "gaussian", lambda raw: (raw[:, :256], torch.full_like(raw[:, :256], 1e-8))
    )
    w = initial(config, seed=5)
    update = method_of(config).train(cr_round(config, w))
    now = cr_round(config, w)
    now.model.load_state_dict(w)
    train_part(now, now.model, "full", 2, 0.05, stream="batches")
    assert_close(update.arrays | update.state["head"], copy_of(now.model), rtol=0, atol=2e-6)


def test_fedcrs_last_heads_are_the_same_without_the_cache():
    found, rows = [], {0: 0, 512: 0}
    for cache_mb in rows:
        config = cr(fedcr__final_head_epochs=3, num_rounds=1, cache_mb=cache_mb)
        now = cr_round(config, initial(config, seed=5), number=1)

        def count(_, x, *, cache_mb=cache_mb):
            rows[cache_mb] += len(x[0])

        next(iter(now.model.stages.values())).body.register_forward_pre_hook(count)
        model = method_of(config).personal_model(now, now.state)
        found.append(dict(model.model.classifier.state_dict()))
    assert rows == {0: 3 * len(now.train_samples), 512: len(now.train_samples)}
    assert_close(*found, rtol=0, atol=1e-6)


def test_fedcr_is_judged_by_the_mean_logits_of_its_draws():
    config = cr()
    now = cr_round(config, initial(config, seed=5))
    model = method_of(config).personal_model(now, now.state)
    assert isinstance(model, Sampled)
    (x, _) = next(now.train_samples.in_order())
    first = model(x).detach()
    again = method_of(config).personal_model(now, now.state)(x).detach()
    assert torch.equal(first, again)  # seeded
    generator = torch.Generator().manual_seed(now.seed("evaluation"))
    eps = torch.randn(4, len(x), 256, generator=generator)
    network = build_network(config, SHAPE, NUM_CLASSES)
    network.load_state_dict(initial(config, seed=5))
    _, (raw,) = network.run(x, ["projection"], to_logits=False)
    z = [raw[:, :256] + F.softplus(raw[:, 256:]) * eps[r] for r in range(4)]
    torch.testing.assert_close(first, sum(network.classifier(v) for v in z).detach() / 4)


@pytest.mark.parametrize(("number", "moved"), [(2, set()), (3, HEAD)])
def test_fedcrs_final_epochs_tune_the_head_after_the_last_round_alone(number, moved):
    config = cr(fedcr__final_head_epochs=1, num_rounds=3)
    w = initial(config, seed=5)
    now = cr_round(config, w, number=number)
    model = method_of(config).personal_model(now, now.state)
    assert set(differ(model.model.state_dict(), w)) == moved


# --- FedCR, server --------------------------------------------------------------------------------


def test_the_servers_product_has_a_standard_normal_expert():
    m, s, seen = product_of_gaussians(
        [torch.full((2, 1), 6.0)], [torch.full((2, 1), 0.5)], [torch.tensor([1.0, 0.0])]
    )
    assert s[0].item() ** 2 == pytest.approx(0.25 / 1.25)
    assert m[0].item() == pytest.approx(6 / 1.25)
    assert (m[1].item(), s[1].item()) == (0, 1)
    assert seen.tolist() == [True, False]


@pytest.mark.parametrize("b2", [1.0, 0.25])
def test_fedcrs_server_moves_the_gaussians_of_reported_classes(b2):
    config = cr(fedcr__b2=b2)
    server = FedCRServer(config, build_network(config, SHAPE, NUM_CLASSES))
    body = server.initial_arrays(build_network(config, SHAPE, NUM_CLASSES))
    assert (server.extra()["M"] == 0).all()
    assert (server.extra()["S"] == 1).all()
    server.m, server.s = random(3, 256, seed=9).float(), random(3, 256, seed=8).exp().float()
    old_m, old_s = server.m.clone(), server.s.clone()
    seen = [torch.tensor([1.0, 0, 1]), torch.tensor([1.0, 0, 0])]
    means = [random(3, 256, seed=n).float() for n in (1, 2)]
    deviations = [random(3, 256, seed=n).exp().float() for n in (3, 4)]
    replies = [
        TrainReply(str(i), 1, body, {"M": m, "S": s, "seen": k}, {"num-examples": 1})
        for i, (m, s, k) in enumerate(zip(means, deviations, seen, strict=True))
    ]
    assert replies[0].extra.keys() == server.expected_extra().keys()
    server.next_arrays(body, replies)
    for k, who in ((0, (0, 1)), (2, (0,))):
        precision = 1 + sum(1 / deviations[i][k] ** 2 for i in who)
        mean = sum(means[i][k] / deviations[i][k] ** 2 for i in who) / precision
        torch.testing.assert_close(server.m[k], (1 - b2) * old_m[k] + b2 * mean)
        torch.testing.assert_close(server.s[k], (1 - b2) * old_s[k] + b2 * precision**-0.5)
    assert torch.equal(server.m[1], old_m[1])
    assert torch.equal(server.s[1], old_s[1])
    other = FedCRServer(config, build_network(config, SHAPE, NUM_CLASSES))
    other.load(server.state())
    assert_same_bits(other.extra(), server.extra())
