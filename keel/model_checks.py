"""Whether Keel's methods can use a network: `keel check-method --model`."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from models.layers import NORMS
from models.registry import BUILDERS
from models.staged import Stage, Trunk
from protocol.arrays import DTYPES
from protocol.code import place_of
from protocol.models import MODELS

INPUT_SHAPE = (3, 32, 32)
RESERVED_LAYERS = ("features", "logits", "projection")  # not for stages


def model_problems(name: str) -> list[str]:
    """What is wrong with the function of the model `name`, a line each; [] for nothing."""
    if name not in BUILDERS:
        return [f"model = {name!r} is in MODELS, but not in BUILDERS: models/registry.py"]
    spec = MODELS[name]
    options: list[object] = [NORMS[spec.norm_layer("")]] if spec.norms else []
    options += [spec.width] if spec.width else []
    trunk = BUILDERS[name](INPUT_SHAPE, *options)
    problems = (  # what comes later needs what is checked before
        [*problems_of_stages(trunk)]
        or [*problems_of_tensors(trunk, has_statistics=spec.norm_layer("") == "batch")]
        or [*problems_of_layers(trunk)]
        or [*replaced_buffers(trunk)]
    )
    return [f"{place_of(BUILDERS[name])}: {problem}" for problem in problems]


def problems_of_stages(trunk: Trunk) -> Iterator[str]:
    """Stages that are none or have a reserved name, and weights outside of them."""
    for key, stage in trunk.stages.items():
        if not isinstance(stage, Stage) or set(key) & set(".:") or key in RESERVED_LAYERS:
            yield (
                f"stage {key!r} is a {type(stage).__name__}: expected a Stage, under a name "
                f"without dots and colons that is not one of {', '.join(RESERVED_LAYERS)}"
            )
    if weights := list(trunk.to_features.state_dict()):
        yield (
            f"to_features has weights ({', '.join(weights)}): neither extractor nor head would "
            "include them; put them into a stage"
        )


def problems_of_tensors(trunk: Trunk, has_statistics: bool) -> Iterator[str]:
    """Types that cannot be sent, frozen weights, and statistics of which MODELS does not say.

    has_statistics: whether the network has BatchNorm, as the config reads it from MODELS: methods
    without BatchNorm and private runs refuse it.
    """
    chain = nn.ModuleDict(trunk.stages)
    for key, value in chain.state_dict().items():
        if key.endswith("._extra_state"):  # what `get_extra_state` returned, of any type
            yield f"{key}: only parameters and buffers are sent: store this state in buffers"
        elif value.layout is not torch.strided or value.dtype not in DTYPES:
            kind = value.dtype if value.layout is torch.strided else value.layout
            yield f"{key} is {kind}: expected one of {', '.join(map(str, DTYPES))}"
    for key, parameter in chain.named_parameters():
        if not parameter.requires_grad:  # training would set it to True
            yield f"{key} has requires_grad = False: store what stays constant in a buffer"
    for key, module in chain.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats and not has_statistics:
            yield (
                f'{key} has running statistics: write ModelSpec(norms=("batch",)) in MODELS and '
                "use the norm layer that the function is then given"
            )


def problems_of_layers(trunk: Trunk) -> Iterator[str]:
    """Layers that overwrite their input, and features of another width, for an image of zeros."""
    parts: list[tuple[str, nn.Module]] = [
        (f"{half} of {key}", part)
        for key, stage in trunk.stages.items()
        for half, part in stage.named_children()
    ]
    nn.ModuleDict(trunk.stages).eval()
    x = torch.zeros(1, *INPUT_SHAPE)
    with torch.no_grad():
        for place, part in [*parts, ("to_features", trunk.to_features)]:
            version, out = x._version, part(x)
            if not isinstance(out, Tensor):  # such as the tuple of nn.LSTM
                yield f"{place} returned {type(out).__name__}: expected a Tensor"
                return
            if x._version != version:
                yield f"{place} changes its input in place: methods read the output of every layer"
            x = out
    if list(x.shape) != [1, trunk.width]:
        yield (
            f"the features of one image have shape {list(x.shape)}: expected [1, {trunk.width}], "
            "as the Trunk's width says"
        )


def replaced_buffers(trunk: Trunk) -> Iterator[str]:
    """Buffers that a training step replaces with a new tensor, which Keel does not send."""
    twin = copy.deepcopy(nn.ModuleDict(trunk.stages)).train()
    before: dict[str, Tensor] = {}
    with torch.no_grad():
        for _ in range(2):  # the first may make tensors of this batch's shape, such as a mask
            before, x = dict(twin.named_buffers()), torch.zeros(2, *INPUT_SHAPE)
            for stage in twin.values():
                x = stage(x)
    for key, buffer in twin.named_buffers():
        if buffer is not before.get(key):
            yield f"training replaces the buffer {key}: change it in place, as with copy_()"
