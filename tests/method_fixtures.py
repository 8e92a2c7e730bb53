"""Shared by the tests of methods: formulas in loops, parts of a network, SGD by hand."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from client_fixtures import NUM_CLASSES, SHAPE, make_round

from client_app.methods import method_class, method_of
from client_app.methods.fedavg import FedAvg
from client_app.methods.fedprox import FedProx
from client_app.objective import LocalObjective
from client_app.privacy import privatise
from client_app.round import on_device
from client_app.setup import build_network
from protocol.catalogue import classes, method_names

METHODS = {name: method_class(name) for name in method_names()}


def with_method(monkeypatch, name, cls):
    """Has `method_class` return `cls` for the method."""
    monkeypatch.setitem(classes, name, cls)
    method_of.cache_clear()  # of configs that another test has read


@dataclass(frozen=True)
class FloatPenalty(FedProx):
    def penalty(self, batch):
        return 0.5


@dataclass(frozen=True)
class ForgottenReturn(FedProx):
    def penalty(self, batch):
        batch.logits.square().mean()


@dataclass(frozen=True)
class InPlace(FedProx):
    def begin_round(self, ctx):
        for array in ctx.received.values():
            array.mul_(0.5)


@dataclass(frozen=True)
class Leaky(FedAvg):
    """Inherits `supports_privacy`, and sends label counts without noise."""

    def train(self, ctx):
        return replace(super().train(ctx), extra={"counts": ctx.label_counts.float()})


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Inherits `supports_privacy`, and half of what it sends is without noise."""

    def train(self, ctx):
        update = LocalObjective.train(self, ctx)
        half = dict(list(update.arrays.items())[::2])
        return replace(update, arrays=update.arrays | privatise(half, ctx))


@dataclass(frozen=True)
class Twice(FedAvg):
    """Inherits `supports_privacy`, and makes two releases of one."""

    def train(self, ctx):
        update = super().train(ctx)
        return replace(update, arrays=privatise(update.arrays, ctx))


LONG = {  # phases whose length `local-epochs` does not say
    "fedpac": {"fedpac.extractor-epochs": 6},
    "fedreco": {"fedreco.k-u": "12 steps", "fedreco.k-v": "12 steps"},
    "fedrep": {"fedrep.extractor-epochs": 6},
}


def train_two_rounds(subject, local_epochs=2, **keys):
    """The updates of a first participation, and of one with client state and what the server sends
    beside it.
    """
    config = subject.config(local_epochs=local_epochs, flip=True, clip_norm=5.0, **keys)
    state, updates = {}, []
    for number in (1, 2):  # of three clients: two batches an epoch
        updates.append(method_of(config).train(subject.round(config, number, state, 3)))
        state = {group: on_device(a, torch.device("cpu")) for group, a in updates[-1].state.items()}
    return updates


HEAD = {"classifier.weight", "classifier.bias"}


MOVING = {"momentum": 0.5, "weight_decay": 0.01}  # what would move weights without a gradient


def body_part(weights):
    return {n: a for n, a in weights.items() if n not in HEAD}


def head_part(weights):
    return {n: weights[n] for n in HEAD}


def sgd_by_hand(config, weights, batches, names, lr, term=None, momentum=0.0, weight_decay=0.0):
    """SGD on cross entropy plus `term` over `names`: one autograd call a batch, in float64."""
    network = build_network(config, SHAPE, NUM_CLASSES).double()
    w = {n: a.double() for n, a in weights.items()}
    velocity = {n: torch.zeros_like(w[n]) for n in names}
    for step in batches:
        leaves = {n: w[n].clone().requires_grad_() for n in names}
        logits = torch.func.functional_call(network, w | leaves, (step.x.double(),))
        loss = F.cross_entropy(logits, step.y)
        if term:
            loss = loss + term(leaves)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for n, g in zip(leaves, gradients, strict=True):
            velocity[n] = momentum * velocity[n] + g + weight_decay * w[n]
            w[n] = w[n] - lr * velocity[n]
    return w


def batches_of(config, stream, epochs, **about):
    now = make_round(config, **about)
    return list(now.steps(stream, epochs))


def extra_for(server, client):
    """All that this client is sent alongside the model."""
    return server.extra() | server.own_extra.get(client, {})


def random(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def softmax(row):
    return [math.exp(v) / sum(math.exp(u) for u in row) for v in row]


def cross_entropy(logits, y):
    """Mean over the batch of -log softmax(row)[label]."""
    pairs = zip(logits.tolist(), y.tolist(), strict=True)
    return sum(-math.log(softmax(row)[label]) for row, label in pairs) / len(y)
