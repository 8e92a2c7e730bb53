"""`precision` and `threads`: off by default, and near the plain run when on."""

from types import SimpleNamespace

import pytest
import torch
from client_fixtures import (
    differ,
    initial,
    make_config,
    make_round,
    train,
)

import client_app.process_cache
from client_app.evaluation import evaluate
from client_app.networks import resolved

METHODS = ("fedavg", "fedcka", "fedrcl")


def update(**keys):
    config = make_config(local_epochs=2, **keys)
    return train(config, number=2, state={"previous": initial(config, seed=5)})


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_near_fp32_and_is_not_it(method):
    """bfloat16 keeps 8 bits, so 0.4 % of each number: the step taken must be alike, not equal."""
    keys = {"method": method}
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


def test_evaluation_is_fp32_whatever_training_was():
    half, plain = make_round(make_config(precision="bf16")), make_round(make_config())
    scores = []
    for now in (half, plain):
        now.model.load_state_dict(now.received)
        score = evaluate(now.model, now.train_samples)
        scores.append((score.accuracy, score.loss))
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("flags", "device", "num_parameters", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "cpu", 1_000_001, "bf16"),
        ({"avx512_bf16": True}, "cpu", 1_000_000, "fp32"),
        ({"avx512_bf16": False, "amx_bf16": False}, "cpu", 10**8, "fp32"),
        ({"capability": (8, 0)}, "cuda", 1_000_001, "bf16"),
        ({"capability": (7, 5)}, "cuda", 10**8, "fp32"),  # a T4, where torch emulates bfloat16
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
