"""The networks that a process reuses for all the clients of a run, and their precision.

Training is in float32, with TF32 in a GPU's matrix products, or with bfloat16 forward passes.
Weights, gradients and losses are float32 throughout. Evaluation is too, or TF32 under "auto".
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from models import StagedModel
from protocol.arrays import Arrays

auto_min_parameters = 1_000_000  # below, converting costs what bfloat16 saves: docs/results/gpu.md


class Networks:
    """Each network of a run on one device, built once and lent to one client after the other.

    build: the network of a name with the weights that the run's seed gives it, on the CPU.
    """

    def __init__(self, build: Callable[[str], StagedModel], device: torch.device) -> None:
        self.build, self.device = build, device
        self.built: dict[tuple[str, str], StagedModel] = {}  # by name and slot
        self.initial_weights: dict[str, Arrays] = {}  # by name, of those that are built
        self.has_logged_full_cache = False  # see `FrozenFeatureCache`

    def network(self, name: str, slot: str) -> StagedModel:
        """The network `name`: one instance per slot ("local", "global", ...)."""
        if (name, slot) not in self.built:
            model = self.build(name)
            self.initial_weights[name] = {k: v.clone() for k, v in model.state_dict().items()}
            self.built[name, slot] = placed(model, self.device)
        return self.built[name, slot]


def placed(model: StagedModel, device: torch.device) -> StagedModel:
    """The model, moved to this device and to the memory format that is fastest there.

    CUDA's GroupNorm works on contiguous memory only: in channels-last memory it would copy the
    input of every such layer, and its output for the next convolution.
    """
    model.to(device)
    if device.type == "cuda" and any(isinstance(p, torch.nn.GroupNorm) for p in model.modules()):
        model.to(memory_format=torch.contiguous_format)
    return model


def resolved(precision: str, model: StagedModel, device: torch.device) -> str:
    """The precision itself; for "auto", bf16 where it pays, else fp32.

    GPUs before Ampere emulate bfloat16. On a CPU, grouped convolutions, as in MobileNet-v2, are
    slower in it.
    """
    if precision != "auto":
        return precision
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu" and cpu_has_bf16():
        layers = model.modules()
        has_bf16 = not any(isinstance(each, nn.Conv2d) and each.groups > 1 for each in layers)
    num_parameters = sum(p.numel() for p in model.parameters())
    return "bf16" if has_bf16 and num_parameters > auto_min_parameters else "fp32"


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies in bfloat16 (AMX or AVX-512)."""
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("amx_bf16") or flags.get("avx512_bf16"))


def of_evaluation(precision: str) -> str:
    """The precision of evaluation in a run of this precision."""
    return "tf32" if precision == "auto" else "fp32"


@contextmanager
def products(precision: str) -> Iterator[None]:
    """A context with GPU matrix products, convolutions and RNNs in TF32 under "tf32", else float32.

    By default torch lets convolutions and RNNs use TF32. Without a GPU nothing changes.
    """
    cudnn = torch.backends.cudnn
    places: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]  # type: ignore[attr-defined]  # defined at import
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def forward_in(
    precision: str, device: torch.device, enabled: bool = True
) -> AbstractContextManager[object]:
    """A context for forward passes: autocast to bfloat16 under "bf16"."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def losses_in_float32(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for losses: bfloat16 is too coarse for similarities."""
    return forward_in(precision, device, enabled=False)
