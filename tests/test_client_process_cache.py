"""What a worker keeps warm: samples within a limit, of this run alone, and never other values."""

from dataclasses import replace

import numpy as np
import torch
from client_fixtures import assert_same_bits, facts, make_config, make_round, train

import client_app.process_cache
from client_app.node_config import own_splits
from client_app.process_cache import ProcessCache
from client_app.setup import open_source


def test_a_clients_samples_are_kept_for_its_next_round():
    config, cache = make_config(flip=True), ProcessCache()
    first = make_round(config, cache=cache).train_samples
    other = make_round(config, cache=cache, partition=1).train_samples
    again = make_round(config, number=2, cache=cache).train_samples
    assert again is first
    assert other is not first
    assert_same_bits(train(config, cache=cache, number=3).arrays, train(config, number=3).arrays)


def test_another_run_has_other_samples():
    config, cache = make_config(), ProcessCache()
    first = make_round(config, cache=cache).train_samples
    assert make_round(make_config(seed=1), cache=cache).train_samples is not first
    assert make_round(config, cache=cache).train_samples is not first  # it was let go


def test_other_statistics_or_another_device_have_other_samples_and_networks():
    """Of servers with one config, and of clients that share a worker."""
    config, cache, node = make_config(), ProcessCache(), {"partition-id": 0, "num-partitions": 2}
    data, cpu, meta = facts(config), torch.device("cpu"), torch.device("meta")
    first, _ = cache.samples(config, data, node, cpu)
    other, _ = cache.samples(config, replace(data, mean=(0.25,)), node, cpu)
    assert (*first.pixels.mean, *other.pixels.mean) == (*data.mean, 0.25)
    for device in (cpu, meta, cpu):
        model = cache.network(config, data, config.model.model, "local", device)
        assert {weight.device for weight in model.parameters()} == {device}


def test_the_clients_used_last_are_kept_within_the_limit(monkeypatch):
    size = 12 * 28 * 28 + client_app.process_cache.client_bytes  # 60 samples over 5 clients
    monkeypatch.setattr(client_app.process_cache, "samples_cache_bytes", 2 * size)
    config, cache = make_config(), ProcessCache()

    def samples_of(partition):
        return make_round(config, cache=cache, partition=partition, of=5).train_samples

    kept = {p: samples_of(p) for p in (0, 1)}
    assert samples_of(0) is kept[0]
    samples_of(2)  # in place of 1, which was used least recently
    assert samples_of(0) is kept[0]
    assert samples_of(1) is not kept[1]
    monkeypatch.setattr(client_app.process_cache, "samples_cache_bytes", 0)
    assert len(samples_of(3)) == 12  # the one in use always is


def test_clients_with_few_samples_take_no_more_memory_than_the_limit(monkeypatch):
    """A million clients of two small images filled a gigabyte of 256 MiB."""
    monkeypatch.setattr(client_app.process_cache, "samples_cache_bytes", 10 * 4096)
    config, cache = make_config(), ProcessCache()
    first = make_round(config, cache=cache, of=60).train_samples  # 784 bytes
    for partition in range(1, 10):
        make_round(config, cache=cache, partition=partition, of=60)
    assert make_round(config, cache=cache, of=60).train_samples is not first


def test_labels_can_be_had_without_images():
    config = make_config(local_test_fraction=0.2)
    node = {"partition-id": 1, "num-partitions": 3}
    for whole, bare in zip(
        own_splits(config, facts(config), node),
        own_splits(config, facts(config), node, with_images=False),
        strict=True,
    ):
        assert np.array_equal(whole.labels, bare.labels)
        assert len(bare.images) == 0
        assert bare.images.shape[1:] == whole.images.shape[1:] == open_source(config).image_shape
    assert torch.equal(
        torch.from_numpy(np.asarray(own_splits(config, facts(config), node)[0].labels)),
        make_round(config, partition=1, of=3).train_samples.labels,
    )
