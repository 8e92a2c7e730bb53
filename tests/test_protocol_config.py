"""The run config: every key parsed once, by name, and every mistake refused by its key."""

import dataclasses
import json
from typing import Any

import pytest

from client_app.methods import method_of
from protocol.catalogue import classes as METHODS
from protocol.config import config_from_json, default_config, presets, resolve_config
from protocol.config_keys import ModelConfig, PrivacyConfig, RoundsConfig, TrainConfig
from protocol.data_keys import DataConfig
from protocol.options import (
    ConfigError,
    key_of,
    keys_of,
)
from protocol.server_optimizers import SERVER_OPTIMIZERS


def refusal_of(keys: dict[str, object]) -> Any:
    """The refusal of these keys, by the config or by the method; None where they are accepted."""
    try:
        method_of(resolve_config(keys))
    except ConfigError as error:
        refusal = error
    else:
        return None
    assert "\n" not in str(refusal)
    return refusal


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "key", "neighbour"),
    [
        ({"num-round": 3}, "num-round", "num-rounds"),
        ({"tensorboard": True}, "tensorboard", ""),  # a key that is gone
        ({"learning-rate": 0.1}, "learning-rate", "lr"),
        ({"dataset": "mnist"}, "dataset", "source"),
        ({"method": "fedcka", "mu": 5}, "mu", "fedcka.mu"),
        ({"local_epochs": 3}, "local_epochs", "local-epochs"),
        ({"preset": "fedrcl-table1-cifar"}, "preset", "fedrcl-table1-cifar10"),
        ({"server-optimizer": "adam"}, "server-optimizer", "fedadam"),
        ({"method": "fedprx"}, "method", "fedprox"),
        ({"model": "resnet"}, "model", "resnet"),
        ({"client-models": "vgg9,resnet"}, "client-models", "resnet"),
        ({"diagnostics": "vci,drif"}, "diagnostics", "drift"),
    ],
)
def test_what_is_unknown_is_refused_with_its_neighbour(keys, key, neighbour):
    error = refusal_of(keys)
    assert error.key == key
    assert not neighbour or f"did you mean {neighbour}" in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num-rounds", 0), ("train-fraction", 0.0), ("train-fraction", 1.5), ("momentum", 1.0),
        ("lr", -0.1), ("lr-decay", 0.0), ("batch-size", 0), ("partition", "sorted"),
        ("channels", 2), ("image-size", 7), ("image-size", "28x513"), ("weighting", "equal"),
        ("norm", "layer"), ("source", "digit"), ("source", "folder:"), ("device", "gpu"),
        ("device", "cuda:x"), ("local-test-fraction", 1.0), ("round-timeout", 0.0),
        ("alpha", 0.0), ("threads", -1), ("threads", 100_000), ("flip", 1), ("seed", -1),
        ("cache-mb", True), ("evaluate-clients", "some"), ("source", "folder:data"),
        ("resume", "runs/here"), ("tracker", "aim"), ("diagnostics-every", 0),
        ("output-dir", "runs/here"), ("data-dir", "runs/here"),
        ("data-dir", "~no-such-user/x"), ("source", "folder:~no-such-user/x"),
        ("run-name", "-a"), ("run-name", ".."), ("run-name", "reset-state"),
        ("privacy.epsilon", 1e-300),
        ("privacy.epsilon", 1.0),
        # options of methods and server optimizers, also of those that the run does not use
        ("fedprox.mu", -1.0), ("fedavgm.beta", 1.0), ("fedavgm.lr", 0.0), ("fedadam.tau", 0.0),
        ("fedadam.beta1", 1.0), ("fedacg.lambda", 1.0), ("fedlc.tau", -1.0),
        ("fedcr.samples", 0), ("fedintr.projection-width", 10**18), ("fedbabu.part", "tail"),
        ("fedreco.k-u", f"{'9' * 20} steps"), ("scaffold.momentum-form", "plain"),
    ],
)  # fmt: skip
def test_values_that_are_not_allowed_are_named(key, value):
    error = refusal_of({key: value})
    assert error.key == key
    assert str(error).startswith(f"{key} = ")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"model": "cnn-fedcka", "norm": "batch"}, "norm"),
        ({"model": "vgg9", "width": 8}, "width"),
        ({"model": "resnet20", "width": 6}, "width"),
        ({"method": "fedreco", "server-optimizer": "fedadam"}, "server-optimizer"),
        ({"method": "scaffold", "server-optimizer": "fedadam"}, "server-optimizer"),
        ({"method": "local", "aggregation": "krum"}, "aggregation"),
        ({"method": "fedreco", "weighting": "examples"}, "weighting"),
        ({"method": "fedrep", "server-optimizer": "fedacg"}, "fedacg.beta"),
        ({"method": "moon", "privacy.epsilon": 0.5}, "privacy.epsilon"),
        ({"method": "ditto", "privacy.epsilon": 0.5}, "privacy.epsilon"),
        ({"method": "scaffold", "privacy.epsilon": 0.5}, "privacy.epsilon"),
        ({"privacy.epsilon": 0.5, "model": "resnet20"}, "privacy.epsilon"),
        ({"method": "fedreco", "model": "resnet20"}, "model"),
        ({"method": "fedreco", "model": "resnet18", "norm": "batch"}, "model"),
        ({"method": "moon", "client-models": "vgg9,resnet18"}, "client-models"),
        ({"method": "fedrep", "evaluate-clients": "none"}, "evaluate-clients"),
        ({"method": "local", "evaluate-clients": "none"}, "evaluate-clients"),
        (
            {"method": "fedbabu", "fedbabu.fedper-like": True, "evaluate-clients": "none"},
            "evaluate-clients",
        ),
        ({"fedntd.convex": True, "fedntd.beta": 1.0}, "fedntd.beta"),
        # what fits together
        ({"privacy.epsilon": 0.5, "model": "resnet20", "norm": "group"}, ""),
        ({"privacy.epsilon": 0.5, "method": "fedreco"}, ""),
        ({"privacy.epsilon": 1e-6}, ""),
        ({"method": "fedrep", "server-optimizer": "fedacg", "fedacg.beta": 0.0}, ""),
        ({"method": "ditto", "server-optimizer": "fedacg"}, ""),
        ({"method": "fedreco", "client-models": "cnn-fedreco, vgg9", "weighting": "uniform"}, ""),
        ({"method": "fedbabu", "evaluate-clients": "none"}, ""),
        ({"method": "local", "server-optimizer": "fedavg", "weighting": "examples"}, ""),
        ({"source": "npz:/tmp/a.npz"}, ""),
        ({"source": "folder:~/data"}, ""),
        ({"device": "cuda:1"}, ""),
    ],
)
def test_keys_that_contradict_each_other_are_refused_and_others_are_not(keys, key):
    error = refusal_of(keys)
    assert (error.key if error else "") == key


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "none"),
        ({"method": "fedrep"}, "all"),
        ({"evaluate-clients": "cohort"}, "cohort"),
        ({"evaluate-clients": "all", "privacy.epsilon": 0.5}, "none"),
        ({"evaluate-clients": "all", "privacy.epsilon": 0.5, "privacy.metrics": "exact"}, "all"),
    ],
)
def test_clients_are_evaluated_unless_they_withhold_what_they_measure(keys, expected):
    assert resolve_config(keys).evaluated_clients == expected


# --- presets --------------------------------------------------------------------------------------


def test_an_explicit_key_beats_the_preset_even_where_it_is_the_default():
    preset = "fedintr-table1-fmnist"
    default = default_config()["local-epochs"]
    assert presets()[preset]["local-epochs"] == 10 != default
    assert resolve_config({"preset": preset}).train.local_epochs == 10
    assert resolve_config({"preset": preset, "local-epochs": default}).train.local_epochs == default
    untouched = default_config().keys() - presets()[preset].keys() - {"preset"}
    flat = resolve_config({"preset": preset}).flat
    assert all(flat[key] == default_config()[key] for key in untouched)


@pytest.mark.parametrize("name", presets())
def test_every_preset_resolves_with_every_method_it_is_compared_with(name):
    config = resolve_config({"preset": name})
    assert presets()[name].keys() <= default_config().keys()
    for method, cls in METHODS.items():
        assert type(config.table(method, cls)) is cls


# --- pyproject.toml and the dataclasses -----------------------------------------------------------


def test_every_default_belongs_to_one_option_and_every_option_has_one():
    groups = [RoundsConfig, DataConfig, ModelConfig, TrainConfig]
    declared = [key for cls in groups for key in keys_of(cls)]
    tables = {**METHODS, **SERVER_OPTIMIZERS, "privacy": PrivacyConfig}
    declared += [f"{name}.{key}" for name, cls in tables.items() for key in keys_of(cls)]
    assert sorted(declared) == sorted(default_config())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_options_from_its_table(name):
    config = resolve_config({"method": name})
    method = method_of(config)
    assert type(method) is METHODS[name]
    for field in dataclasses.fields(method):
        assert getattr(method, field.name) == config.flat[f"{name}.{key_of(field)}"]


# --- json -----------------------------------------------------------------------------------------


def test_what_clients_are_sent_is_the_same_config():
    keys = {"lr": 1, "method": "fedintr", "fedintr.mu": 3.5, "seed": 7, "source": "npz:/tmp/ü.npz"}
    config = resolve_config({"preset": "fedrcl-table1-cifar10"} | keys)
    back = config_from_json(config.to_json())
    for part in ("rounds", "data", "model", "train", "privacy"):
        assert getattr(back, part) == getattr(config, part)
    assert dict(back.flat) == dict(config.flat)
    assert method_of(back) == method_of(config)


def test_a_json_that_lacks_a_key_or_is_no_object_is_refused():
    flat = json.loads(resolve_config({}).to_json())
    del flat["batch-size"]
    with pytest.raises(ConfigError) as refusal:
        config_from_json(json.dumps(flat))
    assert refusal.value.key == "batch-size"
    for text in ("1", "null", "[]", "[" * 100_000):  # as a server may send
        with pytest.raises(ValueError, match="config"):
            config_from_json(text)


@pytest.mark.parametrize("value", [{0: list(range(50_000))}, "x" * 100_000])
def test_a_huge_value_is_shortened_in_its_error(value):
    error = refusal_of({"lr": value})
    assert error.key == "lr"
    assert len(str(error)) < 1000
