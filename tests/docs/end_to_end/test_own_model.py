"""The model of docs/how-to/own-model.md, registered as the page says, in this process."""

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import test_models

from keel.cli.main import main
from keel.model_checks import model_problems
from models.registry import BUILDERS
from protocol.models import MODELS, ModelSpec

repository = Path(__file__).parents[3]
page = (repository / "docs/how-to/own-model.md").read_text().partition("## In Keel's own folder")[2]


def test_the_pages_model_passes_the_tests_and_trains(
    home: Path, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.S))
    names: dict[str, Any] = {"__name__": "models.tiny", "ModelSpec": ModelSpec}
    exec(blocks.pop("models/tiny.py"), names)
    tables: dict[str, dict[str, Any]] = {"MODELS": MODELS, "BUILDERS": BUILDERS}
    for path, block in blocks.items():  # the head of a table, and a line to add to it
        *_, head, line = block.strip().splitlines()
        assert (repository / path).read_text().count(f"{head}\n") == 1
        for name, value in eval(f"{{{line}}}", names).items():
            monkeypatch.setitem(tables.pop(head.partition(":")[0]), name, value)
    assert not tables
    tests = [
        test
        for test in vars(test_models).values()
        if [each.args for each in getattr(test, "pytestmark", ())] == [("name", MODELS)]
    ]
    assert len(tests) > 1
    for test in tests:
        arguments = {"name": "cnn-tiny", "monkeypatch": monkeypatch}
        test(**{key: arguments[key] for key in signature(test).parameters})
    assert model_problems("cnn-tiny") == []  # the first thing that `keel check-method` checks
    words, check, run = re.findall(r"^(?:python -m|keel) (.*)", page, re.M)
    assert words.endswith("tests/test_models.py")
    assert main([*check.split(), "--help"]) == 0
    assert "parameters  5,130" in printed(*run.split())
