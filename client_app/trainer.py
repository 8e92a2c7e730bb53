"""The one loop of local training: SGD on a local objective, frozen models read once a sample."""

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.look_ahead import look_ahead_term
from client_app.method import Arrays, Batch, LocalObjective, Update
from client_app.precision import forward_in, losses_in_float32, products
from client_app.round import ClientRound
from client_app.samples import Step, num_variants
from client_app.sgd import SGD
from models import StagedModel

log = logging.getLogger("keel.client")


class FrozenTaps:
    """What a frozen model says of a client's samples, computed once a sample and variant.

    Within a round its weights do not change, so neither does this: after the first epoch it is a
    look-up. Beyond the memory budget, or where augmentation has too many variants, it is computed
    again for every batch, with the same result.
    """

    def __init__(
        self, objective: LocalObjective, model: StagedModel, now: ClientRound, is_first: bool = True
    ) -> None:
        """is_first: of the frozen models of this client's round; it speaks for all of them."""
        self.objective, self.model = objective, model
        self.taps = objective.taps(model)
        self.num_samples = len(now.train_samples)
        self.variants = num_variants(now.config.data)
        self.num_models = int(objective.uses_global) + int(objective.uses_previous)
        self.budget_bytes = now.config.train.cache_mb * 2**20  # of all frozen models together
        self.client, self.is_first = now.client, is_first
        self.precision = now.config.train.precision
        is_read_twice = now.config.train.local_epochs > 1
        self.is_cached = is_read_twice and self.variants > 0 and self.budget_bytes > 0
        self.known = torch.zeros(self.variants * self.num_samples, dtype=torch.bool)
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def compute(self, x: Tensor) -> list[Tensor]:
        """Straight from the model, which runs no further than the last tap."""
        with forward_in(self.precision, x.device):
            _, taps = self.model.run(x, self.taps, to_logits=False)
        with losses_in_float32(self.precision, x.device):  # as of the local model
            return self.objective.represent(self.model, taps)

    @torch.no_grad()
    def of(self, step: Step) -> list[Tensor]:
        """For one batch, in the order of the objective's taps, [B, ...] each."""
        if not self.is_cached:
            return self.compute(step.x)
        rows = step.variant * self.num_samples + step.index  # on the CPU: no wait for the device
        missing = ~self.known[rows]
        device = step.x.device
        if missing.any():
            all_missing = bool(missing.all())
            fresh = self.compute(step.x if all_missing else step.x[missing.to(device)])
            if not self.kept and not self._make_room(fresh):
                return fresh  # the first batch is all missing
            new_rows = rows[missing].to(device)
            for kept, values in zip(self.kept, fresh, strict=True):
                kept.index_copy_(0, new_rows, values)
            self.known[rows[missing]] = True
            if all_missing:
                return fresh
        on_device = rows.to(device)
        return [kept.index_select(0, on_device) for kept in self.kept]

    def _make_room(self, fresh: list[Tensor]) -> bool:
        rows = self.variants * self.num_samples
        own_bytes = sum(rows * t[0].numel() * t.element_size() for t in fresh)
        size_bytes = self.num_models * own_bytes
        if size_bytes > self.budget_bytes:
            if self.is_first:
                log.info(
                    "%s: what the frozen models say of its samples would take %.1f MB, more than "
                    "cache-mb = %d: it is computed again in every epoch",
                    *(self.client, size_bytes / 2**20, self.budget_bytes >> 20),
                )
            self.is_cached = False
            return False
        self.kept = [
            torch.empty(
                (rows, *t.shape[1:]),
                dtype=t.dtype,
                device=t.device,
                memory_format=torch.channels_last if t.dim() == 4 else torch.contiguous_format,
            )
            for t in fresh
        ]
        return True


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


def parse_duration(key: str, text: str) -> Duration:
    """From "1 epoch", "2 epochs" or "20 steps"; ValueError naming the key for anything else."""
    count, _, unit = text.partition(" ")
    unit = unit if unit.endswith("s") else unit + "s"
    if not count.isdecimal() or unit not in ("epochs", "steps"):
        raise ValueError(f"{key} = {text!r}: it has to be like '1 epoch', '2 epochs' or '20 steps'")
    return Duration(int(count), unit)


@dataclass(frozen=True)
class Descent:
    """What a descent did: mean of each loss term, steps taken, sum of their learning rates."""

    terms: dict[str, float]
    num_steps: int
    total_lr: float


def descend(
    now: ClientRound,
    parameters: Sequence[Tensor],
    terms_of: Callable[[Step], dict[str, Tensor]],
    *,
    lr: float,
    duration: Duration,
    stream: str = "batches",
    momentum: float | None = None,
    weight_decay: float | None = None,
    after_backward: Callable[[], None] | None = None,
    after_step: Callable[[float], None] | None = None,
) -> Descent:
    """SGD on `parameters` down the sum of the terms; the one loop of all local training.

    terms_of: the loss terms of one batch, scalars by name. lr: before this round's decay.
    momentum, weight_decay: the run's if None.
    stream: names the random stream of batch order, augmentation and dropout. after_backward may
    change the gradients (before they are clipped), after_step (given the rate) the parameters.
    Modes (`train`, `requires_grad_`) are the caller's.
    """
    train = now.config.train
    optimizer = SGD(
        parameters,
        momentum=train.momentum if momentum is None else momentum,
        weight_decay=train.weight_decay if weight_decay is None else weight_decay,
    )
    sums = MeanTerms({})
    num_steps = 0
    total_lr = 0.0
    cuda = [now.device] if now.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), products(train.precision):
        torch.manual_seed(now.seed("dropout", stream))
        for epoch, step in steps_of(now, stream, duration):
            rate = lr * now.lr_factor * train.lr_decay_epoch**epoch
            with forward_in(train.precision, now.device):
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


def steps_of(now: ClientRound, stream: str, duration: Duration) -> Iterator[tuple[int, Step]]:
    """(epoch, batch) for the duration; steps go on into as many epochs as they need."""
    epoch = taken = 0
    in_epochs = duration.unit == "epochs"
    while (epoch if in_epochs else taken) < duration.count:
        for step in now.batches(stream, epoch):
            yield epoch, step
            taken += 1
            if not in_epochs and taken == duration.count:
                return
        epoch += 1


def objective_terms(
    objective: LocalObjective, now: ClientRound, model: StagedModel
) -> Callable[[Step], dict[str, Tensor]]:
    """The loss terms of one batch under a local objective: `supervised`, and `penalty` if any.

    Builds the frozen models that the objective uses, from what was received and kept.
    """
    previous = now.state.get("previous") or objective.first_previous(now)
    has_penalty = not (objective.uses_previous and previous is None)
    global_taps = previous_taps = None
    global_model = None
    if has_penalty and objective.uses_global_model:
        global_model = now.frozen("global", now.received)
    if has_penalty and objective.uses_global:
        global_taps = FrozenTaps(objective, now.frozen("global", now.received), now)
    if has_penalty and objective.uses_previous and previous is not None:
        frozen = now.frozen("previous", previous)
        previous_taps = FrozenTaps(objective, frozen, now, is_first=global_taps is None)
    names = objective.taps(model) if has_penalty else []

    def terms_of(step: Step) -> dict[str, Tensor]:
        logits, taps = model.run(step.x, names)
        assert logits is not None
        batch = Batch(
            x=step.x,
            y=step.y,
            logits=logits,
            taps=taps,
            taps_g=global_taps.of(step) if global_taps else [],
            taps_p=previous_taps.of(step) if previous_taps else [],
            round=now,
            global_model=global_model,
        )
        with losses_in_float32(now.config.train.precision, now.device):
            terms = {"supervised": objective.supervised(batch)}
            penalty = objective.penalty(batch) if has_penalty else None
            if penalty is not None:
                terms["penalty"] = penalty
            ahead = look_ahead_term(now, model)
            if ahead is not None:
                terms["look-ahead"] = ahead
        return terms

    return terms_of


def train_on_objective(objective: LocalObjective, now: ClientRound) -> Update:
    """Local training: `local-epochs` of SGD from the received model on supervised + penalty.

    Keeps the local model it ends with where the objective `uses_previous`.
    """
    train, model = now.config.train, now.model
    model.load_state_dict(now.received)
    model.train().requires_grad_(True)
    descent = descend(
        now,
        list(model.parameters()),
        objective_terms(objective, now, model),
        lr=train.lr,
        duration=Duration(train.local_epochs, "epochs"),
    )
    arrays = copy_of(model)
    state = {"previous": arrays} if objective.uses_previous else {}
    return Update(arrays, descent.num_steps, descent.terms, state=state)


def copy_of(model: torch.nn.Module) -> Arrays:
    """The model's parameters and buffers, in memory of their own."""
    return {name: array.detach().clone() for name, array in model.state_dict().items()}
