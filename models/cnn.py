"""Plain convolutional networks: the small CNNs of three papers, and VGG-9.

The papers' CNNs have no norm; `norm` adds one after each convolution. Pooling comes before the
ReLU: the values and gradients are those of ReLU then pool, at a quarter of the ReLU's cost. It may
overwrite the pool's output, which no layer and no gradient needs.
"""

import math

from torch import nn

from models.layers import NORMS, MaxPool2x2, Norm, conv_of, he_normal_
from models.staged import Stage, Trunk
from protocol.models import MODELS


def cnn_fedintr(input_shape: tuple[int, int, int], norm: Norm) -> Trunk:
    """FedIntR, section IV-A: three convolutions and two fully connected layers."""
    return _plain_cnn(
        input_shape, kernel=3, conv_widths=(8, 16, 32), fc_widths=(128, 96), norm=norm
    )


def cnn_fedcka(input_shape: tuple[int, int, int], norm: Norm) -> Trunk:
    """FedCKA, section 4.1. Its seven layers are the six stages and "logits".

    fc1 to fc4 are what the paper calls the projection head.
    """
    return _plain_cnn(
        input_shape, kernel=5, conv_widths=(16, 32), fc_widths=(120, 84, 84, 256), norm=norm
    )


def cnn_fedreco(
    input_shape: tuple[int, int, int],
    norm: Norm,
    layer_widths: tuple[int, ...] = MODELS["cnn-fedreco"].layer_widths,
) -> Trunk:
    """FedReCo, section 6.1: two convolutions, three fully connected layers, the last one the head.

    layer_widths: of all but the last. The paper's text has none. By default they are LeNet-5's
    (LeCun et al. 1998); its code has (4, 12, 1024, 1024) for Fashion-MNIST and (64, 64, 1024, 1024)
    for CIFAR-10 and CIFAR-100.
    """
    convs, fcs = layer_widths[:2], layer_widths[2:]
    return _plain_cnn(input_shape, kernel=5, conv_widths=convs, fc_widths=fcs, norm=norm)


def vgg9(input_shape: tuple[int, int, int], norm: Norm, variant: str = "") -> Trunk:
    """VGG-9 (Simonyan and Zisserman 2015, in the widths FedMA uses), with norms as in ResNet.

    fc1 grows with the image: 4 x 4 positions for 32 pixels, 8 x 8 for 64. variant "fedrcl": the
    convolutions have biases.
    """
    conv = conv_of(norm, variant)
    in_width, height, width = input_shape
    stages = {}
    for n, (width_a, width_b) in enumerate([(32, 64), (128, 128), (256, 256)], start=1):
        body = nn.Sequential(conv(in_width, width_a, 3), nn.ReLU(), conv(width_a, width_b, 3))
        stages[f"conv{n}"] = Stage(body, _pool_relu())
        in_width, height, width = width_b, height // 2, width // 2
    stages["fc1"] = _fully_connected(in_width * height * width, 512)
    stages["fc2"] = _fully_connected(512, 512)
    he_normal_(stages.values())
    return Trunk(stages, nn.Flatten(), 512)


def _plain_cnn(
    input_shape: tuple[int, int, int],
    kernel: int,
    conv_widths: tuple[int, ...],
    fc_widths: tuple[int, ...],
    norm: Norm = NORMS[""],
) -> Trunk:
    """Convolutions without padding, each pooled 2 x 2, then fully connected layers; ReLU each.

    norm: after each convolution, unless it is the identity.
    """
    in_width, *sides = input_shape
    stages = {}
    for n, width in enumerate(conv_widths, start=1):
        conv, after = nn.Conv2d(in_width, width, kernel), norm(width)
        body = conv if isinstance(after, nn.Identity) else nn.Sequential(conv, after)
        stages[f"conv{n}"] = Stage(body, _pool_relu())
        in_width, sides = width, [(side - kernel + 1) // 2 for side in sides]
    in_width *= math.prod(sides)
    for n, width in enumerate(fc_widths, start=1):
        stages[f"fc{n}"] = _fully_connected(in_width, width)
        in_width = width
    return Trunk(stages, nn.Flatten(), in_width)


def _pool_relu() -> nn.Sequential:
    return nn.Sequential(MaxPool2x2(), nn.ReLU(inplace=True))


def _fully_connected(in_width: int, width: int) -> Stage:
    return Stage(nn.Sequential(nn.Flatten(), nn.Linear(in_width, width)), nn.ReLU())
