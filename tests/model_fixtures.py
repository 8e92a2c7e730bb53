"""Networks with uninitialised weights: drawing millions takes longer than the rest of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def undrawn() -> Iterator[None]:
    """Networks made in this context have uninitialised weights.

    The "meta" device draws nothing either, but imports torch's compiler, which takes a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        for draw in ("normal_", "uniform_"):
            patch.setattr(torch.Tensor, draw, lambda self, *where, **how: self)
        yield
