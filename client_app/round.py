"""One client in one round: everything that the client half of a method reads.

`FrozenFeatureCache` has what frozen models say of the client's samples, for as long as the round.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from client_app.networks import Networks, resolved
from client_app.optimizers import Optimizer, lr_factor, optimizer_for
from client_app.samples import BatchPlan, Duration, Samples, Step, batch_size_for, num_variants
from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.seeds import seed_of

log = logging.getLogger("keel.client")


def on_device(arrays: Arrays, device: torch.device) -> Arrays:
    """The arrays on this device; those that are there are not copied."""
    return {name: array.to(device) for name, array in arrays.items()}


@dataclass(frozen=True)
class RoundContext:
    """Client `client` in round `round` (from 1).

    received: the arrays that the server sent, on `device`; extra: what it sent beside them.
    state: the client state, by group name, on the CPU; {} at the first participation.
    last_accepted_round: the last round in which this client's update was aggregated; 0: none.
    model: this client's network on `device`, its weights not yet set.
    is_simulated: its data is a partition, and its noise may be drawn from the run's seed.
    caches: each `FrozenFeatureCache` in use; they share the run's `cache-mb`.
    faults: the loss terms that were not finite in training, as `MeanTerms.fault` names them.
    releases: the number of values in each call of `privatise`.
    """

    config: RunConfig
    client: str
    round: int
    device: torch.device
    train_samples: Samples
    test_samples: Samples
    received: Arrays
    extra: Arrays
    state: dict[str, Arrays]
    last_accepted_round: int
    model: StagedModel
    is_simulated: bool
    networks: Networks = field(repr=False)
    caches: WeakSet[Any] = field(default_factory=WeakSet, repr=False)
    faults: list[str] = field(default_factory=list, repr=False)
    releases: list[int] = field(default_factory=list, repr=False)

    @property
    def lr_factor(self) -> float:
        """The factor on every learning rate of this round."""
        return lr_factor(self.config.train, self.round, self.config.rounds.num_rounds)

    def optimizer(
        self,
        parameters: Sequence[Tensor],
        momentum: float | None = None,
        weight_decay: float | None = None,
    ) -> Optimizer:
        """The run's optimizer, for a loop of your own: `step(lr)` uses the gradients that are set.

        The rate of this round is `config.train.lr * lr_factor`. momentum, weight_decay: the run's
        if None.
        """
        return optimizer_for(self.config.train, parameters, momentum, weight_decay)

    @cached_property
    def precision(self) -> str:
        """The precision in which this client trains: fp32, tf32 or bf16."""
        return resolved(self.config.train.precision, self.model, self.device)

    def seed(self, *names: int | str) -> int:
        """The seed of one of this client's random streams in this round."""
        return seed_of(self.config.rounds.seed, self.round, self.client, *names)

    @cached_property
    def label_counts(self) -> Tensor:
        """This client's training samples per class, [num_classes]."""
        return torch.bincount(self.train_samples.labels, minlength=self.model.num_classes)

    def initial_weights(self) -> Arrays:
        """The weights that the run's seed gives this client's network; the same for all clients."""
        return self.networks.initial_weights[self.model.name]

    def plan(self, stream: str, count: int, unit: str) -> BatchPlan:
        """The batches of `count` epochs or steps (`unit`) in the order of the stream.

        Epoch n draws from (seed, round, client, stream, n).
        """
        numbers = range(count) if unit == "epochs" else itertools.count()
        generators = (torch.Generator().manual_seed(self.seed(stream, n)) for n in numbers)
        samples, train = self.train_samples, self.config.train
        size = batch_size_for(len(samples), train)
        max_steps = None if unit == "epochs" else count
        min_batch = self.model.min_batch
        return samples.plan(size, self.config.data, generators, max_steps, min_batch)

    def steps(self, stream: str, count: int, unit: str = "epochs") -> Iterator[Step]:
        """The steps of `plan`."""
        plan = self.plan(stream, count, unit)
        for number in range(len(plan.epochs)):
            yield self.train_samples.step(plan, number)

    def network(self, slot: str, name: str = "") -> StagedModel:
        """Another instance of this client's network (or `name`); its weights are unspecified.

        There is one instance per slot: a second call with the same slot returns the same instance.
        """
        return self.networks.network(name or self.model.name, slot)

    def frozen(self, slot: str, arrays: Arrays) -> StagedModel:
        """`network(slot)` with these weights, in eval mode and without gradient."""
        model = self.network(slot)
        model.load_state_dict(arrays)
        return model.eval().requires_grad_(False)


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
