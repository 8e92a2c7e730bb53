"""Networks whose weights hold anything: to draw millions takes longer than all else."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def undrawn() -> Iterator[None]:
    """Networks made here keep the memory that they got. The "meta" device, which draws nothing
    either, would import torch's compiler, for a second."""
    with pytest.MonkeyPatch.context() as patch:
        for draw in ("normal_", "uniform_"):
            patch.setattr(torch.Tensor, draw, lambda self, *where, **how: self)
        yield
