"""Clients of one process that train as one batched model (`clients-per-step`).

The clients' weights are stacked, [k, ...], and the loss of one client is mapped over them by
`torch.func.vmap`. Clients do not wait for each other: a step takes those whose next batch has the
same size and learning rate, the most there are. So no batch is padded, and a loss that compares the
samples of a batch sees that batch alone.

The result is that of training one client after the other, up to rounding.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from client_app.method import Method, Update
from client_app.objective import Constants, LocalObjective, constants_of, loss_terms
from client_app.precision import forward_in, products
from client_app.round import Networks, RoundContext
from client_app.samples import Step
from client_app.sgd import SGD
from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, DatasetSpec

Key = tuple[int, float, bool]  # batch size, learning rate, whether there is a penalty


def obstacle(method: Method, config: RunConfig, model: nn.Module) -> str:
    """Why the clients of this run cannot train together; "" if they can."""
    name = config.rounds.method
    if not isinstance(method, LocalObjective) or type(method).train is not LocalObjective.train:
        return f"method = {name!r} trains by a procedure of its own, one client at a time"
    if config.client_models:
        return f"client-models = {config.model.client_models!r}: the clients' networks differ"
    if config.train.compile:
        return "compile = true compiles the network of one client"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return f"model = {config.model.model!r} has dropout, whose masks are drawn client by client"
    return ""


def check_stackable(method: Method, config: RunConfig, model: nn.Module) -> None:
    """ValueError, one line, if `clients-per-step` is above 1 and the clients cannot be stacked."""
    if config.train.clients_per_step > 1 and (reason := obstacle(method, config, model)):
        raise ValueError(
            f"clients-per-step = {config.train.clients_per_step}: {reason}; set it to 1"
        )


@dataclass(frozen=True)
class OwnSlots:
    """The process's networks, with slots of this client's own where its weights are its own."""

    networks: Networks
    place: int

    @property
    def has_logged_full_cache(self) -> bool:
        """As the process's."""
        return self.networks.has_logged_full_cache

    @has_logged_full_cache.setter
    def has_logged_full_cache(self, value: bool) -> None:
        self.networks.has_logged_full_cache = value

    def network(
        self, config: RunConfig, data: DatasetSpec, name: str, slot: str, device: torch.device
    ) -> StagedModel:
        """The global model is the same for all clients; the others are this client's."""
        own = slot if slot == "global" else f"{slot} {self.place}"
        return self.networks.network(config, data, name, own, device)

    def initial_weights(self, name: str) -> Arrays:
        """As the process's."""
        return self.networks.initial_weights(name)

    def random_weights(self, config: RunConfig, data: DatasetSpec, name: str, seed: int) -> Arrays:
        """As the process's."""
        return self.networks.random_weights(config, data, name, seed)


class Swapped(nn.Module):
    """Calls a function while the model has other parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        """What the function returns."""
        return function()


class SharedContext:
    """What a loss may read of the round while several clients train: what they have in common."""

    shared = ("config", "data", "round", "device", "received", "extra", "model", "precision")

    def __init__(self, ctx: RoundContext) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        if name not in self.shared:
            raise ValueError(
                f"clients-per-step: the loss reads ctx.{name}, which may differ between clients: "
                "return it from begin_round and read batch.prepared, or set clients-per-step to 1"
            )
        return getattr(self._ctx, name)


class Stack:
    """The weights, momenta and buffers of k clients, [k, ...] each, by the model's names."""

    def __init__(self, ctxs: Sequence[RoundContext]) -> None:
        self.model, self.device, train = ctxs[0].model, ctxs[0].device, ctxs[0].config.train
        self.model.load_state_dict(ctxs[0].received)
        self.model.train().requires_grad_(True)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.arrays = {
            name: torch.stack([array.detach()] * len(ctxs))
            for name, array in self.model.state_dict().items()
        }
        self.momentum, self.weight_decay = train.momentum, train.weight_decay
        self.velocities = {n: torch.zeros_like(self.arrays[n]) for n in self.names}
        self.clip_norm = train.clip_norm
        self.swapped = Swapped(self.model)
        self.sums: dict[str, Tensor] = {}  # of each loss term over samples, [k]

    def rows(self, places: list[int]) -> slice | Tensor:
        """The clients at these places, ascending; a slice, whose rows are views, if it can be."""
        first, last = places[0], places[-1]
        if last - first + 1 == len(places):
            return slice(first, last + 1)
        return torch.tensor(places).to(self.device, non_blocking=True)

    def step(
        self,
        places: list[int],
        rate: float,
        terms_of: Callable[[Any], dict[str, Tensor]],
        inputs: Any,
        batch_size: int,
    ) -> set[str]:
        """One SGD step of these clients; the names of their loss terms.

        terms_of: the loss terms of one client; inputs: its argument, each tensor [g, ...].
        """
        rows = self.rows(places)
        own = {name: array[rows] for name, array in self.arrays.items()}
        velocities = {name: self.velocities[name][rows] for name in self.names}
        weights = {name: own[name].detach().requires_grad_() for name in self.names}

        def one(arrays: Arrays, given: Any) -> dict[str, Tensor]:
            named = {f"model.{name}": array for name, array in arrays.items()}
            terms: dict[str, Tensor] = functional_call(
                self.swapped, named, (lambda: terms_of(given),)
            )
            return terms

        terms = torch.func.vmap(one)(own | weights, inputs)  # [g] each
        functools.reduce(operator.add, terms.values()).sum().backward()  # type: ignore[no-untyped-call]
        if self.clip_norm:
            clip_each(list(weights.values()), self.clip_norm)
        optimizer = SGD(list(weights.values()), self.momentum, self.weight_decay)
        if self.momentum:
            optimizer.velocities = list(velocities.values())
        optimizer.step(rate)
        if isinstance(rows, Tensor):
            for stacked, changed in ((self.arrays, own | weights), (self.velocities, velocities)):
                for name, values in changed.items():
                    stacked[name].index_copy_(0, rows, values.detach())
        for name, value in terms.items():
            total = self.sums.setdefault(name, value.new_zeros(len(self.arrays[self.names[0]])))
            total[rows] += value.detach() * batch_size
        return set(terms)

    def arrays_of(self, place: int) -> Arrays:
        """Copies of the weights and buffers of one client."""
        return {name: array[place].clone() for name, array in self.arrays.items()}


def batched(
    objective: LocalObjective, constants: Sequence[Constants], steps: Sequence[Step]
) -> tuple[Any, Callable[[Any], dict[str, Tensor]]]:
    """The inputs of one step of these clients, each tensor [g, ...], and the loss terms of one."""
    leaves, structures = zip(
        *(pytree.tree_flatten(each.prepared) for each in constants), strict=True
    )
    tensors: list[Tensor] = []
    for values in zip(*leaves, strict=True):
        if isinstance(values[0], Tensor):
            tensors.append(torch.stack(values))
        elif any(value != values[0] for value in values):
            raise ValueError(
                "clients-per-step: begin_round returns values that differ between clients and are "
                "no tensors: return tensors, or set clients-per-step to 1"
            )
    reps = [each.reps(step) for each, step in zip(constants, steps, strict=True)]
    stacked_reps = {
        slot: [torch.stack(z) for z in zip(*(each[slot] for each in reps), strict=True)]
        for slot in reps[0]
    }
    x, y = torch.stack([step.x for step in steps]), torch.stack([step.y for step in steps])
    shared: Any = SharedContext(constants[0].ctx)

    def terms_of(given: Any) -> dict[str, Tensor]:
        x, y, reps, own = given
        rest = iter(own)
        values = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves[0]]
        prepared = pytree.tree_unflatten(values, structures[0])
        each = replace(constants[0], ctx=shared, prepared=prepared)
        return loss_terms(objective, each, shared.model, x, y, reps)

    return (x, y, stacked_reps, tensors), terms_of


@torch.no_grad()
def clip_each(weights: Sequence[Tensor], max_norm: float) -> None:
    """Scale each client's gradient, [k, ...] over all weights, to a norm of at most `max_norm`."""
    gradients = [w.grad for w in weights if w.grad is not None]
    if not gradients:
        return
    squares = [g.flatten(1).norm(dim=1) for g in gradients]
    scale = (max_norm / (torch.stack(squares).norm(dim=0) + 1e-6)).clamp_max(1.0)  # [k]
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))


def check_alike(ctxs: Sequence[RoundContext]) -> None:
    """ValueError unless all clients received the same arrays, from which they start."""
    first = ctxs[0]
    for ctx in ctxs[1:]:
        for mine, others in ((first.received, ctx.received), (first.extra, ctx.extra)):
            is_alike = mine.keys() == others.keys()
            if not is_alike or any(not torch.equal(a, others[n]) for n, a in mine.items()):
                raise ValueError(
                    f"clients-per-step: {first.client} and {ctx.client} received different arrays, "
                    "so they cannot train together; set it to 1"
                )


def train_stacked(objective: LocalObjective, ctxs: Sequence[RoundContext]) -> list[Update]:
    """`objective.train` of each of these clients, which share a process, a model and a round."""
    check_alike(ctxs)
    train, precision, device = ctxs[0].config.train, ctxs[0].precision, ctxs[0].device
    constants = [
        constants_of(objective, replace(ctx, networks=OwnSlots(ctx.networks, n)))
        for n, ctx in enumerate(ctxs)
    ]
    plans = [ctx.plan("batches", train.local_epochs, "epochs") for ctx in ctxs]
    stack = Stack(ctxs)
    taken, names = [0] * len(ctxs), [set[str]() for _ in ctxs]

    def key_of(n: int) -> Key:
        epoch = plans[n].epochs[taken[n]]
        rate = train.lr * ctxs[n].lr_factor * train.lr_decay_epoch**epoch
        return len(plans[n].index[taken[n]]), rate, constants[n].has_penalty

    with products(precision):
        while waiting := [n for n, plan in enumerate(plans) if taken[n] < len(plan.epochs)]:
            groups: dict[Key, list[int]] = defaultdict(list)
            for n in waiting:
                groups[key_of(n)].append(n)
            (size, rate, _), places = max(groups.items(), key=lambda item: len(item[1]))
            steps = [ctxs[n].train_samples.step(plans[n], taken[n]) for n in places]
            inputs, terms_of = batched(objective, [constants[n] for n in places], steps)
            with forward_in(precision, device):
                made = stack.step(places, rate, terms_of, inputs, size)
            for n in places:
                taken[n] += 1
                names[n] |= made
    totals = dict(zip(stack.sums, torch.stack(list(stack.sums.values())).tolist(), strict=True))
    updates = []
    for n, ctx in enumerate(ctxs):
        arrays = stack.arrays_of(n)
        ctx.model.load_state_dict(arrays)
        num = max(1, train.local_epochs * len(ctx.train_samples))
        terms = {name: total[n] / num for name, total in totals.items() if name in names[n]}
        state = {"previous": arrays} if objective.uses_previous else {}
        updates.append(objective.finish(Update(arrays, taken[n], terms, state=state), ctx))
    return updates
