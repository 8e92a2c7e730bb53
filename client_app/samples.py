"""A client's samples as tensors on its training device: a batch is an index, never a loop."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from data.augment import draw_flips, flip, random_crop, random_rotation
from protocol.config import DataConfig, TrainConfig

evaluation_batch = 500


@dataclass(frozen=True)
class Pixels:
    """How uint8 pixels become what a model reads: (pixel / 255 - mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """[B, C, H, W] of pixels 0..255, any dtype, as float32 in channels-last memory."""
        scale, shift = _scale_and_shift(self, images.device)
        x = images.to(torch.float32, copy=True).mul_(scale).sub_(shift)
        return x.contiguous(memory_format=torch.channels_last)


@lru_cache(maxsize=8)
def _scale_and_shift(pixels: Pixels, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and mean / std, [1, C, 1, 1]: made once, as a copy to a device waits for it."""
    std, mean = (
        torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (pixels.std, pixels.mean)
    )
    return 1 / (255 * std), mean / std


@dataclass(frozen=True)
class Step:
    """One batch. x [B, C, H, W] normalised and augmented, y [B]; both on the training device.

    index [B], on the CPU: which of the client's samples. variant [B], on the CPU: which of
    `Samples.num_variants` forms each sample has here; meaningless where that is 0.
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
        """images uint8 [N, C, H, W], labels int64 [N]; both are copied to the device."""
        # tensor() copies: out of the memory map, which all workers share, to the device
        self.images = torch.tensor(np.asarray(images), device=device)
        self.labels = torch.tensor(np.asarray(labels), device=device)
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, batch_size: int, augmentation: DataConfig, generator: torch.Generator
    ) -> Iterator[Step]:
        """One epoch in a random order, augmented; the last batch may be smaller.

        Every draw comes from `generator` on the CPU, so it is the same on every device.
        """
        flips = augmentation.flip
        device = self.labels.device
        order = torch.randperm(len(self), generator=generator)
        for index in torch.split(order, batch_size):
            on_device = index.to(device, non_blocking=True)
            images = self.images.index_select(0, on_device)
            variant = torch.zeros(len(index), dtype=torch.int64)
            if flips:
                is_flipped = draw_flips(len(index), generator)
                images, variant = flip(images, is_flipped), is_flipped.long()
            if augmentation.crop_padding:
                images = random_crop(images, augmentation.crop_padding, generator, fill=0.0)
            if augmentation.rotation:
                images = random_rotation(images.float(), augmentation.rotation, generator, fill=0.0)
            x = self.pixels.normalise(images)
            yield Step(x, self.labels.index_select(0, on_device), index, variant)

    def in_order(self, batch_size: int = evaluation_batch) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples as they are, (x, y) batches in the order of storage."""
        for start in range(0, len(self), batch_size):
            images = self.images[start : start + batch_size]
            yield self.pixels.normalise(images), self.labels[start : start + batch_size]


def num_variants(augmentation: DataConfig) -> int:
    """How many forms augmentation gives one sample: 1, 2 (flipped or not), or 0: too many."""
    if augmentation.crop_padding or augmentation.rotation:
        return 0
    return 2 if augmentation.flip else 1


def batch_size_for(num_samples: int, train: TrainConfig) -> int:
    """The batch size of a client: fixed, or its samples over `batches-per-epoch`, rounded up."""
    if train.batches_per_epoch:
        return max(1, -(-num_samples // train.batches_per_epoch))
    return train.batch_size
