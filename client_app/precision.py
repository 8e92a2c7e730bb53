"""Precision of training: float32, TF32 in a GPU's matrix products, or bfloat16 forward passes.

Weights, gradients and losses are float32 throughout. Evaluation is too, or TF32 under "auto".
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from models import StagedModel

auto_min_parameters = 1_000_000  # below, converting costs what bfloat16 saves: docs/results/gpu.md


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
