"""Local training: its batches, and what must not change its result."""

import logging

import pytest
import torch
from client_fixtures import (
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    train,
)

import client_app.process_cache
from client_app.methods import method_of
from client_app.process_cache import ProcessCache
from models import StagedModel

WITH_PREVIOUS = ("moon", "fedintr", "fedcka")


@pytest.mark.parametrize("keys", [{"batch_size": 8}, {"batches_per_epoch": 4, "batch_size": 1}])
def test_a_batch_has_batch_size_samples_or_a_share_of_the_clients(keys):
    """A fourth of 30, rounded up. tests/methods/test_whole_rounds.py has the steps themselves."""
    config = make_config(**keys)
    assert [len(index) for index in make_round(config).plan("batches", 1, "epochs").index] == [
        *(8, 8, 8, 6)
    ]
    assert train(config).num_steps == 4


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
    keys = {"method": method, "local_epochs": 2, "flip": flip}
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


def test_representations_beyond_cache_mb_are_computed_again_and_logged_once(monkeypatch, caplog):
    """60 samples x (16 x 12 x 12 + 32 x 4 x 4) floats = 0.64 MB a frozen model; there are two."""
    config = make_config(method="fedcka", model="cnn-fedcka", local_epochs=2, cache_mb=1)
    rows = count_frozen_rows(monkeypatch)
    with caplog.at_level(logging.INFO, logger="keel.client"):
        train(config, state={"previous": initial(config, seed=5)}, of=1)
    assert sum(rows) == 60 + 2 * 60
    assert ["cache-mb" in message for message in caplog.messages] == [True]


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


# --- what a process reuses ---------------------------------------------------------------------


def test_a_clients_samples_are_reused_in_its_next_round():
    config, cache = make_config(flip=True), ProcessCache()
    first = make_round(config, cache=cache).train_samples
    other = make_round(config, cache=cache, partition=1).train_samples
    assert make_round(config, number=2, cache=cache).train_samples is first
    assert other is not first
    assert_same_bits(train(config, cache=cache, number=3).arrays, train(config, number=3).arrays)


def test_the_clients_used_last_are_cached_within_the_limit(monkeypatch):
    size = 12 * 28 * 28 + client_app.process_cache.client_bytes  # 60 samples over 5 clients
    monkeypatch.setattr(client_app.process_cache, "samples_cache_bytes", 2 * size)
    config, cache = make_config(), ProcessCache()

    def samples_of(partition):
        return make_round(config, cache=cache, partition=partition, of=5).train_samples

    cached = {p: samples_of(p) for p in (0, 1)}
    assert samples_of(0) is cached[0]
    samples_of(2)  # in place of 1, which was used least recently
    assert samples_of(0) is cached[0]
    assert samples_of(1) is not cached[1]
    monkeypatch.setattr(client_app.process_cache, "samples_cache_bytes", 0)
    assert len(samples_of(3)) == 12  # the one in use always is
