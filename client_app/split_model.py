"""A network split into a feature extractor (all stages) and a head (the classifier)."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from client_app.feature_cache import FrozenFeatureCache
from client_app.round import RoundContext
from client_app.samples import Step
from client_app.trainer import Duration, Phase
from models import StagedModel
from protocol.messages import Arrays

PARTS = ("head", "extractor", "full")  # of a model, which `part_phase` trains


def head_of(model: StagedModel) -> Arrays:
    """Copies of the classifier's arrays, by their names in the whole model."""
    weights = model.tensors
    return {name: weights[name].detach().clone() for name in model.head_keys(model.stage_names[-1])}


def extractor_of(model: StagedModel) -> Arrays:
    """Copies of all other arrays, by their names in the whole model."""
    weights = model.tensors
    names = model.extractor_keys(model.stage_names[-1])
    return {name: weights[name].detach().clone() for name in names}


def with_own_head(ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
    """The client's network: the received extractor and the client's own head.

    Before its first participation, the run's initial head.
    """
    ctx.model.load_state_dict(ctx.initial_weights() | ctx.received | state.get("head", {}))
    return ctx.model


def part_phase(
    ctx: RoundContext,
    part: str,
    epochs: int,
    lr: float,
    stream: str,
    momentum: float | None = None,
    decays: bool = True,
) -> Phase:
    """Epochs of cross entropy on one part of `ctx.model`: head, extractor or full.

    The rest is frozen; a frozen extractor is in eval mode, so that BatchNorm's statistics do not
    change either. momentum: the run's if None; otherwise there is no weight decay, as in FedBABU's
    fine-tuning. decays: whether lr decays like the run's.
    """
    model = ctx.model
    if part not in PARTS:
        raise ValueError(f"part_phase: part = {part!r}: expected one of {', '.join(PARTS)}")
    trained: nn.Module = {"head": model.classifier, "extractor": model.stages, "full": model}[part]
    model.eval().requires_grad_(False)
    trained.train().requires_grad_(True)
    duration = Duration(epochs, "epochs")
    features = FrozenFeatureCache(  # read where the head is trained alone
        ctx,
        lambda x: model.run(x, ["features"], to_logits=False)[1],
        is_read_again=duration.reads_again(ctx),
    )

    def inputs(step: Step) -> tuple[Tensor, Tensor]:
        x_or_h = features.of(step)[0] if part == "head" else step.x
        return x_or_h, step.y

    def terms(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x_or_h, y = batch
        logits = model.resume(x_or_h, after="features") if part == "head" else model(x_or_h)
        return {"supervised": F.cross_entropy(logits, y)}

    return Phase(
        parameters=list(trained.parameters()),
        inputs=inputs,
        terms=terms,
        lr=lr,
        duration=duration,
        stream=stream,
        momentum=momentum,
        weight_decay=None if momentum is None else 0.0,
        decays=decays,
    )
