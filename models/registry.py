"""Builds a model by its name; protocol/models.py says what can be known without building it."""

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from models.cnn import cnn_fedcka, cnn_fedintr, cnn_fedreco, vgg9
from models.layers import NORMS, FirstHalf, UnitLength, fan_in_
from models.mobilenet import mobilenet_v2
from models.resnet import resnet18, resnet20, resnet50
from models.shufflenet import shufflenet
from models.squeezenet import squeezenet
from models.staged import Stage, StagedModel, Trunk
from protocol.code import place_of
from protocol.models import IMAGE_SIZES, MODELS
from protocol.options import ConfigError
from protocol.packing import DTYPES

PROJECTION_TAILS: dict[str, Callable[[], nn.Module]] = {
    "mlp": nn.Identity,  # MOON
    "mlp-normalised": UnitLength,  # FedProc
}
PROJECTION_WIDTH = 256  # of MOON's projection and FedIntR's projection heads
RESERVED_LAYERS = ("features", "logits", "projection")  # not for stages
one_build = threading.RLock()  # at a time: threads share torch's default generator


# Each takes the input shape and, where the model offers a choice of them, the norm layer and width.
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
    image_size: int,
    seed: int | None = None,
    norm: str = "",
    width: int = 0,
    init: str = "",
    projection: str = "none",
    projection_heads: int = 0,
    head_stages: tuple[int | None, int | None] = (None, None),
) -> StagedModel:
    """The model `name`, in training mode, on the CPU.

    With a seed the weights depend on the arguments alone and no global random state is touched;
    projection heads are drawn last, so the rest is the same with and without them.
    projection_heads: outputs of each projection head; 0: no heads. head_stages: the slice of the
    network's own stages that have one.
    norm: "group" (two groups) or "batch"; "" is the model's own choice.
    width: channels of a ResNet's first stage; 0: its own.
    init: "fan-in" redraws all convolutions and linear layers, heads included, from N(0, 2/fan_in).
    projection: "mlp" adds a last stage "projection", two linear layers down to 256 features;
    "mlp-normalised" scales these to unit length; "gaussian" (FedCR) is one layer to 512, of which
    the classifier reads the first half. "none" adds one to resnet50 alone, "mlp".
    """
    if name not in MODELS:
        raise ConfigError("model", f"model = {name!r}: expected one of {', '.join(MODELS)}")
    spec = MODELS[name]
    if channels not in (1, 3):
        raise ConfigError(
            "channels", f"channels = {channels!r}: {name} takes images of 1 or 3 channels"
        )
    if image_size not in IMAGE_SIZES:
        raise ConfigError(
            "image-size", f"image-size = {image_size!r}: {name} takes squares of 28 to 64 pixels"
        )
    if num_classes < 2:
        raise ConfigError(
            "num-classes", f"num-classes = {num_classes!r}: a classifier needs at least 2 classes"
        )
    spec.check(name, norm, width)
    if projection not in ("none", "gaussian", *PROJECTION_TAILS):
        allowed = ", ".join([*PROJECTION_TAILS, "gaussian"])
        raise ConfigError("projection", f"projection = {projection!r}: expected none, {allowed}")

    input_shape = (channels, image_size, image_size)
    options: list[object] = [NORMS[spec.norm_layer(norm)]] if spec.norms else []
    options += [width or spec.width] if spec.width else []
    if projection == "none":
        projection = spec.projection
    with one_build, nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            # torch.manual_seed would reseed the GPUs too.
            torch.default_generator.manual_seed(seed)
        trunk = _trunk_of(name, input_shape, *options)
        _check_tensors(trunk, name, has_statistics=spec.norm_layer(norm) == "batch")
        _check_buffers(trunk, name, input_shape)
        if projection == "gaussian":
            trunk = _gaussian(trunk)
        elif projection != "none":
            trunk = _projected(trunk, PROJECTION_TAILS[projection]())
        model = StagedModel(name, input_shape, num_classes, trunk)
        for tensor in model.tensors.values():
            if not tensor.is_contiguous():
                # torch's fused SGD updates wrong elements if memory has gaps; a clone has none
                tensor.data = tensor.data.clone()
        if init:
            fan_in_(model)
        if projection_heads:
            model.projection_heads = _projection_heads(model, projection_heads, head_stages)
            if init:
                fan_in_(model.projection_heads)
    return model


def _trunk_of(name: str, input_shape: tuple[int, int, int], *options: object) -> Trunk:
    """The Trunk of the model's function.

    ValueError, naming the function, if it fails on one image, its width is wrong, or a layer's
    output would not be what methods read under its name.
    """
    if name not in BUILDERS:
        raise ConfigError(
            "model", f"model = {name!r} is in MODELS, but not in BUILDERS: models/registry.py"
        )
    build = BUILDERS[name]
    try:
        trunk = build(input_shape, *options)
    except Exception as error:
        raise ValueError(f"{place_of(build)}: {type(error).__name__}: {error}") from error
    if not isinstance(trunk, Trunk):
        raise ValueError(f"{place_of(build)} returned {type(trunk).__name__}: expected a Trunk")
    if not isinstance(trunk.stages, dict) or not trunk.stages:
        raise ValueError(f"{place_of(build)}: expected a dict of at least one stage")
    for key, stage in trunk.stages.items():
        if not isinstance(stage, Stage) or set(key) & set(".:") or key in RESERVED_LAYERS:
            raise ValueError(
                f"{place_of(build)}: stage {key!r} is a {type(stage).__name__}: expected a "
                "Stage, under a name without dots and colons that is not one of "
                f"{', '.join(RESERVED_LAYERS)}"
            )
    if weights := list(trunk.to_features.state_dict()):
        raise ValueError(
            f"{place_of(build)}: to_features has weights ({', '.join(weights)}): expected none, "
            "because neither extractor nor head would include them; put them into a stage"
        )
    chain = nn.Sequential(*trunk.stages.values(), trunk.to_features).eval()
    parts = {
        f"{half} of {key}": part
        for key, stage in trunk.stages.items()
        for half, part in stage.named_children()
    }
    overwriting = []
    try:
        with torch.inference_mode(False), torch.no_grad():  # a tensor has a version only outside it
            x = torch.zeros(1, *input_shape)
            for place, part in (parts | {"to_features": trunk.to_features}).items():
                version, out = x._version, part(x)
                if not isinstance(out, torch.Tensor):  # such as the tuple of nn.LSTM
                    raise TypeError(f"{place} returned {type(out).__name__}: expected a Tensor")
                if x._version != version:
                    overwriting.append(place)
                x = out
    except Exception as error:
        raise ValueError(
            f"{place_of(build)}: its stages fail on an image of shape {list(input_shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if overwriting:
        raise ValueError(
            f"{place_of(build)}: {', '.join(overwriting)} changes its input in place: expected "
            "a new tensor, because methods read the output of every layer"
        )
    shape = list(x.shape)
    if shape != [1, trunk.width]:
        raise ValueError(
            f"{place_of(build)}: the features of one image have shape {shape}: expected "
            f"[1, {trunk.width}], as the Trunk's width says"
        )
    chain.train()
    return trunk


def _check_tensors(trunk: Trunk, name: str, has_statistics: bool) -> None:
    """ValueError for a type that cannot be sent, a frozen weight, or statistics not in MODELS.

    has_statistics: whether the network has BatchNorm, as the config reads it from MODELS: methods
    without BatchNorm and private runs refuse it.
    """
    place, chain = place_of(BUILDERS[name]), nn.ModuleDict(trunk.stages)
    for key, tensor in chain.state_dict().items():
        if key.endswith("._extra_state"):  # what `get_extra_state` returned, of any type
            raise ValueError(
                f"{place}: {key}: Keel sends parameters and buffers only: store the state of "
                "get_extra_state in buffers (register_buffer)"
            )
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout  # sparse_coo
        if kind not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            found = str(kind).removeprefix("torch.")
            raise ValueError(f"{place}: {key} is {found}: expected one of {allowed}")
    for key, parameter in chain.named_parameters():
        if not parameter.requires_grad:  # training would set it to True
            raise ValueError(
                f"{place}: {key} has requires_grad = False: Keel trains every parameter; store "
                "what stays constant in a buffer (register_buffer)"
            )
    for key, module in chain.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and not has_statistics:
            raise ValueError(
                f"{place}: {key} has running statistics, of which the entry in MODELS says "
                'nothing: write ModelSpec(norms=("batch",)) and use the norm layer that the '
                "function is then given"
            )


def _check_buffers(trunk: Trunk, name: str, input_shape: tuple[int, int, int]) -> None:
    """ValueError if a training step replaces a buffer of one of the model's own modules.

    The new tensor would not be sent, and would carry over to the next client.
    """
    chain = nn.ModuleDict(trunk.stages)
    own = (m for m in chain.modules() if not type(m).__module__.startswith("torch."))
    if not any(module._buffers for module in own):
        return
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    # what fails on images of zeros, or to be copied, may not fail in training
    with torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Exception):
        twin = copy.deepcopy(chain).train()
        for _ in range(2):  # the first may make tensors of this batch's shape, such as a mask
            before, x = dict(twin.named_buffers()), torch.zeros(2, *input_shape)
            for stage in twin.values():
                x = stage(x)
        after = dict(twin.named_buffers())
    for key, buffer in after.items():
        if buffer is not before.get(key):
            raise ValueError(
                f"{place_of(BUILDERS[name])}: training replaces the buffer {key} with a new "
                "tensor, which Keel does not send: change it in place, for example with copy_()"
            )


def _projected(trunk: Trunk, tail: nn.Module) -> Trunk:
    """The trunk with MOON's projection on its features, as one more stage."""
    body = nn.Sequential(trunk.to_features, *_mlp(trunk.width, trunk.width))
    stages = {**trunk.stages, "projection": Stage(body, tail)}
    return Trunk(stages, nn.Flatten(), PROJECTION_WIDTH)


def _gaussian(trunk: Trunk) -> Trunk:
    """The trunk with one more stage: means and raw deviations of 256 features, [B, 512]."""
    body = nn.Sequential(trunk.to_features, nn.Linear(trunk.width, 2 * PROJECTION_WIDTH))
    stages = {**trunk.stages, "projection": Stage(body, nn.Identity())}
    return Trunk(stages, FirstHalf(), PROJECTION_WIDTH)


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
