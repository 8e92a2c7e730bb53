"""Recorded steps, on the CPU: a replay calls the function, with the recorded inputs and memory.

Kernels themselves are recorded in tests/test_gpu.py.
"""

import pytest
import torch
from client_fixtures import assert_same_bits, subject_of
from method_fixtures import METHODS
from test_client_waits import train_two_rounds
from torch.utils import _pytree as pytree

import client_app.graphs
import client_app.trainer
from client_app.graphs import Recording, Replayed

LONG = {  # phases whose length `local-epochs` does not say
    "fedpac": {"fedpac.extractor-epochs": 6},
    "fedreco": {"fedreco.k-u": "12 steps", "fedreco.k-v": "12 steps"},
    "fedrep": {"fedrep.extractor-epochs": 6},
}


class OnCpu(Recording):
    """Its replay computes anew, and writes the result where the first one's lies."""

    made = 0

    def record(self, call):
        OnCpu.made += 1
        self.call, self.run = call, self.compute

    def compute(self):
        result = self.call()
        if self.result is None:
            self.result = result
            return
        pairs = zip(*map(pytree.tree_leaves, (self.result, result)), strict=True)
        with torch.no_grad():
            for place, value in pairs:
                assert (place is None) == (value is None)
                if value is not None:
                    place.copy_(value)


def sizes_of(plan):
    return set(map(len, plan.index))


@pytest.fixture
def recorded(monkeypatch):
    """Every phase is recorded; returns the class that counts the recordings."""
    monkeypatch.setattr(client_app.graphs, "Recording", OnCpu)
    monkeypatch.setattr(client_app.trainer, "recorded_sizes", lambda ctx, plan: sizes_of(plan))
    monkeypatch.setattr(Replayed, "obstacles", {})
    monkeypatch.setattr(Replayed, "recorded", set())
    monkeypatch.setattr(OnCpu, "made", 0)
    return OnCpu


@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_are_those_that_are_not(method, recorded):
    """The inputs of a step reach its recording, and nobody keeps what the next one overwrites."""
    subject, keys = subject_of(method), {"local_epochs": 4, **LONG.get(method, {})}
    found = train_two_rounds(subject, **keys)
    assert recorded.made
    assert not Replayed.obstacles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_app.trainer, "recorded_sizes", lambda ctx, plan: set())
        expected = train_two_rounds(subject, **keys)
    for one, other in zip(found, expected, strict=True):
        assert one.terms == other.terms
        assert_same_bits(one.arrays, other.arrays)
        assert_same_bits(one.extra, other.extra)
        assert one.state.keys() == other.state.keys()
        for group, arrays in other.state.items():
            assert_same_bits(one.state[group], arrays)


@pytest.mark.parametrize(
    "keys",
    [
        {"crop_padding": 2, "rotation": 9.0, "weight_decay": 0.1},
        {"server_optimizer": "fedacg", "momentum": 0.0},
        {"model": "resnet20", "lr_decay_epoch": 0.5},
        {"precision": "bf16"},
        {"cache_mb": 0},
    ],
)
def test_replayed_steps_are_those_that_are_not_whatever_the_run(keys, recorded, monkeypatch):
    subject = subject_of("moon")
    found = train_two_rounds(subject, local_epochs=4, **keys)
    assert recorded.made
    monkeypatch.setattr(client_app.trainer, "recorded_sizes", lambda ctx, plan: set())
    for one, other in zip(found, train_two_rounds(subject, local_epochs=4, **keys), strict=True):
        assert_same_bits(one.arrays, other.arrays)


def fails(self, call):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("record", "second"), [(fails, torch.ones(1)), (OnCpu.record, 1.0)])
def test_what_cannot_be_recorded_is_called_as_it_is_and_logged_once(
    record, second, recorded, caplog, monkeypatch
):
    """The recording fails, as that of a step that waits does, or a number is among the inputs."""
    monkeypatch.setattr(recorded, "record", record)
    for _ in range(2):
        replayed = Replayed(lambda inputs: inputs[0] + inputs[1], "a step of mine")
        made = [float(replayed((torch.tensor(float(n)), second))) for n in range(5)]
        assert made == [1, 2, 3, 4, 5]
    assert len(caplog.records) == 1
