"""The one loop of local training: SGD on a local objective, frozen models read once a sample."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.method import Arrays, Batch, LocalObjective, Update
from client_app.round import ClientRound
from client_app.samples import Step, num_variants
from models import StagedModel
from protocol.config import TrainConfig

log = logging.getLogger("keel.client")


def make_sgd(parameters: list[Tensor], train: TrainConfig, lr: float) -> torch.optim.SGD:
    """A fresh SGD with the run's momentum and weight decay; fused: one kernel for all arrays."""
    return torch.optim.SGD(
        parameters,
        lr=lr,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        fused=True,
    )


class FrozenTaps:
    """What a frozen model says of a client's samples, computed once a sample and variant.

    Within a round its weights do not change, so neither does this: after the first epoch it is a
    look-up. Beyond the memory budget, or where augmentation has too many variants, it is computed
    again for every batch, with the same result.
    """

    def __init__(self, objective: LocalObjective, model: StagedModel, now: ClientRound) -> None:
        self.objective, self.model = objective, model
        self.taps = objective.taps(model)
        self.num_samples = len(now.train_samples)
        self.variants = num_variants(now.config.data)
        self.budget_bytes = now.config.train.cache_mb * 2**20
        self.client = now.client
        is_read_twice = now.config.train.local_epochs > 1
        self.is_cached = is_read_twice and self.variants > 0 and self.budget_bytes > 0
        self.known = torch.zeros(self.variants * self.num_samples, dtype=torch.bool)
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def compute(self, x: Tensor) -> list[Tensor]:
        """Straight from the model, which runs no further than the last tap."""
        _, taps = self.model.run(x, self.taps, to_logits=False)
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
        size_bytes = sum(rows * t[0].numel() * t.element_size() for t in fresh)
        if size_bytes > self.budget_bytes:
            log.info(
                "%s: what the frozen models say of its samples would take %d MB, more than "
                "cache-mb = %d: it is computed again in every epoch",
                *(self.client, size_bytes >> 20, self.budget_bytes >> 20),
            )
            self.is_cached = False
            return False
        self.kept = [
            torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in fresh
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


def train_on_objective(objective: LocalObjective, now: ClientRound) -> Update:
    """Local training: `local-epochs` of SGD from the received model on supervised + penalty.

    Keeps the local model it ends with where the objective `uses_previous`.
    """
    train = now.config.train
    model = now.model
    model.load_state_dict(now.received)
    previous = now.state.get("previous") or objective.first_previous(now)
    has_penalty = not (objective.uses_previous and previous is None)
    globals_ = previouses = None
    if has_penalty and objective.uses_global:
        globals_ = FrozenTaps(objective, now.frozen("global", now.received), now)
    if has_penalty and objective.uses_previous and previous is not None:
        previouses = FrozenTaps(objective, now.frozen("previous", previous), now)
    taps = objective.taps(model) if has_penalty else []
    optimizer = make_sgd(list(model.parameters()), train, train.lr * now.lr_factor)
    terms = MeanTerms({})
    num_steps = 0
    model.train().requires_grad_(True)
    with torch.random.fork_rng(devices=[now.device] if now.device.type == "cuda" else []):
        torch.manual_seed(now.seed("dropout"))
        for epoch in range(train.local_epochs):
            for group in optimizer.param_groups:
                group["lr"] = train.lr * now.lr_factor * train.lr_decay_epoch**epoch
            for step in now.batches("batches", epoch):
                logits, local = model.run(step.x, taps)
                assert logits is not None
                batch = Batch(
                    x=step.x,
                    y=step.y,
                    logits=logits,
                    taps=local,
                    taps_g=globals_.of(step) if globals_ else [],
                    taps_p=previouses.of(step) if previouses else [],
                    round=now,
                )
                loss = supervised = objective.supervised(batch)
                losses = {"supervised": supervised}
                penalty = objective.penalty(batch) if has_penalty else None
                if penalty is not None:
                    loss = supervised + penalty
                    losses["penalty"] = penalty
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                if train.clip_norm:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
                optimizer.step()
                terms.add(losses, len(step.y))
                num_steps += 1
    arrays: Arrays = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state = {"previous": arrays} if objective.uses_previous else {}
    return Update(arrays=arrays, num_steps=num_steps, terms=terms.read(), state=state)
