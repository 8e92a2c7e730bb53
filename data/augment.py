"""Augmentation of a whole batch [B, C, H, W] at once, on the device that holds it.

Every draw comes from a CPU generator, so that a seed means the same flips, shifts and angles on any
device. Drawing is a function of its own; mirrored images need no other one: `Samples` keeps them.
`fill` is the value of pixels from outside the image, one number or one per channel: for images
that are normalised already, the normalised value of black rather than 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

Fill = float | Tensor


def draw_flips(batch_size: int, generator: torch.Generator) -> Tensor:
    """Which samples to mirror left to right: bool [B] on the CPU, true with probability 1/2."""
    return torch.randint(2, (batch_size,), generator=generator).bool()


def shift(x: Tensor, offsets: Tensor, fill: Fill = 0.0) -> Tensor:
    """Sample b moved by offsets[b] = (dy, dx) pixels, int64 [B, 2]; positive is down and right."""
    batch, channels, height, width = x.shape
    margin = int(offsets.abs().max()) if batch else 0
    size = (batch, channels, height + 2 * margin, width + 2 * margin)
    framed = _per_channel(fill, x).expand(size).contiguous()
    framed[:, :, margin : margin + height, margin : margin + width] = x
    windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # [B, C, dy, dx, H, W], a view
    dy, dx = (margin - offsets).to(x.device, non_blocking=True).unbind(1)
    return windows[torch.arange(batch, device=x.device), :, dy, dx]


def random_crop(x: Tensor, padding: int, generator: torch.Generator, fill: Fill = 0.0) -> Tensor:
    """`x` padded on all sides and cut back to its size at a random place, another for each sample.

    That is a shift by -padding to +padding pixels, each equally likely, down and right on its own.
    """
    offsets = torch.randint(-padding, padding + 1, (len(x), 2), generator=generator)
    return shift(x, offsets, fill)


def rotate(x: Tensor, degrees: Tensor, fill: Fill = 0.0) -> Tensor:
    """Sample b turned about its centre by degrees[b], counter-clockwise as displayed; bilinear."""
    height, width = x.shape[2:]
    radians = degrees.to(x.device, x.dtype, non_blocking=True) * (math.pi / 180)
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    # Where the pixel that ends up at (x, y) comes from, in units of half the width and height.
    to_source = torch.stack(
        [
            torch.stack([cos, -sin * (height / width), zero], dim=1),
            torch.stack([sin * (width / height), cos, zero], dim=1),
        ],
        dim=1,
    )  # [B, 2, 3]
    grid = F.affine_grid(to_source, list(x.shape), align_corners=False)
    outside = _per_channel(fill, x)
    return F.grid_sample(x - outside, grid, align_corners=False) + outside  # beyond the edge is 0


def random_rotation(
    x: Tensor, degrees: float, generator: torch.Generator, fill: Fill = 0.0
) -> Tensor:
    """`x` with each sample turned by an angle drawn evenly from -degrees to +degrees."""
    angles = (2 * torch.rand(len(x), generator=generator) - 1) * degrees
    return rotate(x, angles, fill)


def _per_channel(fill: Fill, x: Tensor) -> Tensor:
    """`fill` as [1, 1, 1] or [C, 1, 1], of the type and on the device of `x`."""
    if isinstance(fill, Tensor):
        return fill.to(x.device, x.dtype).reshape(-1, 1, 1)
    return torch.full((1, 1, 1), fill, dtype=x.dtype, device=x.device)  # no copy to wait for
