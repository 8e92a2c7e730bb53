"""Representations of a client's samples in frozen models, cached for one round."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from client_app.round import RoundContext
from client_app.samples import BatchPlan, Duration, Step, num_variants

log = logging.getLogger("keel.client")


class FrozenFeatureCache:
    """The outputs of `compute` for every batch, cached by sample and augmentation variant.

    After the first epoch each batch is a look-up. If `cache-mb`, which all caches of a client's
    round share, is used up, or augmentation has too many variants, outputs are computed for every
    batch, with the same result.
    """

    def __init__(
        self, ctx: RoundContext, compute: Callable[[Tensor], list[Tensor]], *, is_read_again: bool
    ) -> None:
        """compute: from x [B, C, H, W] a list of [B, ...], each row a function of its own sample.

        is_read_again: samples come up more than once, so that caching pays off.
        """
        self.ctx, self.compute = ctx, torch.no_grad()(compute)
        self.variants = num_variants(ctx.config.data)
        self.is_cached = is_read_again and self.variants > 0 and ctx.config.train.cache_mb > 0
        self.plan: BatchPlan | None = None  # the plan whose first `num_filled` steps are cached
        self.num_filled = 0
        self.rows: list[Tensor] = []  # one tensor for each output, [variants * num_samples, ...]
        ctx.caches.add(self)

    @torch.no_grad()
    def of(self, step: Step) -> list[Tensor]:
        """The outputs for one batch, as `compute` returns them.

        Which rows are missing follows from the plan, so nothing here waits for the device.
        """
        if not self.is_cached or step.plan is None:
            return self.compute(step.x)
        if step.plan is not self.plan:
            self.plan, self.num_filled = step.plan, 0
        if step.number > self.num_filled:  # steps were left out, so rows may be missing
            return self.compute(step.x)
        rows = self.plan.forms[step.number]
        if step.number == self.num_filled:
            self.num_filled += 1
            new = self.plan.new_forms[step.number]
            if new is None:
                fresh = self.compute(step.x)
                if not self.rows and not self._allocate(fresh):
                    return fresh  # the first batch is all new
                self._store(rows, fresh)
                return fresh
            if len(new):
                self._store(rows.index_select(0, new), self.compute(step.x.index_select(0, new)))
        found = [cached.index_select(0, rows) for cached in self.rows]
        return [t.permute(0, 3, 1, 2) if t.dim() == 4 else t for t in found]

    def _store(self, rows: Tensor, values: list[Tensor]) -> None:
        for cached, value in zip(self.rows, values, strict=True):
            cached.index_copy_(0, rows, _channels_last(value))

    def _allocate(self, fresh: list[Tensor]) -> bool:
        """Make room for all rows like these; False if `cache-mb` does not allow it."""
        ctx, num_rows = self.ctx, self.variants * len(self.ctx.train_samples)
        needed_mb = sum(num_rows * t[0].nbytes for t in fresh) / 2**20
        left_mb = ctx.config.train.cache_mb - sum(
            t.nbytes / 2**20 for cache in ctx.caches for t in cache.rows
        )
        if needed_mb > left_mb:
            if not ctx.networks.has_logged_full_cache:
                ctx.networks.has_logged_full_cache = True
                log.info(
                    "%s: the representations of a frozen model take %.1f MB, and %.1f of cache-mb "
                    "are left: they are computed again in every epoch (logged once a run)",
                    ctx.client,
                    needed_mb,
                    left_mb,
                )
            self.is_cached = False
            return False
        self.rows = [
            torch.empty((num_rows, *_channels_last(t).shape[1:]), dtype=t.dtype, device=t.device)
            for t in fresh
        ]
        return True


# Rows are cached in channels-last order, as in memory: other look-ups take ten times as long.
def _channels_last(t: Tensor) -> Tensor:
    return t.permute(0, 2, 3, 1) if t.dim() == 4 else t


def cached(
    ctx: RoundContext, compute: Callable[[Tensor], Tensor], duration: Duration
) -> Callable[[Step], Tensor]:
    """The function from a step to compute(x) without gradient, cached as above.

    compute: from x [B, C, H, W] to [B, ...], each row a function of its own sample. duration: of
    the training that reads it.
    """
    is_read_again = duration.reads_again(len(ctx.train_samples), ctx.config.train)
    cache = FrozenFeatureCache(ctx, lambda x: [compute(x)], is_read_again=is_read_again)
    return lambda step: cache.of(step)[0]
