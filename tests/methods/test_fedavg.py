"""FedAvg against what it must be: the mean cross entropy, and clipping and noise if private."""

import math

import pytest
import torch
from client_fixtures import assert_close, assert_same_bits, batch_of, initial, make_config, train

import client_app.privacy
from client_app.methods.fedavg import FedAvg
from protocol.privacy import granularity, noise_sigma


def random_batch(batch_size, num_classes):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch_size, num_classes, generator=generator, dtype=torch.float64)
    y = torch.randint(num_classes, (batch_size,), generator=generator)
    return batch_of(y=y, logits=3 * logits)


def test_loss_is_the_mean_negative_log_probability_of_the_labels():
    batch = random_batch(batch_size=7, num_classes=4)
    total = 0.0
    for row, label in zip(batch.logits.tolist(), batch.y.tolist(), strict=True):
        total -= math.log(math.exp(row[label]) / sum(math.exp(logit) for logit in row))
    assert FedAvg().supervised(batch).item() == pytest.approx(total / 7, rel=1e-12)


def test_nothing_is_added_and_nothing_is_asked_of_the_trainer():
    method = FedAvg()
    assert method.penalty(random_batch(2, 3)).item() == 0
    assert method.layers(None) == []
    assert not method.uses_global
    assert not method.uses_previous


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


def test_without_epsilon_fedavg_is_as_it_was():
    w = initial(make_config(), seed=5)
    a, b = train(make_config(), received=w), train(private(privacy__epsilon=0.0), received=w)
    assert_same_bits(a.arrays, b.arrays)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_a_private_run_of_a_network_with_batch_norms_is_refused(method):
    with pytest.raises(ValueError, match=r"privacy\.epsilon = 0\.5: resnet20 .*set norm"):
        private(method=method, model="resnet20", local_test_fraction=0.2)
