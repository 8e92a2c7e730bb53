"""`keel check-method` names what the classes of a method declare in a way that Keel cannot read."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from client_app.class_checks import class_problems, function_problems
from client_app.methods import method_class
from client_app.objective import LocalObjective
from protocol.catalogue import method_names
from protocol.config import app_folder
from protocol.options import at_least, keys_of, option
from strategies import Average
from tools.config_table import with_tables

METHODS = {name: method_class(name) for name in method_names()}
NAMES = {
    "dataclass": dataclass,
    "ClassVar": ClassVar,
    "LocalObjective": LocalObjective,
    "at_least": at_least,
    "option": option,
}


def class_with(body: str, decorator: str = "@dataclass(frozen=True)") -> type[Any]:
    """A local objective with this body."""
    names: dict[str, Any] = {**NAMES, "__name__": __name__}
    exec(f"{decorator}\nclass Mine(LocalObjective):\n    {body}", names)
    found: type[Any] = names["Mine"]
    return found


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("mu: float = 0.1", "mu"),
        ('mu: list = option(at_least(0), "x")', "mu"),
        ('mu: float = option("weight", "x")', "mu"),
        ('mu: float = option(at_least(0), "x")', "default"),
        ("uses_global: bool = True", "uses_global"),
        ("has_own_server_hlaf: ClassVar[bool] = True", "has_own_server_half"),
        ("has_own_server_hlaf = True", "has_own_server_half"),
        ("supports_privacy: ClassVar[bool] = 'no'", "supports_privacy"),
        ("default_weighting = 'exmaples'", "default_weighting"),
        ("shared_part = 'head'", "shared_part"),
        ("uses_previous = True", "is_stateful"),
        ("def penalti(self, batch): ...", "penalty"),
        ("def layers(self): ...", "layers"),
        ("def penalty(self, batch, y): ...", "penalty"),
    ],
)
def test_a_mistake_in_a_class_is_named(body, named):
    [problem] = class_problems(class_with(body))
    assert named in problem


def test_a_function_of_a_server_half_that_nothing_calls_is_named():
    class Half(Average):
        def next_arays(self, current, replies): ...

    [problem] = function_problems(Half)
    assert "next_arrays" in problem


def test_the_table_of_options_in_pyproject_toml_is_as_declared():
    text = (app_folder / "pyproject.toml").read_text()
    assert with_tables(text) == text, "run `python -m tools.config_table`"


@pytest.mark.parametrize("name", METHODS)
def test_the_flags_name_keys_that_there_are(name):
    cls = METHODS[name]
    declared = {f"{name}.{key}" for key in keys_of(cls)}
    assert {*cls.duration_keys} <= {"local-epochs", *declared}
    assert {*cls.rate_keys} <= {"lr", *declared}
    assert cls.is_local_objective == issubclass(cls, LocalObjective)
