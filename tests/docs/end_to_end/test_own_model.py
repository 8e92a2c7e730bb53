"""The model of docs/how-to/own-model.md, registered as the page says, in this process."""

import re
from collections.abc import Callable
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
    for test in (
        test_models.test_layers_come_in_the_order_asked_for_and_leave_the_logits_as_they_are,
        test_models.test_every_split_puts_the_forward_pass_together_again,
        test_models.test_extractor_and_head_share_out_the_state,
        test_models.test_projection_heads_take_every_stage_to_256,
    ):
        test("cnn-tiny")
    assert model_problems("cnn-tiny") == []  # the first thing that `keel check-method` checks
    test, check, run = re.findall(r"^(?:python -m|keel) (.*)", page, re.M)
    assert test.endswith("tests/test_models.py")
    assert main([*check.split(), "--help"]) == 0
    assert "parameters  5,130" in printed(*run.split())
