"""A local objective: a loss on one batch, and the local training that minimises it.

The trainer provides batches, frozen models, the optimizer and client state; a subclass of
`LocalObjective` says which layers it compares and how.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.drift import server_optimizer_terms
from client_app.feature_cache import FrozenFeatureCache
from client_app.method import Method, Phases, Update, train_alone
from client_app.precision import forward_in, losses_in_float32
from client_app.round import RoundContext
from client_app.samples import Step
from client_app.trainer import Duration, Phase
from models import StagedModel
from protocol.code import place_of
from protocol.messages import Arrays
from protocol.options import key_of, one_of, option


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


@dataclass(frozen=True)
class LocalObjective(Method):
    """A loss on one batch: `supervised` plus `penalty`; plain cross entropy unless overridden."""

    is_local_objective: ClassVar[bool] = True

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
        names = self.layers(model)
        if not isinstance(names, list | tuple) or set(names) - set(model.layer_names):
            raise ValueError(
                f"{place_of(self.layers)} returned {names!r}: expected a list of layers of "
                f"{model.name}: {', '.join(model.layer_names)}"
            )

    def phases(self, ctx: RoundContext) -> Phases:
        """Local training as in FedAvg, on this objective, then `finish`."""
        update = yield from objective_phases(self, ctx)
        return self.finish(update, ctx)

    def finish(self, update: Update, ctx: RoundContext) -> Update:
        """Postprocess the update after local training.

        `ctx.model` is the trained model; it may share its memory with `update.arrays`.
        """
        return update


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
        source="initial: FedIntR's code",
    )

    def first_previous(self, ctx: RoundContext) -> Arrays | None:
        """None for "received"; the run's initial weights for "initial", random ones for "official".

        In round 1 always None: the received model is then the initial one, and MOON's code has no
        contrast yet.
        """
        if self.first_use == "received" or ctx.round == 1:
            return None
        is_initial = self.first_use == "initial"
        return ctx.initial_weights() if is_initial else ctx.random_weights("first-use")


def frozen_representations(
    objective: LocalObjective, ctx: RoundContext, slot: str, arrays: Arrays
) -> FrozenFeatureCache:
    """The representations of a frozen model, which are cached unless they depend on the batch."""
    network = ctx.frozen(slot, arrays)
    by_batch = ctx.config.train.frozen_statistics == "batch" and any(
        isinstance(module, _BatchNorm) for module in network.modules()
    )
    return FrozenFeatureCache(
        ctx,
        representations(objective, network.train(by_batch), ctx),
        is_read_again=ctx.config.train.local_epochs > 1 and not by_batch,
    )


def representations(
    objective: LocalObjective, model: StagedModel, ctx: RoundContext
) -> Callable[[Tensor], list[Tensor]]:
    """The function from a batch x to its representations; the model runs no further than these."""
    layers, precision = objective.layers(model), ctx.precision

    def compute(x: Tensor) -> list[Tensor]:
        with forward_in(precision, x.device):
            _, outputs = model.run(x, layers, to_logits=False)
        with losses_in_float32(precision, x.device):  # as for the local model
            return objective.represent(model, outputs)

    return compute


# x, y, the representations in the frozen models, and what `begin_round` returned
LossInputs = tuple[Tensor, Tensor, dict[str, list[Tensor]], Any]


@dataclass(frozen=True)
class Constants:
    """What the loss of one client in one round reads beside its model and batch.

    frozen: the representations of the models that the penalty uses, by "global" and "previous".
    """

    ctx: RoundContext
    prepared: Any
    has_penalty: bool
    frozen: dict[str, FrozenFeatureCache]
    global_model: StagedModel | None

    def inputs(self, step: Step) -> LossInputs:
        """What `loss_terms` reads of a step, and of this client."""
        reps = {slot: cache.of(step) for slot, cache in self.frozen.items()}
        return step.x, step.y, reps, self.prepared


def is_at_limit(objective: LocalObjective) -> bool:
    """Whether its options are those of `equals_fedavg_at`."""
    values = {key_of(field): getattr(objective, field.name) for field in fields(objective)}
    limit = objective.equals_fedavg_at
    return bool(limit) and limit.items() <= values.items()


def constants_of(objective: LocalObjective, ctx: RoundContext) -> Constants:
    """Builds the frozen models that the objective uses, from received arrays and client state."""
    prepared = objective.begin_round(ctx)
    previous = ctx.state.get("previous") or objective.first_previous(ctx)
    lacks_previous = objective.uses_previous and previous is None
    has_penalty = not lacks_previous and not is_at_limit(objective)
    used = {}
    if has_penalty and objective.uses_global:
        used["global"] = ctx.received
    if has_penalty and objective.uses_previous and previous is not None:
        used["previous"] = previous
    frozen = {
        slot: frozen_representations(objective, ctx, slot, arrays) for slot, arrays in used.items()
    }
    global_model = None
    if has_penalty and objective.uses_global_model:
        global_model = ctx.frozen("global", ctx.received)
    return Constants(ctx, prepared, has_penalty, frozen, global_model)


def loss_terms(
    objective: LocalObjective, constants: Constants, model: StagedModel, inputs: LossInputs
) -> dict[str, Tensor]:
    """The loss terms of a batch: `supervised`, `penalty` if there is one, the server optimizer's.

    Where the method equals FedAvg the penalty is not computed: its zero gradients would apply
    weight decay to weights that only the penalty reads, and change the last bits of the gradient
    norm used for clipping.

    inputs: as `Constants.inputs` returns them for this batch.
    """
    ctx, has_penalty = constants.ctx, constants.has_penalty
    x, y, reps, prepared = inputs
    logits, outputs = model.run(x, objective.layers(model) if has_penalty else [])
    assert logits is not None
    with losses_in_float32(ctx.precision, ctx.device):
        batch = Batch(
            ctx=ctx,
            x=x,
            y=y,
            logits=logits,
            reps=objective.represent(model, outputs) if has_penalty else [],
            reps_global=_frozen_reps(objective, reps, "global"),
            reps_previous=_frozen_reps(objective, reps, "previous"),
            global_model=constants.global_model,
            prepared=prepared,
        )
        terms = {"supervised": objective.supervised(batch)}
        if has_penalty and type(objective).penalty is not LocalObjective.penalty:
            terms["penalty"] = objective.penalty(batch)
        for name, term in terms.items():
            check_scalar(term, getattr(objective, name))
        return terms | server_optimizer_terms(ctx, model)


def check_scalar(term: Any, function: Callable[..., Any]) -> None:
    """TypeError naming the function that returned this loss term, unless it is a scalar tensor."""
    if isinstance(term, Tensor) and term.dim() == 0:
        return
    found = f"shape {list(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
    hint = "; for no penalty, batch.logits.new_zeros(())" if term is None else ""
    raise TypeError(f"{place_of(function)} returned {found}: expected a scalar Tensor{hint}")


class _NotComputed(list[Tensor]):
    """In place of the representations that an objective reads without the flag for them."""

    def __init__(self, objective: LocalObjective, slot: str) -> None:
        self.objective, self.slot = objective, slot

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(
            f"{place_of(self.objective.penalty)} reads batch.reps_{self.slot}: set "
            f"uses_{self.slot} = True in its class"
        )

    __iter__ = __len__ = __getitem__ = _refuse


def _frozen_reps(
    objective: LocalObjective, reps: dict[str, list[Tensor]], slot: str
) -> list[Tensor]:
    if slot in reps or getattr(objective, f"uses_{slot}"):
        return reps.get(slot, [])
    return _NotComputed(objective, slot)


def objective_terms(
    objective: LocalObjective, ctx: RoundContext, model: StagedModel
) -> Callable[[Step], dict[str, Tensor]]:
    """The function from a batch to its loss terms, in this client's round."""
    constants = constants_of(objective, ctx)

    def terms_of(step: Step) -> dict[str, Tensor]:
        return loss_terms(objective, constants, model, constants.inputs(step))

    return terms_of


def objective_phase(objective: LocalObjective, ctx: RoundContext) -> Phase:
    """`local-epochs` of SGD on supervised + penalty, from the weights that `ctx.model` has."""
    train, model = ctx.config.train, ctx.model.train().requires_grad_(True)
    constants = constants_of(objective, ctx)
    return Phase(
        parameters=model.weights,
        inputs=constants.inputs,
        terms=lambda inputs: loss_terms(objective, constants, model, inputs),
        lr=train.lr,
        duration=Duration(train.local_epochs, "epochs"),
        frozen=[constants.global_model] if constants.global_model else [],
        kind=(constants.has_penalty, constants.prepared is None),
    )


def objective_phases(objective: LocalObjective, ctx: RoundContext) -> Phases:
    """`objective_phase` from the received model.

    The client state is the trained local model where the objective `uses_previous`. The update may
    share its memory with `ctx.model`, until that is loaded or trained again.
    """
    ctx.model.load_state_dict(ctx.received)
    descent = yield objective_phase(objective, ctx)
    arrays = ctx.model.hand_over()
    state = {"previous": arrays} if objective.uses_previous else {}
    return Update(arrays, descent.num_steps, descent.terms, state=state)


def train_on_objective(objective: LocalObjective, ctx: RoundContext) -> Update:
    """The update of `objective_phases`."""
    return train_alone(ctx, objective_phases(objective, ctx))
