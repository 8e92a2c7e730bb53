"""ShuffleNet for small images (Zhang et al. 2018, the first version; FedRCL, Table C)."""

import torch
from torch import Tensor, nn

from models.layers import GlobalAverage, Norm, Residual, conv_norm
from models.staged import Stage, Trunk

GROUPS = 3


def shufflenet(input_shape: tuple[int, int, int], norm: Norm) -> Trunk:
    """ShuffleNet 1x, g = 3 (the paper's Table 1), without the stem's stride and pool."""
    channels, _, _ = input_shape
    stages = {"conv1": Stage(conv_norm(channels, 24, 3, norm), nn.ReLU())}
    in_width = 24
    for n, (width, depth) in enumerate([(240, 4), (480, 8), (960, 4)], start=2):
        # 24 channels are too few to divide: the paper's section 3.2.
        units: list[nn.Module] = [_halving_unit(in_width, width, 1 if n == 2 else GROUPS, norm)]
        for _ in range(depth - 1):
            units += [nn.ReLU(), _unit(width, norm)]
        stages[f"stage{n}"] = Stage(nn.Sequential(*units), nn.ReLU())
        in_width = width
    return Trunk(stages, GlobalAverage(), in_width)


class Concatenated(Residual):
    """The channels of the shortcut, then those of the body, instead of their sum."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C1, H, W] and [B, C2, H, W] -> [B, C1 + C2, H, W]."""
        return torch.cat([self.shortcut(x), self.body(x)], dim=1)


def _unit(width: int, norm: Norm) -> Residual:
    """Figure 2 (b), up to the sum."""
    return Residual(_body(width, width // 4, width, 1, GROUPS, norm), nn.Identity())


def _halving_unit(in_width: int, width: int, first_groups: int, norm: Norm) -> Concatenated:
    """Figure 2 (c), up to the concatenation: the body adds the channels that the pool lacks."""
    body = _body(in_width, width // 4, width - in_width, 2, first_groups, norm)
    return Concatenated(body, nn.AvgPool2d(3, stride=2, padding=1))


def _body(
    in_width: int, inner: int, width: int, stride: int, first_groups: int, norm: Norm
) -> nn.Sequential:
    return nn.Sequential(
        conv_norm(in_width, inner, 1, norm, groups=first_groups),
        nn.ReLU(),
        nn.ChannelShuffle(GROUPS),
        conv_norm(inner, inner, 3, norm, stride, groups=inner),
        conv_norm(inner, width, 1, norm, groups=GROUPS),
    )
