"""A client's samples as tensors on its training device; a batch is an index into them.

Local training is planned before its first step: all random draws are made on the CPU and uploaded
together, so that no step waits for the device.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from client_app.gpu_errors import is_out_of_memory
from data.augment import draw_degrees, draw_flips, draw_offsets, rotate, shift
from protocol.config_keys import TrainConfig
from protocol.data_keys import DataConfig

evaluation_batch = 500  # of images of up to 64 x 64 pixels; fewer of larger ones
evaluation_pixels = evaluation_batch * 64 * 64

Draws = tuple[Tensor, Tensor | None, Tensor | None]  # of a step: forms, shifts, degrees
Labelled = tuple[Tensor, Tensor]  # x and y of a step
Output = TypeVar("Output")


@dataclass(frozen=True)
class Pixels:
    """Normalisation of uint8 pixels: (pixel / 255 - mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """[B, C, H, W] of pixels 0..255, any dtype, as float32 in channels-last memory."""
        batch, channels, height, width = images.shape
        scale, shift = _scale_and_shift(self, width, images.device)
        # whole rows of interleaved channels: on a CPU faster than one pixel at a time
        rows = images.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
        x = rows.to(torch.float32, copy=True).mul_(scale).sub_(shift)
        return x.view(batch, height, width, channels).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _scale_and_shift(pixels: Pixels, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 / (255 std) and mean / std of a row, [W * C]: cached, because a copy to a device waits."""
    std, mean = (
        torch.tensor(v, dtype=torch.float32, device=device) for v in (pixels.std, pixels.mean)
    )
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
class BatchPlan:
    """The batches of one local training; element n of every list belongs to step n.

    index, variant and forms are int64 [B]. index, on the CPU: places in the client's N samples.
    variant, on the CPU: the augmented form of each sample, below `num_variants`; meaningless where
    that is 0. host_forms: all of `forms`, in a row. On the training device: forms, which is
    index + N variant, and what augmentation draws, shifts in pixels [B, 2] and degrees [B], or [].
    """

    num_samples: int
    augmentation: DataConfig
    epochs: list[int]
    index: list[Tensor]
    variant: list[Tensor]
    host_forms: np.ndarray
    forms: list[Tensor]
    shifts: list[Tensor]
    degrees: list[Tensor]

    @cached_property
    def new_forms(self) -> list[Tensor | None]:
        """The places in each batch of forms that no earlier batch has, on the training device.

        None: the whole batch.
        """
        sizes = [len(index) for index in self.index]
        is_new = np.zeros(sum(sizes), dtype=bool)
        is_new[np.unique(self.host_forms, return_index=True)[1]] = True
        places = [part.nonzero()[0] for part in np.split(is_new, np.cumsum(sizes)[:-1])]
        on_device = _uploaded([torch.from_numpy(part) for part in places], self.forms[0].device)
        return [
            None if len(part) == size else part for part, size in zip(on_device, sizes, strict=True)
        ]


def _uploaded(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on the device, by one copy."""
    if not parts:
        return []
    whole = torch.cat(parts).to(device, non_blocking=True)
    return list(torch.split(whole, [len(part) for part in parts]))


@dataclass(frozen=True)
class Step:
    """One batch. x [B, C, H, W] normalised and augmented, y [B]; both on the training device.

    index [B] and variant [B], on the CPU: as in `BatchPlan`. It is step `number`, in epoch `epoch`,
    of `plan`, if there is one.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    variant: Tensor
    epoch: int = 0
    number: int = 0
    plan: BatchPlan | None = None


class Samples:
    """Images and labels of one client (or a test set) on one device."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, pixels: Pixels, device: torch.device
    ) -> None:
        """images uint8 [N, C, H, W], labels int64 [N]; do not modify them later."""
        self.images = _on(device, images).contiguous(memory_format=torch.channels_last)
        self.labels = _on(device, labels)
        self.pixels = pixels
        _scale_and_shift(pixels, images.shape[-1], self.images.device)  # cached here: it waits

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def plain_and_mirrored(self) -> Tensor:
        """uint8 [2 N, H, W, C]: the images, then their mirror images; a flip is an index."""
        images = self.images.permute(0, 2, 3, 1)
        both = torch.cat([images, images.flip(2)])
        self.images = both[: len(self)].permute(0, 3, 1, 2)  # no second copy in memory
        return both

    def plan(
        self,
        batch_size: int,
        augmentation: DataConfig,
        generators: Iterable[torch.Generator],
        max_steps: int | None = None,
        min_batch: int = 1,
    ) -> BatchPlan:
        """The batches of one epoch for each generator, up to `max_steps` in all.

        An epoch is in random order; its last batch may be smaller, but is joined to the one before
        if it has fewer than `min_batch` samples. Every draw comes from its
        generator on the CPU, so batches are the same on every device.
        """
        num, device = len(self), self.labels.device
        epochs: list[int] = []
        index: list[Tensor] = []
        variant: list[Tensor] = []
        shifts: list[Tensor] = []
        degrees: list[Tensor] = []
        batches = (
            (epoch, generator, batch)
            for epoch, generator in enumerate(generators)
            for batch in torch.split(
                torch.randperm(num, generator=generator), batch_sizes(num, batch_size, min_batch)
            )
        )
        for epoch, generator, batch in itertools.islice(batches, max_steps):
            epochs.append(epoch)
            index.append(batch)
            flips = draw_flips(len(batch), generator).long() if augmentation.flip else None
            variant.append(torch.zeros_like(batch) if flips is None else flips)
            if padding := augmentation.crop_padding:
                shifts.append(draw_offsets(len(batch), padding, generator))
            if augmentation.rotation:
                degrees.append(draw_degrees(len(batch), augmentation.rotation, generator))
        forms = [
            i + num * v if augmentation.flip else i for i, v in zip(index, variant, strict=True)
        ]
        host_forms = torch.cat(forms).numpy() if forms else np.empty(0, np.int64)
        on_device = [_uploaded(parts, device) for parts in (forms, shifts, degrees)]
        return BatchPlan(num, augmentation, epochs, index, variant, host_forms, *on_device)

    def step(
        self, plan: BatchPlan, number: int, batch: Callable[[Draws], Labelled] | None = None
    ) -> Step:
        """The batch of step `number` of the plan. batch: replaces `Samples.batch(plan)`."""
        draws = (
            plan.forms[number],
            plan.shifts[number] if plan.shifts else None,
            plan.degrees[number] if plan.degrees else None,
        )
        x, y = (batch or self.batch(plan))(draws)
        index, variant, epoch = plan.index[number], plan.variant[number], plan.epochs[number]
        return Step(x, y, index, variant, epoch, number, plan)

    def batch(self, plan: BatchPlan) -> Callable[[Draws], Labelled]:
        """The function from what is drawn for a step of the plan to its x and y, as in `Step`."""
        augmentation = plan.augmentation

        def compute(draws: Draws) -> Labelled:
            form, shifts, degrees = draws
            forms = (
                self.plain_and_mirrored if augmentation.flip else self.images.permute(0, 2, 3, 1)
            )
            images = forms.index_select(0, form).permute(0, 3, 1, 2)
            if shifts is not None:
                images = shift(images, shifts, augmentation.crop_padding)
            if degrees is not None:
                images = rotate(images.float(), degrees)
            place = form % plan.num_samples if augmentation.flip else form
            return self.pixels.normalise(images), self.labels.index_select(0, place)

        return compute

    def in_order(self, batch_size: int = evaluation_batch) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples without augmentation, as (x, y) batches in the order of storage."""
        for start in range(0, len(self), batch_size):
            images = self.images[start : start + batch_size]
            yield self.pixels.normalise(images), self.labels[start : start + batch_size]

    def outputs(self, compute: Callable[[Tensor], Output]) -> Iterator[tuple[Output, Tensor]]:
        """(compute(x), y) for each batch (x, y) of all samples in order.

        Batches that do not fit into the GPU's memory are halved: `batch-size` is of training only.
        """
        height, width = self.images.shape[2:]
        start, size = 0, max(1, min(evaluation_batch, evaluation_pixels // (height * width)))
        while start < len(self):
            size = min(size, len(self) - start)
            try:
                made = compute(self.pixels.normalise(self.images[start : start + size]))
            except RuntimeError as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                size //= 2
                continue
            yield made, self.labels[start : start + size]
            start += size


@dataclass(frozen=True)
class Duration:
    """How long to train: a number of epochs or of steps."""

    count: int
    unit: str = "epochs"  # or steps

    def reads_again(self, num_samples: int, train: TrainConfig) -> bool:
        """Whether any of a client's samples comes up more than once."""
        if self.unit == "epochs":
            return self.count > 1
        return self.count * batch_size_for(num_samples, train) > num_samples


def num_variants(augmentation: DataConfig) -> int:
    """The number of augmented forms of a sample: 1, 2 (flipped or not), or 0 for too many."""
    if augmentation.crop_padding or augmentation.rotation:
        return 0
    return 2 if augmentation.flip else 1


def batch_sizes(num_samples: int, batch_size: int, min_batch: int) -> list[int]:
    """The sizes of an epoch's batches."""
    full, rest = divmod(num_samples, batch_size)
    sizes = [batch_size] * full + ([rest] if rest or not full else [])
    if full and 0 < rest < min_batch:
        sizes[-2:] = [batch_size + rest]
    return sizes


def batch_size_for(num_samples: int, train: TrainConfig) -> int:
    """The batch size of a client: fixed, or its samples over `batches-per-epoch`, rounded up."""
    if train.batches_per_epoch:
        return max(1, -(-num_samples // train.batches_per_epoch))
    return train.batch_size
