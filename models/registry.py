"""Builds a model by its name; protocol/models.py says what can be known without building it."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from models.cnn import cnn_fedcka, cnn_fedintr, cnn_fedreco, vgg9
from models.layers import NORMS, FirstHalf, UnitLength, fan_in_
from models.mobilenet import mobilenet_v2
from models.own import own_trunk
from models.resnet import resnet18, resnet20, resnet50
from models.shufflenet import shufflenet
from models.squeezenet import squeezenet
from models.staged import Stage, StagedModel, Trunk
from protocol.models import MODELS, model_spec, widths_in

PROJECTION_TAILS: dict[str, Callable[[], nn.Module]] = {
    "mlp": nn.Identity,  # MOON
    "mlp-normalised": UnitLength,  # FedProc
}
PROJECTION_WIDTH = 256  # of MOON's projection and FedIntR's projection heads
one_build = threading.RLock()  # at a time: threads share torch's default generator


# Each takes the input shape and, where the model offers a choice of them, the norm layer and width;
# by name what the config keys layer-widths and variant change.
BUILDERS: dict[str, Callable[..., Trunk]] = {
    "cnn-fedintr": cnn_fedintr,
    "cnn-fedcka": cnn_fedcka,
    "cnn-fedreco": cnn_fedreco,
    "resnet20": resnet20,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vgg9": vgg9,
    "mobilenet-v2": mobilenet_v2,
    "shufflenet": shufflenet,
    "squeezenet": squeezenet,
}


def build_model(
    name: str,
    *,
    num_classes: int,
    channels: int,
    image_size: int | tuple[int, int],
    seed: int | None = None,
    norm: str = "",
    width: int = 0,
    layer_widths: str = "",
    variant: str = "",
    init: str = "",
    projection: str = "none",
    projection_heads: int = 0,
    head_stages: tuple[int | None, int | None] = (None, None),
    own: Any = None,
) -> StagedModel:
    """The model `name`, in training mode, on the CPU.

    With a seed the weights depend on the arguments alone and no global random state is touched;
    projection heads are drawn last, so the rest is the same with and without them.
    projection_heads: outputs of each projection head; 0: no heads. head_stages: the slice of the
    network's own stages that have one.
    image_size: of a square, or (height, width).
    norm: "group" (two groups) or "batch"; "" is the model's own choice.
    width, layer_widths, variant: as the config keys.
    own: what a `name` that is not Keel's stands for: a module, or a function or class that makes
    one. It starts from the module's weights.
    init: "fan-in" redraws all convolutions and linear layers, heads included, from N(0, 2/fan_in).
    projection: "mlp" adds a last stage "projection", two linear layers down to 256 features;
    "mlp-normalised" scales these to unit length; "gaussian" (FedCR) is one layer to 512, of which
    the classifier reads the first half. "none" adds one to resnet50 alone, "mlp".
    """
    spec = model_spec(name)
    spec.check(name, norm, width, layer_widths, variant)
    size = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    input_shape = (channels, *size)
    if projection == "none":
        projection = spec.projection
    with one_build, nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            # torch.manual_seed would reseed the GPUs too.
            torch.default_generator.manual_seed(seed)
        if name in MODELS:
            trunk = _built_in(name, input_shape, norm, width, layer_widths, variant)
        else:
            trunk = own_trunk(name, own, input_shape, num_classes)
        if projection == "gaussian":
            trunk = _gaussian(trunk)
        elif projection != "none":
            trunk = _projected(trunk, PROJECTION_TAILS[projection]())
        model = StagedModel(name, input_shape, num_classes, trunk).train()
        _close_gaps(model)
        if init:
            fan_in_(model)
        if projection_heads:
            model.projection_heads = _projection_heads(model, projection_heads, head_stages)
            if init:
                fan_in_(model.projection_heads)
    return model


def _close_gaps(model: StagedModel) -> None:
    for tensor in model.tensors.values():
        if not tensor.is_contiguous():
            # torch's fused SGD updates wrong elements if memory has gaps; a clone has none
            tensor.data = tensor.data.clone()


def _built_in(
    name: str,
    input_shape: tuple[int, ...],
    norm: str,
    width: int,
    layer_widths: str,
    variant: str,
) -> Trunk:
    spec = MODELS[name]
    options: list[object] = [NORMS[spec.norm_layer(norm)]] if spec.norms else []
    options += [width or spec.width] if spec.width else []
    changes: dict[str, object] = {"layer_widths": widths_in(layer_widths)} if layer_widths else {}
    changes |= {"variant": variant} if variant else {}
    return BUILDERS[name](input_shape, *options, **changes)


def _projected(trunk: Trunk, tail: nn.Module) -> Trunk:
    """The trunk with MOON's projection on its features, as one more stage."""
    body = nn.Sequential(trunk.to_features, *_mlp(trunk.width, trunk.width))
    stages = {**trunk.stages, "projection": Stage(body, tail)}
    return Trunk(stages, nn.Flatten(), PROJECTION_WIDTH, own_names=trunk.own_names)


def _gaussian(trunk: Trunk) -> Trunk:
    """The trunk with one more stage: means and raw deviations of 256 features, [B, 512]."""
    body = nn.Sequential(trunk.to_features, nn.Linear(trunk.width, 2 * PROJECTION_WIDTH))
    stages = {**trunk.stages, "projection": Stage(body, nn.Identity())}
    return Trunk(stages, FirstHalf(), PROJECTION_WIDTH, own_names=trunk.own_names)


def _projection_heads(
    model: StagedModel, width: int, head_stages: tuple[int | None, int | None]
) -> nn.ModuleDict:
    """FedIntR's q_k for this slice of the stages: [B, size of the stage's output] -> [B, width].

    As in the authors' code, the hidden layer has `width` units, except at the last stage, if that
    is fully connected: there it is as wide as the stage's output.
    """
    own = model.regularised_stages
    names = own[slice(*head_stages)]
    model.eval()  # the batch norms' statistics are not for this image
    with torch.no_grad():
        _, outputs = model.run(torch.zeros(1, *model.input_shape), names, to_logits=False)
    model.train()
    hidden = [width] * len(outputs)
    if names[-1] == own[-1] and outputs[-1].dim() == 2:
        hidden[-1] = outputs[-1].numel()
    return nn.ModuleDict(
        {n: _mlp(z.numel(), h, width) for n, z, h in zip(names, outputs, hidden, strict=True)}
    )


def _mlp(in_width: int, hidden: int, width: int = PROJECTION_WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_width, hidden), nn.ReLU(), nn.Linear(hidden, width))
