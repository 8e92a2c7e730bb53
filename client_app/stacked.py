"""Clients of one process that train as one batched model.

They are clients of one run (`clients-per-step`), or of several runs in the same round
(`stacked-runs`), which differ in their seed and in numbers among the options of their method.
Each client's `Method.phases` runs on a model of its own up to its next phase. Then the weights of
the k clients are stacked, [k, ...], and `torch.func.vmap` maps one client's loss terms over them.
Clients do not wait for each other within a phase: a step trains the largest group, of g clients,
whose next batches have the same size and learning rate. So no batch is padded, and a loss that
compares the samples of a batch sees that batch alone.

What differs between runs, the received arrays and these options, takes the place of the first
client's own while the loss is computed.

The result equals that of training one client after the other, up to rounding.
"""

import copy
import functools
import inspect
import logging
import operator
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from client_app.gpu_errors import is_out_of_memory
from client_app.method import Method, Phases, Update, check_phase, phases_of
from client_app.precision import forward_in, products
from client_app.round import RoundContext
from client_app.samples import batch_size_for
from client_app.trainer import Descent, Phase, add_to_gradients, total_loss
from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, DatasetSpec
from protocol.options import types_of
from protocol.text import in_one_line

log = logging.getLogger("keel.client")
OF_VMAP = re.compile("vmap|[Bb]atching rule")  # in errors of vmap about what it cannot batch
Key = tuple[int, float, Hashable, int]  # batch size, learning rate, kind, place if it steps alone
StepResult = tuple[set[str], Any]  # of g clients: names of the loss terms; observed, [g, ...]


def key_of_stack(config: RunConfig) -> str:
    """The key with which this run's clients train together; what a refusal names."""
    return "stacked-runs" if config.train.stacked_runs > 1 else "clients-per-step"


def num_stacked(config: RunConfig) -> int:
    """The value of that key."""
    train = config.train
    return train.stacked_runs if train.stacked_runs > 1 else train.clients_per_step


def without_stacking(config: RunConfig) -> str:
    """What to do where clients cannot train together; the end of a refusal."""
    return "leave out --stack" if config.train.stacked_runs > 1 else "set it to 1"


def obstacle(method: Method, config: RunConfig, model: nn.Module) -> str:
    """Why the clients of this run cannot train together; "" if they can."""
    name = config.rounds.method
    if type(method).train is not Method.train:
        return f"method = {name!r} overrides `train`, for one client at a time, and not `phases`"
    if config.client_models:
        return f"client-models = {config.model.client_models!r}: the clients' networks differ"
    if config.train.compile:
        return "compile = true compiles the network of one client"
    if any(_drops(module) for module in model.modules()):
        return f"model = {config.model.model!r} has dropout, whose masks are drawn client by client"
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    if any(norm.track_running_stats and norm.momentum is None for norm in norms):
        return (
            f"model = {config.model.model!r} has BatchNorm without momentum, which counts batches"
        )
    tensors = model.state_dict(keep_vars=True).values()
    if len(set(map(id, tensors))) < len(tensors):
        return f"model = {config.model.model!r} has weights that several of its layers share"
    return ""


def _drops(module: nn.Module) -> bool:
    """Whether a layer of PyTorch's has dropout; one may be part of attention or an RNN."""
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    return isinstance(module, _DropoutNd) and module.p > 0


def check_stackable(method: Method, config: RunConfig, model: nn.Module) -> None:
    """ValueError, one line, if clients are to train together and cannot be stacked."""
    num = num_stacked(config)
    if num > 1 and (reason := obstacle(method, config, model)):
        raise ValueError(f"{key_of_stack(config)} = {num}: {reason}; {without_stacking(config)}")


class Swapped(nn.Module):
    """Calls a function while the model and frozen networks have other parameters and buffers."""

    def __init__(self, model: nn.Module, frozen: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model, self.frozen = model, nn.ModuleList(frozen)

    def forward(self, function: Callable[[], Any]) -> Any:
        """What the function returns."""
        return function()


@dataclass
class LossGuard:
    """Up while the loss of several clients is computed; see `StackedContext`."""

    is_up: bool = False


@dataclass(frozen=True)
class StackedContext(RoundContext):
    """The round of one client of a stack.

    The loss is traced once for all clients. While it is computed (`guard`), it may therefore read
    only the attributes in `shared`, which are the same for all clients, or, if also in `separate`,
    arrays that are replaced by each client's own. ValueError for any other attribute.
    place: the client's index in the stack; all of its networks but the global model are its own.
    """

    place: int = 0
    guard: LossGuard = field(default_factory=LossGuard, repr=False)
    shared: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        guard = own.get("guard")  # none before it is set
        if guard and guard.is_up and not name.startswith("_") and name not in own["shared"]:
            key = key_of_stack(own["config"])
            raise ValueError(
                f"{key}: the loss reads ctx.{name}, which may differ between clients: return it "
                "from begin_round and read batch.prepared, or return it from a phase's inputs; or "
                f"set {key} to 1"
            )
        return object.__getattribute__(self, name)

    def network(self, slot: str, name: str = "") -> StagedModel:
        """As `RoundContext.network`."""
        return super().network(slot if slot == "global" else f"{slot} {self.place}", name)


def contexts_of(ctxs: Sequence[RoundContext]) -> list[StackedContext]:
    """The rounds, each with a model of its own.

    ValueError if clients of one run received different arrays.
    """
    guard = LossGuard()
    shared = ["config", "data", "round", "device", "received", "model", "precision"]
    first_of_run: dict[int, RoundContext] = {}  # by the networks, which are the run's
    for ctx in ctxs:
        first = first_of_run.setdefault(id(ctx.networks), ctx)
        if first is not ctx and not same_values(first.received, ctx.received):
            raise ValueError(
                f"{key_of_stack(ctx.config)}: {first.client} and {ctx.client} received different "
                "arrays, so they cannot train together; set it to 1"
            )
    separate = []
    if not all(same_values(ctxs[0].received, ctx.received) for ctx in first_of_run.values()):
        separate.append("received")
    shapes = [{name: array.shape for name, array in ctx.extra.items()} for ctx in ctxs]
    if all(each == shapes[0] for each in shapes):
        shared.append("extra")
        if not all(same_values(ctxs[0].extra, ctx.extra) for ctx in ctxs[1:]):
            separate.append("extra")
    made = []
    for n, ctx in enumerate(ctxs):
        values = {f.name: getattr(ctx, f.name) for f in fields(RoundContext)}
        values["model"] = ctx.network(f"local {n}")
        own = StackedContext(
            **values, place=n, guard=guard, shared=tuple(shared), separate=tuple(separate)
        )
        made.append(own)
    return made


def differing(ctxs: Sequence[StackedContext]) -> dict[str, Arrays]:
    """What clients received differently and the loss may read, by attribute: [k, ...] each."""
    received = {name: [getattr(ctx, name) for ctx in ctxs] for name in ctxs[0].separate}
    return {
        name: {n: torch.stack([arrays[n] for arrays in each]) for n in each[0]}
        for name, each in received.items()
    }


def stacked_frozen(phases: Sequence[Phase]) -> list[Arrays]:
    """The weights of each frozen network, [k, ...]; {} where all clients have the same one."""
    longest = max((phase.frozen for phase in phases), key=len)
    found: list[Arrays] = []
    for n, network in enumerate(longest):
        own = [phase.frozen[n] if n < len(phase.frozen) else network for phase in phases]
        differ = any(each is not network for each in own)
        states = [each.state_dict() for each in own] if differ else [{}]
        found.append({name: torch.stack([s[name] for s in states]) for name in states[0]})
    return found


def differing_options(methods: Sequence[Method], like: Tensor) -> Arrays:
    """The numbers that differ between the clients' methods, by field: [k] each, of `like`'s type.

    ValueError if anything else differs.
    """
    first = methods[0]
    found: Arrays = {}
    for each in fields(first):
        values = [getattr(method, each.name) for method in methods]
        if all(value == values[0] for value in values):
            continue
        if types_of(type(first))[each.name] is not float:  # type: ignore[arg-type]  # hashable
            raise ValueError(
                f"stacked-runs: {each.name} is {values[0]!r} in one run and another in others; "
                "only numbers with decimals may differ"
            )
        found[each.name] = torch.tensor(values, dtype=like.dtype, device=like.device)
    return found


@contextmanager
def replaced(one: object, values: Mapping[str, Any]) -> Iterator[None]:
    """This object, frozen or not, has these attributes within this context."""
    before = {name: object.__getattribute__(one, name) for name in values}
    try:
        for name, value in values.items():
            object.__setattr__(one, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(one, name, value)


def same_values(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and plain values are equal."""
    (leaves, structure), (others, other_structure) = map(pytree.tree_flatten, (one, other))

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return structure == other_structure and all(map(same, leaves, others))


def check_captured(phases: Sequence[Phase], key: str) -> None:
    """ValueError if the closures of loss terms of one kind hold values that differ by client."""
    plain = (Tensor, bool, int, float, str, type(None), list, tuple, dict)
    first: dict[Hashable, Mapping[str, Any]] = {}  # what the first client's terms read, by kind
    for phase in phases:
        if not inspect.isroutine(phase.terms):  # a partial or another object that can be called
            continue
        held = inspect.getclosurevars(phase.terms).nonlocals
        for name, value in first.setdefault(phase.kind, held).items():
            if isinstance(value, plain) and not same_values(value, held[name]):
                raise ValueError(
                    f"{key}: {name_of(phase.terms)} reads {name!r}, which differs between "
                    f"clients: return it from the phase's inputs, or set {key} to 1"
                )


class Stack:
    """The weights, momenta and buffers of k clients in one phase, by name, [k, ...] each."""

    def __init__(
        self, methods: Sequence[Method], ctxs: Sequence[StackedContext], phases: Sequence[Phase]
    ) -> None:
        self.methods, self.ctxs, self.config = methods, ctxs, common_config(ctxs)
        self.models, self.train = [ctx.model for ctx in ctxs], ctxs[0].config.train
        self.precision, self.device = ctxs[0].precision, ctxs[0].device
        key = key_of_stack(self.config)
        names = [names_of(m, phase, key) for m, phase in zip(self.models, phases, strict=True)]
        optimizers = {(phase.momentum, phase.weight_decay) for phase in phases}
        if any(each != names[0] for each in names) or len(optimizers) > 1:
            raise ValueError(
                f"{key}: the clients train different parameters, or with "
                "another momentum or weight decay; set it to 1"
            )
        check_captured(phases, key)
        self.phases, self.names = phases, names[0]
        states = [model.state_dict() for model in self.models]
        self.arrays = {name: torch.stack([s[name] for s in states]) for name in states[0]}
        self.velocities = {n: torch.zeros_like(self.arrays[n]) for n in self.names}
        self.constants, self.frozen = differing(ctxs), stacked_frozen(phases)
        self.options = differing_options(methods, next(iter(self.arrays.values())))
        self.gradient_offsets = stacked([list(p.gradient_offsets) for p in phases])
        self.step_offsets = stacked([list(p.step_offsets) for p in phases])
        self.sums: dict[str, Tensor] = {}  # of each loss term over samples, [k]
        self.has_batch_norm = any(isinstance(m, _BatchNorm) for m in self.models[0].modules())

    def steps_alone(self, batch_size: int) -> bool:
        """Whether a client with a batch of this size steps by itself, without vmap.

        Under vmap, the stride of a one-sample batch matches no memory format, and BatchNorm (torch
        2.15, CPU) returns a wrong input gradient in training and evaluation mode. Other layers, and
        BatchNorm without vmap, are correct.
        """
        return batch_size == 1 and self.has_batch_norm

    def rows(self, places: list[int]) -> slice | Tensor:
        """The index of clients at these ascending places: a slice, which gives views, if it can."""
        first, last = places[0], places[-1]
        if last - first + 1 == len(places):
            return slice(first, last + 1)
        return torch.tensor(places).to(self.device, non_blocking=True)

    def step(
        self, places: list[int], rate: float, inputs: Sequence[Any], batch_size: int
    ) -> StepResult:
        """One SGD step of the clients at these places; inputs: one batch of this size for each."""
        rows = self.rows(places)
        own = {name: array[rows] for name, array in self.arrays.items()}
        velocities = {name: self.velocities[name][rows] for name in self.names}
        weights = {name: own[name].detach().requires_grad_() for name in self.names}
        trained = list(weights.values())
        tensors, rebuilt = batched(inputs, key_of_stack(self.config))
        first = places[0]
        phase, method, ctx = self.phases[first], self.methods[first], self.ctxs[first]
        swapped = Swapped(self.models[first], phase.frozen)

        def one(
            arrays: Arrays, tensors: list[Tensor], constants: dict[str, Arrays], options: Arrays
        ) -> Any:
            function = functools.partial(phase.terms, rebuilt(tensors))
            with replaced(ctx, constants | {"config": self.config}), replaced(method, options):
                return functional_call(swapped, arrays, (function,))

        arrays = {f"model.{name}": array for name, array in (own | weights).items()}
        constants = {
            name: {n: array[rows] for n, array in arrays.items()}
            for name, arrays in self.constants.items()
        }
        for n in range(len(phase.frozen)):
            arrays |= {f"frozen.{n}.{name}": a[rows] for name, a in self.frozen[n].items()}
        options = {name: values[rows] for name, values in self.options.items()}
        try:
            mapped = by_itself(one) if self.steps_alone(batch_size) else torch.func.vmap(one)
            with forward_in(self.precision, self.device):
                made = mapped(arrays, tensors, constants, options)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            if options:
                raise ValueError(
                    f"stacked-runs: {', '.join(options)} of {type(method).__name__} differs "
                    "between runs, and the loss can only calculate with it, not branch on it: "
                    "compute what depends on it in begin_round, or set stacked-runs to 1 "
                    f"({in_one_line(error)})"
                ) from error
            if not OF_VMAP.search(str(error)):
                raise
            what = in_one_line(error).partition(". ")[0].rstrip(".")
            where = layer_in(error, swapped) or name_of(phase.terms)
            raise ValueError(
                f"{key_of_stack(self.config)} = {num_stacked(self.config)}: {where} cannot be "
                f"computed for several clients at once ({what}); {without_stacking(self.config)}"
            ) from error
        terms, observed = made if phase.observe else (made, None)  # [g, ...] each
        if self.names:  # a phase may train nothing and only observe
            total_loss(terms, ctx).sum().backward()  # type: ignore[no-untyped-call]
        add_to_gradients(trained, [offset[rows] for offset in self.gradient_offsets])
        if self.train.clip_norm:
            clip_each(trained, self.train.clip_norm)
        optimizer = phase.optimizer(trained, self.train)
        if optimizer.momentum:
            optimizer.velocities = list(velocities.values())
        optimizer.step(rate)
        if self.step_offsets:
            with torch.no_grad():
                torch._foreach_add_(trained, [o[rows] for o in self.step_offsets], alpha=rate)
        if isinstance(rows, Tensor):
            for stack, changed in ((self.arrays, own | weights), (self.velocities, velocities)):
                for name, values in changed.items():
                    stack[name].index_copy_(0, rows, values.detach())
        for name, value in terms.items():
            total = self.sums.setdefault(name, value.new_zeros(len(self.models)))
            total[rows] += value.detach() * batch_size
        return set(terms), observed


def name_of(function: Callable[..., Any]) -> str:
    """The name of a loss, for an error; a callable object or a partial one may have none."""
    return str(getattr(function, "__qualname__", "the loss"))


def layer_in(error: Exception, networks: nn.Module) -> str:
    """The innermost module of these networks in which the error was raised; "" for none."""
    names = {module: name for name, module in networks.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = (frame.f_locals.get("self") for frame in reversed(frames))
    found = (names.get(each, "") for each in called if isinstance(each, nn.Module))
    name = next(filter(None, found), "")
    return f"layer {name.removeprefix('model.')}" if "." in name else ""


def by_itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.func.vmap` for one client, whose tensors are [1, ...]."""

    def called(*stacks: Any) -> Any:
        made = function(*pytree.tree_map(operator.itemgetter(0), stacks))
        return pytree.tree_map(lambda tensor: tensor[None], made)

    return called


def common_config(ctxs: Sequence[RoundContext]) -> RunConfig:
    """The config without the keys in which runs differ; a loss that reads one is refused."""
    config = ctxs[0].config
    flats = [ctx.config.flat for ctx in ctxs]
    flat = {k: v for k, v in config.flat.items() if all(other[k] == v for other in flats)}
    return replace(config, flat=flat) if len(flat) < len(config.flat) else config


def names_of(model: nn.Module, phase: Phase, key: str) -> list[str]:
    """The names of the parameters that the phase trains, in its order.

    ValueError if one is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if not names.keys() >= set(map(id, phase.parameters)):
        raise ValueError(
            f"{key}: the phase of {name_of(phase.terms)} trains a tensor that is not a parameter "
            f"of ctx.model; set {key} to 1"
        )
    return [names[id(parameter)] for parameter in phase.parameters]


def stacked(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The first tensors of all k lists stacked, [k, ...], then the second ones, and so on."""
    return [torch.stack(tensors) for tensors in zip(*lists, strict=True)]


def batched(inputs: Sequence[Any], key: str) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors in the inputs of g clients, [g, ...] each, and a function that reverses it.

    The function makes one client's inputs from its tensors. ValueError if anything but the values
    of tensors differs between the clients.
    """
    leaves, structures = zip(*map(pytree.tree_flatten, inputs), strict=True)
    places = [n for n, leaf in enumerate(leaves[0]) if isinstance(leaf, Tensor)]
    shapes = [[getattr(leaf, "shape", None) for leaf in each] for each in leaves]
    are_alike = all(each == structures[0] for each in structures)
    if not are_alike or any(each != shapes[0] for each in shapes):
        raise ValueError(
            f"{key}: begin_round, or a phase's inputs, returns other keys, or tensors of another "
            f"shape, for one client than for another: return the same for all, or set {key} to 1"
        )
    for values in zip(*leaves, strict=True):
        if not isinstance(values[0], Tensor) and any(value != values[0] for value in values):
            raise ValueError(
                f"{key}: begin_round, or a phase's inputs, returns values that differ between "
                f"clients and are not tensors: return tensors, or set {key} to 1"
            )

    def rebuilt(tensors: list[Tensor]) -> Any:
        values = list(leaves[0])
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return pytree.tree_unflatten(values, structures[0])

    return stacked([[each[n] for n in places] for each in leaves]), rebuilt


@torch.no_grad()
def clip_each(weights: Sequence[Tensor], max_norm: float) -> None:
    """Scale each client's gradient, over all weights [k, ...], to a norm of at most `max_norm`."""
    gradients = [w.grad for w in weights if w.grad is not None]
    if not gradients:
        return
    # [k] each; a scalar parameter has no dimension to flatten, hence the None
    norms = [g[..., None].flatten(1).norm(dim=1) for g in gradients]
    scale = (max_norm / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp_max(1.0)  # [k]
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))


def train_phases(
    methods: Sequence[Method], ctxs: Sequence[StackedContext], phases: Sequence[Phase]
) -> list[Descent]:
    """`train_phase` of each of these clients."""
    precision, device, guard = ctxs[0].precision, ctxs[0].device, ctxs[0].guard
    plans = [
        ctx.plan(phase.stream, phase.duration.count, phase.duration.unit)
        for ctx, phase in zip(ctxs, phases, strict=True)
    ]
    rates = [phase.rates(c, plan) for c, phase, plan in zip(ctxs, phases, plans, strict=True)]
    stack = Stack(methods, ctxs, phases)
    taken, names = [0] * len(ctxs), [set[str]() for _ in ctxs]

    def key_of(n: int) -> Key:
        size = len(plans[n].index[taken[n]])
        return size, rates[n][taken[n]], phases[n].kind, n if stack.steps_alone(size) else -1

    with products(precision):
        while waiting := [n for n in range(len(ctxs)) if taken[n] < len(rates[n])]:
            groups: dict[Key, list[int]] = defaultdict(list)
            for n in waiting:
                groups[key_of(n)].append(n)
            (size, rate, *_), places = max(groups.items(), key=lambda item: len(item[1]))
            steps = [ctxs[n].train_samples.step(plans[n], taken[n]) for n in places]
            with forward_in(precision, device):
                inputs = [phases[n].inputs(s) for n, s in zip(places, steps, strict=True)]
            with replaced(guard, {"is_up": True}):
                made, observed = stack.step(places, rate, inputs, size)
            for row, (n, step) in enumerate(zip(places, steps, strict=True)):
                taken[n] += 1
                names[n] |= made
                if observe := phases[n].observe:
                    observe(step, pytree.tree_map(operator.itemgetter(row), observed))
    for n, model in enumerate(stack.models):
        model.load_state_dict({name: array[n] for name, array in stack.arrays.items()})
    totals: dict[str, list[float]] = {}  # of each loss term, by client
    if stack.sums:
        in_one_copy = torch.stack(list(stack.sums.values())).tolist()
        totals = dict(zip(stack.sums, in_one_copy, strict=True))
    descents = []
    for n, plan in enumerate(plans):
        num_samples = sum(map(len, plan.index))
        means = {name: totals[name][n] / num_samples for name in totals if name in names[n]}
        descents.append(Descent(means, rates[n]))
    return descents


def clients_that_fit(
    method: Method,
    config: RunConfig,
    model: StagedModel,
    data: DatasetSpec,
    device: torch.device,
    num_samples: int,
) -> int:
    """How many clients of at most `num_samples` train together with `clients-per-step = 0`.

    As many as half of the GPU's free memory holds, by the weights, one batch and `cache-mb`; 1 on a
    CPU, where stacking does not pay (docs/results/gpu.md), and where clients cannot be stacked.
    At least 1.
    """
    if device.type != "cuda" or obstacle(method, config, model):
        return 1
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(torch.cuda.mem_get_info(device)[0]) + unused
    return max(1, int(free // 2 // bytes_of_training(config, model, data, device, num_samples)))


def bytes_of_training(
    config: RunConfig, model: StagedModel, data: DatasetSpec, device: torch.device, num_samples: int
) -> int:
    """Memory that one of several clients takes: weights, one batch, cached representations."""
    saved: int = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        size = batch_size_for(num_samples, config.train)
        model.eval()(torch.zeros(size, *data.image_shape, device=device))
    weights = sum(int(array.nbytes) for array in model.state_dict().values())
    # weights: local, previous, stacked, gradients, momenta, reply; a batch: saved and gradients
    return 6 * weights + 2 * saved + config.train.cache_mb * 2**20


def train_stacked(
    methods: Sequence[Method], ctxs: Sequence[RoundContext]
) -> list[Update | Exception]:
    """`method.train` of each of these clients, which share a process, a network and a round.

    An error of one client before or between its phases is its own; one of a step is raised.
    """
    own = contexts_of(ctxs)
    methods = [copy.copy(method) for method in methods]  # each with options of its own
    trainings: list[Phases] = [phases_of(m, ctx) for m, ctx in zip(methods, own, strict=True)]
    ended: dict[int, Update | Exception] = {}
    descents: Mapping[int, Descent] = {}
    while len(ended) < len(ctxs):
        phases: dict[int, Phase] = {}
        for n, training in enumerate(trainings):
            if n in ended:
                continue
            try:
                phase = training.send(descents[n]) if n in descents else next(training)
                check_phase(phase, training)
                phases[n] = phase
            except StopIteration as end:
                ended[n] = end.value
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                ended[n] = error
        if phases:
            chosen = [methods[n] for n in phases], [own[n] for n in phases]
            descents = dict(zip(phases, train_phases(*chosen, list(phases.values())), strict=True))
    return [ended[n] for n in range(len(ctxs))]
