"""keel check-method passes sound methods and names what is wrong with broken ones."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from method_fixtures import (
    METHODS,
    FloatPenalty,
    Forgetful,
    ForgottenReturn,
    InPlace,
    Leaky,
    Twice,
    with_method,
)
from torch import nn

import keel.method_checks
from client_app.methods.fedprox import FedProx
from client_app.methods.moon import MOON
from keel.cli.main import main
from keel.method_checks import check_method
from models.cnn import cnn_fedreco
from models.registry import BUILDERS
from protocol.config import default_config

# The checks that need the class alone: broken methods are put in the place of a sound one.
OF_THE_CLASS = [
    "source is named",
    "loss terms are scalars",
    "a client trains, and received arrays stay as they are",
    "gradient is finite and equals finite differences",
    "frozen models get no gradient",
    "order of the batch does not matter",
    "batch of one",
    "client state is declared and survives a round trip",
]


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return 2 * g


@dataclass(frozen=True)
class WithWrongGradient(FedProx):
    def penalty(self, batch):
        return WrongGradient.apply(batch.logits.square().mean())


@dataclass(frozen=True)
class WithGradientIntoReceived(FedProx):
    def penalty(self, batch):
        w_g = batch.ctx.received
        named = batch.ctx.model.named_parameters()
        return sum((p - w_g[name]).square().sum() for name, p in named)


@dataclass(frozen=True)
class WithOrder(FedProx):
    def penalty(self, batch):
        return batch.logits[0].square().sum()


@dataclass(frozen=True)
class WithUnbiasedVariance(FedProx):
    def penalty(self, batch):
        return batch.logits.var(0).sum()  # of one sample: NaN


@dataclass(frozen=True)
class WithUndeclaredState(FedProx):
    uses_previous: ClassVar[bool] = True


@dataclass(frozen=True)
class WithEmptyState(FedProx):
    is_stateful: ClassVar[bool] = True

    def train(self, ctx):
        return replace(super().train(ctx), state={"norm": {}})


@dataclass(frozen=True)
class WithOwnNormLayers(FedProx):
    is_stateful: ClassVar[bool] = True

    def train(self, ctx):
        update = super().train(ctx)
        norm = {name: a for name, a in update.arrays.items() if "running" in name}
        return replace(update, state={"norm": norm})


@dataclass(frozen=True)
class WithNoUpdate(FedProx):
    def train(self, ctx):
        super().train(ctx)


@dataclass(frozen=True)
class WithPlaceholder(FedProx):
    paper: ClassVar[str] = "<authors and year>"


BROKEN = {  # the check that fails, and what its reason names
    WithPlaceholder: ("source is named", "<authors and year>"),
    FloatPenalty: ("loss terms are scalars", "FloatPenalty.penalty"),
    ForgottenReturn: ("loss terms are scalars", "ForgottenReturn.penalty"),
    InPlace: ("a client trains", "received"),
    WithWrongGradient: ("gradient is finite", ""),
    WithGradientIntoReceived: ("frozen models", "received"),
    WithOrder: ("order of the batch", ""),
    WithUnbiasedVariance: ("batch of one", ""),
    WithUndeclaredState: ("a client trains", "is_stateful"),
    WithNoUpdate: ("a client trains", "WithNoUpdate.train"),
    WithEmptyState: ("client state", "'norm'"),
}


@pytest.fixture
def few_checks(monkeypatch):
    checks = {name: keel.method_checks.CHECKS[name] for name in OF_THE_CLASS}
    monkeypatch.setattr(keel.method_checks, "CHECKS", checks)


@pytest.fixture
def only_flags(monkeypatch):
    only = {name: check for name, check in keel.method_checks.CHECKS.items() if "flags" in name}
    monkeypatch.setattr(keel.method_checks, "CHECKS", only)


@pytest.mark.filterwarnings("ignore:var... degrees of freedom")  # of WithUnbiasedVariance
@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_fails_and_nothing_else(broken, few_checks, monkeypatch, tmp_path):
    with_method(monkeypatch, "fedprox", broken)
    failed = [r for r in check_method("fedprox", tmp_path) if r.outcome == "FAIL"]
    check, reason = BROKEN[broken]
    assert [(r.check.startswith(check), reason in r.reason) for r in failed] == [(True, True)]


def test_a_method_that_needs_batch_norm_is_checked_with_a_network_that_has_it(monkeypatch, capsys):
    checks = {n: check for n, check in keel.method_checks.CHECKS.items() if "round trip" in n}
    monkeypatch.setattr(keel.method_checks, "CHECKS", checks)
    with_method(monkeypatch, "fedprox", WithOwnNormLayers)
    assert main(["check-method", "fedprox"]) == 1
    assert re.search(r"^FAIL  client state .*--model resnet20", capsys.readouterr().out, re.M)
    assert main(["check-method", "fedprox", "--model", "resnet20"]) == 0, capsys.readouterr().out
    assert main(["check-method", "fedprox", "--model", "resnet21"]) == 2
    assert "resnet20" in capsys.readouterr().err


def test_a_network_with_dropout_is_no_mistake_of_the_method(few_checks, monkeypatch, tmp_path):
    """The masks of a permuted batch go to other samples."""

    def with_dropout(input_shape, norm):
        trunk = cnn_fedreco(input_shape, norm)
        trunk.stages["fc1"].tail = nn.Sequential(trunk.stages["fc1"].tail, nn.Dropout(0.5))
        return trunk

    monkeypatch.setitem(BUILDERS, "cnn-fedreco", with_dropout)
    outcomes = {r.check: r.outcome for r in check_method("fedprox", tmp_path)}
    assert outcomes.pop("order of the batch does not matter") == "skip"
    assert "FAIL" not in outcomes.values()


def test_a_network_with_batch_norm_is_no_mistake_of_a_method_that_supports_privacy(
    only_flags, tmp_path
):
    """`privacy.epsilon` is refused with such a network, whatever the method."""
    [result] = check_method("fedavg", tmp_path, "resnet20")
    assert result.outcome == "pass", result.reason


@pytest.mark.parametrize("leaky", [Leaky, Forgetful, Twice])
def test_a_method_that_inherits_supports_privacy_and_sends_something_without_noise_is_named(
    leaky, only_flags, monkeypatch, tmp_path
):
    with_method(monkeypatch, "fedavg", leaky)
    [result] = check_method("fedavg", tmp_path)
    assert result.outcome == "FAIL"
    assert leaky.__name__ in result.reason


@dataclass(frozen=True)
class Mixed(METHODS["ditto"]):
    """Evaluates the middle between the stored and the received model, as APFL does."""

    def personal_model(self, ctx, state):
        model = super().personal_model(ctx, state)
        own = model.state_dict()
        model.load_state_dict({k: (v + ctx.received[k]) / 2 for k, v in own.items()})
        return model


@dataclass(frozen=True)
class OwnFirstLayer(METHODS["ditto"]):
    """Stores a part of the model, which the received one completes, as FedBN does."""

    def personal_model(self, ctx, state):
        ctx.model.load_state_dict(ctx.received | state.get("first", {}))
        return ctx.model

    def train(self, ctx):
        update = super().train(ctx)
        first = {n: a for n, a in update.state["personal"].items() if n.startswith("conv1")}
        return replace(update, state={"first": first})


@pytest.mark.parametrize(("method", "group"), [(Mixed, "personal"), (OwnFirstLayer, "first")])
def test_a_personal_model_that_predict_would_not_use_is_named(
    method, group, only_flags, monkeypatch, tmp_path
):
    with_method(monkeypatch, "ditto", method)
    [result] = check_method("ditto", tmp_path)
    assert result.outcome == "FAIL"
    assert "keel predict --client" in result.reason
    assert f"'{group}'" in result.reason


def test_nothing_else_is_checked_without_the_options_defaults(monkeypatch, tmp_path):
    defaults = {k: v for k, v in default_config().items() if k != "fedprox.mu"}
    monkeypatch.setattr(keel.method_checks, "default_config", lambda: defaults)
    [*_, result] = check_method("fedprox", tmp_path)
    assert result.outcome == "FAIL"
    assert "fedprox.mu" in result.reason


def test_an_error_of_the_methods_code_is_named_with_its_line(few_checks, monkeypatch, tmp_path):
    monkeypatch.setattr(MOON, "layers", lambda self, model: ["conv1", "conv2"])
    reasons = {r.reason for r in check_method("moon", tmp_path) if r.outcome == "FAIL"}
    assert reasons
    form = r".* \(client_app/methods/moon.py:\d+\): .*unpack .*"
    assert all(re.fullmatch(form, reason) for reason in reasons)
