"""Milliseconds an image of every model on this machine, for `keel models` and `keel presets`.

Batch 64, on the run's device (the GPU if there is one); on a CPU with one thread, as simulation
workers have by default. The minimum over a few repetitions after one warm-up.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from client_app.networks import placed
from client_app.setup import device_for
from models import StagedModel, build_model
from protocol.models import MODELS

BATCH, NUM_CLASSES = 64, 10
DEFAULT_INPUT = (3, 32)  # (channels, pixels) of a model whose paper names none
budget_s = 0.5  # repetitions stop after it


def input_of(name: str) -> tuple[int, int, int]:
    """(channels, height, width) of the images that the model is measured and described with."""
    spec = MODELS[name]
    channels, pixels = spec.channels or DEFAULT_INPUT[0], spec.image_size or DEFAULT_INPUT[1]
    return channels, pixels, pixels


def build(name: str, device: str) -> StagedModel:
    """The model for `input_of(name)`; on device "meta" it has shapes but no values."""
    channels, pixels, _ = input_of(name)
    with torch.device(device):
        return build_model(name, num_classes=NUM_CLASSES, channels=channels, image_size=pixels)


def measure(name: str) -> dict[str, float | str]:
    """Milliseconds an image of a forward pass and an SGD step of the model, and the device."""
    device = device_for("auto")
    model = placed(build(name, str(device)).to(memory_format=torch.channels_last), device)
    x = torch.randn(BATCH, *input_of(name), device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.arange(BATCH, device=device) % NUM_CLASSES
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()

    @torch.no_grad()
    def forward() -> None:
        model(x)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step_s = min_seconds(step, device.type)
        model.eval()
        forward_s = min_seconds(forward, device.type)
    finally:
        torch.set_num_threads(num_threads)
    return {
        "forward_ms": round(1e3 * forward_s / BATCH, 4),
        "step_ms": round(1e3 * step_s / BATCH, 4),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, 1 thread",
    }


def min_seconds(run: Callable[[], object], device: str, repetitions: int = 0) -> float:
    """Minimum wall seconds of a run, after one warm-up.

    repetitions: 0 for as many as fit in the time budget, at least one.
    """

    def synchronise() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    seconds: list[float] = []
    while len(seconds) < (repetitions or 1) or (not repetitions and sum(seconds) < budget_s):
        synchronise()
        started = time.perf_counter()
        run()
        synchronise()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
