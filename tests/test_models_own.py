"""Networks that are not Keel's: cut without a change of their outputs, sized, refused by name."""

import os

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from models import build_model
from models.cut import staged
from models.weights import load_weights
from protocol.options import ConfigError


def resnet(num_classes: int = 3) -> nn.Module:
    from torchvision.models import ResNet, resnet

    return ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes)


def densenet(num_classes: int = 3) -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(4, (2, 2), 8, num_classes=num_classes)


def vit(num_classes: int = 3) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=num_classes)


def row(num_classes: int = 3) -> nn.Module:
    first = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *first, nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(6, num_classes),
    )  # fmt: skip


class Functional(nn.Module):
    """Calls functions where others have modules; a block with control flow."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.first, self.block = nn.Conv2d(3, 4, 3), Switching()
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = self.block(x).mean((2, 3))
        if scale is not None:
            x = x * scale
        return self.head(F.dropout(x, 0.5, self.training))


class Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > 0 else -self.conv(x)


def built(own, size=32, num_classes=3, name="own:net", **more):
    return build_model(
        name, num_classes=num_classes, channels=3, image_size=size, seed=0, own=own, **more
    )


@pytest.mark.parametrize(
    ("make", "size", "first", "last"),
    [
        (resnet, 32, "conv1", "layer4"),
        (resnet, (40, 24), "conv1", "layer4"),
        (densenet, 32, "features_conv0", "features_denseblock2"),
        (vit, 32, "conv_proj", "encoder_layers_encoder_layer_1"),
        (row, 16, "0", "5"),
    ],
)
def test_a_cut_network_computes_what_it_did(make, size, first, last):
    """The logits and their gradients, to the bit; in training too, where nothing is random."""
    torch.manual_seed(1)
    network = make()
    model = built(network, size)
    x = torch.randn(4, *model.input_shape)
    names = model.own_names
    assert (model.stage_names[0], model.stage_names[-1]) == (first, last)
    assert sorted(names) == sorted(network.state_dict())
    with torch.no_grad():
        for stage in model.eval().stage_names:
            assert torch.equal(model.predict(model.extract(x, stage), stage), model(x))
    for mode in (False, True):
        if mode and make is row:
            continue  # dropout
        network.train(mode), model.train(mode)
        logits = network(x)
        assert torch.equal(model(x), logits)
        for module in (network, model):
            module.zero_grad()
            module(x).square().sum().backward()
        ours = dict(model.named_parameters())
        for name, parameter in network.named_parameters():
            assert torch.equal(ours[names[name]].grad, parameter.grad), name


def test_an_instance_keeps_its_weights_and_a_head_of_another_width_is_replaced():
    assert built(resnet, num_classes=7).classifier.out_features == 7  # a function may ask for them
    network = resnet(num_classes=5)
    for _ in range(2):
        model = built(network, num_classes=3)
        conv = model.tensors["stages.conv1.body.conv1.weight"]
        assert torch.equal(conv, network.conv1.weight)
        assert model.classifier.out_features == 3
        conv.data.zero_()  # not the caller's own


def test_named_stages_may_have_control_flow():
    network = Functional()
    with pytest.raises(ConfigError) as refused:
        built(network)
    assert f"{os.path.basename(__file__)}:" in str(refused.value)
    assert "keel.staged" in str(refused.value)
    model = built(staged(network, ["first", "block"])).eval()
    x = torch.randn(2, 3, 32, 32)
    assert model.stage_names == ("first", "block")
    assert torch.equal(model(x), network.eval()(x))
    assert not torch.equal(model.train()(x), model(x))  # the function of dropout
    with pytest.raises(ValueError, match="blok"):
        staged(network, ["first", "blok"])


class Twice(nn.Module):
    """What it returns is changed by `how`."""

    def __init__(self, how) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.head, self.how = nn.Linear(4, 3), how

    def forward(self, x):
        x = self.a(x)
        if self.how == "in place":
            x.relu_()
        y = self.b(x)
        if self.how == "skip":
            y = torch.cat([y, x], 1)[:, :4]
        y = self.head(y.mean((2, 3)))
        return {"two": (y, x), "softmax": y.softmax(1)}.get(self.how, y)


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (Twice("in place"), "tail of a"),
        (Twice("two"), "tuple"),
        (Twice("softmax"), "softmax"),
        (staged(Twice("skip"), ["a", "b"]), None),
        (3, "int"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(own, named):
    if named is None:
        assert built(own).stage_names == ("a", "b")  # the skip lies within b
        return
    with pytest.raises(ConfigError) as refused:
        built(own)
    assert refused.value.key == "model"
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_network_that_cannot_take_a_size_is_refused():
    for own, size in ((row, 4), (vit, 40)):
        with pytest.raises(ConfigError) as refused:
            built(own, size)
        assert refused.value.key == "image-size"
        assert "\n" not in str(refused.value)


def test_libraries_networks_by_name():
    model = built(None, 64, name="torchvision:mobilenet_v3_small")
    assert model.classifier.out_features == 3
    with pytest.raises(ConfigError, match="did you mean resnet18"):
        built(None, name="torchvision:resnet81")
    with pytest.raises(ConfigError, match="timm"):
        built(None, name="timm:no-such-network")


# --- saved weights --------------------------------------------------------------------------------


def test_weights_by_the_networks_names_or_keels(tmp_path):
    torch.manual_seed(5)
    network = resnet()
    torch.save(network.state_dict(), tmp_path / "own.pt")
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    for file in ("own.pt", "own.safetensors"):
        model = built(resnet, projection_heads=8)
        load_weights(model, tmp_path / file)
        for name, array in network.state_dict().items():
            assert torch.equal(model.tensors[model.own_names[name]], array)
        assert not model.left_out
    plain = built(resnet)
    save_file(plain.state_dict(), tmp_path / "keels.safetensors")
    load_weights(model, tmp_path / "keels.safetensors")
    assert torch.equal(model.classifier.weight, plain.classifier.weight)


def test_a_head_of_another_width_is_left_out(tmp_path):
    torch.save(resnet(10).state_dict(), tmp_path / "ten.pt")
    model = built(resnet)
    before = model.classifier.weight.clone()
    load_weights(model, tmp_path / "ten.pt")
    assert model.left_out == ("classifier.weight", "classifier.bias")
    assert torch.equal(model.classifier.weight, before)


def without(arrays, name):
    return {k: v for k, v in arrays.items() if k != name}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (lambda arrays: without(arrays, "conv1.weight"), "lacks conv1.weight"),
        (lambda arrays: arrays | {"extra": torch.zeros(1)}, "has no extra"),
        (lambda arrays: arrays | {"bn1.bias": torch.zeros(1)}, "another shape of bn1.bias"),
        (lambda arrays: {"state_dict": arrays}, "expected a state_dict"),
    ],
)
def test_other_weights_are_refused_by_name(tmp_path, content, named):
    torch.save(content(resnet().state_dict()), tmp_path / "w.pt")
    with pytest.raises(ConfigError) as refused:
        load_weights(built(resnet), tmp_path / "w.pt")
    assert refused.value.key == "weights"
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"no-such\.pt"):
        load_weights(built(resnet), tmp_path / "no-such.pt")
