"""keel methods, models, datasets, presets and keys against the registries they list."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest

import keel.model_speed
from client_app.methods import method_class
from keel.cli import catalog
from keel.cli.overrides import parse_overrides
from keel.model_speed import build, input_of
from protocol.catalogue import method_names
from protocol.config import app_folder, default_config, presets
from protocol.models import MODELS
from protocol.options import key_of

README = app_folder / "README.md"


@pytest.fixture
def speed(monkeypatch):
    """Made-up speeds: 1 ms an image forward, 3 ms a training step, on one core."""
    measured = {"forward_ms": 1.0, "step_ms": 3.0, "device": "cpu, 1 thread"}
    monkeypatch.setattr(catalog, "model_speed", lambda *_: measured)
    monkeypatch.setattr(catalog, "num_cores", lambda: 1)


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
    model = build("cnn-fedintr", "cpu")
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
        (["keys", "flip"], {"flip": default_config()["flip"]}),
    ],
)
def test_values_are_shown_as_they_are_typed(words, expected, speed, monkeypatch, printed):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "240")
    text = re.sub(r"\x1b\[[\d;]*m", "", printed(*words))
    rows = [line.split() for line in text.splitlines() if line.strip()]
    at = 2 if words[0] != "presets" else 1  # the type comes before a default
    shown = [f"{row[0]}={row[at]}" for row in rows if row[0] in expected]
    assert parse_overrides(shown) == expected


def test_the_markdown_table_has_one_row_a_method(printed):
    _, _, *rows = printed("methods", "--markdown").splitlines()
    assert [row.split("`")[1] for row in rows] == list(method_names())


def test_the_readmes_table_is_current(printed):
    """Its rows are those printed; a new method may wait for its row."""
    table = set(printed("methods", "--markdown").splitlines())
    rows = re.findall(r"^\| `[a-z-]+`(?: \(personal\))? \|.*$", README.read_text(), re.M)
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
    assert refusal("keys", "lrr") == "error: config key = 'lrr' is unknown; did you mean lr?\n"
    assert refusal("keys", "qqqqqq").endswith("is unknown. `keel keys` lists all.\n")


def test_unknown_names_are_refused_in_one_line(refusal):
    for command in ("methods", "models", "datasets", "presets"):
        assert "fedxyz" in refusal(command, "fedxyz")


@pytest.mark.end_to_end
def test_layers_add_up_to_the_model_and_name_their_widths():
    for name in ("cnn-fedreco", "resnet20"):
        model = build(name, "cpu")
        rows = catalog.layers_of(name)
        assert sum(r["parameters"] for r in rows) == sum(p.numel() for p in model.parameters())
        assert rows[-2]["layer"] == "features"
        assert rows[-2]["width"] == model.feature_width
        x = np.prod(rows[0]["shape"])
        assert rows[0]["width"] == x


@pytest.mark.end_to_end
def test_models_that_fit_have_equal_feature_widths():
    widths = {name: build(name, "meta").feature_width for name in MODELS}
    for name in ("resnet18", "cnn-fedreco"):
        [features] = [r for r in catalog.layer_rows(name) if r["layer"] == "features"]
        assert set(features["fits"]) == {
            other for other in widths if other != name and widths[other] == widths[name]
        }


@pytest.mark.end_to_end
def test_measuring_a_model_times_it(monkeypatch):
    monkeypatch.setattr(keel.model_speed, "budget_s", 0.0)
    measured = keel.model_speed.measure("cnn-fedreco")
    assert measured["forward_ms"] > 0
    assert measured["step_ms"] > 0


def test_lists_do_not_wait_for_measurements(monkeypatch, printed):
    monkeypatch.setattr(keel.model_speed, "measure", lambda _: pytest.fail("measured"))
    monkeypatch.setattr(catalog, "version", lambda _: "none of which a speed is known")
    rows = as_json(printed, "models")
    assert {row["step ms"] for row in rows} == {None}
    assert {row["name"]: row["norms"] for row in rows}["cnn-fedreco"] == "none, group"
    assert all(row["parameters"] > 0 for row in rows)
    assert {row["expected time"] for row in as_json(printed, "presets")} == {None}
    *rows, caption = printed("presets").strip().split("\n\n")
    assert rows[-1].count("–\n") >= len(presets()) - 1
    assert "–: not measured yet; --measure measures all" in caption


def test_a_measurement_is_reused_until_its_key_changes(home):
    values = iter(range(9))
    assert catalog.cached("x", [1], lambda: next(values)) == 0
    assert catalog.cached("x", [1], lambda: next(values)) == 0
    assert catalog.cached("x", [1], lambda: next(values), again=True) == 1
    assert catalog.cached("x", [2], lambda: next(values)) == 2


def test_inputs_are_the_papers_or_colour_images_of_32_pixels():
    for name in MODELS:
        spec = MODELS[name]
        assert input_of(name) == (spec.channels or 3, *[spec.image_size or 32] * 2)


def test_expected_time_is_images_times_milliseconds(speed):
    # FedReCo, Fashion-MNIST: 60,000 images, of which 80 % are trained on, 2 epochs, 500 rounds;
    # one extra forward pass; 10,000 test images a round; 28 pixels instead of 32
    training = 60_000 * 0.8 * 2 * (3 + 1)
    expected = 500 * (training + 10_000 * 1) * (28 / 32) ** 2 / 1e3
    row = catalog.preset_row("fedreco-table1-fmnist")
    assert row["expected seconds"] == pytest.approx(expected, abs=0.5)


def test_presets_show_what_they_set(speed, printed):
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
    line = refusal("datasets", name, "--image-size", "20")
    assert "image-size = 20: expected 0, or 28 to 64" in line


def test_tables_are_printed_for_people(speed, printed):
    for words in (["methods"], ["methods", "moon"], ["models"], ["datasets"], ["presets"]):
        assert printed(*words).count("\n") > 5


@pytest.mark.parametrize(
    "words", [["methods"], ["methods", "fedcr"], ["models"], ["datasets"], ["presets"], ["keys"]]
)
def test_eighty_columns_cut_no_word(words, speed, monkeypatch, printed):
    everything = as_json(printed, *words)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[\d;]*m", "", printed(*words))
    assert "…" not in text
    for row in everything["options"] if isinstance(everything, dict) else everything:
        first = next(iter(row.values()))
        assert re.search(rf"^ ?{re.escape(first)}[ =]", text, re.MULTILINE)
        for word in row["description"].split() if "default" in row else ():
            assert word in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_shows_whole_names(width, monkeypatch, printed):
    monkeypatch.setattr(catalog, "model_speed", lambda *_: None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    text = re.sub(r"\x1b\[[\d;]*m", "", printed("presets"))
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert [row[0] for row in rows if row[0] in presets()] == list(presets())
    if width == 60:  # without the column that has no time yet, the others fit
        assert next(row for row in rows if row[0] == "fedcka-table1-cifar10")[1] == "cifar10"
    assert "Hidden at this width: expected time, method, model" in " ".join(text.split())


def test_a_class_named_in_brackets_is_shown_as_it_is(capsys):
    """Brackets are markup to rich."""
    catalog.show([{"class": "[red] cell", "train": 3}], False, "classes")
    assert "[red] cell" in capsys.readouterr().out
