"""The README's example of a method of one's own, run as it stands there."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

import client_app.methods
import protocol.config
import strategies
from protocol.config import default_config
from server_app.inline import run_inline

readme = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture
def fedpull(monkeypatch: pytest.MonkeyPatch) -> type:
    code = re.search(r"```python\n(# client_app/methods/fedpull\.py\n.*?)```", readme, re.S)
    assert code
    module = types.ModuleType("client_app.methods.fedpull")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code[1], module.__dict__)
    monkeypatch.setitem(client_app.methods.METHODS, "fedpull", module.FedPull)
    monkeypatch.setitem(strategies.STRATEGIES, "fedpull", strategies.Average)
    with_option = default_config() | {"fedpull.mu": 0.1}
    monkeypatch.setattr(protocol.config, "_defaults", lambda: with_option)
    return module.FedPull


def test_the_readmes_method_trains_and_its_penalty_counts(
    fedpull: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    overrides = {"method": "fedpull", "num-rounds": 2, "fedpull.mu": 0.5, "lr": 0.05}
    folder = run_inline(overrides, num_clients=2)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert all(line["losses"]["penalty"] > 0 for line in lines)


def test_both_registries_hold_the_same_methods() -> None:
    assert client_app.methods.METHODS.keys() == strategies.STRATEGIES.keys()
