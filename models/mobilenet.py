"""MobileNet-V2 for small images (Sandler et al. 2018; FedRCL, Table C)."""

from torch import nn

from models.layers import ConvNorm, GlobalAverage, Norm, Residual, conv_of
from models.staged import Stage, Trunk


def mobilenet_v2(input_shape: tuple[int, int, int], norm: Norm, variant: str = "") -> Trunk:
    """Width 1, halving the image in three of the paper's five places: 32 pixels become 4.

    As in the paper's Table 2, except the strides. Bottlenecks end without an activation, so all
    stages except the last have an empty tail. variant "fedrcl": convolutions with biases, a 1x1
    stem that pads its image by a pixel, and a 1x1 convolution in the first bottleneck too.
    """
    channels, _, _ = input_shape
    conv = conv_of(norm, variant)
    stem = conv(channels, 32, 1, padding=1) if variant else conv(channels, 32, 3)
    first = nn.Sequential(stem, nn.ReLU6(), _bottleneck(32, 16, 1, 1, conv, bool(variant)))
    last = nn.Sequential(
        _bottlenecks(96, 160, 3, 1, conv), _bottlenecks(160, 320, 1, 1, conv), conv(320, 1280, 1)
    )
    stages = {
        "conv1": Stage(first, nn.Identity()),
        "bottleneck2": Stage(_bottlenecks(16, 24, 2, 2, conv), nn.Identity()),
        "bottleneck3": Stage(_bottlenecks(24, 32, 3, 2, conv), nn.Identity()),
        "bottleneck4": Stage(_bottlenecks(32, 64, 4, 2, conv), nn.Identity()),
        "bottleneck5": Stage(_bottlenecks(64, 96, 3, 1, conv), nn.Identity()),
        "conv6": Stage(last, nn.ReLU6()),
    }
    return Trunk(stages, GlobalAverage(), 1280)


def _bottlenecks(
    in_width: int, width: int, depth: int, stride: int, conv: ConvNorm
) -> nn.Sequential:
    blocks = [_bottleneck(in_width, width, stride, 6, conv)]
    blocks += [_bottleneck(width, width, 1, 6, conv) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def _bottleneck(
    in_width: int, width: int, stride: int, expansion: int, conv: ConvNorm, expands: bool = True
) -> nn.Sequential | Residual:
    """Expand, filter each channel by itself, project; a shortcut where the shapes allow one."""
    inner = in_width * expansion
    expand = [conv(in_width, inner, 1), nn.ReLU6()] if expands else []
    body = nn.Sequential(
        *expand,
        conv(inner, inner, 3, stride=stride, groups=inner),
        nn.ReLU6(),
        conv(inner, width, 1),
    )
    return Residual(body, nn.Identity()) if stride == 1 and in_width == width else body
