"""A mistake in one's own method is named with its function or file, without a traceback."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from client_app.handlers import check_update
from client_app.method import Update, phases_of
from client_app.methods import method_class
from client_app.methods.fedavg import FedAvg
from client_app.methods.moon import MOON
from client_app.objective import LocalObjective
from client_app.split_model import part_phase
from keel.cli.main import main
from protocol import catalogue
from protocol.catalogue import method_names, method_spec, options_class
from protocol.code import _digest_of, check_signatures, place_of
from server_app.summary import read_summary
from strategies import Average, server_half
from strategies.server_optimizers import ServerOptimizer
from tests.run_fixtures import SMALL, final_model, same_bits

QUICK = {"method": "fedavg", "num-rounds": 1, "local-epochs": 1}


@pytest.fixture(autouse=True)
def _reads_files_anew():
    """Pytest may give a test the directory of one that passed, so another `mine.py` lies there."""
    catalogue._parsed.cache_clear()
    options_class.cache_clear()


UNLIKE = "arrays unlike those it was given: array "


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda w: None, "NoneType: expected a dict of tensors"),
        (
            lambda w: {n: a.numpy() for n, a in w.items()},
            r"'[\w.]+': ndarray: expected a dict of tensors",
        ),
        (lambda w: dict(list(w.items())[1:]), UNLIKE + r"'[\w.]+' is missing \(1 of"),
        (lambda w: {**w, "foo": torch.zeros(1)}, UNLIKE + "'foo' is unknown"),
        (lambda w: {n: a.double() for n, a in w.items()}, UNLIKE + "'.+' is torch.float64"),
        (lambda w: {n: a[None] for n, a in w.items()}, UNLIKE + r"'.+' is \[1, "),
    ],
)
def test_the_arrays_of_a_server_half_are_checked(returned, found, run, monkeypatch):
    """A forgotten `return` gave a finished run with the initial model."""

    def mistaken(self, current, replies):
        return returned(current)

    monkeypatch.setattr(Average, "next_arrays", mistaken)
    name = re.escape(mistaken.__qualname__)
    with pytest.raises(ValueError, match=rf"^{name} \(.*:\d+\) returned {found}"):
        run(QUICK)


@pytest.mark.parametrize(
    "name", ["extra", "own_extra", "own_state", "expected", "expected_extra", "initial_arrays"]
)
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "NoneType"),
        ({"h": 3.0}, "'h': float"),
        ({"h": torch.zeros(3) * 1j}, "'h': torch.complex64"),
    ],
)
def test_what_else_a_server_half_returns_is_checked(name, value, found, run, monkeypatch):
    def mistaken(self, *_):
        return value

    monkeypatch.setattr(Average, name, mistaken)
    with pytest.raises(ValueError, match=rf"mistaken \(.*:\d+\) returned {found}: expected a dict"):
        run(QUICK)


@pytest.mark.parametrize(
    ("value", "found"), [(None, "None"), ([1.0], "[1.0]"), ([0.0] * 4, "[0.0, 0.0,"), (3, "3")]
)
def test_the_weights_of_a_server_half_are_checked(value, found, run, monkeypatch):
    """One number too few ended in: zip() argument 2 is shorter than argument 1."""

    def mistaken(self, replies):
        return value

    monkeypatch.setattr(Average, "counts", mistaken)
    expected = rf"mistaken \(.*:\d+\) returned {re.escape(found)}.*: expected 4 numbers"
    with pytest.raises(ValueError, match=expected):
        run(QUICK)


def test_an_array_that_the_global_model_lacks_is_refused_before_round_1(run, monkeypatch):
    """The server trained a round, and could not load the model into its network."""
    arrays = Average.initial_arrays

    def mistaken(self, model):
        return arrays(self, model) | {"h": torch.zeros(3)}

    monkeypatch.setattr(Average, "initial_arrays", mistaken)
    with pytest.raises(ValueError, match=r"mistaken \(.*:\d+\) returned 'h', which cnn-fed"):
        run(QUICK)


def test_the_state_of_a_server_optimizer_is_checked(run, monkeypatch):
    """It ended in a traceback: 'int' object has no attribute 'is_floating_point'."""

    def mistaken(self):
        return {"steps": 1}

    monkeypatch.setattr(ServerOptimizer, "state", mistaken)
    with pytest.raises(ValueError, match=r"mistaken \(.*:\d+\) returned 'steps': int: expected"):
        run(QUICK)


def test_a_server_half_may_make_its_arrays_in_inference_mode(run, monkeypatch):
    """It ended with: Inference tensors do not track version counter."""

    class Half(Average):
        h = torch.zeros(2)

        @torch.inference_mode()
        def next_arrays(self, current, replies):
            self.h = self.h + 1
            return {n: 1 * array for n, array in super().next_arrays(current, replies).items()}

        def extra(self):
            return {"h": self.h}

        def own_state(self):
            return {"h": self.h}

    whole = final_model(run(QUICK | {"num-rounds": 2}))
    monkeypatch.setattr("strategies.server_half", lambda method: Half)
    assert same_bits(final_model(run(QUICK | {"num-rounds": 2})), whole)


def test_a_server_half_that_does_not_initialise_its_base_is_named(run, monkeypatch):
    """`keel run` ended with a traceback: 'Half' object has no attribute 'config'."""

    class Half(Average):
        def __init__(self, config, model):
            self.h = {}

    monkeypatch.setattr("strategies.server_half", lambda method: Half)
    with pytest.raises(ValueError, match=r"Half.__init__ \(.*:\d+\) does not call super\(\)\.__i"):
        run(QUICK)


def test_arrays_for_one_client_need_names_of_their_own(run, monkeypatch):
    """In one process the client's own replaced those of all; between processes it refused both."""

    def mistaken(self, client):
        return {"h": torch.ones(1), "own": torch.ones(1)}

    monkeypatch.setattr(Average, "extra", lambda self: {"h": torch.zeros(1)})
    monkeypatch.setattr(Average, "own_extra", mistaken)
    with pytest.raises(ValueError, match=r"mistaken \(.*:\d+\) returned 'h', as `extra` does: exp"):
        run(QUICK)


def test_an_error_in_a_server_half_is_one_line_with_its_place(tmp_path, monkeypatch, capsys):
    """FedReCo's half then reads the keys of None."""
    monkeypatch.setattr(Average, "average", lambda self, replies: None)
    keys = {**SMALL, **QUICK, "method": "fedreco", "local-test-fraction": 0.2}
    words = [f"{key}={str(value).lower()}" for key, value in keys.items()]
    assert main(["run", *words, f"output-dir={tmp_path}", "--clients", "2"]) == 1
    place = r"TypeError: 'NoneType' object is not iterable \(strategies/fedreco.py:\d+\)"
    assert re.fullmatch(f"error: {place}", capsys.readouterr().err.splitlines()[-1])
    (folder,) = (path.parent for path in tmp_path.glob("*/config.json"))
    assert re.fullmatch(f"failed: {place}", read_summary(folder)["status"])


@dataclass(frozen=True)
class Stateful(FedAvg):
    is_stateful: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("kind", "state", "found"),
    [
        (Stateful, {"w": torch.zeros(3)}, "Stateful: Update.state['w'] is Tensor: expected a dict"),
        (Stateful, {"m": 3.0}, "Stateful: Update.state['m'] is float: expected a dict of tensors"),
        (Stateful, {"m": {"w": 3.0}}, "Update.state['m'] is float in 'w': expected a dict of ten"),
        (Stateful, {"m": {"w": np.zeros(3)}}, "Update.state['m'] is ndarray in 'w': expected a d"),
        (Stateful, {"m": {0: torch.zeros(3)}}, "Stateful: Update.state['m'] has [0]: expected str"),
        (Stateful, {"a/b": {"w": torch.zeros(3)}}, "no '/' in a group's"),
        (Stateful, {"m": {"w": torch.zeros(3) * 1j}}, "['w'] is torch.complex64: expected one of"),
    ],
)
def test_client_state_of_another_form_is_named(kind, state: Any, found):
    update = Update(arrays={}, num_steps=1, terms={}, state=state)
    with pytest.raises(TypeError, match=re.escape(found)):
        check_update(kind(), update)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("arrays", None, ": Update.arrays is NoneType: expected a dict of tensors"),
        ("arrays", {"w": np.zeros(3)}, ": Update.arrays is ndarray in 'w': expected a dict of"),
        ("extra", {"v": 3.0}, ": Update.extra is float in 'v': expected a dict of tensors"),
        ("terms", None, ": Update.terms is NoneType: expected a dict of numbers"),
        ("state", None, ": Update.state is NoneType: expected a dict of dicts of tensors"),
        ("num_steps", "many", "Update.num_steps is 'many': expected an int"),
        ("num_steps", 1.5, "FedAvg: Update.num_steps is 1.5: expected an int"),
        ("terms", {"a": torch.zeros(2)}, "Update.terms['a'] is tensor([0., 0.]): expected a num"),
    ],
)
def test_an_update_with_a_field_of_another_type_is_named(field, value: Any, found):
    """A NumPy array ended a round with: 'numpy.ndarray' object has no 'untyped_storage'."""
    fields = {"arrays": {}, "num_steps": 1, "terms": {}} | {field: value}
    with pytest.raises(TypeError, match=re.escape(found)):
        check_update(FedAvg(), Update(**fields))


def test_numbers_of_an_update_that_are_tensors_are_converted():
    update = Update(arrays={}, num_steps=torch.tensor(3), terms={"supervised": torch.tensor(0.5)})
    check_update(FedAvg(), update)
    assert (type(update.num_steps), update.num_steps) == (int, 3)
    assert (type(update.terms["supervised"]), update.terms) == (float, {"supervised": 0.5})


def test_a_part_of_the_model_that_does_not_exist_is_named(run, monkeypatch):
    """The reason was "KeyError: 'extracter'", without a file and a line."""

    def phases(self, ctx):
        yield part_phase(ctx, "extracter", 1, 0.1, stream="batches")

    monkeypatch.setattr(FedAvg, "phases", phases)
    with pytest.raises(RuntimeError, match=r"part = 'extracter': expected one of head, extr"):
        run(SMALL | QUICK)


def test_phases_that_yield_nothing_are_named():
    class Mine(FedAvg):
        def phases(self, ctx):
            return Update(arrays={}, num_steps=0, terms={})

    with pytest.raises(TypeError, match=r"Mine.phases \(.*:\d+\) returned Update: expected a "):
        phases_of(Mine(), None)


def test_what_is_yielded_and_is_no_phase_is_named(run, monkeypatch):
    """The reason was: 'NoneType' object has no attribute 'parameters'."""

    def phases(self, ctx):
        yield None

    monkeypatch.setattr(FedAvg, "phases", phases)
    with pytest.raises(RuntimeError, match=r"phases yielded NoneType: expected a Phase, such as"):
        run(SMALL | QUICK)


@pytest.mark.parametrize("found", [None, "conv1", 3, ["conv9"]])
def test_layers_that_are_no_list_of_layers_are_named(found, run, monkeypatch):
    def layers(self, model):
        return found

    monkeypatch.setattr(MOON, "layers", layers)
    with pytest.raises(ValueError, match=r"layers \(.*\) returned .*: expected a list of layers"):
        run(QUICK | {"method": "moon"})


@pytest.mark.parametrize(
    ("kind", "function", "name", "expected"),
    [
        (LocalObjective, "layers(self)", "layers", "(self): expected (self, model)"),
        (
            LocalObjective,
            "penalty(self, batch, y)",
            "penalty",
            "(self, batch, y): expected (self, batch)",
        ),
        (
            Average,
            "next_arrays(self, c)",
            "next_arrays",
            "(self, c): expected (self, current, replies)",
        ),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused(kind, function, name, expected):
    """A LocalObjective.layers without the model ended `keel run` with a traceback."""
    names: dict[str, Any] = {"Base": kind}
    exec(f"class Mine(Base):\n    def {function}: ...\nclass Half(Mine): ...", names)
    for half in (names["Mine"], names["Half"]):
        with pytest.raises(
            ValueError, match=rf"^Mine\.{name} \(.*:2\) takes {re.escape(expected)}$"
        ):
            check_signatures(half)


@pytest.mark.parametrize(
    ("decorator", "parameters"),
    [("", "self, m"), ("", "self, model, extra=1"), ("", "self, *a"), ("@staticmethod", "model")],
)
def test_a_function_that_keel_can_call_is_accepted(decorator, parameters):
    names: dict[str, Any] = {"Base": LocalObjective}
    exec(f"class Mine(Base):\n    {decorator}\n    def layers({parameters}): return []", names)
    check_signatures(names["Mine"])


@pytest.mark.parametrize("parameters", ["self, *, tau", "self, *rest", "self, x=1, /, **named"])
def test_a_function_of_ones_own_may_take_what_it_likes(parameters):
    names: dict[str, Any] = {"Base": LocalObjective}
    exec(f"class Mine(Base):\n    def mine({parameters}): ...\nclass Other(Mine): ...", names)
    check_signatures(names["Other"])
    exec(f"class Overrides(Mine):\n    def mine({parameters}): ...", names)
    check_signatures(names["Overrides"])


def test_both_halves_of_a_method_are_checked_before_round_1(monkeypatch):
    half = server_half("fedreco")
    check_signatures.cache_clear()
    monkeypatch.setattr(MOON, "layers", lambda self: [])
    with pytest.raises(ValueError, match=r"takes \(self\): expected \(self, model\)"):
        method_class("moon")
    monkeypatch.setattr(half, "next_arrays", lambda self: {})
    with pytest.raises(ValueError, match=r"takes \(self\): expected \(self, current, replies\)"):
        server_half("fedreco")


def test_a_method_is_checked_once_in_a_process(monkeypatch):
    """Its class is looked up for each client of each round."""
    method_class("moon")
    monkeypatch.setattr("protocol.code.inspect.signature", None)
    method_class("moon")


def test_the_place_of_a_decorated_function_is_its_own():
    @torch.no_grad()
    def mine(): ...

    assert re.search(r"mine \(tests/methods/test_mistakes\.py:\d+\)", place_of(mine))


@pytest.mark.parametrize(
    ("decorator", "field", "found"),
    [
        (
            "",
            'mu: float = option(at_least(0), "x")',
            "mu is not an option, because the class lacks @dataclass",
        ),
        ("@dataclass", "", "TypeError: cannot inherit non-frozen"),
        ("@dataclass(frozen=True)", "mu: float = 0.1", "mu is not an option"),
        ("@dataclass(frozen=True)", "mu: float", "mu is not an option"),
        ("@dataclass(frozen=True)", 'mu: list = option(at_least(0), "x")', "mu is not an option"),
        ("@dataclass(frozen=True)", 'mu: float = option("weight", "x")', "mu is not an option"),
        ("@dataclass(frozen=True)", "mu: float = option()", "TypeError: option() missing"),
        ("@dataclass(frozen=True)", 'mu: "Tensor" = option(at_least(0), "x")', "'Tensor' is"),
        ("@dataclass(frozen=True)", 'uses_global: "ClassVar[bool]" = True', "'ClassVar' is"),
        ("@dataclass(frozen=True)", "uses_global: bool = True", "is not an option"),
    ],
)
def test_a_mistake_in_the_class_is_one_line_with_what_is_expected(
    decorator, field, found, tmp_path
):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from client_app.objective import LocalObjective\n"
        "from protocol.options import at_least, option\n\n\n"
        f"{decorator}\nclass Mine(LocalObjective):\n    {field or 'pass'}\n"
    )
    expected = re.escape(f"{path}: ") + ".*" + re.escape(found) + r".*; expected @dataclass\(froz"
    with pytest.raises(ValueError, match=expected):
        options_class(path, "Mine")


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("supports_privacy: ClassVar[bool]", "no", "True, False"),
        ("uses_global", "yes", "True, False"),
        ("default_weighting", "exmaples", "'examples', 'uniform'"),
        ("shared_part", "head", "'model', 'extractor', 'nothing'"),
    ],
)
def test_a_flag_with_a_value_that_means_nothing_is_refused(flag, value, allowed, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from typing import ClassVar\n"
        "from client_app.objective import LocalObjective\n\n\n"
        f"class Mine(LocalObjective):\n    {flag} = {value!r}\n"
    )
    expected = f"{path}: Mine.{flag.partition(':')[0]} = {value!r}: expected one of {allowed}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        options_class(path, "Mine")


def test_the_previous_model_without_client_state_is_refused_before_training(tmp_path):
    """The first round was trained, and then each client failed. A base class may leave it out."""
    for name, body in (("bad", "pass"), ("good", "is_stateful = True")):
        path = tmp_path / f"{name}.py"
        path.write_text(
            "from client_app.objective import LocalObjective\n\n\n"
            "class _Base(LocalObjective):\n    uses_previous = True\n\n\n"
            f"class Mine(_Base):\n    {body}\n"
        )
    with pytest.raises(ValueError, match=r"Mine.uses_previous = True: .*; set is_stateful"):
        options_class(tmp_path / "bad.py", "Mine")
    assert options_class(tmp_path / "good.py", "Mine").is_stateful


def test_a_hidden_file_is_no_method(tmp_path, monkeypatch):
    """Beside a file that is being edited, Emacs leaves a dangling link, and no run began."""
    (tmp_path / "client_app").mkdir()
    (tmp_path / "client_app" / "mine.py").write_text("")
    monkeypatch.setattr("protocol.code.app_folder", tmp_path)
    monkeypatch.setattr(catalogue, "methods_folder", tmp_path / "client_app")
    before = _digest_of(["client_app"])
    (tmp_path / "client_app" / ".#mine.py").symlink_to("nobody@nowhere.1:2")
    assert _digest_of(["client_app"]) == before
    assert method_names.__wrapped__() == ("mine",)


@pytest.mark.parametrize("name", ["fed-pull", "fed pull", "1fed-pull"])
def test_a_methods_file_with_an_invalid_name_is_named(name, tmp_path, monkeypatch):
    """The error named a file that does not exist."""
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setattr(catalogue, "methods_folder", tmp_path)
    monkeypatch.setattr(catalogue, "method_names", lambda: (name,))
    expected = rf"^{tmp_path}/{name}\.py: the name .* rename it, for example to fed_pull\.py$"
    with pytest.raises(ValueError, match=expected):
        method_spec.__wrapped__(name)


def test_a_class_may_have_the_name_of_its_base(tmp_path):
    """It ended with: maximum recursion depth exceeded."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from client_app.objective import LocalObjective\n\n\n"
        "class LocalObjective(LocalObjective):\n    is_stateful = True\n"
    )
    assert options_class(path, "LocalObjective").is_stateful


def test_a_base_imported_under_another_name_is_refused_with_the_way_to_import_it(
    tmp_path, monkeypatch
):
    """The error said only that the file has no method."""
    (tmp_path / "mine.py").write_text(
        "from client_app.methods.fedavg import FedAvg as Base\n\n\nclass Mine(Base):\n    pass\n"
    )
    monkeypatch.setattr(catalogue, "methods_folder", tmp_path)
    monkeypatch.setattr(catalogue, "method_names", lambda: ("mine",))
    with pytest.raises(ValueError, match=r"with `from client_app\.MODULE import NAME`$"):
        method_spec.__wrapped__("mine")


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_bytes("# André\nclass Mine:\n    pass\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{path}: .*0xe9.*: save it as UTF-8$"):
        options_class(path, "Mine")


def test_an_import_of_what_is_not_there_is_named_with_its_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from protocol.options import at_leest\n\n\nclass Mine:\n    pass\n")
    with pytest.raises(ValueError, match=rf"^{path}: .*at_leest"):
        options_class(path, "Mine")
