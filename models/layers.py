"""The pieces that several model families are made of."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]  # number of channels -> layer
ConvNorm = Callable[..., nn.Sequential]  # `conv_norm` with its norm

NORMS: dict[str, Norm] = {
    "": lambda width: nn.Identity(),
    "group": partial(nn.GroupNorm, 2),
    "batch": nn.BatchNorm2d,
}


class Residual(nn.Module):
    """The sum of a body and its shortcut, without an activation after it."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """`shortcut(x)` must have the shape of `body(x)`."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class MaxPool2x2(nn.Module):
    """The largest of each 2 x 2 pixels; of an odd side, the last row or column is left out.

    Without gradients no index is needed, and two maxima of slices give the same faster on a CPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H // 2, W // 2]."""
        if torch.is_grad_enabled() or not x.is_cpu:
            return F.max_pool2d(x, 2)
        height, width = (side // 2 * 2 for side in x.shape[2:])
        rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
        return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class UnitLength(nn.Module):
    """Each row of [B, d] divided by its 2-norm; a row of zeros stays one."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, d] -> [B, d]."""
        return F.normalize(x, dim=1)


class FirstHalf(nn.Module):
    """The first half of each row of [B, 2 d]."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 2 d] -> [B, d]."""
        return x.chunk(2, dim=1)[0]


def conv_norm(
    in_width: int,
    width: int,
    kernel: int,
    norm: Norm,
    stride: int = 1,
    groups: int = 1,
    *,
    bias: bool = False,
    padding: int | None = None,
) -> nn.Sequential:
    """A convolution, then its norm.

    No bias unless asked for, as the norm has a shift. padding: None: only the stride changes the
    image's size.
    """
    pixels = kernel // 2 if padding is None else padding
    conv = nn.Conv2d(in_width, width, kernel, stride, pixels, groups=groups, bias=bias)
    return nn.Sequential(conv, norm(width))


def conv_of(norm: Norm, variant: str) -> ConvNorm:
    """`conv_norm` with this norm and, as in the code of FedRCL's group, with biases for "fedrcl".

    GroupNorm with two groups does not take them out again: it subtracts the mean of many channels.
    """
    return partial(conv_norm, norm=norm, bias=variant == "fedrcl")


class GlobalAverage(nn.Module):
    """The mean over positions: the usual `to_features` of a network that ends in a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C]."""
        return x.mean((2, 3))


def fan_in_(model: nn.Module) -> None:
    """Redraws the weights of every convolution and linear layer from N(0, 2 / fan_in).

    He et al. 2015, eq. (10); FedIntR's code does this to its whole ResNet-20, with the heads.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)


def he_normal_(stages: Iterable[nn.Module]) -> None:
    """Redraws every convolution's weight from N(0, 2 / fan_out) (He et al. 2015); biases are 0."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
