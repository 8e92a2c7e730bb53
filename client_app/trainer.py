"""The one loop of local training: gradient descent on the sum of some loss terms."""

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from client_app.graphs import MIN_CALLS, Replayed
from client_app.networks import forward_in, products
from client_app.round import RoundContext
from client_app.samples import BatchPlan, Duration, Step
from models import StagedModel
from protocol.arrays import Arrays

MAX_TRACED = 100  # steps whose loss terms can be read one by one after training
Inputs = Callable[[Step], tuple[Any, ...]]
Loss = Callable[..., dict[str, Tensor]]


@dataclass
class MeanTerms:
    """Sums of loss terms over samples, on the device; read once, because reading waits."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    num_samples: int = 0
    first_sums: list[list[Tensor]] = field(default_factory=list)  # after each of the first steps

    def add(self, terms: dict[str, Tensor], batch_size: int) -> None:
        """Add one batch, over which each term is a mean."""
        for name, value in terms.items():
            term = value * batch_size
            self.sums[name] = self.sums[name] + term if name in self.sums else term
        self.num_samples += batch_size
        if len(self.first_sums) < MAX_TRACED:
            self.first_sums.append(list(self.sums.values()))

    def read(self) -> dict[str, float]:
        """The mean of each term over all samples added, in one copy from the device."""
        if not self.sums:
            return {}
        totals: list[float] = torch.stack(list(self.sums.values())).tolist()
        means = (total / max(1, self.num_samples) for total in totals)
        return dict(zip(self.sums, means, strict=True))

    def fault(self) -> str:
        """The first term that was not finite, with its value and step; "" if none is at fault.

        If all terms became infinite or NaN in the same step, after the first, the step before it
        was too long: the weights are at fault, not a term. Only the first 100 steps are searched.
        """
        for number, sums in enumerate(self.first_sums, start=1):
            values = torch.stack(sums).tolist()
            bad = [n for n, value in enumerate(values) if not math.isfinite(value)]
            if len(bad) == len(values) and number > 1:
                return ""
            if bad:
                name = list(self.sums)[bad[0]]
                return f"`{name}` is {values[bad[0]]} in step {number}"
        return ""


@dataclass(frozen=True)
class Descent:
    """What came of `fit`: the mean of each loss term, and the learning rate of each step."""

    terms: dict[str, float]
    rates: Sequence[float]

    @property
    def num_steps(self) -> int:
        """The steps taken."""
        return len(self.rates)


def fit(
    ctx: RoundContext,
    parameters: Sequence[Tensor],
    inputs: Inputs,
    loss: Loss,
    lr: float,
    duration: Duration,
    *,
    stream: str = "batches",
    decays: bool = True,
    momentum: float | None = None,
    weight_decay: float | None = None,
    gradient_offsets: Sequence[Tensor] = (),
    step_offsets: Sequence[Tensor] = (),
) -> Descent:
    """The run's optimizer on these parameters and the sum of some loss terms; all local training.

    parameters: those trained, of `ctx.model`; the caller sets modes (`train`, `requires_grad_`).
    inputs: from a step the tensors that the loss reads, in a tuple that may hold lists and dicts.
    loss: called with these inputs, returns the loss terms, scalars by name. With `cuda-graphs` it
    is not called in every step: what differs between steps has to come through `inputs`.
    lr: before the run's decays; constant, as a method's own learning rate, if `decays` is False.
    stream: names the random stream of batch order, augmentation and dropout.
    momentum, weight_decay: the run's if None; Adam has no momentum.
    gradient_offsets: one per parameter, added to its gradient before gradients are clipped.
    step_offsets: one per parameter, added to it times the learning rate after each step.
    """
    optimizer = ctx.optimizer(parameters, momentum, weight_decay)
    plan = ctx.plan(stream, duration.count, duration.unit)
    decay = ctx.config.train.lr_decay_epoch
    rates = [lr * ctx.lr_factor * decay**epoch if decays else lr for epoch in plan.epochs]
    sums = MeanTerms()
    gradients = functools.partial(gradients_of, ctx, parameters, loss, gradient_offsets)
    plain: tuple[Callable[..., Any], ...] = (ctx.train_samples.batch(plan), gradients)
    sizes = recorded_sizes(ctx, plan)
    recorded = replayed(ctx, stream, *plain) if sizes else plain
    with deterministic(ctx, stream):
        for number, rate in enumerate(rates):  # nothing here waits for the device
            is_recorded = len(plan.index[number]) in sizes
            batch, gradients_for = recorded if is_recorded else plain
            step = ctx.train_samples.step(plan, number, batch)
            with forward_in(ctx.precision, ctx.device):
                values = inputs(step)
            terms, found = gradients_for(values)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
            optimizer.step(rate)
            if step_offsets:
                with torch.no_grad():
                    torch._foreach_add_(list(parameters), list(step_offsets), alpha=rate)
            sums.add(terms, len(step.y))
    means = sums.read()
    if not all(map(math.isfinite, means.values())) and (fault := sums.fault()):
        ctx.faults.append(fault)
    return Descent(means, rates)


def gradients_of(
    ctx: RoundContext,
    parameters: Sequence[Tensor],
    loss: Loss,
    offsets: Sequence[Tensor],
    inputs: tuple[Any, ...],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """The loss terms of one step, and the gradient of each parameter, or None."""
    for parameter in parameters:
        parameter.grad = None
    with forward_in(ctx.precision, ctx.device):
        terms = loss(*inputs)
    functools.reduce(operator.add, terms.values()).backward()  # type: ignore[no-untyped-call]
    for parameter, offset in zip(parameters, offsets, strict=False):
        if parameter.grad is not None:
            parameter.grad.add_(offset)
    if ctx.config.train.clip_norm:
        torch.nn.utils.clip_grad_norm_(parameters, ctx.config.train.clip_norm)
    gradients = [parameter.grad for parameter in parameters]
    return {name: term.detach() for name, term in terms.items()}, gradients


def replayed(
    ctx: RoundContext, stream: str, batch: Callable[..., Any], gradients: Callable[..., Any]
) -> tuple[Replayed, Replayed]:
    """The two functions of a step, recorded at their third call."""
    what = f"of {ctx.config.rounds.method} with {ctx.model.name}, in {stream},"
    return Replayed(batch, f"a batch {what}"), Replayed(gradients, f"a step {what}")


def recorded_sizes(ctx: RoundContext, plan: BatchPlan) -> set[int]:
    """The sizes of batches whose steps are recorded as CUDA graphs: those that come up often."""
    if not ctx.config.train.cuda_graphs or ctx.device.type != "cuda":
        return set()
    return {size for size, num in Counter(map(len, plan.index)).items() if num >= MIN_CALLS}


@contextmanager
def deterministic(ctx: RoundContext, stream: str) -> Iterator[None]:
    """A context with the run's precision, and torch's default generators seeded for dropout.

    `torch.manual_seed` is not used: without a GPU it stores a formatted traceback at each call and
    never frees it.
    """
    device, seed = ctx.device, ctx.seed("dropout", stream)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), products(ctx.precision):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def copy_of(model: StagedModel) -> Arrays:
    """The model's parameters and buffers, in contiguous memory of their own."""
    return {
        name: array.detach().clone(memory_format=torch.contiguous_format)
        for name, array in model.tensors.items()
    }
