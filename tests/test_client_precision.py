"""`precision` and `threads`: off by default, and near the plain run when on."""

from types import SimpleNamespace

import pytest
import torch
from client_fixtures import (
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from model_fixtures import undrawn

import client_app.process_cache
from client_app.evaluation import evaluate
from client_app.methods import method_of
from client_app.objective import frozen_representations
from client_app.precision import forward_in, products, resolved
from models import build_model

METHODS = ("fedavg", "moon", "fedintr", "fedcka", "fedrcl", "fedrep")


def update(**keys):
    config = make_config(local_epochs=2, **keys)
    return train(config, number=2, state={"previous": initial(config, seed=5)})


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_near_fp32_and_is_not_it(method):
    """bfloat16 keeps 8 bits, so 0.4 % of each number: the step taken must be alike, not equal."""
    keys = {"method": method}
    if method == "fedcka":
        keys |= {"model": "cnn-fedcka"}
    if method == "fedrcl":  # pairs enter and leave its sums at the threshold: none does here
        keys |= {"fedrcl__threshold": 1.0, "fedrcl__tau": 0.5}
    plain, half = update(**keys), update(**keys, precision="bf16")
    start = initial(make_config(**keys))
    names = [n for n in half.arrays if n in plain.arrays]
    moved, moved_half = (
        torch.cat([(u.arrays[n] - start[n]).flatten() for n in names]) for u in (plain, half)
    )
    assert all(a.dtype == torch.float32 for a in half.arrays.values())
    assert differ({n: plain.arrays[n] for n in names}, half.arrays)
    assert (moved - moved_half).norm() < 0.1 * moved.norm()
    assert half.terms == {k: pytest.approx(v, rel=0.02) for k, v in plain.terms.items()}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_what_is_cached_is_what_the_local_network_would_say(precision):
    """Equal weights: local and frozen representations of a batch are the same numbers."""
    config = make_config(method="fedintr", local_epochs=2, precision=precision)
    now, objective = make_round(config), method_of(config)
    now.model.load_state_dict(now.received)
    now.model.eval()
    frozen = frozen_representations(objective, now, "global", now.received)
    step = next(now.steps("batches", 1))
    with forward_in(precision, now.device):  # as the trainer calls both
        first, again = frozen.of(step), frozen.of(step)
        _, reps = now.model.run(step.x, objective.layers(now.model))
    for z, z_first, z_again in zip(objective.represent(now.model, reps), first, again, strict=True):
        assert z.dtype == torch.float32
        assert torch.equal(z_first, z_again)
        assert torch.equal(z, z_first)


def test_evaluation_is_fp32_whatever_training_was():
    half, plain = make_round(make_config(precision="bf16")), make_round(make_config())
    scores = []
    for now in (half, plain):
        now.model.load_state_dict(now.received)
        scores.append(evaluate(now.model, now.train_samples))
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("flags", "device", "num_parameters", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "cpu", 1_000_001, "bf16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "cpu", 1_000_001, "bf16"),
        ({"avx512_bf16": True}, "cpu", 1_000_000, "fp32"),
        ({"avx512_bf16": False, "amx_bf16": False}, "cpu", 10**8, "fp32"),
        ({}, "cpu", 10**8, "fp32"),  # not x86
        ({"capability": (8, 0)}, "cuda", 1_000_001, "bf16"),
        ({"capability": (8, 0)}, "cuda", 1_000_000, "fp32"),
        ({"capability": (7, 5)}, "cuda", 10**8, "fp32"),  # a T4, where torch emulates bfloat16
        ({}, "mps", 10**8, "fp32"),
    ],
)
def test_auto_is_bf16_for_large_networks_where_the_device_has_it(
    flags, device, num_parameters, expected, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: flags["capability"])
    device = torch.device(device)
    model = SimpleNamespace(
        parameters=lambda: [torch.empty(num_parameters, device="meta")], modules=list
    )
    assert resolved("auto", model, device) == expected
    for precision in ("fp32", "tf32", "bf16"):
        assert resolved(precision, model, device) == precision


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [("mobilenet-v2", "cpu", "fp32"), ("mobilenet-v2", "cuda", "bf16"), ("vgg9", "cpu", "bf16")],
)
def test_auto_is_fp32_for_grouped_convolutions_on_a_cpu(name, device, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with undrawn():
        model = build_model(name, num_classes=10, channels=3, image_size=32)
    assert sum(p.numel() for p in model.parameters()) > 10**6
    assert resolved("auto", model, torch.device(device)) == expected


def test_on_a_cpu_tf32_is_fp32_and_the_settings_are_put_back():
    before = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    assert_same_bits(update(precision="tf32").arrays, update().arrays)
    after = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    assert after == before


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_every_product_on_a_gpu_has_the_runs_precision(precision, expected):
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    with products(precision):
        found = [each.fp32_precision for each in (cuda.matmul, cudnn.conv, cudnn.rnn)]
    assert found == [expected] * 3


def test_threads_are_the_workers_share_or_as_asked(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(client_app.process_cache, "available_threads", 3)
        make_round(make_config(threads=0))
        assert torch.get_num_threads() == 3
        make_round(make_config(threads=2))
        assert torch.get_num_threads() == 2
        make_round(make_config())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
