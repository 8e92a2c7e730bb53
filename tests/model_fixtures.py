"""Networks with weights of 0: drawing millions takes longer than the rest of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def undrawn() -> Iterator[None]:
    """Networks made in this context have the weights 0.

    The "meta" device draws nothing either, but imports torch's compiler, which takes a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        for draw in ("normal_", "uniform_"):
            patch.setattr(torch.Tensor, draw, lambda self, *where, **how: self.zero_())
        yield


def small_resnet(num_classes: int) -> torch.nn.Module:
    """A ResNet of torchvision's with one block a stage, and the first two of its four stages."""
    from torchvision.models import ResNet
    from torchvision.models.resnet import BasicBlock

    net = ResNet(BasicBlock, [1, 1, 1, 1])
    net.layer3 = net.layer4 = torch.nn.Identity()
    net.fc = torch.nn.Linear(128, num_classes)
    return net
