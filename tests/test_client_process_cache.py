"""What a process reuses: samples within a limit, of this run alone, and never other values."""

from client_fixtures import assert_same_bits, make_config, make_round, train

import client_app.process_cache
from client_app.process_cache import ProcessCache


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
