"""Local training against a loop written out in float64, and against what must not change it."""

import logging
import math
from functools import cache

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

from client_app.methods import method_of
from client_app.process_cache import ProcessCache
from client_app.setup import build_network
from models import StagedModel

WITH_PREVIOUS = ("moon", "fedintr", "fedcka")
FEDCKA = {"model": "cnn-fedcka"}  # its first two layers are the widest that are cached here


def seen_batches(now):
    """The batches of local training, in order, epoch by epoch: indices into the samples."""
    plan = now.plan("batches", now.config.train.local_epochs, "epochs")
    numbered = list(zip(plan.epochs, plan.index, strict=True))
    return [[i for e, i in numbered if e == epoch] for epoch in sorted(set(plan.epochs))]


def sgd_by_hand(now):
    """(weights, mean loss over samples) of plain SGD on cross entropy, every operation in float64.

    g = grad, clipped; g += decay * w; m = momentum * m + g; w -= lr * m.
    """
    t = now.config.train
    network = build_network(now.config, SHAPE, NUM_CLASSES).double()
    network.load_state_dict(now.received)
    images = now.train_samples.pixels.normalise(now.train_samples.images).double()
    labels = now.train_samples.labels
    weights = list(network.parameters())
    velocity = [torch.zeros_like(w) for w in weights]
    total, count = 0.0, 0
    for epoch, batches in enumerate(seen_batches(now)):
        lr = t.lr * t.lr_decay ** (now.round - 1) * t.lr_decay_epoch**epoch
        for index in batches:
            loss = F.cross_entropy(network(images[index]), labels[index])
            gradients = torch.autograd.grad(loss, weights)
            length = math.sqrt(sum(float((g * g).sum()) for g in gradients))
            shrink = min(1.0, t.clip_norm / (length + 1e-6)) if t.clip_norm else 1.0
            with torch.no_grad():
                for w, g, m in zip(weights, gradients, velocity, strict=True):
                    m.copy_(t.momentum * m + shrink * g + t.weight_decay * w)
                    w -= lr * m
            total, count = total + loss.item() * len(index), count + len(index)
    return network.state_dict(), total / count


@pytest.mark.parametrize(
    "keys",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {"momentum": 0.9, "weight_decay": 0.1, "local_epochs": 2},
        {"clip_norm": 0.2, "momentum": 0.5, "local_epochs": 2},
        {"lr_decay": 0.5, "lr_decay_epoch": 0.25, "local_epochs": 3},
        {"batches_per_epoch": 4, "batch_size": 1},
    ],
    ids=["plain", "momentum and decay", "clipped", "decayed rates", "batches per epoch"],
)
def test_fedavg_is_sgd_written_out(keys, in_float64):
    config = make_config(**keys)
    now = make_round(config, number=3)
    update = method_of(config).train(now)
    weights, mean_loss = sgd_by_hand(now)
    assert update.num_steps == sum(len(batches) for batches in seen_batches(now))
    assert_close(update.arrays, weights, rtol=0, atol=1e-12)
    assert update.terms == {"supervised": pytest.approx(mean_loss, rel=1e-5)}
    assert update.state == {}
    # 8 is asked for, or a fourth of 30 rounded up; the smaller last batch weighs less in the mean
    assert [len(index) for index in seen_batches(now)[0]] == [8, 8, 8, 6]


def test_kept_arrays_are_not_the_networks_own_memory():
    config, cache = make_config(method="moon"), ProcessCache()
    update = train(config, cache=cache)
    before = {name: array.clone() for name, array in update.state["previous"].items()}
    train(config, cache=cache, partition=1)
    assert_same_bits(update.state["previous"], before)


def count_frozen_rows(monkeypatch):
    """A list that gets the batch size of every run of a frozen model."""
    rows, run = [], StagedModel.run

    def counted(self, x, layers=(), *, to_logits=True):
        if not self.classifier.weight.requires_grad:
            rows.append(len(x))
        return run(self, x, layers, to_logits=to_logits)

    monkeypatch.setattr(StagedModel, "run", counted)
    return rows


def distinct_forms(now):
    """How many (sample, flipped or not) local training meets."""
    met = set()
    for step in now.steps("batches", now.config.train.local_epochs):
        met |= set(zip(step.index.tolist(), step.variant.tolist(), strict=True))
    return len(met)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("method", [*WITH_PREVIOUS, "fedntd", "fitnet"])
def test_a_cached_frozen_model_says_what_a_fresh_one_does(method, flip, monkeypatch):
    num_frozen = 2 if method in WITH_PREVIOUS else 1
    model = FEDCKA if method == "fedcka" else {}
    keys = {"method": method, "local_epochs": 2, "flip": flip, **model}
    cached, recomputed = make_config(**keys), make_config(**keys, cache_mb=0)
    state = {"previous": initial(cached, seed=5)}
    rows = count_frozen_rows(monkeypatch)
    update = train(cached, state=state)
    num_forms = distinct_forms(make_round(cached))
    assert sum(rows) == num_frozen * num_forms  # each form once a frozen model
    assert num_forms == 30 if not flip else 30 < num_forms < 60
    rows.clear()
    other = train(recomputed, state=state)
    assert sum(rows) == num_frozen * 2 * 30
    assert_close(update.arrays, other.arrays, rtol=0, atol=1e-6)
    # a divergence near zero is a difference of logarithms: each is off by float32's 1e-7
    assert update.terms == {k: pytest.approx(v, rel=1e-5, abs=1e-7) for k, v in other.terms.items()}


@pytest.mark.parametrize(("cache_mb", "cached"), [(0, 0), (1, 1), (2, 2)])
def test_representations_beyond_cache_mb_are_computed_again_and_logged_once(
    cache_mb, cached, monkeypatch, caplog
):
    """60 samples x (16 x 12 x 12 + 32 x 4 x 4) floats = 0.64 MB a frozen model; there are two."""
    config = make_config(method="fedcka", model="cnn-fedcka", local_epochs=2, cache_mb=cache_mb)
    state = {"previous": initial(config, seed=5)}
    rows = count_frozen_rows(monkeypatch)
    with caplog.at_level(logging.INFO, logger="keel.client"):
        update = train(config, state=state, of=1)
    assert sum(rows) == cached * 60 + (2 - cached) * 2 * 60
    assert ["cache-mb" in message for message in caplog.messages] == [True] * (cached == 1)
    assert_close(update.arrays, without_cache().arrays, rtol=0, atol=1e-6)


@cache
def without_cache():
    """The update of the test above with nothing cached."""
    config = make_config(method="fedcka", model="cnn-fedcka", local_epochs=2, cache_mb=0)
    return train(config, state={"previous": initial(config, seed=5)}, of=1)


def test_the_same_seed_round_and_client_give_the_same_bits_whoever_came_before():
    config, warm = make_config(local_epochs=2, flip=True), ProcessCache()
    train(config, cache=warm, partition=1)
    assert_same_bits(train(config, cache=warm).arrays, train(config).arrays)


def test_another_client_round_epoch_or_seed_has_another_batch_order():
    def order(now, epoch=0):
        steps = now.steps("batches", epoch + 1)
        return torch.cat([step.index for step in steps if step.epoch == epoch]).tolist()

    config = make_config()
    orders = [
        order(make_round(config)),
        order(make_round(config), epoch=1),
        order(make_round(config, partition=1)),
        order(make_round(config, number=2)),
        order(make_round(make_config(seed=1))),
    ]
    assert all(sorted(o) == list(range(30)) for o in orders)
    assert len(set(map(tuple, orders))) == len(orders)


def with_dropout(now):
    now.model.to_features = torch.nn.Sequential(now.model.to_features, torch.nn.Dropout(0.5))
    return now


def test_dropout_comes_from_the_clients_seed_and_leaves_the_global_generator_alone():
    config, updates = make_config(), []
    for global_seed in (1, 2):
        now = with_dropout(make_round(config))
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        updates.append(method_of(config).train(now).arrays)
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(*updates)
    assert differ(updates[0], train(config).arrays)  # dropout was on
