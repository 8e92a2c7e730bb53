"""A local objective: a loss on one batch, and the local training that minimises it.

The trainer provides batches, frozen models, the optimizer and client state; a subclass of
`LocalObjective` says which layers it compares and how. Its `train` is one call of `fit`. At the end
are the distances between weights, for FedProx, Ditto and FedACG.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.method import FIT_KEYS, Method, Update
from client_app.networks import forward_in, losses_in_float32
from client_app.round import FrozenFeatureCache, RoundContext
from client_app.samples import Duration, Step
from client_app.trainer import Descent, copy_of, fit
from models import StagedModel
from protocol.arrays import Arrays
from protocol.options import key_of, one_of, option
from protocol.server_optimizers import SERVER_OPTIMIZERS


@dataclass(frozen=True)
class Batch:
    """One step of local training, as a local objective sees it. B is the batch size.

    x [B, C, H, W] augmented, y [B], logits [B, num_classes] of the local model. `reps`,
    `reps_global` and `reps_previous` are what `LocalObjective.represent` returns for this batch in
    the local model (with gradient), the global model and the previous local model (constants);
    the last two are empty where the objective does not use that model. global_model: the frozen
    network itself. prepared: what `LocalObjective.begin_round` returned.
    """

    ctx: RoundContext
    x: Tensor
    y: Tensor
    logits: Tensor
    reps: list[Tensor]
    reps_global: list[Tensor]
    reps_previous: list[Tensor]
    global_model: StagedModel | None = None
    prepared: Any = None

    def loss_at(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of this batch with other weights of the local model, a scalar.

        weights: by name, such as `p + shift` of each of `ctx.model.named_parameters()`; those not
        named are the model's. Gradients flow into them. Buffers, such as BatchNorm's statistics,
        stay as they are.
        """
        ctx, model = self.ctx, self.ctx.model
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with forward_in(ctx.precision, ctx.device):
            logits = torch.func.functional_call(model, buffers | dict(weights), (self.x,))
        return F.cross_entropy(logits, self.y)


@dataclass(frozen=True)
class LocalObjective(Method):
    """A loss on one batch: `supervised` plus `penalty`; plain cross entropy unless overridden."""

    is_local_objective: ClassVar[bool] = True
    training_keys: ClassVar[Sequence[str]] = (*FIT_KEYS, "local-epochs", "lr")

    detaches: ClassVar[bool] = False
    """A part of the loss is a constant on purpose, as in sharpness-aware steps: `keel check-method`
    does not compare its gradient with finite differences."""

    uses_global: ClassVar[bool] = False
    """The penalty reads `Batch.reps_global`."""

    uses_global_model: ClassVar[bool] = False
    """The penalty reads `Batch.global_model`."""

    uses_previous: ClassVar[bool] = False
    """The penalty reads `Batch.reps_previous`; needs `is_stateful`."""

    def layers(self, model: StagedModel) -> list[str]:
        """Names of the layers whose representations are compared; none by default."""
        return []

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """What is compared between models, [B, ...] each; by default the layers' outputs.

        For a frozen model it is a constant of the sample, which is cached.
        """
        return outputs

    def begin_round(self, ctx: RoundContext) -> Any:
        """Computed once per round, before training; each batch has the result as `prepared`."""
        return None

    def first_previous(self, ctx: RoundContext) -> Arrays | None:
        """Weights of the previous model at a client's first participation; None: no penalty."""
        return None

    def supervised(self, batch: Batch) -> Tensor:
        """The loss on the labels, a scalar: cross entropy, mean over the batch."""
        return F.cross_entropy(batch.logits, batch.y)

    def penalty(self, batch: Batch) -> Tensor:
        """The regulariser times its weight, a scalar; 0 by default.

        If `uses_previous`, it is not called at a client's first participation (unless
        `first_previous` returns weights): the previous model is then the global one, the term is
        constant and its gradient zero.
        """
        return batch.logits.new_zeros(())

    def check_model(self, model: StagedModel) -> None:
        """ValueError if the network lacks a layer that is compared."""
        if lacking := set(self.layers(model)) - set(model.layer_names):
            raise ValueError(
                f"{type(self).__name__}.layers has {', '.join(sorted(lacking))}: expected layers "
                f"of {model.name}: {', '.join(model.layer_names)}"
            )

    def train(self, ctx: RoundContext) -> Update:
        """Local training as in FedAvg, from the received model, on this objective.

        The client state is the trained local model where the objective `uses_previous`.
        """
        ctx.model.load_state_dict(ctx.received)
        descent = minimise(self, ctx)
        arrays = copy_of(ctx.model)
        state = {"previous": arrays} if self.uses_previous else {}
        return Update(arrays, descent.num_steps, descent.terms, state=state)


@dataclass(frozen=True)
class PreviousModelObjective(LocalObjective):
    """Compares with the global model and with this client's previous one, its client state."""

    is_stateful: ClassVar[bool] = True
    uses_global: ClassVar[bool] = True
    uses_previous: ClassVar[bool] = True
    client_state: ClassVar[str] = "its previous local model"

    first_use: str = option(
        one_of("received", "initial"),
        "previous model at a client's first participation",
        default="received",
        source="initial: FedIntR's code",
    )

    def first_previous(self, ctx: RoundContext) -> Arrays | None:
        """None for "received"; for "initial" the run's initial weights, which round 1 receives."""
        return ctx.initial_weights() if self.first_use == "initial" and ctx.round > 1 else None


def minimise(
    objective: LocalObjective,
    ctx: RoundContext,
    gradient_offsets: Sequence[Tensor] = (),
    step_offsets: Sequence[Tensor] = (),
) -> Descent:
    """`local-epochs` of SGD on supervised + penalty, from the weights that `ctx.model` has.

    gradient_offsets, step_offsets: as in `fit`.
    """
    train, model = ctx.config.train, ctx.model.train().requires_grad_(True)
    loss = ObjectiveLoss(objective, ctx, model)
    return fit(
        ctx,
        list(model.parameters()),
        loss.inputs,
        loss,
        lr=train.lr,
        duration=Duration(train.local_epochs),
        gradient_offsets=gradient_offsets,
        step_offsets=step_offsets,
    )


class ObjectiveLoss:
    """The loss terms of an objective on the batches of one client's round.

    Where the method equals FedAvg the penalty is not computed: its zero gradients would apply
    weight decay to weights that only the penalty reads, and change the last bits of the gradient
    norm used for clipping.
    """

    def __init__(self, objective: LocalObjective, ctx: RoundContext, model: StagedModel) -> None:
        """Builds the frozen models that the objective uses, from received arrays and state."""
        self.objective, self.ctx, self.model = objective, ctx, model
        self.prepared = objective.begin_round(ctx)
        previous = ctx.state.get("previous") or objective.first_previous(ctx)
        lacks_previous = objective.uses_previous and previous is None
        self.has_penalty = not lacks_previous and not is_at_limit(objective)
        self.frozen: dict[str, FrozenFeatureCache] = {}
        self.global_model: StagedModel | None = None
        if not self.has_penalty:
            return
        if objective.uses_global:
            self.frozen["global"] = frozen_representations(objective, ctx, "global", ctx.received)
        if objective.uses_previous and previous:
            self.frozen["previous"] = frozen_representations(objective, ctx, "previous", previous)
        if objective.uses_global_model:
            self.global_model = ctx.frozen("global", ctx.received)

    def inputs(self, step: Step) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        """What the loss reads of a step: x, y, and the frozen models' representations by slot."""
        return step.x, step.y, {slot: cache.of(step) for slot, cache in self.frozen.items()}

    def __call__(self, x: Tensor, y: Tensor, reps: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """`supervised`, `penalty` if there is one, and the server optimizer's term: scalars."""
        objective, ctx, model = self.objective, self.ctx, self.model
        logits, outputs = model.run(x, objective.layers(model) if self.has_penalty else [])
        assert logits is not None
        with losses_in_float32(ctx.precision, ctx.device):
            batch = Batch(
                ctx=ctx,
                x=x,
                y=y,
                logits=logits,
                reps=objective.represent(model, outputs) if self.has_penalty else [],
                reps_global=reps.get("global", []),
                reps_previous=reps.get("previous", []),
                global_model=self.global_model,
                prepared=self.prepared,
            )
            terms = {"supervised": objective.supervised(batch)}
            if self.has_penalty and type(objective).penalty is not LocalObjective.penalty:
                terms["penalty"] = objective.penalty(batch)
            check_scalars(objective, terms)
            return terms | server_optimizer_terms(ctx, model)


def check_scalars(objective: LocalObjective, terms: Mapping[str, Any]) -> None:
    """TypeError naming the function of an objective that returned something else than a scalar."""
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.numel() != 1:
            found = f"{list(term.shape)}" if isinstance(term, Tensor) else repr(term)
            raise TypeError(
                f"{type(objective).__name__}.{name} returned {found:.80}: expected a scalar tensor"
            )


def is_at_limit(objective: LocalObjective) -> bool:
    """Whether its options are those of `equals_fedavg_at`."""
    values = {key_of(field): getattr(objective, field.name) for field in fields(objective)}
    limit = objective.equals_fedavg_at
    return bool(limit) and limit.items() <= values.items()


def frozen_representations(
    objective: LocalObjective, ctx: RoundContext, slot: str, arrays: Arrays
) -> FrozenFeatureCache:
    """The representations of a frozen model, which runs no further than these.

    They are cached unless they depend on the batch.
    """
    network = ctx.frozen(slot, arrays)
    by_batch = ctx.config.train.frozen_statistics == "batch" and any(
        isinstance(module, _BatchNorm) for module in network.modules()
    )
    network.train(by_batch)
    layers = objective.layers(network)

    def compute(x: Tensor) -> list[Tensor]:
        with forward_in(ctx.precision, x.device):
            _, outputs = network.run(x, layers, to_logits=False)
        with losses_in_float32(ctx.precision, x.device):  # as for the local model
            return objective.represent(network, outputs)

    is_read_again = ctx.config.train.local_epochs > 1 and not by_batch
    return FrozenFeatureCache(ctx, compute, is_read_again=is_read_again)


class SquaredDistance(torch.autograd.Function):
    """||w - w_g||^2 and its gradient, in a few kernels for all arrays together."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arrays: Tensor) -> Tensor:
        """A scalar. arrays: each of w, then each of w_g."""
        half = len(arrays) // 2
        drift = torch._foreach_sub(arrays[:half], arrays[half:])
        ctx.save_for_backward(*drift)
        return torch.stack(torch._foreach_norm(drift)).square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for each of w; None for w_g."""
        drift = list(ctx.saved_tensors)  # type: ignore[attr-defined]  # saved by forward
        return *torch._foreach_mul(drift, 2 * grad), *(None for _ in drift)


def squared_distance(w: list[Tensor], w_g: list[Tensor]) -> Tensor:
    """||w - w_g||^2, a scalar: summed over every entry of every array, no averaging.

    Gradient 2 (w - w_g) for `w`, and 0, not NaN, where they are equal; none for `w_g`.
    """
    distance: Tensor = SquaredDistance.apply(*w, *(array.detach() for array in w_g))
    return distance


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """`squared_distance` of the model's trained parameters to the arrays of the same names."""
    trained = trained_parameters(model)
    return squared_distance(list(trained.values()), [arrays[n] for n in trained])


def unsquared_drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """sum_k ||w^k - w_g^k|| over the model's trained parameters w^k, a scalar.

    The gradient of a norm is taken to be 0, not NaN, where the arrays are equal.
    """
    trained = trained_parameters(model)
    return torch.stack([torch.linalg.vector_norm(p - arrays[n]) for n, p in trained.items()]).sum()


def server_optimizer_terms(ctx: RoundContext, model: nn.Module) -> dict[str, Tensor]:
    """FedACG's term of every local objective; {} with beta 0 and for other server optimizers.

    Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR
    2024, arXiv 2201.03172: beta ||theta - wh||^2, a scalar, for the look-ahead model wh that the
    server (`FedACGStep` in strategies/server_optimizers.py) sends; without 1/2 as in their code.
    """
    term = SERVER_OPTIMIZERS[ctx.config.rounds.server_optimizer].client_term
    beta = getattr(ctx.config.server_optimizer_options(), term) if term else 0
    return {"look-ahead": beta * drift_from(model, ctx.received)} if beta else {}
