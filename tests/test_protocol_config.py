"""The run config: every key parsed once, by name, and every mistake refused in one line."""

import dataclasses
import json
import re

import pytest
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    keel_home_of_tests,  # noqa: F401 (used by being here)
    make_config,
    make_round,
)

from client_app.methods import METHODS, method_of
from client_app.setup import build_network
from protocol.config import (
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    RoundsConfig,
    TrainConfig,
    all_group_keys,
    config_from_json,
    default_config,
    presets,
    resolve_config,
)
from protocol.options import (
    at_least,
    between,
    dump_options,
    key_of,
    keys_of,
    more_than,
    one_of,
    option,
    parse_options,
    true_or_false,
)
from server_app.federation import check_config
from strategies import STRATEGIES
from strategies.server_optimizers import SERVER_OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Sample:
    """One option of every kind."""

    learning_rate: float = option(more_than(0))
    local_steps: int = option(at_least(1))
    share: float = option(between(0, 1, open_low=True))
    kind: str = option(one_of("red", "green"))
    is_on: bool = option(true_or_false())
    lambda_: float = option(at_least(0), key="lambda")


GOOD = {
    "my.learning-rate": 0.1,
    "my.local-steps": 3,
    "my.share": 1,
    "my.kind": "red",
    "my.is-on": False,
    "my.lambda": 0.0,
}


def test_options_are_read_by_name():
    sample = parse_options(Sample, GOOD | {"my.other": 1, "kind": "blue"}, prefix="my.")
    assert sample == Sample(0.1, 3, 1.0, "red", False, 0.0)
    assert type(sample.share) is float  # a whole number will do for a number
    assert dump_options(sample, "my.") == GOOD


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=f"^{re.escape(key)} is missing from the config: "):
        parse_options(Sample, {k: v for k, v in GOOD.items() if k != key}, prefix="my.")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        # of another type; a bool is no number though Python says so, nor is a whole float an int
        ("my.local-steps", True, "a whole number is needed (a finite number >= 1), not bool"),
        ("my.local-steps", 3.0, "a whole number is needed (a finite number >= 1), not float"),
        ("my.local-steps", "3", "a whole number is needed (a finite number >= 1), not str"),
        ("my.learning-rate", True, "a number is needed (a finite number > 0), not bool"),
        ("my.learning-rate", "0.1", "a number is needed (a finite number > 0), not str"),
        ("my.is-on", 1, "true or false is needed (true or false), not int"),
        ("my.is-on", "true", "true or false is needed (true or false), not str"),
        ("my.kind", 1, "a string is needed (one of red, green), not int"),
        # out of range
        ("my.local-steps", 0, "it has to be a finite number >= 1"),
        ("my.learning-rate", 0.0, "it has to be a finite number > 0"),
        ("my.learning-rate", float("inf"), "it has to be a finite number > 0"),
        ("my.learning-rate", float("nan"), "it has to be a finite number > 0"),
        ("my.share", 0.0, "it has to be a number in (0, 1]"),
        ("my.share", 1.0001, "it has to be a number in (0, 1]"),
        ("my.share", float("nan"), "it has to be a number in (0, 1]"),
        ("my.kind", "Red", "it has to be one of red, green"),
        ("my.lambda", -1e-9, "it has to be a finite number >= 0"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(key, value, allowed):
    with pytest.raises(ValueError) as error:
        parse_options(Sample, GOOD | {key: value}, prefix="my.")
    assert str(error.value) == f"{key} = {value!r}: {allowed}"


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (between(0, 1), [0, 0.5, 1], [-0.1, 1.1]),
        (between(0, 1, open_low=True), [0.1, 1], [0]),
        (between(0, 1, open_high=True), [0, 0.9], [1]),
        (between(0, 1, open_low=True, open_high=True), [0.5], [0, 1]),
        (at_least(2), [2, 3], [1.9, float("inf")]),
        (more_than(2), [2.1], [2]),
    ],
)
def test_intervals_have_the_ends_that_they_say(allowed, inside, outside):
    assert all(allowed.holds(v) for v in inside)
    assert not any(allowed.holds(v) for v in [*outside, float("nan")])


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num-round": 3}, "config key = 'num-round' is unknown; did you mean num-rounds"),
        ({"fedprox.m": 1.0}, "config key = 'fedprox.m' is unknown"),
        ({"local_epochs": 3}, "config key = 'local_epochs' is unknown; did you mean local-epochs"),
        ({"preset": "fedrcl-table1-cifar"}, "did you mean fedrcl-table1-cifar10"),
        ({"preset": "zzz"}, "preset = 'zzz' is unknown. Allowed: "),
    ],
)
def test_what_is_unknown_is_refused_with_its_neighbours(keys, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        resolve_config(keys)
    assert "\n" not in str(error.value)


def test_an_unknown_method_is_refused_with_its_neighbours():
    with pytest.raises(ValueError, match=r"^method = 'fedprx' is unknown; did you mean fedprox"):
        method_of(resolve_config({"method": "fedprx"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num-rounds", 0), ("fraction-train", 0.0), ("fraction-train", 1.5), ("momentum", 1.0),
        ("lr", -0.1), ("lr-decay", 0.0), ("batch-size", 0), ("partition", "sorted"),
        ("channels", 2), ("image-size", 27), ("image-size", 65), ("weighting", "equal"),
        ("norm", "layer"),
        ("local-test-fraction", 1.0), ("round-timeout", 0.0), ("alpha", 0.0), ("threads", -1),
        ("flip", 1), ("seed", -1), ("cache-mb", True), ("evaluate-clients", "some"),
    ],
)  # fmt: skip
def test_values_of_the_run_that_are_not_allowed_are_named(key, value):
    with pytest.raises(ValueError, match=rf"^{key} = {re.escape(repr(value))}: .+"):
        resolve_config({key: value})


@pytest.mark.parametrize("key", ["resume", "output-dir", "data-dir"])
def test_a_relative_path_is_refused(key):
    with pytest.raises(ValueError, match=rf"^{key} = 'runs/here': .*absolute"):
        resolve_config({key: "runs/here"})
    assert resolve_config({key: "/tmp/here"}).flat[key] == "/tmp/here"
    assert resolve_config({key: "~/here"}).flat[key] == "~/here"


# --- presets --------------------------------------------------------------------------------------


def test_an_explicit_key_beats_the_preset_even_where_it_is_the_default():
    preset = "fedintr-table1-fmnist"
    default = default_config()["local-epochs"]
    assert presets()[preset]["local-epochs"] == 10 != default
    assert resolve_config({"preset": preset}).train.local_epochs == 10
    assert resolve_config({"preset": preset, "local-epochs": default}).train.local_epochs == default
    assert resolve_config({"preset": preset, "fedintr.mu": 1.0}).flat["fedintr.mu"] == 1.0
    assert resolve_config({"preset": preset}).rounds.preset == preset


def test_a_preset_leaves_alone_what_it_does_not_set():
    config = resolve_config({"preset": "fedintr-table1-fmnist"})
    untouched = default_config().keys() - presets()["fedintr-table1-fmnist"].keys() - {"preset"}
    assert untouched
    assert all(config.flat[key] == default_config()[key] for key in untouched)


@pytest.mark.parametrize("name", presets())
def test_every_preset_resolves(name):
    config = resolve_config({"preset": name})
    assert presets()[name].keys() <= default_config().keys()
    check_config(config)
    method_of(config)
    for method in METHODS:  # and for every method that it is run with for comparison
        method_of(resolve_config({"preset": name, "method": method}))


# --- pyproject.toml and the dataclasses -----------------------------------------------------------


def test_every_group_has_every_key_and_none_is_left_over():
    groups = (RoundsConfig, DataConfig, ModelConfig, TrainConfig)
    names = [key for cls in groups for key in keys_of(cls)]
    names += [f"privacy.{key}" for key in keys_of(PrivacyConfig)]
    assert len(set(names)) == len(names)
    plain = {key for key in default_config() if "." not in key or key.startswith("privacy.")}
    assert plain == set(names) == all_group_keys()


class Recorded(dict):
    """A flat config that remembers which of its keys were read."""

    def __init__(self, flat):
        super().__init__(flat)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


def recorded(**keys):
    config = make_config(**keys)
    return dataclasses.replace(config, flat=Recorded(config.flat))


def keys_read_of_method(name):
    """The keys that both halves read of their tables."""
    config = recorded(method=name)
    method_of(config)
    STRATEGIES[name](config, build_network(config, SHAPE, NUM_CLASSES))
    return config.flat.read


def keys_read_of_server_step(name):
    """The keys that the server reads, and a client as it trains (FedACG's has a term there)."""
    config = recorded(server_optimizer=name)
    STRATEGIES["fedavg"](config, build_network(config, SHAPE, NUM_CLASSES))
    method_of(config).train(make_round(config))
    return config.flat.read


def test_every_key_of_a_table_is_read_by_a_half_of_its_method_or_by_its_server_step():
    in_tables = default_config().keys() - all_group_keys()
    assert {key.partition(".")[0] for key in in_tables} <= METHODS.keys() | SERVER_OPTIMIZERS.keys()
    read = set().union(*(keys_read_of_method(name) for name in METHODS))
    read |= set().union(*(keys_read_of_server_step(name) for name in SERVER_OPTIMIZERS))
    assert read & in_tables == in_tables


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_table_parses_with_the_defaults(name):
    config = resolve_config({"method": name})
    method = method_of(config)
    assert type(method) is METHODS[name]
    for field in dataclasses.fields(method):
        assert getattr(method, field.name) == config.flat[f"{name}.{key_of(field)}"]
    assert name in STRATEGIES


def test_every_default_is_of_the_type_that_its_field_has():
    for key, value in default_config().items():
        assert resolve_config({key: value}).flat[key] == value


# --- json -----------------------------------------------------------------------------------------


def test_what_clients_are_sent_is_the_same_config():
    keys = {"lr": 1, "method": "fedintr", "fedintr.mu": 3.5, "seed": 7, "source": "npz:/tmp/ü.npz"}
    config = resolve_config({"preset": "fedrcl-table1-cifar10"} | keys)
    text = config.to_json()
    assert "\n" not in text
    back = config_from_json(text)
    for part in ("rounds", "data", "model", "train", "privacy"):
        assert getattr(back, part) == getattr(config, part)
    assert dict(back.flat) == dict(config.flat)
    assert method_of(back) == method_of(config)
    assert back.train.lr == 1.0
    assert config_from_json(text) is back  # parsed once a process


def test_a_json_that_lacks_a_key_is_refused():
    flat = json.loads(resolve_config({}).to_json())
    del flat["batch-size"]
    with pytest.raises(ValueError, match="batch-size is missing from the config"):
        config_from_json(json.dumps(flat))
