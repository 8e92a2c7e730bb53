"""Steps of local training without a GPU: where tensors are, what would wait, what is recorded.

tests/test_gpu.py has the same on a GPU.
"""

from collections import Counter

import pytest
import torch
from client_fixtures import assert_same_bits, subject_of
from method_fixtures import LONG, METHODS, train_two_rounds
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import client_app.graphs
import client_app.process_cache
import client_app.trainer
from client_app.graphs import Recording, Replayed
from client_app.methods import method_of
from client_app.methods.fedcr import FedCR
from client_app.round import RoundContext

# --- every tensor of a step is on the device ------------------------------------------------------

# torch's `meta`: its tensors have no values, and like a GPU it refuses those of another device
META = torch.device("meta")


def checked_sgd(weights, gradients, velocities, **_):
    """What the fused kernel requires on CUDA; `meta` has no such kernel."""
    for others in (gradients, velocities):
        for one, other in zip(weights, others, strict=False):
            assert (other.device, other.dtype) == (one.device, one.dtype)
            assert other.stride() == one.stride()


@pytest.fixture
def on_meta(monkeypatch):
    """Clients train on `meta`; what needs values is replaced."""
    monkeypatch.setattr(client_app.process_cache, "device_for", lambda name: META)
    monkeypatch.setattr(client_app.trainer.MeanTerms, "read", lambda self: {})
    monkeypatch.setattr(torch, "_fused_sgd_", checked_sgd)
    counts = property(lambda ctx: torch.zeros(ctx.model.num_classes, dtype=int, device=META))
    monkeypatch.setattr(RoundContext, "label_counts", counts)

    def draws(self, ctx, stream):  # `meta` has no generator
        width = ctx.model.feature_width
        return lambda step: torch.empty(self.samples, len(step.y), width, device=META)

    monkeypatch.setattr(FedCR, "_draws", draws)


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("method", METHODS)
def test_training_and_the_personal_model_are_on_the_device(method):
    subject = subject_of(method)
    config = subject.config(local_epochs=1, flip=True, clip_norm=5.0, weight_decay=0.1)
    state = {}  # on the CPU, as read from a file
    for number in (1, 2):
        ctx = subject.round(config, number, state, 3)
        update = method_of(config).train(ctx)
        assert update.num_steps > 0
        state = {
            group: {name: torch.zeros_like(array, device="cpu") for name, array in arrays.items()}
            for group, arrays in update.state.items()
        }
        model = method_of(config).personal_model(ctx, state)
        if model is not None:
            ((x, _),) = ctx.test_samples.in_order()
            assert model.eval()(x).device == META


# --- no step waits for the device -----------------------------------------------------------------

# What would wait on a GPU: a read of a number, a copy to the host, a shape that depends on values.
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


@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_device(method, waits):
    train_two_rounds(subject_of(method))
    assert waits.pop("trainings") >= 2
    assert waits.pop("steps") >= 2
    assert not waits


# --- recorded steps: a replay calls the function, with the recorded inputs and memory -------------


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


@pytest.mark.parametrize(
    "keys",
    [
        *({"method": name} for name in METHODS),
        {"method": "moon", "crop_padding": 2, "rotation": 9.0, "weight_decay": 0.1},
        {"method": "moon", "server_optimizer": "fedacg", "momentum": 0.0},
        {"method": "moon", "model": "resnet20", "lr_decay_epoch": 0.5},
        {"method": "moon", "precision": "bf16", "cache_mb": 0},
    ],
    ids=str,
)
def test_replayed_steps_are_those_that_are_not(keys, recorded):
    """The inputs of a step reach its recording, and nobody keeps what the next one overwrites."""
    method = keys["method"]
    subject, keys = subject_of(method), {k: v for k, v in keys.items() if k != "method"}
    keys |= {"local_epochs": 4, **LONG.get(method, {})}
    found = train_two_rounds(subject, **keys)
    assert recorded.made
    assert not Replayed.obstacles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_app.trainer, "recorded_sizes", lambda ctx, plan: set())
        expected = train_two_rounds(subject, **keys)
    for one, other in zip(found, expected, strict=True):
        assert one.terms == other.terms
        assert one.state.keys() == other.state.keys()
        pairs = [(one.arrays, other.arrays), (one.extra, other.extra)]
        for mine, others in [*pairs, *((one.state[k], v) for k, v in other.state.items())]:
            assert_same_bits(mine, others)


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
