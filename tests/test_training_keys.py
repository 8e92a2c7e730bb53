"""Keys of local training: what a method declares, or what its own `train` reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import keel
from client_app.method import FIT_KEYS, Method, Update
from client_app.objective import LocalObjective
from client_app.trainer import copy_of, fit
from client_app.training_keys import used_training_keys
from protocol.options import ConfigError


def decayed(ctx):
    return ctx.config.train.lr * ctx.lr_factor


@dataclass(frozen=True)
class Plain(Method):
    """An own loop with a rate and epochs, which reads no momentum."""

    def train(self, ctx):
        ctx.model.load_state_dict(ctx.received)
        descent = torch.optim.Adagrad(ctx.model.parameters(), lr=decayed(ctx))
        for step in ctx.steps("own", ctx.config.train.local_epochs):
            descent.zero_grad()
            torch.nn.functional.cross_entropy(ctx.model(step.x), step.y).backward()
            descent.step()
        return Update(copy_of(ctx.model), 1, {"supervised": 0.0})


@dataclass(frozen=True)
class After(LocalObjective):
    def train(self, ctx):
        return super().train(ctx)


@dataclass(frozen=True)
class Fits(Method):
    def train(self, ctx):
        fit(ctx, [], None, None, ctx.config.train.lr, None)


@dataclass(frozen=True)
class Says(Plain):
    training_keys: ClassVar[tuple[str, ...]] = ("momentum", "lr")


schedule = {"lr-decay", "lr-schedule", "warmup-rounds"}


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        (Plain, {"lr", "local-epochs", "batch-size", "batches-per-epoch"} | schedule),
        (After, {*FIT_KEYS, "lr", "local-epochs"}),
        (LocalObjective, {*FIT_KEYS, "lr", "local-epochs"}),
        (Fits, {*FIT_KEYS, "lr"}),
        (Says, {"momentum", "lr"}),
    ],
)
def test_a_method_uses_what_it_declares_or_reads(method, keys):
    assert used_training_keys(method()) == keys


@pytest.mark.parametrize("given", [{"momentum": 0.0}, {"clip-norm": 1e-3}, {"precision": "bf16"}])
def test_a_key_that_an_own_train_does_not_read_is_refused_before_round_1(given, tmp_path):
    (tmp_path / "mine.py").write_text(Path(__file__).read_text())
    keys = {"source": "digits", "model": "cnn-fedreco", "output-dir": str(tmp_path / "runs")}
    keys["method"] = f"{tmp_path / 'mine.py'}:Plain"
    with pytest.raises(ConfigError) as refusal:
        keel.run(keys | given, clients=3, quiet=True)
    assert refusal.value.key in given
    assert not (tmp_path / "runs").exists()


def test_keys_that_an_engine_does_not_use_are_refused():
    with pytest.raises(ConfigError) as refusal:
        keel.run({"round-timeout": 5.0, "max-weight-share": 0.5}, clients=2, quiet=True)
    assert refusal.value.key == "max-weight-share"
    assert "round-timeout" in str(refusal.value)
