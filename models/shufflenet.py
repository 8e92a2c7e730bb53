"""ShuffleNet for small images (Zhang et al. 2018, the first version; FedRCL, Table C)."""

import torch
from torch import Tensor, nn

from models.layers import ConvNorm, GlobalAverage, Norm, Residual, conv_of
from models.staged import Stage, Trunk

GROUPS = 3


def shufflenet(input_shape: tuple[int, int, int], norm: Norm, variant: str = "") -> Trunk:
    """ShuffleNet 1x, g = 3 (the paper's Table 1), without the stem's stride and pool.

    variant "fedrcl": convolutions with biases, and all 1x1 ones in groups.
    """
    channels, _, _ = input_shape
    conv = conv_of(norm, variant)
    stages = {"conv1": Stage(conv(channels, 24, 3), nn.ReLU())}
    in_width = 24
    for n, (width, depth) in enumerate([(240, 4), (480, 8), (960, 4)], start=2):
        # 24 channels are too few to divide: the paper's section 3.2.
        groups = 1 if n == 2 and not variant else GROUPS
        units: list[nn.Module] = [_halving_unit(in_width, width, groups, conv)]
        for _ in range(depth - 1):
            units += [nn.ReLU(), _unit(width, conv)]
        stages[f"stage{n}"] = Stage(nn.Sequential(*units), nn.ReLU())
        in_width = width
    return Trunk(stages, GlobalAverage(), in_width)


class Concatenated(Residual):
    """The channels of the shortcut, then those of the body, instead of their sum."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C1, H, W] and [B, C2, H, W] -> [B, C1 + C2, H, W]."""
        return torch.cat([self.shortcut(x), self.body(x)], dim=1)


def _unit(width: int, conv: ConvNorm) -> Residual:
    """Figure 2 (b), up to the sum."""
    return Residual(_body(width, width // 4, width, 1, GROUPS, conv), nn.Identity())


def _halving_unit(in_width: int, width: int, first_groups: int, conv: ConvNorm) -> Concatenated:
    """Figure 2 (c), up to the concatenation: the body adds the channels that the pool lacks."""
    body = _body(in_width, width // 4, width - in_width, 2, first_groups, conv)
    return Concatenated(body, nn.AvgPool2d(3, stride=2, padding=1))


def _body(
    in_width: int, inner: int, width: int, stride: int, first_groups: int, conv: ConvNorm
) -> nn.Sequential:
    return nn.Sequential(
        conv(in_width, inner, 1, groups=first_groups),
        nn.ReLU(),
        nn.ChannelShuffle(GROUPS),
        conv(inner, inner, 3, stride=stride, groups=inner),
        conv(inner, width, 1, groups=GROUPS),
    )
