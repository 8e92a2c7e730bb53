"""Recorded steps, on the CPU: a replay calls the function, with the recorded inputs and memory.

Kernels themselves are recorded in tests/test_gpu.py.
"""

from dataclasses import replace

import pytest
import torch
from client_fixtures import assert_same_bits, make_config, make_round, subject_of, train
from method_fixtures import METHODS
from test_client_waits import train_two_rounds
from torch.utils import _pytree as pytree

import client_app.graphs
import client_app.trainer
from client_app.graphs import NUM_EAGER, Obstacles, Recording, Replayed
from client_app.process_cache import ProcessCache
from client_app.trainer import replayed_sizes
from protocol.config import resolve_config

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
    monkeypatch.setattr(client_app.trainer, "replayed_sizes", lambda ctx, plan: sizes_of(plan))
    monkeypatch.setattr(Replayed, "obstacles", {})
    monkeypatch.setattr(Replayed, "passed", set())
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
        patch.setattr(client_app.trainer, "replayed_sizes", lambda ctx, plan: set())
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
    monkeypatch.setattr(client_app.trainer, "replayed_sizes", lambda ctx, plan: set())
    for one, other in zip(found, train_two_rounds(subject, local_epochs=4, **keys), strict=True):
        assert_same_bits(one.arrays, other.arrays)


def test_each_form_of_the_inputs_is_recorded_at_its_third_call(recorded):
    double = Replayed(lambda inputs: [inputs["x"] * 2, inputs["same"]], "a test")
    same = torch.ones(1)
    for size, value in [(2, 1), (3, 2), (2, 3), (3, 4), (2, 5), (2, 6), (3, 7), (2, 8)]:
        x = torch.full((size,), float(value))
        made, constant = double({"x": x, "same": same})
        assert made.tolist() == [2 * value] * size
        assert constant is same
    assert recorded.made == 2
    other = torch.zeros(1)  # in place of the one that the recording reads where it lies
    made, constant = double({"x": torch.ones(2), "same": other})
    assert (made.tolist(), constant is other, same.item()) == ([2, 2], True, 1)


def test_what_passed_once_is_recorded_at_its_second_call_and_not_searched_again(
    recorded, monkeypatch
):
    def calls_until_recorded(kind=None, structure=list):
        before, double = recorded.made, Replayed(lambda x: x[0] * 2, "a test", kind)
        for number in range(1, 5):
            assert double(structure([torch.full((2,), float(number))])).tolist() == [2 * number] * 2
            if recorded.made > before:
                return number

    searched = []
    monkeypatch.setattr(Obstacles, "__enter__", lambda self: searched.append(1) or self)
    monkeypatch.setattr(Obstacles, "__exit__", lambda *_: None)
    assert [calls_until_recorded() for _ in range(3)] == [3, 2, 2]
    assert [calls_until_recorded("other terms") for _ in range(2)] == [3, 2]
    assert [calls_until_recorded(structure=tuple) for _ in range(2)] == [3, 2]
    assert len(searched) == 3


def test_a_number_that_differs_in_every_step_is_said_and_old_inputs_are_not_kept(recorded, caplog):
    replayed = Replayed(lambda inputs: inputs[0] + inputs[1], "a step of mine")
    for number in range(100):
        assert replayed((torch.ones(1), number)).item() == 1 + number
    assert recorded.made == 0
    assert len(replayed.before) < 20
    assert "a number among its inputs differs in every step" in caplog.text


def test_a_recording_that_fails_says_its_first_error(recorded, caplog, monkeypatch):
    def failing(self, call):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("capture was invalidated")  # as `capture_end` does then

    monkeypatch.setattr(recorded, "record", failing)
    replayed = Replayed(lambda x: 2 * x, "a step of mine")
    assert [replayed(torch.tensor(float(n))).item() for n in range(5)] == [0, 2, 4, 6, 8]
    assert "operation not permitted when stream is capturing" in caplog.text


class WaitsBackwards(torch.autograd.Function):
    """The identity, whose backward pass reads a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


def gradient_of(x):
    weight = torch.ones(2, requires_grad=True)
    (WaitsBackwards.apply(weight) * x).sum().backward()
    return weight.grad


def made_elsewhere(x):
    return torch.tensor([0.0, 1.0], device="meta")


def sees_tensors_made_elsewhere():
    """Not so in torch 2.11, where the recording fails instead."""
    with Obstacles() as found:
        made_elsewhere(None)
    return bool(found.first)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (gradient_of, "_local_scalar_dense"),
        (lambda x: x + x.nonzero().shape[0], "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x[(x > 0).byte()], "index"),
        (lambda x: x * torch.equal(x, x), "equal"),
        (lambda x: torch.rand(2, generator=torch.Generator()) * x, "rand"),
        (lambda x: x.to("meta"), "_to_copy"),
        pytest.param(
            made_elsewhere,
            "lift_fresh",
            marks=pytest.mark.skipif(
                not sees_tensors_made_elsewhere(), reason="this torch does not report torch.tensor"
            ),
        ),
        (lambda x: torch.ones(9, device="meta")[x.long()], "index"),
        (lambda x: torch.linalg.inv(x.diag()), "_linalg_check_errors"),
        (lambda x: torch.linalg.eigvalsh(x.diag()), "_linalg_eigh"),
        (lambda x: torch.linalg.matrix_norm(x.diag(), "nuc"), "_linalg_svd"),
    ],
)
def test_what_a_graph_cannot_have_is_called_as_it_is_and_said_once(
    function, operation, recorded, caplog
):
    for _ in range(2):  # as in two rounds
        replayed = Replayed(function, "a step of mine")
        for value in range(1, 6):
            x = torch.full((2,), float(value))
            made = replayed(x)
            assert made.shape == function(x).shape
    assert recorded.made == 0
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        f"a step of mine is not recorded as a CUDA graph: it has the operation {operation}"
    ]


def test_what_was_found_of_steps_is_forgotten_with_their_run(recorded):
    """The next run in this process, as in a notebook, may have other options or mended code."""
    cache, config = ProcessCache(), make_config()
    make_round(config, cache=cache)
    Replayed.obstacles["a step of mine"] = "it waits"
    make_round(config, number=2, cache=cache)
    assert Replayed.obstacles
    make_round(make_config(seed=1), cache=cache)
    assert not Replayed.obstacles


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((1, object()), "object among the inputs"),
        ((1, 2.0), "inputs on 0 devices"),
        ((torch.ones(1), torch.ones(1, device="meta")), "inputs on 2 devices"),
    ],
)
def test_inputs_that_no_graph_can_have_are_said(inputs, reason, recorded, caplog):
    replayed = Replayed(lambda inputs: inputs[0] + 1, "a step of mine")
    for _ in range(4):
        assert replayed(inputs) == 2
    assert recorded.made == 0
    assert f"not recorded as a CUDA graph: {reason}" in caplog.text


def test_indices_and_copies_on_one_device_are_no_obstacle():
    x, index = torch.rand(4, 3), torch.tensor([1, 0])
    with Obstacles() as found:
        x.index_select(0, index).index_copy_(0, index, x[index]).double().clone().copy_(x[:2])
    assert not found.first


def test_a_size_of_which_a_phase_has_few_batches_is_not_recorded():
    """Each epoch has three batches of 8 samples and one of 6, which was recorded as well."""
    ctx = make_round(make_config(cuda_graphs=True, batch_size=8))
    plans = {num: ctx.plan("batches", num, "epochs") for num in (1, 3, 8)}
    on_gpu = replace(ctx, device=torch.device("cuda"))
    sizes = {num: replayed_sizes(on_gpu, plan) for num, plan in plans.items()}
    assert sizes == {1: set(), 3: {8}, 8: {8, 6}}


def test_only_steps_of_the_chosen_sizes_are_replayed(recorded, monkeypatch):
    config = make_config(cuda_graphs=True, batch_size=8, local_epochs=3)
    forms = set()

    def noted(self, inputs):
        forms.add(len(pytree.tree_leaves(inputs)[0]))
        return self.function(inputs)

    monkeypatch.setattr(Replayed, "__call__", noted)
    monkeypatch.setattr(client_app.trainer, "replayed_sizes", lambda ctx, plan: {8})
    train(config)
    assert forms == {8}


def test_nothing_is_recorded_on_a_cpu_or_for_few_steps(monkeypatch):
    assert NUM_EAGER < client_app.graphs.MIN_CALLS
    monkeypatch.setattr(Recording, "record", lambda *_: pytest.fail("recorded"))
    train(make_config(cuda_graphs=True, local_epochs=6))


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("compile", True, "true"),
    ],
)
def test_keys_that_train_otherwise_are_refused(key, value, shown):
    with pytest.raises(ValueError, match=f"^{key} = {shown}: .*cuda-graphs = true"):
        resolve_config({"cuda-graphs": True, key: value})
