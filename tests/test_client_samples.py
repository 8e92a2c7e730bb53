"""Batches of a client's samples: every sample once an epoch, and every draw from one generator."""

import dataclasses

import numpy as np
import pytest
import torch
from client_fixtures import make_config

from client_app.samples import Pixels, Samples, batch_size_for

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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalise_is_the_equation(dtype):
    _, images = colour_samples()
    pixels = torch.from_numpy(images).to(dtype)
    before = pixels.clone()
    assert_pixels(COLOUR.normalise(pixels), by_hand(images))
    assert torch.equal(pixels, before)  # floats come from a rotation, or from a user


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


@pytest.mark.parametrize("fields", [{}, {"flip": True}, {"crop_padding": 2, "rotation": 9.0}])
def test_a_plan_of_steps_is_the_beginning_of_one_of_epochs(fields):
    samples, _ = colour_samples()
    seeded = [[torch.Generator().manual_seed(n) for n in range(3)] for _ in range(2)]
    whole = samples.plan(5, augmentation(**fields), seeded[0])
    part = samples.plan(5, augmentation(**fields), seeded[1], max_steps=7)
    assert [len(index) for index in whole.index] == 3 * [5, 5, 5, 5, 3]
    assert part.epochs == whole.epochs[:7] == [0] * 5 + [1] * 2
    for number in range(7):
        step, other = samples.step(part, number), samples.step(whole, number)
        assert torch.equal(step.x, other.x)
        assert torch.equal(step.index, other.index)
    assert samples.plan(5, augmentation(**fields), iter([]), max_steps=0).epochs == []


def test_new_forms_are_those_that_no_earlier_batch_has():
    samples, _ = colour_samples()
    plan = samples.plan(5, augmentation(flip=True), [torch.Generator().manual_seed(4)] * 3)
    met = set()
    counts = []
    for index, variant, new in zip(plan.index, plan.variant, plan.new_forms, strict=True):
        pairs = list(zip(index.tolist(), variant.tolist(), strict=True))
        expected = [place for place, pair in enumerate(pairs) if pair not in met]
        assert (list(range(len(pairs))) if new is None else new.tolist()) == expected
        assert (new is None) == (len(expected) == len(pairs))
        counts.append(len(expected))
        met |= set(pairs)
    assert counts[:5] == [5, 5, 5, 5, 3]
    assert 0 < sum(counts[5:]) < 23  # some were mirrored in two epochs


def test_what_a_crop_brings_in_is_black():
    white = np.full((40, 3, 28, 28), 255, dtype=np.uint8)
    samples = Samples(white, np.zeros(40, dtype=np.int64), COLOUR, torch.device("cpu"))
    (step,), _ = epoch_of(samples, batch_size=40, crop_padding=4)
    black, bright = by_hand(np.zeros((1, 3, 1, 1))), by_hand(white[:1, :, :1, :1])
    is_black = (step.x - black).abs() < 1e-5
    is_bright = (step.x - bright).abs() < 1e-5
    assert (is_black | is_bright).all()
    assert is_black.any()
    assert (is_bright.sum((1, 2, 3)) >= 3 * 24 * 24).all()


def test_rotation_keeps_the_middle_and_the_scale():
    white = np.full((10, 3, 28, 28), 255, dtype=np.uint8)
    samples = Samples(white, np.zeros(10, dtype=np.int64), COLOUR, torch.device("cpu"))
    (step,), _ = epoch_of(samples, batch_size=10, rotation=30.0)
    middle = step.x[:, :, 10:18, 10:18]
    assert (middle - by_hand(white[:1, :, :1, :1])).abs().max() < 1e-4
    assert (step.x[:, :, 0, 0] - by_hand(np.zeros((1, 3, 1, 1)))[:, :, 0, 0]).abs().min() < 1e-4


@pytest.mark.parametrize(
    ("num", "per_epoch", "size"),
    [(100, 0, 32), (5, 0, 32), (100, 10, 10), (101, 10, 11), (9, 10, 1), (1, 10, 1), (30, 4, 8)],
)
def test_batch_size(num, per_epoch, size):
    """Fixed, or a client's samples over so many batches, rounded up."""
    train = make_config(batch_size=32, batches_per_epoch=per_epoch).train
    assert batch_size_for(num, train) == size
    if per_epoch:
        assert -(-num // size) <= per_epoch


@pytest.mark.parametrize("batch_size", [1, 7, 23, 500])
def test_in_order_is_every_sample_as_it_is(batch_size):
    samples, images = colour_samples()
    batches = list(samples.in_order(batch_size))
    assert all(len(y) <= batch_size for _, y in batches)
    assert_pixels(torch.cat([x for x, _ in batches]), by_hand(images))
    assert torch.cat([y for _, y in batches]).tolist() == [n % 7 for n in range(23)]


@pytest.mark.parametrize(("fits", "sizes"), [(23, [23]), (8, [5, 5, 5, 5, 3]), (1, [1] * 23)])
def test_outputs_are_computed_in_batches_that_fit_into_the_memory(fits, sizes):
    """The error advised a lower `batch-size`, which is not the size of these batches."""
    samples, _ = colour_samples()

    def compute(x):
        if len(x) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x

    found = list(samples.outputs(compute))
    assert [len(y) for _, y in found] == [len(x) for x, _ in found] == sizes
    ((x, y),) = samples.in_order()
    assert torch.equal(torch.cat([x for x, _ in found]), x)
    assert torch.equal(torch.cat([y for _, y in found]), y)


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_memory_map_is_copied_and_a_client_s_own_array_is_not(is_read_only, tmp_path):
    arrays = {"images": np.zeros((3, 1, 28, 28), dtype=np.uint8), "labels": np.arange(3)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        mapped = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        arrays[name] = mapped if is_read_only else mapped[np.arange(3)]
    samples = Samples(*arrays.values(), Pixels((0.0,), (1.0,)), torch.device("cpu"))
    for name, array in arrays.items():
        assert np.shares_memory(getattr(samples, name).numpy(), array) is not is_read_only
    ((x, y),) = samples.in_order()
    assert x.max() == 0
    assert y.tolist() == [0, 1, 2]
