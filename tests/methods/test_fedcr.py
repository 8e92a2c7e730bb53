"""FedCR, both halves: sampled loss, divergence and products of Gaussians in loops."""

import dataclasses
from contextlib import nullcontext

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
from method_fixtures import HEAD, MOVING, body_part, head_part, random

from client_app.methods import method_of
from client_app.methods.fedcr import Sampled
from client_app.setup import build_network
from protocol.messages import RosterEntry, TrainReply
from strategies.fedcr import FedCRServer


def cr(**keys):
    base = {"momentum": 0.0, "weight_decay": 0.0, "fedcr__beta": 0.3, "fedcr__samples": 4}
    return make_config(method="fedcr", **base | keys)


def cr_round(config, weights, m=None, s=None, **about):
    extra = {
        "M": torch.zeros(3, 256) if m is None else m,
        "S": torch.ones(3, 256) if s is None else s,
    }
    now = make_round(
        config, received=body_part(weights), state={"head": head_part(weights)}, **about
    )
    return dataclasses.replace(now, extra=extra)


def by_hand(config, now, w, names, stream, epochs, penalty):
    """(weights, mean sampled loss) of SGD on these names; penalty of (mu, s, y), a scalar."""
    network = build_network(config, SHAPE, NUM_CLASSES).double()
    w = {n: a.double() for n, a in w.items()}
    generator = torch.Generator().manual_seed(now.seed("dropout", stream))
    velocity, losses, train = dict.fromkeys(names, 0.0), [], config.train
    for step in now.steps(stream, epochs):
        network.load_state_dict(w)
        _, (raw,) = network.run(step.x.double(), ["projection"], to_logits=False)
        mu, dev = raw[:, :256], F.softplus(raw[:, 256:])
        eps = torch.randn(4, len(step.y), 256, generator=generator)
        logits = [network.classifier(mu + dev * each) for each in eps]
        ce = sum(F.cross_entropy(each, step.y) for each in logits) / 4
        losses.append(ce.item())
        leaves = [network.tensors[n] for n in names]
        found = torch.autograd.grad(ce + penalty(mu, dev, step.y), leaves)
        for n, g in zip(names, found, strict=True):
            velocity[n] = train.momentum * velocity[n] + g + train.weight_decay * w[n]
            w = w | {n: w[n] - train.lr * velocity[n]}
    return w, sum(losses) / len(losses)


def test_local_training_and_the_final_epochs_are_sgd_on_the_sampled_loss():
    config = cr(
        batch_size=10, local_epochs=2, fedcr__final_head_epochs=2, num_rounds=1, lr=1e-3, **MOVING
    )
    w = initial(config, seed=5)
    m, s = random(3, 256, seed=1).float(), random(3, 256, seed=2).exp().float()

    def penalty(mu, dev, y):
        local, of_global = (torch.distributions.Normal(*q) for q in ((mu, dev), (m[y], s[y])))
        return 0.3 * torch.distributions.kl_divergence(of_global, local).sum(1).mean()

    now = cr_round(config, w, m, s)
    update = method_of(config).train(now)
    expected, mean_loss = by_hand(config, now, w, sorted(w), "batches", 2, penalty)
    assert update.terms["supervised"] == pytest.approx(mean_loss, rel=1e-4)
    assert update.arrays.keys() == w.keys() - HEAD
    assert_close(update.arrays | update.state["head"], expected, rtol=1e-4, atol=5e-6)
    now = cr_round(config, w, m, s)
    tuned = method_of(config).personal_model(now, now.state).model.state_dict()
    expected, _ = by_hand(config, now, w, sorted(HEAD), "fine-tuning", 2, lambda *_: 0.0)
    assert_close(tuned, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("keys", "before"),
    [
        ({"lr": 0.0, "local_epochs": 3}, {"lr": 0.0}),  # of every sample once
        ({"local_epochs": 2, "batch_size": 100}, {"local_epochs": 1, "batch_size": 100}),
    ],
)
def test_fedcrs_product_is_of_the_last_epoch_alone(keys, before):
    """Of the model as it was `before`: with a rate of zero, and after all steps but the last."""
    classes = {"partition": "classes", "classes_per_client": 2}
    w = initial(cr(), seed=5)
    earlier = method_of(cr(**before, **classes)).train(cr_round(cr(**before, **classes), w))
    config = cr(**keys, **classes)
    now = cr_round(config, w)
    update = method_of(config).train(now)
    network = build_network(config, SHAPE, NUM_CLASSES).double()
    network.load_state_dict(earlier.arrays | earlier.state["head"])
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


def test_fedcrs_server_moves_the_gaussians_of_reported_classes():
    config = cr()
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
        torch.testing.assert_close(server.m[k], mean)
        torch.testing.assert_close(server.s[k], precision**-0.5)
    assert torch.equal(server.m[1], old_m[1])
    assert torch.equal(server.s[1], old_s[1])
    other = FedCRServer(config, build_network(config, SHAPE, NUM_CLASSES))
    other.load(server.state())
    assert_same_bits(other.extra(), server.extra())


@pytest.mark.parametrize(
    ("seen", "scale", "named"),
    [
        ((1, 0, 1), 1.0, ""),
        ((1, 0, 0), 1.0, ""),
        ((1, 1, 0), 1.0, "'seen'"),
        ((1, 0, 0.5), 1.0, "'seen'"),
        ((1, 0, 1), 2e-12, ""),
        ((1, 0, 1), 5e-13, "'S'"),
        ((1, 0, 1), -1.0, "'S'"),
    ],
)
def test_the_server_rejects_gaussians_that_no_client_can_have(seen, scale, named):
    """An epoch cut short may miss a class, and shows none that the client does not have."""
    config = cr()
    server = FedCRServer(config, build_network(config, SHAPE, NUM_CLASSES))
    server.roster = {1: RosterEntry("a", [4, 0, 2], [], [1, 28, 28], "cnn", 256, "", 0)}
    extra = {"M": server.m, "S": server.s * scale, "seen": torch.tensor(seen, dtype=torch.float)}
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        server.checked_extra(TrainReply("a", 1, {}, extra, {}))
