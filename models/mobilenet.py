"""MobileNet-V2 for small images (Sandler et al. 2018; FedRCL, Table C)."""

from torch import nn

from models.layers import GlobalAverage, Norm, Residual, conv_norm
from models.staged import Stage, Trunk


def mobilenet_v2(input_shape: tuple[int, int, int], norm: Norm) -> Trunk:
    """Width 1, halving the image in three of the paper's five places: 32 pixels become 4.

    As in the paper's Table 2, except the strides. Bottlenecks end without an activation, so all
    stages except the last have an empty tail.
    """
    channels, _, _ = input_shape
    first = nn.Sequential(
        conv_norm(channels, 32, 3, norm), nn.ReLU6(), _bottleneck(32, 16, 1, 1, norm)
    )
    last = nn.Sequential(
        _bottlenecks(96, 160, 3, 1, norm),
        _bottlenecks(160, 320, 1, 1, norm),
        conv_norm(320, 1280, 1, norm),
    )
    stages = {
        "conv1": Stage(first, nn.Identity()),
        "bottleneck2": Stage(_bottlenecks(16, 24, 2, 2, norm), nn.Identity()),
        "bottleneck3": Stage(_bottlenecks(24, 32, 3, 2, norm), nn.Identity()),
        "bottleneck4": Stage(_bottlenecks(32, 64, 4, 2, norm), nn.Identity()),
        "bottleneck5": Stage(_bottlenecks(64, 96, 3, 1, norm), nn.Identity()),
        "conv6": Stage(last, nn.ReLU6()),
    }
    return Trunk(stages, GlobalAverage(), 1280)


def _bottlenecks(in_width: int, width: int, depth: int, stride: int, norm: Norm) -> nn.Sequential:
    blocks = [_bottleneck(in_width, width, stride, 6, norm)]
    blocks += [_bottleneck(width, width, 1, 6, norm) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def _bottleneck(
    in_width: int, width: int, stride: int, expansion: int, norm: Norm
) -> nn.Sequential | Residual:
    """Expand, filter each channel by itself, project; a shortcut where the shapes allow one."""
    inner = in_width * expansion
    expand = [conv_norm(in_width, inner, 1, norm), nn.ReLU6()] if expansion > 1 else []
    body = nn.Sequential(
        *expand,
        conv_norm(inner, inner, 3, norm, stride, groups=inner),
        nn.ReLU6(),
        conv_norm(inner, width, 1, norm),
    )
    return Residual(body, nn.Identity()) if stride == 1 and in_width == width else body
