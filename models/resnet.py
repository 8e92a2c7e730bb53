"""Residual networks for small images: a 3x3 stem, no initial pool (He et al. 2016).

The stages are conv1 and the groups conv2_x, conv3_x, ...; every stage but the first two halves the
image. `width` is the number of conv1's channels, of which the other stages have multiples. A
group's body ends in the sum of its last block, its tail is that block's closing ReLU.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from models.layers import GlobalAverage, Norm, Residual, conv_norm, he_normal_
from models.staged import Stage, Trunk

Block = Callable[[int, int, int, Norm], Residual]  # in_width, width, stride, norm


def resnet20(input_shape: tuple[int, int, int], norm: Norm, width: int) -> Trunk:
    """He et al. section 4.2, n = 3, with shortcuts that have no parameters (their option A)."""
    widths, depths = (width, 2 * width, 4 * width), (3, 3, 3)
    stages = _stages(input_shape, _basic_padded, width, widths, depths, norm)
    he_normal_(stages.values())
    return Trunk(stages, GlobalAverage(), 4 * width)


def resnet18(input_shape: tuple[int, int, int], norm: Norm, width: int) -> Trunk:
    """FedRCL's: torch's own initial weights, as in the authors' code."""
    widths, depths = (width, 2 * width, 4 * width, 8 * width), (2, 2, 2, 2)
    stages = _stages(input_shape, _basic, width, widths, depths, norm)
    return Trunk(stages, GlobalAverage(), 8 * width)


def resnet50(input_shape: tuple[int, int, int], norm: Norm, width: int) -> Trunk:
    """FedCKA's and MOON's, the stride in the 3x3 convolution of a block as in torchvision."""
    widths, depths = (4 * width, 8 * width, 16 * width, 32 * width), (3, 4, 6, 3)
    stages = _stages(input_shape, _bottleneck, width, widths, depths, norm)
    he_normal_(stages.values())
    return Trunk(stages, GlobalAverage(), 32 * width)


def _stages(
    input_shape: tuple[int, int, int],
    block: Block,
    stem_width: int,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    norm: Norm,
) -> dict[str, Stage]:
    channels, _, _ = input_shape
    stages = {"conv1": Stage(conv_norm(channels, stem_width, 3, norm), nn.ReLU())}
    in_width = stem_width
    for n, (width, depth) in enumerate(zip(widths, depths, strict=True), start=2):
        blocks: list[nn.Module] = [block(in_width, width, 1 if n == 2 else 2, norm)]
        for _ in range(depth - 1):
            blocks += [nn.ReLU(), block(width, width, 1, norm)]
        stages[f"conv{n}_x"] = Stage(nn.Sequential(*blocks), nn.ReLU())
        in_width = width
    return stages


def _basic(in_width: int, width: int, stride: int, norm: Norm) -> Residual:
    body = _two_convolutions(in_width, width, stride, norm)
    return Residual(body, _projected(in_width, width, stride, norm))


def _basic_padded(in_width: int, width: int, stride: int, norm: Norm) -> Residual:
    shortcut = nn.Identity() if stride == 1 else HalvedAndPadded((width - in_width) // 2)
    return Residual(_two_convolutions(in_width, width, stride, norm), shortcut)


def _bottleneck(in_width: int, width: int, stride: int, norm: Norm) -> Residual:
    inner = width // 4
    body = nn.Sequential(
        conv_norm(in_width, inner, 1, norm),
        nn.ReLU(),
        conv_norm(inner, inner, 3, norm, stride),
        nn.ReLU(),
        conv_norm(inner, width, 1, norm),
    )
    return Residual(body, _projected(in_width, width, stride, norm))


def _two_convolutions(in_width: int, width: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        conv_norm(in_width, width, 3, norm, stride), nn.ReLU(), conv_norm(width, width, 3, norm)
    )


def _projected(in_width: int, width: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and in_width == width:
        return nn.Identity()
    return conv_norm(in_width, width, 1, norm, stride)


class HalvedAndPadded(nn.Module):
    """Option A: every second pixel, with `padding` channels of zeros before and after."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C + 2 * padding, ceil(H / 2), ceil(W / 2)]."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
