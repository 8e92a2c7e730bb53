"""keel methods, models, datasets, presets and keys against the registries they list."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest
from data_fixtures import make_npz, random_images
from model_fixtures import undrawn

from client_app.methods import method_class
from keel.cli.models import layers_of
from keel.cli.overrides import parse_overrides
from keel.tables import show
from models import build_model
from protocol.catalogue import method_names
from protocol.config import app_folder, default_config, presets
from protocol.models import MODELS
from protocol.options import key_of

PRESET = "fedcka-table1-cifar10"


def build(name):
    """The model as `keel models` describes it."""
    spec = MODELS[name]
    size = spec.image_size or 32
    return build_model(name, num_classes=10, channels=spec.channels or 3, image_size=size)


def num_parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.fixture
def as_json(printed):
    return lambda *words: json.loads(printed(*words, "--json"))


def test_every_method_is_listed_with_its_traffic(as_json):
    rows = {row["name"]: row for row in as_json("methods")}
    assert tuple(rows) == method_names()
    # from the definitions: SCAFFOLD sends a control variate alongside the model, both ways
    assert [rows[name]["traffic"] for name in ("fedavg", "local", "scaffold")] == [1, 0, 2]
    assert [rows[name]["stateful"] for name in ("moon", "fedprox")] == [True, False]
    assert rows["ditto"]["personal"]
    model = build("cnn-fedintr")
    without_head = 1 - num_parameters(model.classifier) / num_parameters(model)
    assert rows["fedrep"]["traffic"] == pytest.approx(without_head, abs=1e-4)


def test_a_method_shows_its_capabilities_and_every_option_with_default_and_range(as_json, printed):
    shown = as_json("methods", "fedprox")
    options = {row["option"]: row for row in shown["options"]}
    assert options.keys() == {key for key in default_config() if key.startswith("fedprox.")}
    mu = options["fedprox.mu"]
    assert (mu["default"], mu["type"]) == (default_config()["fedprox.mu"], "float")
    assert ">= 0" in mu["range"]
    assert (app_folder / shown["file"]).is_file()
    assert as_json("methods", "fedreco")["capabilities"]["is_personal"] is True
    shown = printed("methods", "fedreco").splitlines()
    [line] = [line for line in shown if line.startswith("capabilities: ")]
    assert "personal" in line
    assert "server optimizer" not in line
    assert line.endswith("; weighted uniformly; shares extractor")  # only u_0's gradient travels


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["presets", PRESET], presets()[PRESET]),
        (
            ["methods", "fedprox"],
            {k: v for k, v in default_config().items() if k.startswith("fedprox.")},
        ),
    ],
)
def test_values_are_shown_as_they_are_typed(words, expected, monkeypatch, printed):
    monkeypatch.setenv("COLUMNS", "240")
    rows = [line.split() for line in printed(*words).splitlines() if line.strip()]
    at = 2 if words[0] == "methods" else 1  # the type comes before a default
    shown = [f"{row[0]}={row[at]}" for row in rows if row[0] in expected]
    assert parse_overrides(shown) == expected


def test_every_key_of_the_config_is_listed_by_keys_or_by_its_method(as_json, printed):
    listed = {row["key"]: row for row in as_json("keys")}
    options = {f"{n}.{key_of(f)}" for n in method_names() for f in fields(method_class(n))}
    assert listed.keys() | options >= default_config().keys()
    assert listed["lr"]["default"] == default_config()["lr"]
    lines = printed("keys").splitlines()  # to be searched: a line each
    assert len(lines) == len(listed)
    assert all(line.startswith(f"{key}=") for key, line in zip(listed, lines, strict=True))


def test_keys_shows_those_that_begin_alike_and_refuses_others(refusal, as_json):
    for name in ("privacy.", "fedcka"):
        keys = {row["key"] for row in as_json("keys", name)}
        assert keys == {key for key in default_config() if key.startswith(name)}
    assert "lrr" in refusal("keys", "lrr")


def test_unknown_names_are_refused_in_one_line(refusal):
    for command in ("methods", "models", "datasets", "presets"):
        assert "fedxyz" in refusal(command, "fedxyz")


@pytest.mark.end_to_end
def test_layers_add_up_to_the_model(as_json):
    with undrawn():
        models = {name: build(name) for name in MODELS}
        layers = {name: layers_of(name) for name in MODELS}
        rows = {row["name"]: row for row in as_json("models")}
    for name, model in models.items():
        assert sum(r["parameters"] for r in layers[name]) == num_parameters(model)
        assert layers[name][0]["width"] == np.prod(layers[name][0]["shape"])
        [features] = [r for r in layers[name] if r["layer"] == "features"]
        assert features["width"] == model.feature_width
    assert {name: row["parameters"] for name, row in rows.items()} == {
        name: num_parameters(model) for name, model in models.items()
    }
    assert rows["cnn-fedreco"]["norms"] == "none, group"


def test_presets_show_what_they_set(as_json):
    assert [row["name"] for row in as_json("presets")] == list(presets())
    shown = as_json("presets", PRESET)
    assert {row["key"]: row["value"] for row in shown["keys"]} == presets()[PRESET]
    assert shown["clients"] == 10


def test_datasets_say_what_is_here_and_count_classes(as_json, refusal, home):
    rows = {row["name"]: row for row in as_json("datasets")}
    assert rows["digits"]["here"] == "yes"
    assert "data-dir/tiny-imagenet-200" in rows["tiny-imagenet"]["here"]
    digits = as_json("datasets", "digits")
    assert (digits["shape"], digits["shape as published"]) == ([1, 32, 32], [1, 8, 8])
    images, labels = random_images(9, 40, 30), np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    name = make_npz(home / "own.npz", **arrays)
    shown = as_json("datasets", name)
    assert [row["train"] for row in shown["classes"]] == [4, 3, 2]
    assert shown["mean"] == [pytest.approx(images.mean() / 255, abs=1e-4)]
    assert shown["std"] == [pytest.approx(images.std() / 255, abs=1e-4)]
    assert as_json("datasets", name, "--image-size", "32")["shape"] == [1, 32, 32]
    assert "image-size" in refusal("datasets", name, "--image-size", "5")


@pytest.mark.parametrize(
    "words", [["methods"], ["methods", "fedcr"], ["models"], ["datasets"], ["presets"], ["keys"]]
)
def test_eighty_columns_cut_no_name(words, monkeypatch, printed, as_json):
    with undrawn():
        everything = as_json(*words)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
        text = re.sub(r"\x1b\[[\d;]*m", "", printed(*words))
    assert "…" not in text
    for row in everything["options"] if isinstance(everything, dict) else everything:
        first = next(iter(row.values()))
        assert re.search(rf"^ ?{re.escape(first)}[ =]", text, re.MULTILINE)


def test_a_class_named_in_brackets_is_shown_as_it_is(capsys):
    """Brackets are markup to rich."""
    show([{"class": "[red] cell", "train": 3}], False, "classes")
    assert "[red] cell" in capsys.readouterr().out


def test_any_network_is_shown_with_its_stages(as_json, tmp_path):
    text = """
from torch import nn


def net(num_classes):
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 11), *last)
"""
    (tmp_path / "mine.py").write_text(text)
    shown = as_json("models", f"{tmp_path / 'mine.py'}:net")
    assert [row["layer"] for row in shown["layers"]] == ["0", "features", "classifier"]
