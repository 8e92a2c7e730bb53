"""FedAvg against what it must be: the mean cross entropy, and clipping and noise if private."""

import math

import pytest
import torch
from client_fixtures import assert_close, initial, make_config, train

import client_app.privacy
from protocol.privacy import granularity, noise_sigma

# --- private --------------------------------------------------


def private(**keys):
    return make_config(**{"method": "fedavg", "privacy__epsilon": 0.5} | keys)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_with_a_rate_of_zero_pure_noise_is_uploaded(method):
    config = private(method=method, lr=0.0, privacy__clip_norm=0.3)
    w = initial(config, seed=5)
    update = train(config, received=w)
    noise = torch.cat([(update.arrays[n] - w[n]).flatten().double() for n in w])
    sigma = 2 * 0.3 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    assert noise_sigma(config.privacy) == pytest.approx(sigma)
    assert noise.std().item() == pytest.approx(sigma, rel=4 / math.sqrt(2 * len(noise)))
    assert abs(noise.mean().item()) < 4 * sigma / math.sqrt(len(noise))
    half = train(
        private(method=method, lr=0.0, privacy__clip_norm=0.3, privacy__epsilon=0.25), received=w
    )
    twice = torch.cat([(half.arrays[n] - w[n]).flatten().double() for n in w])
    assert twice.std().item() == pytest.approx(2 * sigma, rel=4 / math.sqrt(2 * len(twice)))


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_without_noise_the_difference_is_clipped_in_its_own_direction(method, monkeypatch):
    monkeypatch.setattr(client_app.privacy, "discrete_gaussian", lambda s, num, words: 0)
    w = initial(make_config(), seed=5)
    plain = train(make_config(), received=w)
    difference = {n: plain.arrays[n] - w[n] for n in w}
    norm = math.sqrt(sum(d.double().square().sum().item() for d in difference.values()))
    for clip in (norm / 4, norm * 1.01):
        update = train(private(method=method, privacy__clip_norm=clip), received=w)
        scale = min(1, clip / norm)
        wanted = {n: w[n] + scale * d for n, d in difference.items()}
        step = granularity(
            private(privacy__clip_norm=clip).privacy, sum(a.numel() for a in w.values())
        )
        assert_close(update.arrays, wanted, rtol=0, atol=1e-6 + step)
