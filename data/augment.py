"""Augmentation of a whole batch [B, C, H, W] on the device that holds it.

Random numbers come from a CPU generator, so a seed gives the same flips, shifts and angles on every
device. Pixels from outside the image are 0. Flips are only drawn here: `Samples` stores the
mirrored images.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def draw_flips(batch_size: int, generator: torch.Generator) -> Tensor:
    """Which samples to mirror horizontally: bool [B] on the CPU, true with probability 1/2."""
    return torch.randint(2, (batch_size,), generator=generator).bool()


def shift(x: Tensor, offsets: Tensor, margin: int) -> Tensor:
    """Shift sample b by offsets[b] = (dy, dx) pixels, int64 [B, 2]; positive is down and right.

    margin: no offset is larger.
    """
    height, width = x.shape[2:]
    padded = F.pad(x, (margin,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [B, C, dy, dx, H, W], a view
    dy, dx = (margin - offsets).unbind(1)
    return windows[torch.arange(len(x), device=x.device), :, dy, dx]


def draw_offsets(batch_size: int, padding: int, generator: torch.Generator) -> Tensor:
    """Shifts (dy, dx) that equal padding all sides and cropping at a random position.

    int64 [B, 2] on the CPU, from -padding to +padding, uniform and independent per axis.
    """
    return torch.randint(-padding, padding + 1, (batch_size, 2), generator=generator)


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate sample b about its centre by degrees[b], counter-clockwise as displayed; bilinear."""
    height, width = x.shape[2:]
    radians = degrees.to(x.dtype) * (math.pi / 180)
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    # The source position of the pixel at (x, y), in units of half the width and height.
    to_source = torch.stack(
        [
            torch.stack([cos, -sin * (height / width), zero], dim=1),
            torch.stack([sin * (width / height), cos, zero], dim=1),
        ],
        dim=1,
    )  # [B, 2, 3]
    grid = F.affine_grid(to_source, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def draw_degrees(batch_size: int, degrees: float, generator: torch.Generator) -> Tensor:
    """Angles drawn uniformly from -degrees to +degrees, float32 [B] on the CPU."""
    return (2 * torch.rand(batch_size, generator=generator) - 1) * degrees
