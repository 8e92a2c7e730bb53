"""The one loop of local training: SGD on the sum of some loss terms."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.precision import forward_in, products
from client_app.round import RoundContext
from client_app.samples import Step, batch_size_for
from client_app.sgd import SGD
from protocol.messages import Arrays


@dataclass
class MeanTerms:
    """Sums of loss terms over samples, on the device; read once, because reading waits."""

    sums: dict[str, Tensor]
    num_samples: int = 0

    def add(self, terms: dict[str, Tensor], batch_size: int) -> None:
        """Add one batch, over which each term is a mean."""
        for name, value in terms.items():
            term = value.detach() * batch_size
            self.sums[name] = self.sums[name] + term if name in self.sums else term
        self.num_samples += batch_size

    def read(self) -> dict[str, float]:
        """The mean of each term over all samples added, in one copy from the device."""
        if not self.sums:
            return {}
        totals: list[float] = torch.stack(list(self.sums.values())).tolist()
        return {
            name: total / max(1, self.num_samples)
            for name, total in zip(self.sums, totals, strict=True)
        }


@dataclass(frozen=True)
class Duration:
    """How long to train: a number of epochs or of steps."""

    count: int
    unit: str  # epochs or steps

    def reads_again(self, ctx: RoundContext) -> bool:
        """Whether any sample comes up more than once."""
        if self.unit == "epochs":
            return self.count > 1
        return self.count * batch_size_for(len(ctx.train_samples), ctx.config.train) > len(
            ctx.train_samples
        )


@dataclass(frozen=True)
class Descent:
    """The result of `descend`: mean of each loss term, steps taken, sum of their learning rates."""

    terms: dict[str, float]
    num_steps: int
    total_lr: float


def descend(
    ctx: RoundContext,
    parameters: Sequence[Tensor],
    terms_of: Callable[[Step], dict[str, Tensor]],
    *,
    lr: float,
    duration: Duration,
    stream: str = "batches",
    momentum: float | None = None,
    weight_decay: float | None = None,
    decays: bool = True,
    after_backward: Callable[[], None] | None = None,
    after_step: Callable[[float], None] | None = None,
) -> Descent:
    """SGD on `parameters` to minimise the sum of the terms; the one loop of all local training.

    terms_of: the loss terms of one batch, scalars by name. lr: before the run's decays; constant,
    as a method's own learning rate, if `decays` is False. momentum, weight_decay: the run's if
    None. stream: names the random stream of batch order, augmentation and dropout. after_backward
    may change the gradients (before they are clipped), after_step (called with the learning rate)
    the parameters. The caller sets modes (`train`, `requires_grad_`).
    """
    train = ctx.config.train
    optimizer = SGD(
        parameters,
        momentum=train.momentum if momentum is None else momentum,
        weight_decay=train.weight_decay if weight_decay is None else weight_decay,
    )
    plan = ctx.plan(stream, duration.count, duration.unit)
    rates = [
        lr * ctx.lr_factor * train.lr_decay_epoch**epoch if decays else lr for epoch in plan.epochs
    ]
    sums = MeanTerms({})
    cuda = [ctx.device] if ctx.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), products(ctx.precision):
        seed_default(ctx.seed("dropout", stream), ctx.device)
        for number, rate in enumerate(rates):  # nothing here waits for the device
            step = ctx.train_samples.step(plan, number)
            with forward_in(ctx.precision, ctx.device):
                terms = terms_of(step)
            optimizer.zero_grad()
            functools.reduce(operator.add, terms.values()).backward()  # type: ignore[no-untyped-call]
            if after_backward:
                after_backward()
            if train.clip_norm:
                torch.nn.utils.clip_grad_norm_(parameters, train.clip_norm)
            optimizer.step(rate)
            if after_step:
                after_step(rate)
            sums.add(terms, len(step.y))
    return Descent(sums.read(), len(rates), functools.reduce(operator.add, rates, 0.0))


def seed_default(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and this device.

    Without a GPU, torch's function stores a formatted traceback at each call and never frees it.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def copy_of(model: torch.nn.Module) -> Arrays:
    """The model's parameters and buffers, in contiguous memory of their own."""
    return {
        name: array.detach().clone(memory_format=torch.contiguous_format)
        for name, array in model.state_dict().items()
    }
