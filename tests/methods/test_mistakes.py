"""A mistake in a method's file is refused before round 1, naming the file or the function."""

import dataclasses

import pytest

import client_app.methods
from client_app.methods import documentation, method_class
from protocol import catalogue
from protocol.catalogue import classes, method_names
from strategies import Average, server_half
from tests.run_fixtures import SMALL

METHOD = '''"""{name}: an example."""

from dataclasses import dataclass

from client_app.objective import LocalObjective
from protocol.options import at_least, option


@dataclass(frozen=True)
class {name}(LocalObjective):
    """An example."""

    mu: float = option(at_least(0), "weight")
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of methods that are imported as Keel's are."""
    monkeypatch.setattr(client_app.methods, "__path__", [str(tmp_path)])
    monkeypatch.setattr(client_app.methods, "classes", {})
    return tmp_path


def test_a_method_is_the_one_class_of_its_file(folder, monkeypatch):
    (folder / "mine_one.py").write_text(METHOD.format(name="MineOne"))
    (folder / "mine_none.py").write_text('"""Nothing."""\n')
    (folder / "mine_two.py").write_text(METHOD.format(name="A") + METHOD.format(name="B"))
    cls = method_class("mine-one")
    assert (cls.__name__, documentation("mine-one")) == ("MineOne", "MineOne: an example.")
    assert [f.name for f in dataclasses.fields(cls)] == ["mu"]
    monkeypatch.setattr(catalogue, "methods_folder", folder)
    assert set(method_names.__wrapped__()) == {"mine-one", "mine-none", "mine-two"}
    for name in ("mine-none", "mine-two"):
        with pytest.raises(ValueError, match=name.replace("-", "_")):
            method_class(name)


@pytest.mark.parametrize("line", ["y = = 2", "import nowhere", "from math import tua"])
def test_an_error_of_a_file_is_one_line_with_its_place(folder, line):
    (folder / "mine_bad.py").write_text(f"x = 1\n{line}\n")
    with pytest.raises(ValueError, match=r"mine_bad\.py:2: ") as refused:
        method_class("mine-bad")
    assert "\n" not in str(refused.value)


def test_a_server_half_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(classes["moon"], "has_own_server_half", True)
    with pytest.raises(ValueError) as error:
        server_half(classes["moon"])
    assert "strategies.moon" in str(error.value)


@pytest.mark.parametrize("returned", [lambda w: None, lambda w: dict(list(w.items())[1:])])
def test_arrays_of_a_server_half_unlike_those_it_was_given_are_refused(returned, run, monkeypatch):
    """A forgotten `return` would give a finished run with the initial model."""
    monkeypatch.setattr(Average, "next_arrays", lambda self, current, replies: returned(current))
    with pytest.raises((ValueError, AttributeError)):
        run(SMALL | {"method": "fedavg", "num-rounds": 1})
