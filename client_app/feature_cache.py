"""What a network that does not change within a round says of a client's samples: computed once."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from client_app.round import RoundContext
from client_app.samples import Step, num_variants

log = logging.getLogger("keel.client")


class FrozenFeatureCache:
    """`compute` of every batch, from a cache by sample and variant.

    After the first epoch it is a look-up. Where `cache-mb`, which all caches of a client's round
    share, has no room left, or augmentation has too many variants, it is computed again for every
    batch, with the same result.
    """

    def __init__(
        self,
        ctx: RoundContext,
        compute: Callable[[Tensor], list[Tensor]],
        *,
        is_read_again: bool,
    ) -> None:
        """compute: what is wanted of x [B, C, H, W], a list of [B, ...]; of each row by itself.

        is_read_again: samples come more than once, so that keeping pays.
        """
        self.compute = torch.no_grad()(compute)
        self.num_samples = len(ctx.train_samples)
        self.variants = num_variants(ctx.config.data)
        self.client, self.worker = ctx.client, ctx.worker
        self.budget_mb = ctx.config.train.cache_mb
        self.is_cached = is_read_again and self.variants > 0 and self.budget_mb > 0
        self.known = torch.zeros(self.variants * self.num_samples, dtype=torch.bool)
        self.kept: list[Tensor] = []
        self.caches = ctx.caches  # of this client's round, this one among them
        self.caches.add(self)

    @torch.no_grad()
    def of(self, step: Step) -> list[Tensor]:
        """For one batch, as `compute` gives it."""
        if not self.is_cached:
            return self.compute(step.x)
        rows = step.variant * self.num_samples + step.index  # on the CPU: no wait for the device
        missing = ~self.known[rows]
        device = step.x.device
        if missing.any():
            all_missing = bool(missing.all())
            x = step.x
            if not all_missing:  # by index: a mask would wait for the device to count
                new = missing.nonzero().squeeze(1)
                x = x.index_select(0, new.to(device, non_blocking=True))
            fresh = self.compute(x)
            if not self.kept and not self._make_room(fresh):
                return fresh  # the first batch is all missing
            new_rows = rows[missing].to(device, non_blocking=True)
            for kept, values in zip(self.kept, fresh, strict=True):
                kept.index_copy_(0, new_rows, _channels_last(values))
            self.known[rows[missing]] = True
            if all_missing:
                return fresh
        on_device = rows.to(device, non_blocking=True)
        return [_channels_second(kept.index_select(0, on_device)) for kept in self.kept]

    def _make_room(self, fresh: list[Tensor]) -> bool:
        rows = self.variants * self.num_samples
        wanted_mb = sum(rows * t[0].nbytes for t in fresh) / 2**20
        taken_mb = sum(t.nbytes for cache in self.caches for t in cache.kept) / 2**20
        if taken_mb + wanted_mb > self.budget_mb:
            if not self.worker.has_said_no_room:
                self.worker.has_said_no_room = True
                log.info(
                    "%s: what a frozen model says of its samples takes %.1f MB, and of cache-mb = "
                    "%d there are %.1f left: it is computed again in every epoch (said once a run)",
                    *(self.client, wanted_mb, self.budget_mb, self.budget_mb - taken_mb),
                )
            self.is_cached = False
            return False
        self.kept = [
            torch.empty((rows, *_channels_last(t).shape[1:]), dtype=t.dtype, device=t.device)
            for t in fresh
        ]
        return True


# Rows are kept in the order of their memory: looking up others takes ten times as long.
def _channels_last(t: Tensor) -> Tensor:
    return t.permute(0, 2, 3, 1) if t.dim() == 4 else t


def _channels_second(t: Tensor) -> Tensor:
    return t.permute(0, 3, 1, 2) if t.dim() == 4 else t
