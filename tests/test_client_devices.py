"""Local training on a device other than the CPU: every tensor of a step is on that device.

The device is torch's `meta`: its tensors have shapes and no values, and like a GPU it refuses
operations with a tensor of another device. tests/test_gpu.py compares values.
"""

import pytest
import torch
from client_fixtures import subject_of
from method_fixtures import METHODS

import client_app.process_cache
import client_app.trainer
from client_app.methods import method_of
from client_app.methods.fedcr import FedCR
from client_app.round import RoundContext

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
