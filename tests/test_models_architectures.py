"""Each network against its paper: written out, or against torchvision's."""

from importlib import import_module
from itertools import pairwise

import pytest
import torch
from model_fixtures import undrawn
from torch import Tensor, nn
from torch.nn import functional as F

from models import StagedModel, build_model
from models.layers import NORMS
from models.resnet import HalvedAndPadded


@pytest.fixture(scope="session")
def published():
    """torchvision.models; imported by the tests that need it, as that takes seconds."""
    return import_module("torchvision.models")


VARIANTS = ["", "fedrcl"]  # "fedrcl": with biases, and what each test says


def build(name: str, num_classes: int = 10, channels: int = 3, **options) -> StagedModel:
    return build_model(
        name, num_classes=num_classes, channels=channels, image_size=32, seed=0, **options
    )


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """In the order of definition, whatever the names; refuses another number or another shape."""
    pairs = zip(target.state_dict(), source.state_dict().values(), strict=True)
    target.load_state_dict(dict(pairs))


@pytest.mark.parametrize(
    ("name", "is_he"),
    [
        *(("resnet20", True), ("resnet50", True), ("vgg9", True)),
        *(("resnet18", False), ("cnn-fedcka", False)),
    ],
)
def test_convolutions_begin_with_he_s_variance_or_torchs_own(name, is_he):
    """N(0, 2 / fan_out) in the networks that say so; else uniform within 1 / sqrt(fan_in)."""
    for module in build(name).stages.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            fan_out, fan_in = weight[:, 0].numel(), weight[0].numel()
            expected = 2 / fan_out if is_he else 1 / (3 * fan_in)
            assert weight.std().item() == pytest.approx(
                expected**0.5, rel=4 / weight.numel() ** 0.5
            )


def randomise(model: nn.Module) -> None:
    """Norm layers away from their neutral start, so that a missing or swapped one shows."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.uniform_(module.bias, -0.5, 0.5, generator=generator)


# ------------------------------------------------------------------ written out as in the papers
def pooled(in_width: int, width: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(in_width, width, kernel), nn.ReLU(), nn.MaxPool2d(2)]


def connected(*widths: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten()]
    for in_width, width in pairwise(widths):
        layers += [nn.Linear(in_width, width), nn.ReLU()]
    return [*layers, nn.Linear(widths[-1], 10)]


PLAIN_CNNS = {
    "cnn-fedintr": lambda: [
        *(*pooled(3, 8, 3), *pooled(8, 16, 3), *pooled(16, 32, 3)),
        *connected(32 * 2 * 2, 128, 96),
    ],
    "cnn-fedcka": lambda: [
        *(*pooled(3, 16, 5), *pooled(16, 32, 5)),
        *connected(32 * 5 * 5, 120, 84, 84, 256),
    ],
    "cnn-fedreco": lambda: [*pooled(3, 6, 5), *pooled(6, 16, 5), *connected(400, 120, 84)],
}


@pytest.mark.parametrize("name", PLAIN_CNNS)
def test_a_plain_cnn_is_the_papers_network(name):
    check_same_logits(build(name), nn.Sequential(*PLAIN_CNNS[name]()))


def test_cnn_fedreco_may_have_the_widths_of_its_code():
    network = [*pooled(3, 4, 5), *pooled(4, 12, 5), *connected(300, 1024, 1024)]
    model = build("cnn-fedreco", layer_widths="4,12,1024,1024")
    check_same_logits(model, nn.Sequential(*network))
    assert model.feature_width == 1024


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("vgg9", 3_493_258),
        ("mobilenet-v2", 2_254_090),
        ("shufflenet", 925_618),
        ("squeezenet", 734_986),
    ],
)
def test_the_variants_of_fedrcls_code_have_its_number_of_parameters(name, number):
    model = build(name, variant="fedrcl")
    assert sum(parameter.numel() for parameter in model.parameters()) == number


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_vgg9_is_the_usual_network_with_norms(norm, variant):
    layers: list[nn.Module] = []
    in_width = 3
    for width, pooled in [(32, 0), (64, 1), (128, 0), (128, 1), (256, 0), (256, 1)]:
        conv = nn.Conv2d(in_width, width, 3, padding=1, bias=bool(variant))
        layers += [conv, NORMS[norm](width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)] if pooled else [nn.ReLU()]
        in_width = width
    layers += [nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = build("vgg9", norm=norm, variant=variant)
    check_same_logits(model, nn.Sequential(*layers, nn.Linear(512, 10)))


@torch.no_grad()
def check_same_logits(model: StagedModel, paper: nn.Module) -> None:
    randomise(model)
    copy_weights(model, paper)
    x = images(4)
    torch.testing.assert_close(model.eval()(x), paper.eval()(x), rtol=1e-5, atol=1e-5)


def convolutions(state, variant):
    """A function that applies the next convolution and GroupNorm of these tensors."""

    def conv_gn(x: Tensor, groups: int = 1, stride: int = 1, padding: int | None = None) -> Tensor:
        weight, bias = next(state), next(state) if variant else None
        scale, shift = next(state), next(state)
        padding = weight.shape[-1] // 2 if padding is None else padding
        x = F.conv2d(x, weight, bias, stride=stride, padding=padding, groups=groups)
        return F.group_norm(x, 2, scale, shift)

    return conv_gn


# ------------------------------------------------------------------ against torchvision
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet18_is_torchvisions_with_a_small_stem(norm, published):
    with undrawn():
        reference = published.resnet18(num_classes=10, norm_layer=NORMS[norm])
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    check_same_logits(build("resnet18", norm=norm), reference)


@torch.no_grad()
def test_resnet50_is_torchvisions_with_a_small_stem_up_to_the_projection(published):
    model = build("resnet50", num_classes=10).eval()
    randomise(model)
    with undrawn():
        reference = published.resnet50()
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = reference.fc = nn.Identity()
    keys = model.extractor_keys("conv5_x")
    state = model.state_dict()
    reference.load_state_dict(
        dict(zip(reference.state_dict(), (state[key] for key in keys), strict=True))
    )
    _, (h,) = model.run(images(), ["conv5_x"], to_logits=False)
    expected = reference.eval()(images())
    torch.testing.assert_close(h.mean((2, 3)), expected, rtol=1e-4, atol=1e-4 * expected.std())


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_mobilenet_v2_is_torchvisions_with_other_strides(norm, published):
    reference = published.mobilenet_v2(
        num_classes=10,
        norm_layer=NORMS[norm],
        inverted_residual_setting=[  # expansion, channels, depth, stride
            *([1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2], [6, 64, 4, 2]),
            *([6, 96, 3, 1], [6, 160, 3, 1], [6, 320, 1, 1]),
        ],
    )
    reference.features[0][0].stride = (1, 1)
    check_same_logits(build("mobilenet-v2", norm=norm), reference)


@torch.no_grad()
def test_mobilenet_v2_of_fedrcls_code_has_a_padded_1x1_stem_and_17_bottlenecks_of_three():
    model = build("mobilenet-v2", variant="fedrcl").eval()
    randomise(model)
    state = iter(model.state_dict().values())
    conv_gn = convolutions(state, "fedrcl")

    h = F.relu6(conv_gn(images(), padding=1))
    assert h.shape[2:] == (34, 34)
    in_width = 32
    for factor, width, depth, stride in [
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 1), (6, 320, 1, 1)),
    ]:
        for number in range(depth):
            before, step = h, 1 if number else stride
            h = F.relu6(conv_gn(h))
            h = conv_gn(F.relu6(conv_gn(h, groups=factor * in_width, stride=step)))
            h = before + h if in_width == width else h
            in_width = width
    h = F.relu6(conv_gn(h)).mean((2, 3))
    logits = F.linear(h, next(state), next(state))
    assert next(state, None) is None
    torch.testing.assert_close(model(images()), logits, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ blocks that torchvision lacks
def test_option_a_takes_every_second_pixel_and_pads_both_ends_with_zeros():
    x = torch.randn(2, 4, 5, 7)
    y = HalvedAndPadded(2)(x)
    assert y.shape == (2, 8, 3, 4)
    for channel in range(8):
        for row in range(3):
            for column in range(4):
                inside = 2 <= channel < 6
                want = x[:, channel - 2, 2 * row, 2 * column] if inside else torch.zeros(2)
                assert torch.equal(y[:, channel, row, column], want)


@torch.no_grad()
def test_resnet20_is_nine_blocks_of_two_convolutions():
    """He et al. 2016, section 4.2, step by step; option A is checked above."""
    model = build("resnet20").eval()
    randomise(model)
    state = iter(model.state_dict().values())

    def conv_bn(x: Tensor, stride: int = 1) -> Tensor:
        weight, scale, shift, mean, variance, _ = (next(state) for _ in range(6))
        return F.batch_norm(
            F.conv2d(x, weight, stride=stride, padding=1), mean, variance, scale, shift
        )

    x = images()
    h = F.relu(conv_bn(x))
    for stride in (1, 1, 1, 2, 1, 1, 2, 1, 1):
        shortcut = h if stride == 1 else HalvedAndPadded(h.shape[1] // 2)(h)
        h = F.relu(conv_bn(F.relu(conv_bn(h, stride))) + shortcut)
    logits = F.linear(h.mean((2, 3)), next(state), next(state))
    assert next(state, None) is None
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_shufflenet_follows_figure_2(variant):
    """Zhang et al. 2018: 1x1 in groups, shuffle, 3x3 a channel, 1x1 in groups, then the sum.

    In FedRCL's code the first 1x1 convolution is in groups, too.
    """
    model = build("shufflenet", variant=variant).eval()
    randomise(model)
    state = iter(model.state_dict().values())
    conv_gn = convolutions(state, variant)

    def shuffled(x: Tensor) -> Tensor:  # channel i of group g becomes channel g of group i
        per_group = x.shape[1] // 3
        return torch.stack([x[:, g * per_group + i] for i in range(per_group) for g in range(3)], 1)

    x = images()
    h = F.relu(conv_gn(x))
    for stage, (width, depth) in enumerate([(240, 4), (480, 8), (960, 4)]):
        for unit in range(depth):
            halves = unit == 0
            inner = F.relu(conv_gn(h, groups=1 if stage == 0 and halves and not variant else 3))
            inner = conv_gn(shuffled(inner), groups=width // 4, stride=2 if halves else 1)
            body = conv_gn(inner, groups=3)
            pooled = F.avg_pool2d(h, 3, stride=2, padding=1)
            h = F.relu(torch.cat([pooled, body], 1) if halves else h + body)
    logits = F.linear(h.mean((2, 3)), next(state), next(state))
    assert next(state, None) is None
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_squeezenet_follows_figure_2_with_simple_bypass(variant):
    """Iandola et al. 2016: conv10 before the average, bypass around fire 3, 5, 7 and 9."""
    model = build("squeezenet", variant=variant).eval()
    randomise(model)
    state = iter(model.state_dict().values())
    conv_gn = convolutions(state, variant)

    def conv_gn_relu(x: Tensor) -> Tensor:
        return F.relu(conv_gn(x))

    def fire(x: Tensor) -> Tensor:
        squeezed = conv_gn_relu(x)
        return torch.cat([conv_gn_relu(squeezed), conv_gn_relu(squeezed)], 1)

    x = images()
    h = F.max_pool2d(conv_gn_relu(x), 2)
    for number in range(2, 10):
        h = fire(h) + h if number % 2 else fire(h)
        h = F.max_pool2d(h, 2) if number in (4, 8) else h
    conv10 = F.conv2d(h, next(state)[:, :, None, None], next(state))
    assert next(state, None) is None
    torch.testing.assert_close(model(x), conv10.mean((2, 3)), rtol=1e-4, atol=1e-4)
