"""The run config: every key parsed once, by name, and every mistake refused in one line."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from method_fixtures import METHODS

import protocol.config
from client_app.methods import method_of
from protocol.catalogue import method_names, method_spec
from protocol.config import (
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    RoundsConfig,
    TrainConfig,
    config_from_json,
    default_config,
    presets,
    resolve_config,
)
from protocol.models import MODELS, ModelSpec
from protocol.options import (
    at_least,
    between,
    key_of,
    keys_of,
    more_than,
    one_of,
    option,
    parse_options,
    true_or_false,
)
from protocol.server_optimizers import SERVER_OPTIMIZERS


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


def test_numbers_that_no_float_holds_are_refused_by_name():
    """As any other: `keel run` ended with OverflowError, and a client on what a server sent."""
    for key, default in default_config().items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            for value in (10**400, -(10**400)):
                with pytest.raises(ValueError, match=rf"^{key} = -?1000.*: expected .{{,40}}$"):
                    resolve_config({key: value})


def test_options_are_read_by_name():
    sample = parse_options(Sample, GOOD | {"my.other": 1, "kind": "blue"}, prefix="my.")
    assert sample == Sample(0.1, 3, 1.0, "red", False, 0.0)
    assert type(sample.share) is float  # a whole number will do for a number


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key):
    message = f"^{re.escape(key)} is missing from the config: .*" + re.escape(
        "; give its default under [tool.flwr.app.config.my] in pyproject.toml"
    )
    with pytest.raises(ValueError, match=message):
        parse_options(Sample, {k: v for k, v in GOOD.items() if k != key}, prefix="my.")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        # of another type; a bool is no number though Python says so, nor is a whole float an int
        ("my.local-steps", True, "expected a whole number >= 1, not bool"),
        ("my.local-steps", 3.0, "expected a whole number >= 1, not float"),
        ("my.local-steps", "3", "expected a whole number >= 1, not str"),
        ("my.learning-rate", True, "expected a finite number > 0, not bool"),
        ("my.learning-rate", "0.1", "expected a finite number > 0, not str"),
        ("my.is-on", 1, "expected true or false, not int"),
        ("my.is-on", "true", "expected true or false, not str"),
        ("my.kind", 1, "expected a string (one of red, green), not int"),
        # out of range
        ("my.local-steps", 0, "expected a whole number >= 1"),
        ("my.learning-rate", 0.0, "expected a finite number > 0"),
        ("my.learning-rate", float("inf"), "expected a finite number > 0"),
        ("my.learning-rate", float("nan"), "expected a finite number > 0"),
        ("my.share", 0.0, "expected a number in (0, 1]"),
        ("my.share", 1.0001, "expected a number in (0, 1]"),
        ("my.share", float("nan"), "expected a number in (0, 1]"),
        ("my.kind", "Red", "expected one of red, green; did you mean red?"),
        ("my.lambda", -1e-9, "expected a finite number >= 0"),
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
        ({"learning-rate": 0.1}, "config key = 'learning-rate' is unknown; did you mean lr?"),
        ({"dataset": "mnist"}, "config key = 'dataset' is unknown; did you mean source?"),
        ({"fedprox.m": 1.0}, "config key = 'fedprox.m' is unknown"),
        ({"method": "fedcka", "mu": 5}, "config key = 'mu' is unknown; did you mean fedcka.mu?"),
        ({"local_epochs": 3}, "config key = 'local_epochs' is unknown; did you mean local-epochs"),
        ({"preset": "fedrcl-table1-cifar"}, "did you mean fedrcl-table1-cifar10"),
        (
            {"server-optimizer": "adam"},
            "server-optimizer = 'adam' is unknown; did you mean fedadam",
        ),
        ({"method": "fedprx"}, "method = 'fedprx' is unknown; did you mean fedprox"),
        ({"model": "resnet"}, "model = 'resnet' is unknown; did you mean resnet"),
        ({"client-models": "vgg9,resnet"}, "client-models = 'resnet' is unknown; did you mean"),
        ({"preset": "zzz"}, "preset = 'zzz' is unknown. Allowed: "),
        ({"diagnostics": "vci,drif"}, "diagnostics = 'drif' is unknown; did you mean drift?"),
    ],
)
def test_what_is_unknown_is_refused_with_its_neighbours(keys, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        resolve_config(keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [-1, 20, 27, 65, 100])
def test_an_image_size_out_of_range_is_answered_with_all_that_is_allowed(size):
    with pytest.raises(ValueError, match=rf"^image-size = {size}: expected 0, or 28 to 64$"):
        resolve_config({"image-size": size})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num-rounds", 0), ("fraction-train", 0.0), ("fraction-train", 1.5), ("momentum", 1.0),
        ("lr", -0.1), ("lr-decay", 0.0), ("batch-size", 0), ("partition", "sorted"),
        ("channels", 2), ("image-size", 27), ("image-size", 65), ("weighting", "equal"),
        ("norm", "layer"), ("source", "digit"), ("source", "folder:"), ("device", "gpu"),
        ("device", "cuda:x"),
        ("local-test-fraction", 1.0), ("round-timeout", 0.0), ("alpha", 0.0), ("threads", -1),
        ("threads", 100_000),
        ("flip", 1), ("seed", -1), ("cache-mb", True), ("evaluate-clients", "some"),
    ],
)  # fmt: skip
def test_values_of_the_run_that_are_not_allowed_are_named(key, value):
    with pytest.raises(ValueError, match=rf"^{key} = {re.escape(repr(value))}: .+"):
        resolve_config({key: value})


CONTRADICTIONS = [
    # keys, and what the message names: the key, the value found, what is allowed
    (
        {"model": "cnn-fedreco", "norm": "batch"},
        ["norm = 'batch'", "cnn-fedreco", "expected group"],
    ),
    ({"model": "vgg9", "width": 8}, ["width = 8", "vgg9", "resnet18"]),
    (
        {"method": "fedreco", "server-optimizer": "fedadam"},
        ["server-optimizer = 'fedadam'", "fedreco", "fedavg"],
    ),
    ({"source": "folder:data"}, ["source = 'folder:data'", "absolute"]),
    ({"privacy.epsilon": 1e-300}, ["privacy.epsilon = 1e-300", "0 (no noise) or at least 1e-06"]),
    ({"privacy.epsilon": 1.0}, ["privacy.epsilon = 1.0", "below 1", "0 turns"]),
    (
        {"privacy.epsilon": 0.5, "method": "moon"},
        ["privacy.epsilon = 0.5", "moon", "fedavg, fedavg-ft, fedreco"],
    ),
    (
        {"privacy.epsilon": 0.5, "model": "resnet20"},
        ["privacy.epsilon = 0.5", "resnet20 with BatchNorm", "'group'"],
    ),
    ({"method": "fedreco", "model": "resnet20"}, ["model = 'resnet20'", "fedreco", "'group'"]),
    (
        {"method": "fedreco", "model": "resnet18", "norm": "batch"},
        ["model = 'resnet18'", "fedreco", "'group'"],
    ),
    (
        {"method": "scaffold", "server-optimizer": "fedadam"},
        ["server-optimizer = 'fedadam'", "scaffold", "fedavg"],
    ),
    (
        {"method": "local", "server-optimizer": "fedadam"},
        ["server-optimizer = 'fedadam'", "local", "fedavg"],
    ),
    ({"method": "local", "aggregation": "krum"}, ["aggregation = 'krum'", "local", "mean"]),
    (
        {"method": "fedreco", "weighting": "examples"},
        ["weighting = 'examples'", "fedreco", "auto or uniform"],
    ),
    ({"method": "fedrep", "server-optimizer": "fedacg"}, ["fedacg.beta = 0.001", "fedrep", "0"]),
    (
        {"method": "moon", "client-models": "vgg9,resnet18"},
        ["client-models = 'vgg9,resnet18'", "moon", "fedreco"],
    ),
    (
        {"method": "fedrep", "evaluate-clients": "none"},
        ["evaluate-clients = 'none'", "fedrep", "auto, cohort or all"],
    ),
    (
        {"method": "fedbabu", "fedbabu.fedper-like": True, "evaluate-clients": "none"},
        ["evaluate-clients = 'none'", "fedbabu"],
    ),
    ({"fedntd.convex": True, "fedntd.beta": 1.0}, ["fedntd.beta = 1.0", "below 1"]),
    ({"fedprox.mu": -1.0, "method": "fedavg"}, ["fedprox.mu = -1.0", ">= 0"]),
    ({"fedavgm.beta": 1.0}, ["fedavgm.beta = 1.0", "[0, 1)"]),
    ({"fedavgm.lr": 0.0}, ["fedavgm.lr = 0.0", "> 0"]),
    ({"fedadam.tau": 0.0}, ["fedadam.tau = 0.0", "> 0"]),
    ({"privacy.epsilon": 0.5, "method": "ditto"}, ["privacy.epsilon = 0.5", "ditto"]),
    ({"privacy.epsilon": 0.5, "method": "scaffold"}, ["privacy.epsilon = 0.5", "scaffold"]),
    ({"method": "local", "evaluate-clients": "none"}, ["evaluate-clients = 'none'", "local"]),
    ({"fedadam.beta1": 1.0}, ["fedadam.beta1 = 1.0", "[0, 1)"]),
    ({"fedadam.form": "adam"}, ["fedadam.form = 'adam'", "paper, flower"]),
    ({"fedadam.form": "flower", "fedadam.beta2": 1.0}, ["fedadam.beta2 = 1.0", "flower"]),
    ({"fedacg.lambda": 1.0}, ["fedacg.lambda = 1.0", "[0, 1)"]),
    ({"fedlc.tau": -1.0}, ["fedlc.tau = -1.0", ">= 0"]),
    ({"fedcr.samples": 0}, ["fedcr.samples = 0", "[1, 10000]"]),
    ({"fedcr.samples": 100_000_000}, ["fedcr.samples = 100000000", "[1, 10000]"]),
    ({"fedintr.projection-width": 10**18}, ["fedintr.projection-width = 1000", "[1, 65536]"]),
    ({"fedreco.k-u": f"{'9' * 20} steps"}, ["fedreco.k-u = '9999", "at most 9 digits"]),
    ({"fedbabu.part": "tail"}, ["fedbabu.part = 'tail'", "full, head, extractor"]),
    ({"scaffold.momentum-form": "plain"}, ["scaffold.momentum-form = 'plain'"]),
]


@pytest.mark.parametrize(("keys", "words"), CONTRADICTIONS)
def test_keys_that_contradict_each_other_are_refused_in_one_line(keys, words):
    with pytest.raises(ValueError) as error:
        resolve_config(keys)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "keys",
    [
        {"privacy.epsilon": 0.5, "model": "resnet20", "norm": "group"},
        {"privacy.epsilon": 0.5, "method": "fedreco"},
        {"privacy.epsilon": 1e-6},
        {"method": "fedrep", "server-optimizer": "fedacg", "fedacg.beta": 0.0},
        {"method": "ditto", "server-optimizer": "fedacg"},
        {"method": "fedreco", "client-models": "cnn-fedreco, vgg9", "weighting": "uniform"},
        {"method": "fedbabu", "evaluate-clients": "none"},
        {"method": "local", "server-optimizer": "fedavg", "weighting": "examples"},
        {"source": "npz:/tmp/a.npz"},
        {"source": "folder:~/data"},
        {"device": "cuda:1"},
    ],
)
def test_keys_that_fit_together_are_accepted(keys):
    resolve_config(keys)


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


NO_TORCH = """
import sys
import time
from protocol.catalogue import method_names
from protocol.config import resolve_config

started = time.process_time()
for name in method_names():
    resolve_config({"method": name})
    for mistake in ({"lr": -1.0}, {"norm": "batch"}, {"source": "digit"}, {"num-round": 1}):
        try:
            resolve_config({"method": name, **mistake})
        except ValueError:
            continue
        raise AssertionError(mistake)
for name in ("torch", "numpy", "flwr", "ray", "client_app", "strategies", "models"):
    assert name not in sys.modules, name
assert time.process_time() - started < 2  # 5 configs of each method; 0.3 s on two cores
"""


@pytest.mark.end_to_end
def test_a_config_is_resolved_and_refused_without_torch():
    root = Path(protocol.config.__file__).parent.parent
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True, cwd=root, timeout=60)


@pytest.mark.parametrize("key", ["resume", "output-dir", "data-dir"])
def test_a_relative_path_is_refused(key):
    with pytest.raises(ValueError, match=rf"^{key} = 'runs/here': .*absolute"):
        resolve_config({key: "runs/here"})
    assert resolve_config({key: "/tmp/here"}).flat[key] == "/tmp/here"
    assert resolve_config({key: "~/here"}).flat[key] == "~/here"


@pytest.mark.parametrize("key", ["resume", "output-dir", "data-dir", "source"])
def test_the_folder_of_an_unknown_user_is_refused_by_the_key_s_name(key):
    value = "~no-such-user/x" if key != "source" else "folder:~no-such-user/x"
    with pytest.raises(ValueError, match=rf"^{key} = '{value}': .*absolute"):
        resolve_config({key: value})


# --- presets --------------------------------------------------------------------------------------


def test_an_explicit_key_beats_the_preset_even_where_it_is_the_default():
    preset = "fedintr-table1-fmnist"
    default = default_config()["local-epochs"]
    assert presets()[preset]["local-epochs"] == 10 != default
    assert resolve_config({"preset": preset}).train.local_epochs == 10
    assert resolve_config({"preset": preset, "local-epochs": default}).train.local_epochs == default
    assert resolve_config({"preset": preset, "fedintr.mu": 1.0}).flat["fedintr.mu"] == 1.0
    assert resolve_config({"preset": preset}).rounds.preset == preset


@pytest.mark.parametrize(
    ("keys", "first"),
    [({"method": "fedreco"}, "model = 'own' with"), ({"privacy.epsilon": 0.5}, "privacy.epsilon")],
)
def test_a_model_that_has_batch_norm_alone_is_not_told_to_use_another(monkeypatch, keys, first):
    """Its norm had to be 'group', which was then refused."""
    monkeypatch.setitem(MODELS, "own", ModelSpec(norms=("batch",)))
    with pytest.raises(ValueError, match="own has no other norm layer: choose another") as found:
        resolve_config({"model": "own"} | keys)
    assert str(found.value).startswith(first)
    assert "set norm" not in str(found.value)


def test_a_preset_leaves_alone_what_it_does_not_set():
    config = resolve_config({"preset": "fedintr-table1-fmnist"})
    untouched = default_config().keys() - presets()["fedintr-table1-fmnist"].keys() - {"preset"}
    assert untouched
    assert all(config.flat[key] == default_config()[key] for key in untouched)


@pytest.mark.parametrize("name", presets())
def test_every_preset_resolves(name):
    config = resolve_config({"preset": name})
    assert presets()[name].keys() <= default_config().keys()
    for method, cls in METHODS.items():  # also of those that it is run with for comparison
        config.table(method, cls)


# --- pyproject.toml and the dataclasses -----------------------------------------------------------


def test_every_group_has_every_key_and_none_is_left_over():
    groups = (RoundsConfig, DataConfig, ModelConfig, TrainConfig)
    names = [key for cls in groups for key in keys_of(cls)]
    names += [f"privacy.{key}" for key in keys_of(PrivacyConfig)]
    assert len(set(names)) == len(names)
    plain = {key for key in default_config() if "." not in key or key.startswith("privacy.")}
    assert plain == set(names)


def test_every_table_is_declared_by_a_method_or_a_server_optimizer_and_no_key_is_left_over():
    in_tables = {k for k in default_config() if "." in k and not k.startswith("privacy.")}
    tables = {name: method_spec(name).options for name in method_names()} | SERVER_OPTIMIZERS
    declared = {f"{name}.{key}" for name, options in tables.items() for key in keys_of(options)}
    assert in_tables == declared


@pytest.mark.parametrize("keys", [{"method": "fedprox"}, {"fedprox.nu": 2.0}])
def test_an_option_that_only_pyproject_has_is_refused(keys, monkeypatch):
    defaults = default_config() | {"fedprox.nu": 1.0}
    monkeypatch.setattr("protocol.config._defaults", lambda: defaults)
    with pytest.raises(ValueError, match=r"^fedprox.nu = [12].0: fedprox has no such option.*mu"):
        resolve_config(keys)
    assert resolve_config({"method": "moon"}).rounds.method == "moon"  # others are not concerned


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_table_parses_with_the_defaults(name):
    config = resolve_config({"method": name})
    method = method_of(config)
    assert type(method) is METHODS[name]
    for field in dataclasses.fields(method):
        assert getattr(method, field.name) == config.flat[f"{name}.{key_of(field)}"]


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


@pytest.mark.parametrize("text", ["1", "null", "[]", "[" * 100_000])
def test_a_json_that_is_no_object_is_refused(text):
    """A server may send it: a client's error about it ended in one of another kind."""
    with pytest.raises(ValueError, match=r"^the run's config is not a JSON object"):
        config_from_json(text)
