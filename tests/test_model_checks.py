"""`keel check-method --model`: mistakes in the function of a network are named."""

import pytest
import torch
from model_fixtures import undrawn
from torch import nn

from keel.model_checks import model_problems
from models import registry
from models.staged import Stage, Trunk
from protocol.models import MODELS


def trunk_of(body=None, tail=None, name="conv1", width=7200, to_features=None):
    """A network of one convolution, 8 x 30 x 30 features, with one part that is wrong."""
    stage = Stage(body or nn.Conv2d(3, 8, 3), tail or nn.ReLU())
    return Trunk({name: stage}, to_features or nn.Flatten(), width)


def frozen():
    body = nn.Conv2d(3, 8, 3)
    body.bias.requires_grad_(False)
    return body


def with_buffer(buffer):
    tail = nn.Identity()
    tail.register_buffer("odd", buffer)
    return tail


class WithExtraState(nn.Identity):
    def get_extra_state(self):
        return {"k": 3}


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x, x


class Averaging(nn.Module):
    """Replaces its buffer, where it should change it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean().detach()
        return x


MISTAKES = {
    "a frozen weight": (lambda: trunk_of(body=frozen()), "conv1.body.bias"),
    "two outputs": (lambda: trunk_of(tail=TwoOutputs()), "tail of conv1"),
    "in place": (lambda: trunk_of(tail=nn.ReLU(inplace=True)), "tail of conv1"),
    "a reserved name": (lambda: trunk_of(name="features"), "'features'"),
    "a dot in a name": (lambda: trunk_of(name="conv.1"), "'conv.1'"),
    "weights after the stages": (
        lambda: trunk_of(to_features=nn.Sequential(nn.Flatten(), nn.Linear(7200, 7200))),
        "to_features",
    ),
    "statistics": (
        lambda: trunk_of(body=nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))),
        "conv1.body.1",
    ),
    "complex numbers": (
        lambda: trunk_of(tail=with_buffer(torch.ones(3, dtype=torch.complex64))),
        "conv1.tail.odd",
    ),
    "extra state": (lambda: trunk_of(tail=WithExtraState()), "conv1.tail._extra_state"),
    "another width": (lambda: trunk_of(width=8), "[1, 8]"),
    "a buffer that is replaced": (lambda: trunk_of(tail=Averaging()), "conv1.tail.average"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_place(mistake, monkeypatch):
    build, place = MISTAKES[mistake]
    monkeypatch.setitem(registry.BUILDERS, "cnn-fedreco", lambda input_shape, norm: build())
    [problem] = model_problems("cnn-fedreco")
    assert place in problem
    assert "tests/test_model_checks.py:" in problem


@pytest.mark.parametrize("name", MODELS)
def test_the_models_of_keel_have_no_mistake(name):
    with undrawn():
        assert model_problems(name) == []
