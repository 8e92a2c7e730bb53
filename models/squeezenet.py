"""SqueezeNet for small images (Iandola et al. 2016; FedRCL, Table C)."""

import torch
from torch import Tensor, nn

from models.layers import ConvNorm, GlobalAverage, MaxPool2x2, Norm, Residual, conv_of
from models.staged import Stage, Trunk


def squeezenet(input_shape: tuple[int, int, int], norm: Norm, variant: str = "") -> Trunk:
    """SqueezeNet 1.0 with simple bypass (the paper's Figure 2, middle), a 3x3 stem of stride 1.

    Every convolution has a norm, as in the FedACG repository of FedRCL's group; the paper has none.
    The classifier follows the global average: conv10 before it, without its ReLU, is the same map.
    variant "fedrcl": the convolutions have biases.
    """
    channels, _, _ = input_shape
    conv = conv_of(norm, variant)
    stages = {
        "conv1": Stage(conv(channels, 96, 3), nn.Sequential(MaxPool2x2(), nn.ReLU(inplace=True))),
        "fire3": _pair([Fire(96, 128, conv)], 128, conv),
        "fire5": _pair([Fire(128, 256, conv), MaxPool2x2()], 256, conv),
        "fire7": _pair([Fire(256, 384, conv)], 384, conv),
        "fire9": _pair([Fire(384, 512, conv), MaxPool2x2()], 512, conv),
    }
    return Trunk(stages, GlobalAverage(), 512)


class Fire(nn.Module):
    """A 1x1 convolution to an eighth of `width`, then half of it by 1x1 and half by 3x3."""

    def __init__(self, in_width: int, width: int, conv: ConvNorm) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(conv(in_width, width // 8, 1), nn.ReLU())
        self.expand_1x1 = nn.Sequential(conv(width // 8, width // 2, 1), nn.ReLU())
        self.expand_3x3 = nn.Sequential(conv(width // 8, width // 2, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_width, H, W] -> [B, width, H, W]."""
        x = self.squeeze(x)
        return torch.cat([self.expand_1x1(x), self.expand_3x3(x)], dim=1)


def _pair(first: list[nn.Module], width: int, conv: ConvNorm) -> Stage:
    """`first`, then a fire module that its input bypasses; it ends in their sum, so no tail."""
    return Stage(
        nn.Sequential(*first, Residual(Fire(width, width, conv), nn.Identity())), nn.Identity()
    )
