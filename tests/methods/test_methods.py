"""Every method that is found: its declaration, its two halves, one round, its client state.

Nothing here lists a method: a new file in client_app/methods is tested as it is added.
"""

import ast
import dataclasses
from contextlib import suppress
from pathlib import Path

import pytest
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    Client,
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import METHODS

import client_app.objective
import protocol.catalogue
import strategies
from client_app.handlers import check_state
from client_app.method import Method, Update, phases_of
from client_app.methods import method_of
from client_app.objective import LocalObjective
from client_app.setup import build_network
from client_app.trainer import train_phase
from protocol.catalogue import FLAGS, imported, method_names, method_spec
from protocol.config import default_config
from protocol.messages import read_reply
from protocol.options import key_of
from strategies import Average, server_half, strategy_for

each_method = pytest.mark.parametrize("name", METHODS)


@each_method
def test_the_catalogue_says_what_the_class_says(name):
    spec, cls = method_spec(name), METHODS[name]
    assert spec.class_name == cls.__name__
    assert {flag: getattr(spec, flag) for flag in FLAGS} == {f: getattr(cls, f) for f in FLAGS}
    assert spec.is_local_objective == issubclass(cls, LocalObjective)
    read, written = dataclasses.fields(spec.options), dataclasses.fields(cls)
    assert [(f.name, f.type) for f in read] == [(f.name, f.type) for f in written]
    for mine, other in zip(read, written, strict=True):
        for entry in ("description", "source", "key"):
            assert mine.metadata[entry] == other.metadata[entry]
        constraints = [f.metadata["constraint"] for f in (mine, other)]
        assert constraints[0].description == constraints[1].description
    declared = {f"{name}.{key_of(f)}" for f in written}
    assert declared == {key for key in default_config() if key.startswith(f"{name}.")}
    assert {*spec.options.duration_keys} == {*cls.duration_keys} <= {"local-epochs", *declared}
    assert {*spec.options.rate_keys} == {*cls.rate_keys} <= {"lr", *declared}


@each_method
def test_options_and_flags_of_a_run_are_the_same_in_both_halves(name):
    config = make_config(method=name)
    method, options = method_of(config), config.method_options()
    assert dataclasses.asdict(method) == dataclasses.asdict(options)
    assert {f: getattr(method, f) for f in FLAGS} == {f: getattr(options, f) for f in FLAGS}


def test_a_flag_may_follow_an_option():
    private = make_config(method="fedbabu", fedbabu__fedper_like=True)
    for options in (method_of(private), private.method_options()):
        assert options.is_stateful
        assert not options.has_global_model
    for options in (METHODS["fedbabu"], method_spec("fedbabu").options):
        assert not options.is_stateful
        assert options.has_global_model


@each_method
def test_a_method_is_documented(name):
    spec = method_spec(name)
    assert spec.summary.endswith(".")
    assert spec.paper
    assert all(f.metadata["description"] for f in dataclasses.fields(spec.options))
    assert spec.default_weighting in ("examples", "uniform")
    assert spec.shared_part in ("model", "extractor", "nothing")


@each_method
def test_the_server_half_is_its_own_file_or_the_average(name):
    stem = name.replace("-", "_")
    own = Path(strategies.__file__).parent / f"{stem}.py"
    assert own.is_file() == method_spec(name).has_own_server_half
    assert (server_half(name) is Average) != own.is_file()


@each_method
def test_a_round_returns_what_the_server_half_expects(name):
    config = make_config(method=name, batch_size=16)
    strategy = strategy_for(config, build_network(config, SHAPE, NUM_CLASSES))
    initial = strategy.initial_arrays(build_network(config, SHAPE, NUM_CLASSES))
    ctx = make_round(config, received=initial, extra=strategy.extra())
    update = method_of(config).train(ctx)
    for sent, expected in (
        (update.arrays, strategy.expected(initial)),
        (update.extra, strategy.expected_extra()),
    ):
        assert {k: (a.shape, a.dtype) for k, a in sent.items()} == {
            k: (a.shape, a.dtype) for k, a in expected.items()
        }
        assert all(array.isfinite().all() for array in sent.values())
    for arrays in (update.arrays, update.extra, *update.state.values()):
        assert not any(array.requires_grad for array in arrays.values())
    assert update.num_steps > 0
    assert update.terms
    check_state(method_of(config), update)


@each_method
def test_a_round_trains_a_network_that_an_evaluation_left_frozen(name):
    config = make_config(method=name, batch_size=100)
    strategy = strategy_for(config, build_network(config, SHAPE, NUM_CLASSES))
    received = strategy.initial_arrays(build_network(config, SHAPE, NUM_CLASSES))
    now = make_round(config, received=received, extra=strategy.extra())
    now.model.eval().requires_grad_(False)
    method = method_of(config)
    phases = phases_of(method, now)
    descent, trained = None, set()
    with suppress(StopIteration):
        while True:
            phase = phases.send(descent)
            ids = {id(p) for p in phase.parameters}
            for module in now.model.modules():
                if ids & {id(p) for p in module.parameters(recurse=False)}:
                    assert module.training
                    trained.add(module)
            assert all(p.requires_grad for p in phase.parameters)
            descent = train_phase(now, phase)
    assert trained


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fedavg-ft", "epochs"),
        ("fedbabu", "epochs"),
        ("fedcr", "final_head_epochs"),
        ("fedrep", "final_head_epochs"),
    ],
)
def test_a_method_is_tuned_for_evaluation_if_that_has_epochs(name, key):
    for epochs in (0, 1):
        method = method_of(make_config(method=name, **{f"{name}__{key}": epochs}))
        assert method.is_tuned_for_evaluation() == bool(epochs)


LIMITS = [
    *((n, {}) for n, cls in METHODS.items() if cls.equals_fedavg_at),
    *((n, {f"{n}__projection": "mlp-side"}) for n in ("moon", "fedcka")),
]


@pytest.mark.parametrize(("name", "form"), LIMITS)
def test_at_its_limit_a_method_is_fedavg_to_the_bit_and_otherwise_not(name, form):
    """Also where gradients are clipped by a norm over all weights, those of heads included."""
    keys = {"batch_size": 4, "local_epochs": 2, "clip_norm": 0.2, "weight_decay": 0.001}
    plain = make_config(**keys)
    at_limit = {f"{name}__{k}": value for k, value in METHODS[name].equals_fedavg_at.items()}
    received = initial(make_config(method=name, **form))
    shared = {key: received[key] for key in initial(plain)}
    fedavg = method_of(plain).train(make_round(plain, received=shared)).arrays

    def trained(**options):
        config = make_config(method=name, **keys, **form, **options)
        state = {"previous": initial(config, seed=5)} if METHODS[name].is_stateful else {}
        return method_of(config).train(make_round(config, received=received, state=state)).arrays

    assert_same_bits(trained(**at_limit), fedavg, names=fedavg)
    arrays = trained()
    assert differ(fedavg, arrays)


@pytest.mark.parametrize("weight", ["fedntd__beta", "fitnet__lambda"])
def test_distilling_from_the_model_it_starts_from_leaves_the_first_step(weight):
    received = initial(make_config(), seed=5)
    plain = train(make_config(batch_size=100), received=received)
    config = make_config(method=weight.partition("__")[0], batch_size=100, **{weight: 50.0})
    update = train(config, received=received)
    assert update.num_steps == 1
    assert update.terms["penalty"] == pytest.approx(0, abs=1e-6)
    assert_close(update.arrays, plain.arrays, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "form"), LIMITS)
def test_at_its_limit_a_penalty_is_zero(name, form, monkeypatch):
    """Training leaves it out there; computed, it changes nothing but the norm that clips."""
    monkeypatch.setattr(client_app.objective, "is_at_limit", lambda objective: False)
    keys = {"batch_size": 4, "local_epochs": 2}
    plain = make_config(**keys)
    at_limit = {f"{name}__{k}": value for k, value in METHODS[name].equals_fedavg_at.items()}
    config = make_config(method=name, **keys, **form, **at_limit)
    received = initial(config)
    shared = {key: received[key] for key in initial(plain)}
    fedavg = method_of(plain).train(make_round(plain, received=shared)).arrays
    state = {"previous": initial(config, seed=5)} if METHODS[name].is_stateful else {}
    ctx = make_round(config, received=received, state=state)
    assert_same_bits(method_of(config).train(ctx).arrays, fedavg, names=fedavg)


@each_method
def test_client_state_comes_back_from_its_file(name, tmp_path):
    config = make_config(method=name, batch_size=16)
    strategy = strategy_for(config, build_network(config, SHAPE, NUM_CLASSES))
    initial = strategy.initial_arrays(build_network(config, SHAPE, NUM_CLASSES))
    client = Client(config, tmp_path)
    for number in (1, 2):
        reply = client.ask("train", number, initial, extra=strategy.extra(), counted=number - 1)
        assert read_reply(reply).round == number
    files = list(tmp_path.glob("clients/*/round-*.safetensors"))
    assert bool(files) == method_of(config).is_stateful


# --- what a new method may get wrong --------------------------------------------------------------


def test_state_of_a_method_that_is_not_stateful_is_refused_with_the_class_and_the_flag():
    update = Update({}, 1, {}, state={"mine": {}})
    with pytest.raises(
        TypeError, match=r"FedAvg\.train returned client state .*FedAvg\.is_stateful is False"
    ):
        check_state(method_of(make_config()), update)
    with pytest.raises(TypeError, match=r"MOON\.train returned no client state .* is True"):
        check_state(method_of(make_config(method="moon")), Update({}, 1, {}))


def test_a_method_that_overrides_nothing_says_what_to_override():
    @dataclasses.dataclass(frozen=True)
    class Empty(Method):
        """Nothing."""

    with pytest.raises(NotImplementedError, match=r"Empty overrides nothing: override `phases`"):
        Empty().train(None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of methods."""
    monkeypatch.setattr(protocol.catalogue, "methods_folder", tmp_path)
    method_names.cache_clear()
    yield tmp_path
    method_names.cache_clear()
    method_spec.cache_clear()


METHOD = '''"""{name}: an example."""

from dataclasses import dataclass
from typing import ClassVar

from client_app.{module} import {base}
from protocol.options import at_least, option


@dataclass(frozen=True)
class {name}({base}):
    """An example."""

    mu: float = option({constraint}, "weight")
'''


def write(folder, stem, module="method", base="Method", constraint="at_least(0)"):
    name = stem.title().replace("_", "")
    text = METHOD.format(name=name, module=module, base=base, constraint=constraint)
    assert ast.parse(text)
    (folder / f"{stem}.py").write_text(text)


def test_a_method_is_found_by_its_file(folder):
    write(folder, "my_method")
    assert method_names() == ("my-method",)
    spec = method_spec("my-method")
    assert (spec.class_name, spec.summary) == ("MyMethod", "MyMethod: an example.")
    assert [f.name for f in dataclasses.fields(spec.options)] == ["mu"]


def test_a_method_may_inherit_the_options_of_another(folder):
    write(folder, "my_method", module="methods.fedprox", base="FedProx")
    spec = method_spec("my-method")
    assert [f.name for f in dataclasses.fields(spec.options)] == ["mu", "half", "squared"]
    assert spec.is_local_objective


def test_a_file_without_a_method_or_with_two_is_refused(folder):
    (folder / "none.py").write_text('"""Nothing."""\n\nclass Helper:\n    """No method."""\n')
    write(folder, "two")
    text = (folder / "two.py").read_text()
    (folder / "two.py").write_text(text + text.replace("Two", "Other"))
    with pytest.raises(ValueError, match=r"none\.py defines 0 methods \(none\): expected one"):
        method_spec("none")
    with pytest.raises(ValueError, match=r"two\.py defines 2 methods \(Two, Other\): expected one"):
        method_spec("two")


def test_an_option_that_needs_torch_to_be_read_is_refused(folder):
    write(folder, "mine", constraint="one_of(*torch.names)")
    with pytest.raises(ValueError, match=r"mine\.py: .*use literals and the functions"):
        method_spec("mine")


def test_an_error_of_syntax_is_one_line_with_its_place(folder, monkeypatch):
    (folder / "mine.py").write_text("x = 1\ny = = 2\n")
    message = r"mine\.py:2: invalid syntax"
    with pytest.raises(ValueError, match=message):
        method_spec("mine")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match=message):
        imported("mine")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("from math import tua", "ImportError: cannot import name 'tua'"),
        ("dataclass(type('A', (), {'__annotations__': {'x': int}, 'x': []}))", "ValueError: mut"),
    ],
)
def test_an_error_of_an_import_is_one_line_with_its_place(folder, monkeypatch, line, reason):
    (folder / "other.py").write_text(f"from dataclasses import dataclass\n\n{line}\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match=rf"other\.py:3: {reason}"):
        imported("other")


def with_line(folder, line):
    """A method whose class body has this line too."""
    write(folder, "my_method", module="objective", base="LocalObjective")
    path = folder / "my_method.py"
    path.write_text(f"{path.read_text()}    {line}\n")


def test_a_flag_needs_no_annotation(folder):
    with_line(folder, 'supports_weighting, default_weighting = False, "uniform"')
    spec = method_spec("my-method")
    assert (spec.supports_weighting, spec.default_weighting) == (False, "uniform")
    assert [f.name for f in dataclasses.fields(spec.options)] == ["mu"]


def test_a_function_that_nothing_calls_is_refused(folder):
    with_line(folder, "def penalti(self, batch): return batch.logits.sum()")
    message = r"my_method\.py:\d+: MyMethod\.penalti: .*; did you mean penalty\?"
    with pytest.raises(ValueError, match=message):
        method_spec("my-method")


def test_a_function_of_any_base_class_and_a_private_helper_are_accepted(folder):
    with_line(folder, "def penalty(self, batch): return self._half(batch)")
    with open(folder / "my_method.py", "a") as file:
        file.write("\n    def personal_model(self, ctx, state): return None\n")
        file.write("\n    def _half(self, batch): return batch.logits.sum() / 2\n")
    assert method_spec("my-method").is_local_objective


@pytest.mark.parametrize("annotation", [": ClassVar[bool]", ""])
def test_a_misspelt_flag_is_refused(folder, annotation):
    with_line(folder, f"has_own_server_hlaf{annotation} = True")
    with pytest.raises(
        ValueError, match=r"MyMethod\.has_own_server_hlaf: .* did you mean has_own_server_half\?"
    ):
        method_spec("my-method")


def test_a_server_half_without_its_flag_is_refused(monkeypatch):
    spec = dataclasses.replace(method_spec("fedreco"), has_own_server_half=False)
    monkeypatch.setattr(strategies, "method_spec", lambda name: spec)
    with pytest.raises(
        ValueError, match=r"has_own_server_half = False .*, and strategies/fedreco\.py defines 1"
    ):
        server_half("fedreco")


def test_a_function_of_a_server_half_that_nothing_calls_is_refused(monkeypatch):
    half = server_half("fedreco")
    monkeypatch.setattr(half, "next_arays", lambda self, current, replies: current, raising=False)
    with pytest.raises(ValueError, match=r"tests/methods/.*; did you mean next_arrays\?"):
        server_half("fedreco")


def test_a_server_half_that_is_missing_is_named(monkeypatch):
    spec = dataclasses.replace(method_spec("moon"), has_own_server_half=True)
    monkeypatch.setattr(strategies, "method_spec", lambda name: spec)
    with pytest.raises(ValueError, match=r"moon .*strategies/moon\.py does not exist"):
        server_half("moon")
