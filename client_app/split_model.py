"""A network split into a feature extractor (all stages) and a head (the classifier).

FedRep, FedPAC and FedCR average the extractors, and each client keeps its head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from client_app.method import Method
from client_app.round import RoundContext, cached
from client_app.samples import Duration, Step
from client_app.trainer import Descent, fit
from models import StagedModel
from protocol.arrays import Arrays
from protocol.options import at_least, option


@dataclass(frozen=True)
class OwnHead(Method):
    """A method whose clients share the extractor, and have their heads as client state."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    is_adapted_from_global: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    shared_part: ClassVar[str] = "extractor"
    client_state: ClassVar[str] = "its head"


@dataclass(frozen=True)
class TunedHead(OwnHead):
    """The heads are tuned once more after the last round."""

    final_head_epochs: int = option(
        at_least(0),
        "epochs on the head after the last round",
        default=0,
        source="authors' code: 10",
    )

    def depends_on_num_rounds(self) -> bool:
        """The last round tunes the heads."""
        return self.final_head_epochs > 0

    def is_tuned_for_evaluation(self) -> bool:
        """After the last round."""
        return self.final_head_epochs > 0

    def is_tuned_in(self, ctx: RoundContext) -> bool:
        """Whether the personal model of this round has its head tuned."""
        return self.final_head_epochs > 0 and ctx.round == ctx.config.rounds.num_rounds


def head_of(model: StagedModel) -> Arrays:
    """Copies of the classifier's arrays, by their names in the whole model."""
    names = model.head_keys(model.stage_names[-1])
    return {name: model.tensors[name].detach().clone() for name in names}


def extractor_of(model: StagedModel) -> Arrays:
    """Copies of all other arrays, by their names in the whole model."""
    names = model.extractor_keys(model.stage_names[-1])
    return {name: model.tensors[name].detach().clone() for name in names}


def with_own_head(ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
    """The client's network: the received extractor and the client's own head.

    Before its first participation, the run's initial head.
    """
    ctx.model.load_state_dict(ctx.initial_weights() | ctx.received | state.get("head", {}))
    return ctx.model


def unfreeze(model: StagedModel, part: str) -> list[nn.Parameter]:
    """The parameters of this part: head, extractor or full. The rest is frozen, in eval mode.

    BatchNorm's statistics of what is frozen do not change either.
    """
    parts = {"head": model.classifier, "extractor": model.stages, "full": model}
    model.eval().requires_grad_(False)
    return list(parts[part].train().requires_grad_(True).parameters())


def fit_part(
    ctx: RoundContext,
    part: str,
    epochs: int,
    lr: float,
    stream: str = "batches",
    momentum: float | None = None,
    decays: bool = True,
) -> Descent:
    """Epochs of cross entropy on one part of `ctx.model`, the rest frozen; see `unfreeze`.

    momentum: the run's if None; otherwise there is no weight decay, as in FedBABU's fine-tuning.
    decays: whether lr decays like the run's.
    """
    model, duration = ctx.model, Duration(epochs)
    parameters, last_stage = unfreeze(model, part), model.stage_names[-1]
    features = cached(ctx, lambda x: model.extract(x, last_stage), duration)

    def inputs(step: Step) -> tuple[Tensor, Tensor]:
        return features(step) if part == "head" else step.x, step.y

    def loss(x_or_h: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = model.predict(x_or_h, last_stage) if part == "head" else model(x_or_h)
        return {"supervised": F.cross_entropy(logits, y)}

    return fit(
        ctx,
        parameters,
        inputs,
        loss,
        lr=lr,
        duration=duration,
        stream=stream,
        decays=decays,
        momentum=momentum,
        weight_decay=None if momentum is None else 0.0,
    )
