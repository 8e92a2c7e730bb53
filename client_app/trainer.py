"""The one loop of local training: SGD on the sum of some loss terms."""

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from client_app.graphs import MIN_CALLS, Replayed
from client_app.precision import forward_in, products
from client_app.round import RoundContext
from client_app.samples import BatchPlan, Draws, Labelled, Step, batch_size_for
from client_app.sgd import SGD
from models import StagedModel, own_memory
from protocol.config import TrainConfig
from protocol.messages import Arrays

MAX_TRACED = 100  # steps whose loss terms can be read one by one after training


@dataclass
class MeanTerms:
    """Sums of loss terms over samples, on the device; read once, because reading waits."""

    sums: dict[str, Tensor]
    num_samples: int = 0
    first_sums: list[list[Tensor]] = field(default_factory=list)  # after each of the first steps

    def add(self, terms: dict[str, Tensor], batch_size: int) -> None:
        """Add one batch, over which each term is a mean."""
        for name, value in terms.items():
            term = value.detach() * batch_size
            self.sums[name] = self.sums[name] + term if name in self.sums else term
        self.num_samples += batch_size
        if len(self.first_sums) < MAX_TRACED:
            self.first_sums.append(list(self.sums.values()))

    def read(self) -> dict[str, float]:
        """The mean of each term over all samples added, in one copy from the device."""
        if not self.sums:
            return {}
        totals: list[float] = torch.stack(list(self.sums.values())).tolist()
        return {
            name: total / max(1, self.num_samples)
            for name, total in zip(self.sums, totals, strict=True)
        }

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
class Duration:
    """How long to train: a number of epochs or of steps."""

    count: int
    unit: str  # epochs or steps

    def reads_again(self, ctx: RoundContext) -> bool:
        """Whether any sample comes up more than once."""
        if self.unit == "epochs":
            return self.count > 1
        num_samples = len(ctx.train_samples)
        return self.count * batch_size_for(num_samples, ctx.config.train) > num_samples


@dataclass(frozen=True)
class Descent:
    """The result of a phase: mean of each loss term, and the learning rate of each step."""

    terms: dict[str, float]
    rates: Sequence[float]

    @property
    def num_steps(self) -> int:
        """The steps taken."""
        return len(self.rates)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """SGD on some parameters of `ctx.model` that minimises the sum of some loss terms.

    parameters: those trained; the caller sets modes (`train`, `requires_grad_`).
    inputs: what the loss reads of a step: tensors, in nested tuples, lists and dicts.
    terms: the loss terms of these inputs, scalars by name. Where clients train together
    (`clients-per-step`) it is called for all of them at once: what differs between clients, in its
    value, must come through `inputs`, which in turn must not read what the phase trains. With
    `cuda-graphs` it is not called in every step: what differs between steps must come through
    `inputs`, as a tensor. Neither may draw from torch's default generator, but dropout may. A loss
    that reads a gradient (as sharpness-aware minimisation does) takes it with `torch.func.grad`:
    `torch.autograd.grad` fails where clients train together.
    observe: if given, `terms` returns the terms and tensors without gradient, for which it is
    called after each step. It must not keep them, nor the step's x and y: a later step may be
    written in their place.
    lr: before the run's decays; constant, as a method's own learning rate, if `decays` is False.
    stream: names the random stream of batch order, augmentation and dropout.
    momentum, weight_decay: the run's if None.
    gradient_offsets: one per parameter, added to its gradient before gradients are clipped.
    step_offsets: one per parameter, added to it times the learning rate after each step.
    frozen: networks that the loss reads and does not train.
    kind: clients whose phases differ in it have different terms and are not stacked in one step.
    """

    parameters: Sequence[Tensor]
    inputs: Callable[[Step], Any]
    terms: Callable[[Any], Any]
    lr: float
    duration: Duration
    observe: Callable[[Step, Any], None] | None = None
    stream: str = "batches"
    momentum: float | None = None
    weight_decay: float | None = None
    decays: bool = True
    gradient_offsets: Sequence[Tensor] = ()
    step_offsets: Sequence[Tensor] = ()
    frozen: Sequence[torch.nn.Module] = ()
    kind: Hashable = None

    def optimizer(self, parameters: Sequence[Tensor], train: TrainConfig) -> SGD:
        """SGD on these tensors, with this phase's momentum and weight decay or the run's."""
        return SGD(
            parameters,
            momentum=train.momentum if self.momentum is None else self.momentum,
            weight_decay=train.weight_decay if self.weight_decay is None else self.weight_decay,
        )

    def rates(self, ctx: RoundContext, plan: BatchPlan) -> list[float]:
        """The learning rate of each step."""
        if not self.decays:
            return [self.lr] * len(plan.epochs)
        decay = ctx.config.train.lr_decay_epoch
        return [self.lr * ctx.lr_factor * decay**epoch for epoch in plan.epochs]


def train_phase(ctx: RoundContext, phase: Phase) -> Descent:
    """One phase of one client; the one loop of all local training."""
    train = ctx.config.train
    own_memory(phase.parameters)
    optimizer = phase.optimizer(phase.parameters, train)
    plan = ctx.plan(phase.stream, phase.duration.count, phase.duration.unit)
    rates = phase.rates(ctx, plan)
    sums = MeanTerms({})
    cuda = [ctx.device] if ctx.device.type == "cuda" else []
    batch: Callable[[Draws], Labelled] = ctx.train_samples.batch(plan)
    gradients: Callable[[Any], Any] = functools.partial(gradients_of, ctx, phase)
    recorded, sizes = (batch, gradients), replayed_sizes(ctx, plan)
    if sizes:
        what = f"of {ctx.config.rounds.method} with {ctx.model.name}, in {phase.stream},"
        recorded = (
            Replayed(batch, f"a batch {what}"),
            Replayed(gradients, f"a step {what}", phase.kind),
        )
    with torch.random.fork_rng(devices=cuda), products(ctx.precision):
        seed_default(ctx.seed("dropout", phase.stream), ctx.device)
        for number, rate in enumerate(rates):  # nothing here waits for the device
            is_replayed = bool(sizes) and len(plan.index[number]) in sizes
            batch_of, gradients_for = recorded if is_replayed else (batch, gradients)
            step = ctx.train_samples.step(plan, number, batch_of)
            with forward_in(ctx.precision, ctx.device):
                inputs = phase.inputs(step)
            terms, observed, found = gradients_for(inputs)
            for parameter, gradient in zip(phase.parameters, found, strict=True):
                parameter.grad = gradient
            optimizer.step(rate)
            if phase.step_offsets:
                with torch.no_grad():
                    torch._foreach_add_(
                        list(phase.parameters), list(phase.step_offsets), alpha=rate
                    )
            if phase.observe:
                phase.observe(step, observed)
            sums.add(terms, len(step.y))
    means = sums.read()
    if not all(map(math.isfinite, means.values())) and (fault := sums.fault()):
        ctx.faults.append(fault)
    return Descent(means, rates)


def gradients_of(ctx: RoundContext, phase: Phase, inputs: Any) -> tuple[Any, Any, list[Any]]:
    """The loss terms, what is observed, and each parameter's gradient, or None, of one step."""
    for parameter in phase.parameters:
        parameter.grad = None
    with forward_in(ctx.precision, ctx.device):
        made = phase.terms(inputs)
    terms, observed = made if phase.observe else (made, None)
    if phase.parameters:  # a phase may train nothing and only observe
        total_loss(terms, ctx).backward()  # type: ignore[no-untyped-call]
    add_to_gradients(phase.parameters, phase.gradient_offsets)
    if ctx.config.train.clip_norm:
        torch.nn.utils.clip_grad_norm_(phase.parameters, ctx.config.train.clip_norm)
    found = [parameter.grad for parameter in phase.parameters]
    return {name: term.detach() for name, term in terms.items()}, observed, found


def replayed_sizes(ctx: RoundContext, plan: BatchPlan) -> set[int]:
    """The sizes of batches whose steps are recorded as CUDA graphs and replayed."""
    if not ctx.config.train.cuda_graphs or ctx.device.type != "cuda":
        return set()
    return {size for size, num in Counter(map(len, plan.index)).items() if num >= MIN_CALLS}


def total_loss(terms: dict[str, Tensor], ctx: RoundContext) -> Tensor:
    """The sum of the terms; TypeError if it has no gradient."""
    total = functools.reduce(operator.add, terms.values())
    if not total.requires_grad:
        raise TypeError(
            f"method {ctx.config.rounds.method}: the loss ({' + '.join(terms)}) depends on no "
            "weight that is trained: compute it from the model's outputs, without detach"
        )
    return total


def add_to_gradients(parameters: Sequence[Tensor], offsets: Sequence[Tensor]) -> None:
    """Add each offset to its parameter's gradient, where there is one."""
    pairs = [(p.grad, o) for p, o in zip(parameters, offsets, strict=False) if p.grad is not None]
    if pairs:
        torch._foreach_add_([g for g, _ in pairs], [o for _, o in pairs])


def seed_default(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and this device.

    Without a GPU, torch's function stores a formatted traceback at each call and never frees it.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def copy_of(model: StagedModel) -> Arrays:
    """The model's parameters and buffers, in contiguous memory of their own."""
    return {
        name: array.detach().clone(memory_format=torch.contiguous_format)
        for name, array in model.tensors.items()
    }
