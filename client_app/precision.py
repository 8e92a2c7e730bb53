"""The numbers that training computes in: float32, TF32 in a GPU's products, or bfloat16 forward.

Weights, gradients, losses and evaluation are float32 throughout.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Matrix products and convolutions on a GPU: in TF32 under "tf32", in float32 else.

    torch's own default lets convolutions use TF32. Without a GPU nothing changes.
    """
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # made when imported
    places = (torch.backends.cuda.matmul, convolutions)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def forward_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A forward pass: under "bf16" in bfloat16 where autocast says so."""
    return _autocast(precision, device, enabled=True)


def losses_in_float32(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The losses behind a forward pass: similarities are too fine for bfloat16."""
    return _autocast(precision, device, enabled=False)


def _autocast(
    precision: str, device: torch.device, enabled: bool
) -> AbstractContextManager[object]:
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
