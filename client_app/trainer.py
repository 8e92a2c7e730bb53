"""The one loop of local training: SGD on a local objective, frozen models read once a sample."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.feature_cache import FrozenFeatureCache
from client_app.look_ahead import look_ahead_term
from client_app.method import Arrays, Batch, LocalObjective, Update
from client_app.precision import forward_in, losses_in_float32, products
from client_app.round import RoundContext
from client_app.samples import Step, batch_size_for
from client_app.sgd import SGD
from models import StagedModel


@dataclass
class MeanTerms:
    """Sums of loss terms over samples, on the device: reading them waits, so it is done once."""

    sums: dict[str, Tensor]
    num_samples: int = 0

    def add(self, terms: dict[str, Tensor], batch_size: int) -> None:
        """Count one batch: each term is a mean over it."""
        for name, value in terms.items():
            term = value.detach() * batch_size
            self.sums[name] = self.sums[name] + term if name in self.sums else term
        self.num_samples += batch_size

    def read(self) -> dict[str, float]:
        """The mean of each term over all samples counted."""
        return {name: total.item() / max(1, self.num_samples) for name, total in self.sums.items()}


@dataclass(frozen=True)
class Duration:
    """How long to descend: so many epochs, or so many steps."""

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
    """What a descent did: mean of each loss term, steps taken, sum of their learning rates."""

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
    """SGD on `parameters` down the sum of the terms; the one loop of all local training.

    terms_of: the loss terms of one batch, scalars by name. lr: before the run's decays, unless
    `decays` is False: the rate is then a method's own, and stays.
    momentum, weight_decay: the run's if None.
    stream: names the random stream of batch order, augmentation and dropout. after_backward may
    change the gradients (before they are clipped), after_step (given the rate) the parameters.
    Modes (`train`, `requires_grad_`) are the caller's.
    """
    train = ctx.config.train
    optimizer = SGD(
        parameters,
        momentum=train.momentum if momentum is None else momentum,
        weight_decay=train.weight_decay if weight_decay is None else weight_decay,
    )
    sums = MeanTerms({})
    num_steps = 0
    total_lr = 0.0
    cuda = [ctx.device] if ctx.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), products(train.precision):
        torch.manual_seed(ctx.seed("dropout", stream))
        for epoch, step in steps_of(ctx, stream, duration):
            rate = lr * ctx.lr_factor * train.lr_decay_epoch**epoch if decays else lr
            with forward_in(train.precision, ctx.device):
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
            num_steps += 1
            total_lr += rate
    return Descent(sums.read(), num_steps, total_lr)


def steps_of(ctx: RoundContext, stream: str, duration: Duration) -> Iterator[tuple[int, Step]]:
    """(epoch, batch) for the duration; steps go on into as many epochs as they need."""
    epoch = taken = 0
    in_epochs = duration.unit == "epochs"
    while (epoch if in_epochs else taken) < duration.count:
        for step in ctx.batches(stream, epoch):
            yield epoch, step
            taken += 1
            if not in_epochs and taken == duration.count:
                return
        epoch += 1


def representations(
    objective: LocalObjective, model: StagedModel, ctx: RoundContext
) -> Callable[[Tensor], list[Tensor]]:
    """What the objective compares of a batch x, in a frozen model, run no further than that."""
    taps, precision = objective.taps(model), ctx.config.train.precision

    def compute(x: Tensor) -> list[Tensor]:
        with forward_in(precision, x.device):
            _, found = model.run(x, taps, to_logits=False)
        with losses_in_float32(precision, x.device):  # as of the local model
            return objective.represent(model, found)

    return compute


def objective_terms(
    objective: LocalObjective, ctx: RoundContext, model: StagedModel
) -> Callable[[Step], dict[str, Tensor]]:
    """The loss terms of one batch under a local objective: `supervised`, and `penalty` if any.

    Builds the frozen models that the objective uses, from what was received and kept.
    """
    previous = ctx.state.get("previous") or objective.first_previous(ctx)
    has_penalty = not (objective.uses_previous and previous is None)
    used = {}
    if has_penalty and objective.uses_global:
        used["global"] = ctx.received
    if has_penalty and objective.uses_previous and previous is not None:
        used["previous"] = previous
    frozen = {
        slot: FrozenFeatureCache(
            ctx,
            representations(objective, ctx.frozen(slot, arrays), ctx),
            is_read_again=ctx.config.train.local_epochs > 1,
        )
        for slot, arrays in used.items()
    }
    global_model = None
    if has_penalty and objective.uses_global_model:
        global_model = ctx.frozen("global", ctx.received)
    names = objective.taps(model) if has_penalty else []

    def terms_of(step: Step) -> dict[str, Tensor]:
        logits, taps = model.run(step.x, names)
        assert logits is not None
        batch = Batch(
            x=step.x,
            y=step.y,
            logits=logits,
            taps=taps,
            reps_global=frozen["global"].of(step) if "global" in frozen else [],
            reps_previous=frozen["previous"].of(step) if "previous" in frozen else [],
            round=ctx,
            global_model=global_model,
        )
        with losses_in_float32(ctx.config.train.precision, ctx.device):
            terms = {"supervised": objective.supervised(batch)}
            penalty = objective.penalty(batch) if has_penalty else None
            if penalty is not None:
                terms["penalty"] = penalty
            ahead = look_ahead_term(ctx, model)
            if ahead is not None:
                terms["look-ahead"] = ahead
        return terms

    return terms_of


def train_on_objective(objective: LocalObjective, ctx: RoundContext) -> Update:
    """Local training: `local-epochs` of SGD from the received model on supervised + penalty.

    Keeps the local model it ends with where the objective `uses_previous`.
    """
    train, model = ctx.config.train, ctx.model
    model.load_state_dict(ctx.received)
    model.train().requires_grad_(True)
    descent = descend(
        ctx,
        list(model.parameters()),
        objective_terms(objective, ctx, model),
        lr=train.lr,
        duration=Duration(train.local_epochs, "epochs"),
    )
    arrays = copy_of(model)
    state = {"previous": arrays} if objective.uses_previous else {}
    return Update(arrays, descent.num_steps, descent.terms, state=state)


def copy_of(model: torch.nn.Module) -> Arrays:
    """The model's parameters and buffers, in memory of their own."""
    return {name: array.detach().clone() for name, array in model.state_dict().items()}
