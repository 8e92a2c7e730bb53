"""A network in two parts: the body (all stages) and the head (the classifier)."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from client_app.feature_cache import FrozenFeatureCache
from client_app.method import Arrays
from client_app.round import RoundContext
from client_app.samples import Step
from client_app.trainer import Descent, Duration, descend
from models import StagedModel


def head_of(model: StagedModel) -> Arrays:
    """Copies of the classifier's arrays, by their names in the whole model."""
    weights = model.state_dict()
    return {name: weights[name].detach().clone() for name in model.head_keys(model.stage_names[-1])}


def body_of(model: StagedModel) -> Arrays:
    """Copies of all other arrays, by their names in the whole model."""
    weights = model.state_dict()
    names = model.extractor_keys(model.stage_names[-1])
    return {name: weights[name].detach().clone() for name in names}


def under_own_head(ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
    """The client's network: the received body under the head that it kept, at first the seed's."""
    head = {name: array.to(ctx.device) for name, array in state.get("head", {}).items()}
    ctx.model.load_state_dict(ctx.initial_weights() | ctx.received | head)
    return ctx.model


def train_part(
    ctx: RoundContext,
    model: StagedModel,
    part: str,
    epochs: int,
    lr: float,
    stream: str,
    momentum: float | None = None,
    decays: bool = True,
) -> Descent:
    """Epochs of cross entropy on one part of the model: head, body or full; the rest is frozen.

    A frozen body is in eval mode, so that BatchNorm's statistics stay too. momentum: the run's if
    None; another one comes without weight decay, as the fine-tuning that asks for it. decays: as
    the run's rate does.
    """
    chosen: nn.Module = {"head": model.classifier, "body": model.stages, "full": model}[part]
    model.eval().requires_grad_(False)
    chosen.train().requires_grad_(True)
    duration = Duration(epochs, "epochs")
    features = FrozenFeatureCache(  # under a head that is trained alone
        ctx,
        lambda x: model.run(x, ["features"], to_logits=False)[1],
        is_read_again=duration.reads_again(ctx),
    )

    def terms(step: Step) -> dict[str, Tensor]:
        if part == "head":
            (h,) = features.of(step)
            logits = model.resume(h, after="features")
        else:
            logits = model(step.x)
        return {"supervised": F.cross_entropy(logits, step.y)}

    return descend(
        ctx,
        list(chosen.parameters()),
        terms,
        lr=lr,
        duration=duration,
        stream=stream,
        momentum=momentum,
        weight_decay=None if momentum is None else 0.0,
        decays=decays,
    )


def fine_tune(
    ctx: RoundContext,
    model: StagedModel,
    part: str,
    epochs: int,
    lr: float,
    momentum: float | None = None,
    decays: bool = True,
) -> None:
    """Tune a part of the model in place on this client's training samples; see `train_part`."""
    stream = "fine-tuning"
    train_part(ctx, model, part, epochs, lr, stream=stream, momentum=momentum, decays=decays)
