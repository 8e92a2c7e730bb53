"""A client's samples as tensors on its training device; a batch is an index into them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from data.augment import draw_flips, random_crop, random_rotation
from protocol.config import DataConfig, TrainConfig

evaluation_batch = 500


@dataclass(frozen=True)
class Pixels:
    """Normalisation of uint8 pixels: (pixel / 255 - mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """[B, C, H, W] of pixels 0..255, any dtype, as float32 in channels-last memory."""
        batch, channels, height, width = images.shape
        scale, shift = _scale_and_shift(self, width, images.device)
        # whole rows of interleaved channels: faster on a CPU than three numbers at a time
        rows = images.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
        x = rows.to(torch.float32, copy=True).mul_(scale).sub_(shift)
        return x.view(batch, height, width, channels).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _scale_and_shift(pixels: Pixels, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and mean / std of a row, [W * C]: cached, because a copy to a device waits."""
    std, mean = (torch.tensor(v, device=device) for v in (pixels.std, pixels.mean))
    return (1 / (255 * std)).repeat(width), (mean / std).repeat(width)


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    """The array as a tensor on this device, without a copy if it is writable and on the CPU.

    A read-only array is a memory map that all processes share, which must not be written to.
    """
    array = np.asarray(array)
    if not array.flags.writeable:
        return torch.tensor(array, device=device)
    return torch.from_numpy(array).to(device)


@dataclass(frozen=True)
class Step:
    """One batch. x [B, C, H, W] normalised and augmented, y [B]; both on the training device.

    index [B], on the CPU: places in the client's samples. variant [B], on the CPU: the augmented
    form of each sample, below `num_variants`; meaningless where that is 0.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    variant: Tensor


class Samples:
    """Images and labels of one client (or a test set) on one device."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, pixels: Pixels, device: torch.device
    ) -> None:
        """images uint8 [N, C, H, W], labels int64 [N]; do not modify them later."""
        self.images = _on(device, images).contiguous(memory_format=torch.channels_last)
        self.labels = _on(device, labels)
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def plain_and_mirrored(self) -> Tensor:
        """uint8 [2 N, H, W, C]: the images, then their mirror images; a flip is an index."""
        images = self.images.permute(0, 2, 3, 1)
        both = torch.cat([images, images.flip(2)])
        self.images = both[: len(self)].permute(0, 3, 1, 2)  # no second copy in memory
        return both

    def batches(
        self, batch_size: int, augmentation: DataConfig, generator: torch.Generator
    ) -> Iterator[Step]:
        """One epoch in a random order, augmented; the last batch may be smaller.

        Every draw comes from `generator` on the CPU, so batches are the same on every device.
        """
        flips, num, device = augmentation.flip, len(self), self.labels.device
        forms = self.plain_and_mirrored if flips else self.images.permute(0, 2, 3, 1)
        order = torch.randperm(num, generator=generator)
        for index in torch.split(order, batch_size):
            variant = torch.zeros(len(index), dtype=torch.int64)
            if flips:
                variant = draw_flips(len(index), generator).long()
            form = (index + num * variant).to(device, non_blocking=True)
            images = forms.index_select(0, form).permute(0, 3, 1, 2)
            if augmentation.crop_padding:
                images = random_crop(images, augmentation.crop_padding, generator, fill=0.0)
            if augmentation.rotation:
                images = random_rotation(images.float(), augmentation.rotation, generator, fill=0.0)
            y = self.labels.index_select(0, form % num if flips else form)
            yield Step(self.pixels.normalise(images), y, index, variant)

    def in_order(self, batch_size: int = evaluation_batch) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples without augmentation, as (x, y) batches in the order of storage."""
        for start in range(0, len(self), batch_size):
            images = self.images[start : start + batch_size]
            yield self.pixels.normalise(images), self.labels[start : start + batch_size]


def num_variants(augmentation: DataConfig) -> int:
    """The number of augmented forms of a sample: 1, 2 (flipped or not), or 0 for too many."""
    if augmentation.crop_padding or augmentation.rotation:
        return 0
    return 2 if augmentation.flip else 1


def batch_size_for(num_samples: int, train: TrainConfig) -> int:
    """The batch size of a client: fixed, or its samples over `batches-per-epoch`, rounded up."""
    if train.batches_per_epoch:
        return max(1, -(-num_samples // train.batches_per_epoch))
    return train.batch_size
