"""A mistake in a method's file is refused before round 1, naming the file or the function."""

import dataclasses

import pytest

import protocol.catalogue
import strategies
from client_app.method import Method
from client_app.objective import LocalObjective
from protocol.catalogue import method_names, method_spec
from protocol.code import check_signatures
from strategies import Average, server_half
from tests.run_fixtures import SMALL

METHOD = '''"""{name}: an example."""

from dataclasses import dataclass
from typing import ClassVar

from client_app.objective import LocalObjective
from protocol.options import at_least, option


@dataclass(frozen=True)
class {name}(LocalObjective):
    """An example."""

    mu: float = option(at_least(0), "weight")
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of methods."""
    monkeypatch.setattr(protocol.catalogue, "methods_folder", tmp_path)
    method_names.cache_clear()
    yield tmp_path
    method_names.cache_clear()
    method_spec.cache_clear()


def write(folder, stem, line="pass"):
    """A method whose class body has this line too."""
    text = METHOD.format(name=stem.title().replace("_", ""))
    (folder / f"{stem}.py").write_text(f"{text}\n    {line}\n")


def test_a_method_is_found_by_its_file(folder):
    write(folder, "my_method", 'supports_weighting, default_weighting = False, "uniform"')
    assert method_names() == ("my-method",)
    spec = method_spec("my-method")
    assert (spec.class_name, spec.summary) == ("MyMethod", "MyMethod: an example.")
    assert [f.name for f in dataclasses.fields(spec.options)] == ["mu"]
    assert (spec.supports_weighting, spec.default_weighting) == (False, "uniform")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("def penalti(self, batch): return 0", "MyMethod.penalti"),
        ("has_own_server_hlaf = True", "MyMethod.has_own_server_hlaf"),
        ("is_personal: ClassVar[str] = 'yes'", "MyMethod.is_personal"),
        ("uses_previous: ClassVar[bool] = True", "MyMethod.uses_previous"),
        ("nu: float = 0.1", "MyMethod.nu"),
        ("x = = 2", "my_method.py:16"),
    ],
)
def test_a_mistake_in_the_class_is_refused(folder, line, named):
    write(folder, "my_method", line)
    with pytest.raises(ValueError) as error:
        method_spec("my-method")
    assert named in str(error.value)
    assert "my_method.py" in str(error.value)


def test_a_file_without_a_method_or_with_two_is_refused(folder):
    (folder / "none.py").write_text('"""Nothing."""\n\nclass Helper:\n    """No method."""\n')
    write(folder, "two")
    text = (folder / "two.py").read_text()
    (folder / "two.py").write_text(text + text.replace("Two", "Other"))
    for name in ("none", "two"):
        with pytest.raises(ValueError) as error:
            method_spec(name)
        assert f"{name}.py" in str(error.value)


def test_a_function_that_takes_other_arguments_is_refused():
    class Mine(LocalObjective):
        def layers(self):
            return []

    with pytest.raises(ValueError) as error:
        check_signatures(Mine)
    assert "Mine.layers" in str(error.value)


def test_a_method_that_overrides_nothing_says_what_to_override():
    @dataclasses.dataclass(frozen=True)
    class Empty(Method):
        """Nothing."""

    with pytest.raises(NotImplementedError) as error:
        Empty().train(None)
    assert "`train`" in str(error.value)


@pytest.mark.parametrize("name", ["fedreco", "moon"])
def test_a_server_half_and_its_flag_that_disagree_are_refused(name, monkeypatch):
    spec = method_spec(name)
    other = dataclasses.replace(spec, has_own_server_half=not spec.has_own_server_half)
    monkeypatch.setattr(strategies, "method_spec", lambda name: other)
    with pytest.raises(ValueError) as error:
        server_half(name)
    assert f"strategies/{name}.py" in str(error.value)


@pytest.mark.parametrize("returned", [lambda w: None, lambda w: dict(list(w.items())[1:])])
def test_arrays_of_a_server_half_unlike_those_it_was_given_are_refused(returned, run, monkeypatch):
    """A forgotten `return` would give a finished run with the initial model."""
    monkeypatch.setattr(Average, "next_arrays", lambda self, current, replies: returned(current))
    with pytest.raises(ValueError):
        run(SMALL | {"method": "fedavg", "num-rounds": 1})
