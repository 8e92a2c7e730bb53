"""What holds for every model: layers, prefixes, splits, seeds, options and refusals."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import undrawn
from torch import Tensor, nn
from torch.nn import functional as F

from models import StagedModel, build_model
from protocol.models import MODELS

each_model = pytest.mark.parametrize("name", MODELS)
# ResNets with an eighth of their channels: what is tested does not depend on the width, and the
# 23 million weights of a whole ResNet-50 take half a second to draw
WIDTHS = {name: spec.width // 8 for name, spec in MODELS.items() if spec.width >= 64}


def build_narrow(name: str, **options: Any) -> StagedModel:
    """`build_model`, wide ResNets narrow."""
    return build_model(name, **{"width": WIDTHS.get(name, 0)} | options)


@cache
def shared(name: str) -> StagedModel:
    """One model for many tests, which must not change it: 3 channels, 32 pixels, 10 classes."""
    return build_narrow(name, num_classes=10, channels=3, image_size=32, seed=1).eval()


def images(batch: int = 2, channels: int = 3, size: int = 32) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(2))


@each_model
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, 28, 2), (3, 33, 7)])
def test_logits_have_a_row_a_sample_and_a_column_a_class(name, channels, size, classes):
    build = build_model if size == 28 else build_narrow  # once with its own width
    model = build(name, num_classes=classes, channels=channels, image_size=size, seed=0)
    model.eval()
    with torch.no_grad():
        logits = model(images(2, channels, size))
    assert logits.shape == (2, classes)
    assert logits.isfinite().all()
    assert (model.name, model.input_shape, model.num_classes) == (
        name,
        (channels, size, size),
        classes,
    )


@each_model
@torch.no_grad()
def test_layers_come_in_the_order_asked_for_and_leave_the_logits_as_they_are(name):
    model, x = shared(name), images()
    asked = ["logits", *reversed(model.stage_names), "features", model.stage_names[0]]
    logits, reps = model.run(x, asked)
    found = dict(zip(asked, reps, strict=True))
    assert torch.equal(logits, model(x))
    assert torch.equal(found["logits"], logits)
    assert found["features"].shape == (2, model.feature_width)
    assert torch.equal(model.classifier(found["features"]), logits)
    h = x
    for stage in model.stage_names:  # each stage called by itself, as a module
        h = model.stages[stage](h)
        assert torch.equal(found[stage], h)


@each_model
@torch.no_grad()
def test_every_split_puts_the_forward_pass_together_again(name):
    model, x = shared(name), images(1)
    logits, reps = model.run(x, model.layer_names)
    for split in model.stage_names:
        assert torch.equal(model.predict(model.extract(x, split), split), logits)
        extractor, head = model.extractor_keys(split), model.head_keys(split)
        assert extractor + head == list(model.state_dict())
        assert f"stages.{split}." in extractor[-1]
    assert model.extract(x, model.stage_names[-1]).shape == (1, model.feature_width)
    for layer, h in zip(model.layer_names, reps, strict=True):
        assert torch.equal(model.resume(h.clone(), after=layer), logits)
    for call in (model.resume, model.extract, model.predict):
        with pytest.raises(ValueError, match="'conv9'"):
            call(x, "conv9")


@each_model
def test_a_seed_alone_decides_the_weights_and_global_randomness_is_not_touched(name, monkeypatch):
    def build(seed, **options):
        model = build_narrow(
            name, num_classes=5, channels=1, image_size=28, seed=seed, projection="mlp", **options
        )
        return model.state_dict()

    torch.manual_seed(11)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("reseeded the GPUs"))
    before = torch.get_rng_state()
    first = build(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    again, other = build(7, projection_heads=256), build(8)
    for key, value in first.items():
        assert torch.equal(value, again[key])  # batch norm statistics among them
    assert any(not torch.equal(value, other[key]) for key, value in first.items())


def test_the_widths_in_the_documentation_are_those_of_the_networks():
    def whole(name):
        with undrawn():
            return build_model(name, num_classes=2, channels=1, image_size=28)

    page = Path(__file__).parent.parent / "docs/concepts/representation-regularisation.md"
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page.read_text(), re.M)
    widths = {name: int(width) for width, names in rows for name in re.findall(r"`(.+?)`", names)}
    assert widths == {name: whole(name).feature_width for name in MODELS}


with_batch_norm = [name for name, built in MODELS.items() if "batch" in built.norms]
without_norm = [name for name, built in MODELS.items() if "" in built.norms]


@pytest.mark.parametrize("name", with_batch_norm)
def test_the_norm_is_the_one_asked_for(name):
    def norms(norm):
        model = build_narrow(name, num_classes=2, channels=1, image_size=28, norm=norm)
        kinds = (nn.GroupNorm, nn.BatchNorm2d)
        return [module for module in model.modules() if isinstance(module, kinds)]

    default = norms("")
    assert {type(n) for n in default} == {
        nn.BatchNorm2d if name in ("resnet20", "resnet50") else nn.GroupNorm
    }
    group, batch = norms("group"), norms("batch")
    assert len(group) == len(batch) == len(default)
    assert all(isinstance(n, nn.GroupNorm) and n.num_groups == 2 for n in group)
    assert all(isinstance(n, nn.BatchNorm2d) for n in batch)


@pytest.mark.parametrize("name", without_norm)
@torch.no_grad()
def test_group_norm_follows_each_convolution_of_a_plain_cnn_and_is_off_by_default(name):
    about = {"num_classes": 4, "channels": 3, "image_size": 32, "seed": 0}
    plain, normed = (build_model(name, norm=norm, **about) for norm in ("", "group"))
    added = [m for m in normed.modules() if isinstance(m, nn.GroupNorm)]
    convolutions = [m for m in normed.modules() if isinstance(m, nn.Conv2d)]
    assert [(m.num_groups, m.num_channels) for m in added] == [
        (2, conv.out_channels) for conv in convolutions
    ]
    assert not any(isinstance(m, nn.GroupNorm) for m in plain.modules())
    x = images(3)
    h = F.group_norm(convolutions[0](x), 2, eps=1e-5)
    torch.testing.assert_close(normed.stages["conv1"](x), F.max_pool2d(h, 2).relu())
    with pytest.raises(ValueError, match="norm"):
        build_model(name, norm="batch", **about)


@pytest.mark.parametrize("name", [name for name, built in MODELS.items() if built.width])
def test_width_scales_every_channel_of_a_resnet(name):
    about = {"num_classes": 4, "channels": 3, "image_size": 32}
    with undrawn():
        own = build_model(name, **about)
    quarter = build_model(name, width=MODELS[name].width // 4, **about)
    pairs = zip(own.stages.modules(), quarter.stages.modules(), strict=True)
    widths = [(a.out_channels, b.out_channels) for a, b in pairs if isinstance(a, nn.Conv2d)]
    assert len(widths) > 15
    assert all(a == 4 * b for a, b in widths if (a, b) != (256, 256))
    with torch.no_grad():
        assert quarter.eval()(images()).shape == (2, 4)


def test_fan_in_draws_all_layers_and_heads_with_variance_2_over_fan_in():
    about = {"num_classes": 10, "channels": 3, "image_size": 32, "projection_heads": 64}
    model = build_model("resnet20", seed=0, init="fan-in", **about)
    own = build_model("resnet20", seed=0, **about)
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weighted) == 19 + 1 + 2 * 4
    for module in weighted:
        assert module.weight.std().item() == pytest.approx(
            (2 / module.weight[0].numel()) ** 0.5, rel=4 / module.weight.numel() ** 0.5
        )
    assert torch.equal(model.classifier.bias, own.classifier.bias)
    assert not torch.equal(model.classifier.weight, own.classifier.weight)
    without = build_model("resnet20", seed=0, init="fan-in", **about | {"projection_heads": 0})
    for key, array in without.state_dict().items():
        assert torch.equal(array, model.state_dict()[key]), key
    assert all(module.training for each in (model, without) for module in each.modules())


@each_model
def test_projection_heads_take_every_stage_to_256(name):
    """Hidden widths as in FedIntR's code: 256, but 96 after the small CNN's last layer, fc2."""
    model = build_narrow(
        name, num_classes=10, channels=3, image_size=32, seed=0, projection_heads=256
    )
    assert not shared(name).projection_heads
    assert tuple(model.projection_heads) == model.regularised_stages
    split = model.stage_names[0]
    keys = model.extractor_keys(split) + model.head_keys(split)
    assert keys == [key for key in model.state_dict() if not key.startswith("projection_heads.")]
    hidden = [256] * len(model.projection_heads)
    last_fully_connected = {"cnn-fedintr": 96, "cnn-fedcka": 256, "cnn-fedreco": 84, "vgg9": 512}
    hidden[-1] = last_fully_connected.get(name, 256)
    _, reps = model.eval().run(images(), model.regularised_stages, to_logits=False)
    heads = model.projection_heads.values()
    for rep, head, width in zip(reps, heads, hidden, strict=True):
        first, second = (m for m in head if isinstance(m, nn.Linear))
        assert first.weight.shape == (width, rep[0].numel())
        assert second.weight.shape == (256, width)
