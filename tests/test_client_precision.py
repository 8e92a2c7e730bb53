"""`precision`, `compile` and `threads`: off by default, and near the plain run when on."""

import re
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import (
    Client,
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    subject_of,
    train,
)
from model_fixtures import undrawn

import client_app.process_cache
from client_app.evaluation import evaluate
from client_app.feature_cache import FrozenFeatureCache
from client_app.handlers import train_together
from client_app.methods import method_of
from client_app.methods.fedreco import consensus_gradient
from client_app.objective import representations
from client_app.precision import products, resolved
from client_app.process_cache import ProcessCache
from models import build_model
from protocol.messages import read_reply
from server_app.diagnostics.comparison import Comparison

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


def test_bf16_of_fedreco():
    keys = {"method": "fedreco", "fedreco__eta_u": 0.05, "fedreco__eta_v": 0.05}
    config, half = make_config(**keys), make_config(**keys, precision="bf16")
    one, other = (method_of(c).train(make_round(c, received=_extractor(c))) for c in (config, half))
    assert differ(one.arrays, other.arrays)
    for name, g in one.arrays.items():
        assert (g - other.arrays[name]).norm() <= 0.1 * g.norm() + 1e-3, name


def _extractor(config):
    return {n: a for n, a in initial(config, seed=3).items() if not n.startswith("classifier")}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_what_is_cached_is_what_the_local_network_would_say(precision):
    """Equal weights: local and frozen representations of a batch are the same numbers."""
    config = make_config(method="fedintr", local_epochs=2, precision=precision)
    now, objective = make_round(config), method_of(config)
    now.model.load_state_dict(now.received)
    now.model.eval()
    compute = representations(objective, now.frozen("global", now.received), now)
    frozen = FrozenFeatureCache(now, compute, is_read_again=True)
    step = next(now.steps("batches", 1))
    with client_app.trainer.forward_in(precision, now.device):  # as the trainer calls both
        first, again = frozen.of(step), frozen.of(step)
        _, reps = now.model.run(step.x, objective.layers(now.model))
    for z, z_first, z_again in zip(objective.represent(now.model, reps), first, again, strict=True):
        assert z.dtype == torch.float32
        assert torch.equal(z_first, z_again)
        assert torch.equal(z, z_first)


@pytest.mark.parametrize("method", ["fedcr", "fedpac", "fedreco", "fedrep"])
def test_a_frozen_extractor_whose_features_are_cached_computes_in_bfloat16(method, monkeypatch):
    """As it does where it is trained."""
    seen, of = set(), FrozenFeatureCache.of

    def recorded(self, step):
        seen.add(torch.is_autocast_enabled("cpu"))
        return of(self, step)

    monkeypatch.setattr(FrozenFeatureCache, "of", recorded)
    keys = {"fedcr.final-head-epochs": 1, "num_rounds": 1} if method == "fedcr" else {}
    subject = subject_of(method)
    ctx = subject.round(subject.config(precision="bf16", **keys), 1, {}, 2)
    state = method_of(ctx.config).train(ctx).state
    method_of(ctx.config).personal_model(ctx, state)
    assert seen == {True}


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
    model = SimpleNamespace(weights=[torch.empty(num_parameters, device="meta")], modules=list)
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
    assert sum(p.numel() for p in model.weights) > 10**6
    assert resolved("auto", model, torch.device(device)) == expected


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedreco"])
def test_auto_trains_as_the_precision_that_it_stands_for(method, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    for min_parameters, precision in ((1000, "bf16"), (10**6, "fp32")):
        monkeypatch.setattr(client_app.precision, "auto_min_parameters", min_parameters)
        keys = {"method": method, "local_epochs": 1}
        auto, other = (
            make_config(**keys, precision="auto"),
            make_config(**keys, precision=precision),
        )
        sent = _extractor(auto) if method == "fedreco" else None
        about = {"number": 2, "received": sent}
        if method == "moon":
            about["state"] = {"previous": initial(auto, seed=5)}
        assert_same_bits(train(auto, **about).arrays, train(other, **about).arrays)


@pytest.mark.parametrize(("precision", "expected"), [("auto", "tf32"), ("bf16", "ieee")])
def test_auto_evaluates_in_tf32(precision, expected):
    now, seen = make_round(make_config()), []
    now.model.register_forward_hook(
        lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision)
    )
    evaluate(now.model, now.train_samples, precision)
    assert set(seen) == {expected}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("num_together", [0, 1, 2])
def test_what_a_client_computes_beside_its_phases_has_the_precision_too(
    num_together, precision, tmp_path, monkeypatch
):
    """On a GPU torch's default is TF32 in convolutions: FedReCo would send that gradient."""
    seen = []

    def recorded(*about):
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        return consensus_gradient(*about)

    monkeypatch.setattr("client_app.methods.fedreco.consensus_gradient", recorded)
    config = make_config(method="fedreco", precision=precision)
    received = _extractor(config)
    if num_together:
        cache = ProcessCache()
        ctxs = [
            make_round(config, received=received, partition=n, cache=cache)
            for n in range(num_together)
        ]
        train_together([method_of(config)] * num_together, ctxs)
    else:
        read_reply(Client(config, tmp_path).ask("train", 1, received))
    assert seen == ["tf32" if precision == "tf32" else "ieee"] * max(1, num_together)


def test_diagnostics_are_in_float32():
    now, seen = make_round(make_config()), []
    for layer in now.model.modules():
        layer.register_forward_hook(
            lambda *_: seen.append(torch.backends.cudnn.conv.fp32_precision)
        )
    Comparison(
        ("effective-rank",), now.train_samples, lambda _: now.model, now.model.name, now.received
    )
    assert set(seen) == {"ieee"}


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


def test_clients_that_train_together_have_the_runs_threads(monkeypatch):
    """In stacked runs, another thread trains them than the one that has begun the round."""
    seen, config, before = [], make_config(threads=2), torch.get_num_threads()

    def train(methods, ctxs):
        seen.append(torch.get_num_threads())
        return []

    monkeypatch.setattr("client_app.handlers.train_stacked", train)
    cache = ProcessCache()
    try:
        ctxs = [make_round(config, partition=n, cache=cache) for n in range(2)]
        torch.set_num_threads(3)
        train_together([method_of(config)] * 2, ctxs)
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


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


@pytest.mark.parametrize(
    ("device", "there", "environment", "missing"),
    [
        ("cpu", ["g++"], {}, ""),
        ("cpu", ["gcc", "clang", "cc", "c++"], {}, "C++ compiler on cpu, and there is no g++ here"),
        ("cpu", ["own++"], {"CXX": "own++ -m64", "CC": "none"}, ""),
        ("cpu", ["g++"], {"CXX": "own++"}, "no own++ here"),
        ("cuda", ["gcc"], {}, ""),
        ("cuda", ["clang"], {"CXX": "none"}, ""),
        ("cuda", ["own"], {"CC": "own"}, ""),
        ("cuda", ["g++", "cc"], {}, "C compiler on cuda, and there is no gcc or clang here"),
        ("cuda", ["gcc"], {"CC": "own"}, "no own here"),
    ],
)
def test_compile_wants_the_compiler_of_its_device(
    device, there, environment, missing, tmp_path, monkeypatch
):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in there:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda run: run)
    model = torch.nn.Linear(1, 1)
    model.run = model.forward
    if missing:
        with pytest.raises(ValueError, match=re.escape(missing)):
            client_app.process_cache.compile_passes(model, torch.device(device))
    else:
        client_app.process_cache.compile_passes(model, torch.device(device))


def test_compile_without_a_compiler_is_refused_before_round_1(tmp_path, monkeypatch):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reply = Client(make_config(compile=True), tmp_path).ask("query")
    assert reply.error.reason.startswith("client client-0000: compile = true: torch")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["fedavg", "fedintr"])
def test_compiled_passes_give_the_same_update(method):
    plain, compiled = update(method=method), update(method=method, compile=True)
    assert_close(compiled.arrays, plain.arrays, rtol=0, atol=1e-5)
    assert compiled.terms == {k: pytest.approx(v, rel=1e-4) for k, v in plain.terms.items()}
