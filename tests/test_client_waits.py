"""No step of local training waits for the device: counted on the CPU, for every method.

What would wait on a GPU is recognised by its operation: a read of a number, a copy to the host, or
a shape that depends on values.
"""

from collections import Counter

import pytest
import torch
from client_fixtures import subject_of
from method_fixtures import METHODS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import client_app.trainer
from client_app.methods import method_of
from client_app.round import on_device

READS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "unique", "masked_select",
    "__bool__", "__float__", "__int__", "__index__", "__array__",
}  # fmt: skip
OPERATIONS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "bincount", "repeat_interleave",
}  # fmt: skip


class Calls(TorchFunctionMode):
    """Counts calls from Python that read a tensor."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, arguments=(), named=None):
        name = getattr(function, "__name__", "")
        if name in READS or (name == "where" and len(arguments) + len(named or {}) == 1):
            self.waits[name] += 1
        return function(*arguments, **(named or {}))


class Operations(TorchDispatchMode):
    """Counts operations below Python, those of the backward pass too."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        name = operation.overloadpacket.__name__
        indices = arguments[1] if name.startswith("index") and len(arguments) > 1 else None
        masks = [i for i in indices if i is not None] if isinstance(indices, list | tuple) else []
        if name in OPERATIONS or any(i.dtype in (torch.bool, torch.uint8) for i in masks):
            self.waits[name] += 1
        return operation(*arguments, **(named or {}))


@pytest.fixture
def waits(monkeypatch):
    """Counts, between the first and the last step of every training, what would wait."""
    counts = Counter()

    class Counting(client_app.trainer.MeanTerms):
        def __init__(self):
            super().__init__()
            counts["trainings"] += 1
            self.modes = Calls(counts), Operations(counts)
            for mode in self.modes:
                mode.__enter__()

        def read(self):
            for mode in reversed(self.modes):
                mode.__exit__(None, None, None)
            counts["steps"] += self.num_samples > 0
            return super().read()

    monkeypatch.setattr(client_app.trainer, "MeanTerms", Counting)
    return counts


def train_two_rounds(subject, local_epochs=2, **keys):
    """The updates of a first participation, and of one with client state and what the server sends
    beside it.
    """
    config = subject.config(local_epochs=local_epochs, flip=True, clip_norm=5.0, **keys)
    state, updates = {}, []
    for number in (1, 2):  # of three clients: two batches an epoch
        updates.append(method_of(config).train(subject.round(config, number, state, 3)))
        state = {group: on_device(a, torch.device("cpu")) for group, a in updates[-1].state.items()}
    return updates


@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_device(method, waits):
    train_two_rounds(subject_of(method))
    assert waits.pop("trainings") >= 2
    assert waits.pop("steps") >= 2
    assert not waits
