"""FedIntR against eq. (2) to (6) as printed, in loops, with every option's branch run."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from client_app.method import ModelParts
from client_app.methods.fedintr import FedIntR, similarity_weights
from client_app.objective import Batch
from models import build_model

TAU = 0.3


def random_taps(seed, batch_size=5):
    """Three taps of different shapes, one of them spatial."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch_size, 2, 2, 2), (batch_size, 5), (batch_size, 3)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def model_with_heads(seed):
    torch.manual_seed(seed)
    widths = {"conv1": 8, "fc1": 5, "fc2": 3}
    heads = {
        name: nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 4)).double()
        for name, width in widths.items()
    }
    return SimpleNamespace(regularised_stages=tuple(widths), projection_heads=nn.ModuleDict(heads))


def fedintr(**options):
    defaults = {"mu": 1.0, "tau": TAU, "layer_weights": "similarity", "reduction": "batch"}
    return FedIntR(**(defaults | {"detach": False} | options))


def scene(batch_size=5, same_previous=False):
    """(local model, Batch), each of the three models with weights and heads of its own."""
    method = fedintr()
    local, global_, previous = (model_with_heads(seed) for seed in (1, 2, 3))
    taps = random_taps(4, batch_size)
    z_g = [z.detach() for z in method.represent(global_, random_taps(5, batch_size))]
    z_p = [z.detach() for z in method.represent(previous, random_taps(6, batch_size))]
    none, now = torch.empty(0), SimpleNamespace(model=local)
    batch = Batch(
        x=none,
        y=none,
        logits=none,
        taps=taps,
        reps_global=z_g,
        reps_previous=z_g if same_previous else z_p,
        round=now,
    )
    return local, batch


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def similarities(z, z_other):
    """sim(z^k, z_other^k) of every sample and tap, [B][K]."""
    by_tap = [list(map(cosine, a.tolist(), b.tolist())) for a, b in zip(z, z_other, strict=True)]
    return [list(of_sample) for of_sample in zip(*by_tap, strict=True)]


def mean_over_samples(of_samples):
    return [sum(of_tap) / len(of_samples) for of_tap in zip(*of_samples, strict=True)]


def weights_as_printed(s_g, tau):
    """Eq. (4)."""
    total = sum(math.exp(s / tau) for s in s_g)
    return [math.exp(s / tau) / total for s in s_g]


def losses_as_printed(s_g, s_p, tau):
    """Eq. (2)."""
    losses = []
    for g, p in zip(s_g, s_p, strict=True):
        like_global, like_previous = math.exp(g / tau), math.exp(p / tau)
        losses.append(-math.log(like_global / (like_global + like_previous)))
    return losses


def penalty_as_printed(z, batch, tau, layer_weights, reduction, alpha=None):
    """The sum of eq. (5) or (6); alpha: use these weights instead of the formula's."""
    s_g, s_p = similarities(z, batch.reps_global), similarities(z, batch.reps_previous)
    if reduction == "batch":
        s_g, s_p = [mean_over_samples(s_g)], [mean_over_samples(s_p)]
    totals = []
    for g, p in zip(s_g, s_p, strict=True):
        a = alpha or (weights_as_printed(g, tau) if layer_weights == "similarity" else [1 / 3] * 3)
        totals.append(sum(x * y for x, y in zip(a, losses_as_printed(g, p, tau), strict=True)))
    return sum(totals) / len(totals)


def represented(local, taps):
    """z^k as the paper has it: flattened, through this model's own head."""
    heads = zip(local.projection_heads.values(), taps, strict=True)
    return [head(tap.reshape(len(tap), -1)).detach() for head, tap in heads]


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("layer_weights", ["similarity", "average"])
def test_penalty_equals_equations_2_to_6_as_printed(layer_weights, reduction, detach, batch_size):
    local, batch = scene(batch_size)
    method = fedintr(mu=3.0, layer_weights=layer_weights, reduction=reduction, detach=detach)
    expected = penalty_as_printed(
        represented(local, batch.taps), batch, TAU, layer_weights, reduction
    )
    assert method.penalty(batch).item() == pytest.approx(3 * expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("layer_weights", ["similarity", "average"])
def test_gradient_flows_through_losses_and_weights(layer_weights, reduction):
    _, batch = scene(batch_size=2)
    method = fedintr(layer_weights=layer_weights, reduction=reduction)

    def penalty(*taps):
        return method.penalty(dataclasses.replace(batch, taps=list(taps)))

    assert torch.autograd.gradcheck(penalty, [tap.requires_grad_() for tap in batch.taps])


def test_detached_weights_are_constants_to_the_gradient():
    local, batch = scene()
    taps = batch.taps
    tap = taps[1].requires_grad_()
    fedintr(detach=True).penalty(batch).backward()
    s_g = mean_over_samples(similarities(represented(local, taps), batch.reps_global))
    alpha = weights_as_printed(s_g, TAU)
    step = 1e-6
    for entry in [(0, 0), (2, 3), (4, 1)]:
        around = []
        for sign in (1, -1):
            moved = tap.detach().clone()
            moved[entry] += sign * step
            z = represented(local, [taps[0], moved, taps[2]])
            around.append(penalty_as_printed(z, batch, TAU, "similarity", "batch", alpha))
        slope = (around[0] - around[1]) / (2 * step)
        assert tap.grad[entry].item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("layer_weights", ["similarity", "average"])
def test_first_participation_has_no_say(layer_weights, reduction):
    local, batch = scene(same_previous=True)
    for tap in batch.taps:
        tap.requires_grad_()
    penalty = fedintr(layer_weights=layer_weights, reduction=reduction).penalty(batch)
    penalty.backward()
    assert penalty.item() == pytest.approx(math.log(2), rel=1e-12)
    assert all(tap.grad.abs().max() < 1e-12 for tap in batch.taps)
    assert all(p.grad.abs().max() < 1e-12 for p in local.projection_heads.parameters())


def test_mu_of_zero_adds_exactly_nothing():
    local, batch = scene()
    penalty = fedintr(mu=0.0).penalty(batch)
    penalty.backward()
    assert penalty.item() == 0
    assert all((p.grad == 0).all() for p in local.projection_heads.parameters())


def test_a_step_against_the_gradient_moves_towards_the_global_taps():
    local, batch = scene()
    for tap in batch.taps:
        tap.requires_grad_()
    fedintr(layer_weights="average").penalty(batch).backward()

    def lead(local_taps):
        z = represented(local, local_taps)
        s_g, s_p = similarities(z, batch.reps_global), similarities(z, batch.reps_previous)
        return sum(map(sum, s_g)) - sum(map(sum, s_p))

    moved = [(tap - 0.1 * tap.grad).detach() for tap in batch.taps]
    assert lead(moved) > lead([tap.detach() for tap in batch.taps])


def test_frozen_representations_get_no_gradient_and_every_head_trains():
    local, batch = scene()
    frozen = [z.requires_grad_() for z in [*batch.reps_global, *batch.reps_previous]]
    fedintr().penalty(batch).backward()
    assert all(z.grad is None for z in frozen)
    assert all(p.grad.abs().max() > 0 for p in local.projection_heads.parameters())


def test_the_more_alike_a_tap_the_more_it_weighs_and_the_weights_add_up_to_one():
    s_g = torch.tensor([[0.9, -0.2], [0.1, 0.3], [-0.5, 0.3]], dtype=torch.float64)  # [K, B]
    alpha = similarity_weights(s_g, TAU)
    assert alpha[0, 0] > alpha[1, 0] > alpha[2, 0]
    torch.testing.assert_close(alpha.sum(0), torch.ones(2, dtype=torch.float64))


def test_a_represented_tap_is_flattened_and_goes_through_the_head_of_that_very_model():
    method, taps = fedintr(), random_taps(1)
    for model in (model_with_heads(1), model_with_heads(2)):
        for z, expected in zip(
            method.represent(model, taps), represented(model, taps), strict=True
        ):
            torch.testing.assert_close(z, expected)


def test_all_stages_of_a_model_are_represented_but_not_an_added_projection():
    method = fedintr()
    assert method.model_parts() == ModelParts(projection="none", projection_heads=True)
    assert method.uses_global
    assert method.uses_previous
    model = build_model(
        "cnn-fedintr", num_classes=3, channels=3, image_size=32, seed=0, projection_heads=True
    )
    assert method.layers(model) == ["conv1", "conv2", "conv3", "fc1", "fc2"]
    _, taps = model.run(torch.randn(2, 3, 32, 32), method.layers(model))
    assert [z.shape for z in method.represent(model, taps)] == [(2, 256)] * 5
