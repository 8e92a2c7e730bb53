"""Batched augmentation against one sample, one pixel at a time."""

import math
from collections import Counter

import pytest
import torch

from data.augment import draw_degrees, draw_offsets, rotate, shift


def images(batch, channels, height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, height, width, generator=generator, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def pixel(image, channel, row, column):
    """The value at (row, column), 0 where the image has none."""
    _, height, width = image.shape
    is_inside = 0 <= row < height and 0 <= column < width
    return image[channel, row, column].item() if is_inside else 0.0


def each_pixel(x, value):
    """A tensor like `x` filled with value(sample, channel, row, column)."""
    out = torch.empty_like(x)
    batch, channels, height, width = x.shape
    for b in range(batch):
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    out[b, c, i, j] = value(b, c, i, j)
    return out


def test_shift_moves_each_sample_by_its_own_offset():
    x = images(6, 2, 4, 5)
    offsets = torch.tensor([[0, 0], [1, -2], [-3, 4], [4, 0], [0, -5], [-9, 9]])
    expected = each_pixel(
        x, lambda b, c, i, j: pixel(x[b], c, i - offsets[b, 0], j - offsets[b, 1])
    )
    for margin in (9, 11):
        assert torch.equal(shift(x, offsets, margin), expected)


def test_random_crop_is_each_window_of_the_padded_image_equally_often():
    """Every sample is the same image, so that the window it was cut from can be recognised."""
    image, padding = images(1, 2, 4, 3)[0], 1
    padded = torch.zeros(2, 6, 5, dtype=torch.float64)
    padded[:, 1:5, 1:4] = image
    windows = {(t, s): padded[:, t : t + 4, s : s + 3] for t in range(3) for s in range(3)}
    found = Counter()
    offsets = draw_offsets(1800, padding, seeded(3))
    for crop in shift(image.expand(1800, -1, -1, -1), offsets, padding):
        (place,) = (at for at, window in windows.items() if torch.equal(window, crop))
        found[place] += 1
    assert len(found) == 9
    assert all(abs(count - 200) < 70 for count in found.values())  # 5 sigma


def rotated_as_defined(x, degrees):
    """Each pixel from where it was before the turn, weighing its four neighbours by closeness."""
    _, _, height, width = x.shape
    middle_row, middle_column = (height - 1) / 2, (width - 1) / 2

    def value(b, c, i, j):
        angle = math.radians(degrees[b])
        right, up = j - middle_column, middle_row - i
        # turned back, clockwise, by the angle
        right, up = (
            right * math.cos(angle) + up * math.sin(angle),
            up * math.cos(angle) - right * math.sin(angle),
        )
        row, column = middle_row - up, middle_column + right
        total = 0.0
        for near_row in (math.floor(row), math.floor(row) + 1):
            for near_column in (math.floor(column), math.floor(column) + 1):
                weight = (1 - abs(row - near_row)) * (1 - abs(column - near_column))
                total += weight * pixel(x[b], c, near_row, near_column)
        return total

    return each_pixel(x, value)


@pytest.mark.parametrize(("height", "width"), [(6, 6), (5, 8)])
def test_rotate_is_bilinear_about_the_centre(height, width):
    x, degrees = images(4, 2, height, width), [0.0, 10.0, -37.5, 200.0]
    result = rotate(x, torch.tensor(degrees, dtype=torch.float64))
    assert torch.allclose(result, rotated_as_defined(x, degrees), atol=1e-12)


def test_random_rotation_draws_an_angle_for_each_sample_within_the_bounds():
    degrees = draw_degrees(1000, 30.0, seeded(5))
    assert -30 <= degrees.min() < -29
    assert 29 < degrees.max() <= 30
    assert abs(degrees.mean()) < 2.8  # 5 sigma
