"""keel methods, models, datasets, presets and keys against the registries they list."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest

from client_app.methods import method_class
from keel.cli.models import all_layers, layer_rows
from keel.cli.overrides import parse_overrides
from keel.tables import show
from models import build_model
from protocol.catalogue import method_names
from protocol.config import app_folder, default_config, presets
from protocol.models import MODELS
from protocol.options import key_of

METHODS_PAGE = app_folder / "docs/how-to/choose-a-method.md"


def build(name):
    """The model as `keel models` describes it."""
    spec = MODELS[name]
    size = spec.image_size or 32
    return build_model(name, num_classes=10, channels=spec.channels or 3, image_size=size)


def as_json(printed, *words):
    return json.loads(printed(*words, "--json"))


def test_every_method_is_listed_with_its_traffic(printed):
    rows = {row["name"]: row for row in as_json(printed, "methods")}
    assert tuple(rows) == method_names()
    # from the definitions: SCAFFOLD sends a control variate alongside the model, both ways
    assert rows["fedavg"]["traffic"] == 1
    assert rows["local"]["traffic"] == 0
    assert rows["scaffold"]["traffic"] == 2
    assert rows["moon"]["stateful"]
    assert rows["ditto"]["personal"]
    assert not rows["fedprox"]["stateful"]


def test_traffic_of_fedrep_lacks_the_classifier(printed):
    model = build("cnn-fedintr")
    head = sum(p.numel() for p in model.classifier.parameters())
    whole = sum(p.numel() for p in model.parameters())
    rows = {row["name"]: row for row in as_json(printed, "methods")}
    assert rows["fedrep"]["traffic"] == pytest.approx(1 - head / whole, abs=1e-4)


def test_a_method_shows_every_option_with_default_and_range(printed):
    shown = as_json(printed, "methods", "fedprox")
    options = {row["option"]: row for row in shown["options"]}
    keys = {key for key in default_config() if key.startswith("fedprox.")}
    assert options.keys() == keys
    assert options["fedprox.mu"]["default"] == default_config()["fedprox.mu"]
    assert options["fedprox.mu"]["type"] == "float"
    assert ">= 0" in options["fedprox.mu"]["range"]
    assert (app_folder / shown["file"]).is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["presets", "fedrcl-table1-cifar10"], presets()["fedrcl-table1-cifar10"]),
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


def test_the_markdown_table_has_one_row_a_method(printed):
    _, _, *rows = printed("methods", "--markdown").splitlines()
    assert [row.split("`")[1] for row in rows] == list(method_names())


def test_the_pages_table_of_methods_is_current(printed):
    """Its rows are those printed; a new method may wait for its row."""
    table = set(printed("methods", "--markdown").splitlines())
    rows = re.findall(r"^\| `[a-z-]+`(?: \(personal\))? \|.*$", METHODS_PAGE.read_text(), re.M)
    assert rows
    assert [row for row in rows if row not in table] == []


def test_every_key_of_the_config_is_listed_by_keys_or_by_its_method(printed):
    listed = {row["key"]: row for row in as_json(printed, "keys")}
    options = {f"{n}.{key_of(f)}" for n in method_names() for f in fields(method_class(n))}
    assert listed.keys() | options >= default_config().keys()
    assert listed["lr"]["default"] == default_config()["lr"]
    assert listed["momentum"]["range"] == "a number in [0, 1)"


def test_the_keys_of_a_pipe_are_one_line_each(printed):
    num_keys = len(as_json(printed, "keys"))
    lines = printed("keys").splitlines()
    assert len(lines) == num_keys
    assert "lr=0.01  (a finite number >= 0) learning rate" in lines
    assert all(line == line.rstrip() for line in lines)


def test_the_capabilities_of_a_method_are_one_short_line(printed):
    shown = printed("methods", "fedreco").splitlines()
    [line] = [line for line in shown if line.startswith("capabilities: ")]
    assert "stateful, personal" in line
    assert "; supports mixed architectures" in line
    assert "; does not support server optimizer" in line
    assert line.endswith("; weighted uniformly; shares extractor")  # only u_0's gradient travels
    assert "; weighted by examples; shares model" in printed("methods", "fedprox")
    assert "=" not in line
    assert as_json(printed, "methods", "fedreco")["capabilities"]["is_personal"] is True


def test_keys_shows_those_that_begin_alike_and_refuses_others(refusal, printed):
    shown = printed("keys", "privacy.")
    assert "privacy.delta" in shown
    assert "num-rounds" not in shown
    assert printed("keys", "moon.mu").startswith("moon.mu=")
    rows = as_json(printed, "keys", "fedcka")
    assert {row["key"].partition(".")[0] for row in rows} == {"fedcka"}
    assert "lrr" in refusal("keys", "lrr")


def test_unknown_names_are_refused_in_one_line(refusal):
    for command in ("methods", "models", "datasets", "presets"):
        assert "fedxyz" in refusal(command, "fedxyz")


@pytest.mark.end_to_end
def test_layers_add_up_to_the_model_and_fit_where_widths_are_equal():
    layers, models = all_layers(), {name: build(name) for name in MODELS}
    for name, model in models.items():
        assert sum(r["parameters"] for r in layers[name]) == sum(
            p.numel() for p in model.parameters()
        )
        assert layers[name][0]["width"] == np.prod(layers[name][0]["shape"])
    for name in ("resnet18", "cnn-fedreco"):
        [features] = [r for r in layer_rows(name, layers) if r["layer"] == "features"]
        assert features["width"] == models[name].feature_width
        assert set(features["fits"]) == {
            other
            for other, model in models.items()
            if other != name and model.feature_width == models[name].feature_width
        }


def test_the_list_of_models_has_norms_and_parameters(printed):
    rows = {row["name"]: row for row in as_json(printed, "models")}
    assert rows.keys() == MODELS.keys()
    assert rows["cnn-fedreco"]["norms"] == "none, group"
    assert all(row["parameters"] > 0 for row in rows.values())


def test_presets_show_what_they_set(printed):
    rows = as_json(printed, "presets")
    assert [row["name"] for row in rows] == list(presets())
    shown = as_json(printed, "presets", "fedcka-table1-cifar10")
    assert {row["key"]: row["value"] for row in shown["keys"]} == presets()["fedcka-table1-cifar10"]
    assert shown["clients"] == 10


def test_datasets_say_what_is_here_and_count_classes(printed, home):
    rows = {row["name"]: row for row in as_json(printed, "datasets")}
    assert rows["digits"]["here"] == "yes"
    digits = as_json(printed, "datasets", "digits")
    assert (digits["shape"], digits["shape as published"]) == ([1, 32, 32], [1, 8, 8])
    assert "data-dir/tiny-imagenet-200" in rows["tiny-imagenet"]["here"]
    images = np.random.default_rng(0).integers(0, 256, (9, 28, 28), dtype=np.uint8)
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
    np.savez(home / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    shown = as_json(printed, "datasets", f"npz:{home / 'own.npz'}")
    assert [row["train"] for row in shown["classes"]] == [4, 3, 2]
    assert shown["mean"] == [pytest.approx(images.mean() / 255, abs=1e-4)]
    assert shown["std"] == [pytest.approx(images.std() / 255, abs=1e-4)]


def test_a_data_set_that_needs_an_image_size_is_shown_with_one(
    printed, refusal, tmp_path, monkeypatch
):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    images, labels = np.zeros((4, 70, 90), np.uint8), np.array([0, 1, 1, 1])
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    name = f"npz:{tmp_path / 'own.npz'}"
    shown = as_json(printed, "datasets", name, "--image-size", "32")
    assert shown["shape"] == [1, 32, 32]
    assert [row["train"] for row in shown["classes"]] == [1, 3]
    line = refusal("datasets", name, "--image-size", "5")
    assert "image-size" in line


@pytest.mark.parametrize(
    "words", [["methods"], ["methods", "fedcr"], ["models"], ["datasets"], ["presets"], ["keys"]]
)
def test_eighty_columns_cut_no_name(words, monkeypatch, printed):
    everything = as_json(printed, *words)
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


def test_any_network_is_shown_with_its_stages_and_least_size(printed, tmp_path):
    text = """
from torch import nn


def net(num_classes):
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 11), *last)
"""
    (tmp_path / "mine.py").write_text(text)
    shown = as_json(printed, "models", f"{tmp_path / 'mine.py'}:net")
    assert [row["layer"] for row in shown["layers"]] == ["0", "features", "classifier"]
    assert shown["least size"] == 3 + 11 - 1
