"""Batches of a client's samples: every sample once an epoch, and every draw from one generator."""

import dataclasses

import numpy as np
import pytest
import torch
from client_fixtures import make_config

from client_app.samples import Pixels, Samples, batch_sizes

COLOUR = Pixels(mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.9))
PLAIN = make_config().data


def augmentation(**fields):
    return dataclasses.replace(PLAIN, **fields)


def colour_samples(num=23, size=28):
    generator = np.random.default_rng(5)
    images = generator.integers(0, 256, (num, 3, size, size), dtype=np.uint8)
    return Samples(images, np.arange(num) % 7, COLOUR, torch.device("cpu")), images


def by_hand(images):
    """(p / 255 - mean) / std, per channel, in float64."""
    channels = [
        (images[:, c].astype(np.float64) / 255 - COLOUR.mean[c]) / COLOUR.std[c] for c in range(3)
    ]
    return torch.from_numpy(np.stack(channels, axis=1))


def epoch_of(samples, batch_size=5, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    plan = samples.plan(batch_size, augmentation(**fields), [generator])
    return [samples.step(plan, n) for n in range(len(plan.epochs))], generator


def assert_pixels(x, expected):
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("batch_size", [1, 5, 23, 24, 1000])
def test_an_epoch_has_each_sample_once_and_a_smaller_last_batch(batch_size):
    samples, images = colour_samples()
    steps, _ = epoch_of(samples, batch_size)
    index = torch.cat([step.index for step in steps])
    assert sorted(index.tolist()) == list(range(23))
    sizes = [len(step.y) for step in steps]
    assert sizes == [min(batch_size, 23 - start) for start in range(0, 23, batch_size)]
    for step in steps:
        assert_pixels(step.x, by_hand(images)[step.index])
        assert torch.equal(step.y, step.index % 7)
        assert step.variant.tolist() == [0] * len(step.y)
    in_order = list(samples.in_order(batch_size))
    assert_pixels(torch.cat([x for x, _ in in_order]), by_hand(images))
    assert torch.cat([y for _, y in in_order]).tolist() == [n % 7 for n in range(23)]


def test_variant_says_which_samples_are_mirrored():
    samples, images = colour_samples(num=200)
    steps, _ = epoch_of(samples, batch_size=64, flip=True)
    variant = torch.cat([step.variant for step in steps])
    assert set(variant.tolist()) == {0, 1}
    assert 60 < variant.sum() < 140
    plain = by_hand(images)
    for step in steps:
        mirrored = torch.from_numpy(plain.numpy()[..., ::-1].copy())
        is_mirrored = step.variant.bool()[:, None, None, None]
        expected = torch.where(is_mirrored, mirrored[step.index], plain[step.index])
        assert_pixels(step.x, expected)


@pytest.mark.parametrize(
    ("num", "size", "min_batch", "expected"),
    [(20, 8, 1, [8, 8, 4]), (17, 8, 1, [8, 8, 1]), (17, 8, 2, [8, 9]), (1, 8, 2, [1])],
)
def test_a_batch_that_batch_norm_cannot_train_on_joins_the_one_before(
    num, size, min_batch, expected
):
    assert batch_sizes(num, size, min_batch) == expected
