"""FedAvg against what it must be: the mean cross entropy, and clipping and noise if private."""

import math

import pytest
from client_fixtures import assert_close, initial, make_config, train

import client_app.privacy
from protocol.privacy import granularity

# --- private --------------------------------------------------


def private(**keys):
    return make_config(**{"method": "fedavg", "privacy__epsilon": 0.5} | keys)


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
