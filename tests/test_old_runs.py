"""What Keel 0.1 saved is read under today's names: arrays, client state, keys and values."""

import json
from pathlib import Path

import pytest
import torch
from client_fixtures import Client, assert_same_bits, initial, make_config
from safetensors.torch import load_file, save_file

from client_app.state import StateFolder
from protocol.config import config_from_json, presets, resolve_config
from protocol.files import digest
from protocol.messages import read_reply, with_current_names
from server_app.run_directory import (
    Checkpoint,
    RunDirectory,
    read_arrays,
    read_checkpoint,
    save_arrays,
)
from server_app.summary import read_config_file

OLD, NEW = "tap_heads.", "projection_heads."


def as_of_0_1(arrays):
    return {name.replace(NEW, OLD): array for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tap_heads.conv1.0.weight", "projection_heads.conv1.0.weight"),
        ("previous/tap_heads.fc1.2.bias", "previous/projection_heads.fc1.2.bias"),
        ("state/step/m.tap_heads.fc1.2.bias", "state/step/m.projection_heads.fc1.2.bias"),
        ("stages.conv1.body.weight", "stages.conv1.body.weight"),
    ],
)
def test_names_of_projection_heads(old, new):
    assert with_current_names({old: 1}) == {new: 1}


def test_client_state_of_0_1_gives_the_same_next_round(tmp_path):
    config = make_config(method="fedintr")
    w = initial(config)
    client = Client(config, tmp_path)
    client.ask("train", 1, w)
    folder = tmp_path / "clients" / "client-0000"
    (path,) = folder.glob("round-*.safetensors")
    after = read_reply(client.ask("train", 2, w, counted=1)).arrays

    (newest,) = (p for p in folder.glob("round-*") if p != path)
    newest.unlink()
    arrays = load_file(path)
    path.unlink()
    save_file(as_of_0_1(arrays), folder / "old")
    content = (folder / "old").read_bytes()
    (folder / "old").rename(folder / f"round-00001-{digest(content)}.safetensors")
    assert any(name.startswith(f"previous/{OLD}") for name in as_of_0_1(arrays))
    assert_same_bits(
        StateFolder(folder).load(2)["previous"],
        {name.removeprefix("previous/"): array for name, array in arrays.items()},
    )
    again = read_reply(client.ask("train", 2, w, counted=1)).arrays
    assert_same_bits(again, after)


def test_model_and_checkpoint_of_0_1_are_read(tmp_path: Path):
    config = make_config(method="fedintr")
    w = initial(config)
    save_arrays(tmp_path / "model.safetensors", as_of_0_1(w), {"shape": ""})
    assert_same_bits(read_arrays(tmp_path / "model.safetensors")[0], w)
    moments = {f"state/step/m.{name}": torch.ones(2) for name in as_of_0_1(w)}
    flat = {f"model/{name}": array for name, array in as_of_0_1(w).items()} | moments
    save_arrays(tmp_path / "round-1.safetensors", flat, {"round": "1", "model": "cnn-fedreco"})
    checkpoint = read_checkpoint(tmp_path / "round-1.safetensors", w, "cnn-fedreco")
    assert isinstance(checkpoint, Checkpoint)
    assert_same_bits(checkpoint.arrays, w)
    assert checkpoint.state.keys() == {f"step/m.{name}" for name in w}


@pytest.mark.parametrize(
    ("old", "key", "value"),
    [
        ({"fedrep.body-epochs": 3}, "fedrep.extractor-epochs", 3),
        ({"fedpac.body-epochs": 2}, "fedpac.extractor-epochs", 2),
        ({"fedbabu.part": "body"}, "fedbabu.part", "extractor"),
        ({"server": "fedadam"}, "server-optimizer", "fedadam"),
        ({"rest-after": 7}, "backoff-after", 7),
        ({"evaluate-clients": "participants"}, "evaluate-clients", "cohort"),
    ],
)
def test_keys_and_values_of_0_1_are_accepted_with_a_warning(old, key, value, caplog):
    config = resolve_config(old)
    assert config.flat[key] == value
    assert "is now called" in caplog.text
    ((name, old_value),) = old.items()
    flat = {k: v for k, v in config.flat.items() if k != key} | {name: old_value}
    assert config_from_json(json.dumps(flat)).flat[key] == value


# Keys that came after 0.2 first ran, with the values that are what it did.
AS_BEFORE = {
    "balanced-order": "interleaved",
    "scaffold.control-weighting": "uniform",
    "moon.reduction": "sample",
    "fedcka.projection": "none",
    "fedprox.squared": True,
    "frozen-statistics": "running",
    "init": "",
    "width": 0,
}


@pytest.mark.parametrize(
    ("preset", "method", "then"),
    [
        ("fedintr-table1-cifar100", "moon", {"moon.projection": "mlp"}),
        ("fedrcl-table1-cifar10", "fedrcl", {}),
        ("fedcka-table1-cifar10", "scaffold", {}),
        ("fedreco-table1-fmnist", "ditto", {"ditto.lambda": 1.0, "ditto.personal-epochs": 1}),
    ],
)
def test_a_run_of_a_preset_that_has_changed_resumes_with_its_own_values(
    preset, method, then, tmp_path
):
    given = {"preset": preset, "method": method}
    config = resolve_config(given | then).flat
    saved = {key: value for key, value in config.items() if key not in AS_BEFORE}
    content = {"config": saved, "overrides": given}
    (tmp_path / "config.json").write_text(json.dumps(content))
    current, overrides = read_config_file(tmp_path)
    assert resolve_config(overrides).flat == current
    assert current == saved | {
        key: current[key] if method != "scaffold" and key.startswith("scaffold") else value
        for key, value in AS_BEFORE.items()
    }
    assert set(then) <= overrides.keys()
    assert set(then) <= presets()[preset].keys()


def test_a_run_from_before_ids_has_the_same_id_after_each_restore_from_a_backup(tmp_path):
    """It was random: clients refused the restored directory as another run of its name."""

    def id_of(name, num_rounds, history):
        (folder := tmp_path / name).mkdir()
        content = {"config": {"num-rounds": num_rounds}, "overrides": {}}
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "history.jsonl").write_text(history)
        directory = RunDirectory(folder)
        directory.close()
        return directory.id

    later = '{"round": 1, "s": 1}\n{"round": 2, "s": 1}\n'  # a resume changed num-rounds
    assert id_of("a", 1, '{"round": 1, "s": 1}\n') == id_of("restored", 2, later)
    assert id_of("new", 1, "") == id_of("new-restored", 1, "")
    others = id_of("b", 1, '{"round": 1, "s": 2}\n'), id_of("c", 1, ""), id_of("d", 2, "")
    assert len({id_of("e", 1, later), *others}) == 4


def test_two_new_directories_have_two_ids(tmp_path):
    ids = []
    for name in "ab":
        (tmp_path / name).mkdir()
        ids.append(RunDirectory(tmp_path / name).id)
    assert len(set(ids)) == 2
