"""FedIntR against eq. (2) to (6) as printed, in loops, with every option's branch run."""

import math
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import assert_same_bits, batch_of, differ, initial, make_config, train
from method_fixtures import MOVING
from printed_formulas import cosine
from torch import nn

from client_app.method import ModelParts
from client_app.methods.fedintr import FedIntR, similarity_weights
from models import build_model

TAU = 0.3


def random_outputs(seed, batch_size=5):
    """Outputs of three layers of different shapes, one of them spatial."""
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
    return FedIntR(
        **(
            defaults
            | {"detach": False, "projection_width": 256}
            | {"first_use": "received"}
            | options
        )
    )


def scene(batch_size=5, same_previous=False):
    """(local model, outputs of its layers, z_g, z_p), each model with heads of its own."""
    method = fedintr()
    local, global_, previous = (model_with_heads(seed) for seed in (1, 2, 3))
    z_g = [z.detach() for z in method.represent(global_, random_outputs(5, batch_size))]
    z_p = [z.detach() for z in method.represent(previous, random_outputs(6, batch_size))]
    outputs = random_outputs(4, batch_size)
    return local, outputs, z_g, z_g if same_previous else z_p


def penalty_of(method, local, outputs, z_g, z_p):
    """The penalty of a batch with these outputs of the local model's layers."""
    return method.penalty(batch_of(method.represent(local, outputs), z_g, z_p))


def similarities(z, z_other):
    """sim(z^k, z_other^k) of every sample and layer, [B][K]."""
    by_layer = [list(map(cosine, a.tolist(), b.tolist())) for a, b in zip(z, z_other, strict=True)]
    return [list(of_sample) for of_sample in zip(*by_layer, strict=True)]


def mean_over_samples(of_samples):
    return [sum(of_layer) / len(of_samples) for of_layer in zip(*of_samples, strict=True)]


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


def penalty_as_printed(z, z_g, z_p, tau, layer_weights, reduction, alpha=None):
    """The sum of eq. (5) or (6); alpha: use these weights instead of the formula's."""
    s_g, s_p = similarities(z, z_g), similarities(z, z_p)
    if reduction == "batch":
        s_g, s_p = [mean_over_samples(s_g)], [mean_over_samples(s_p)]
    totals = []
    for g, p in zip(s_g, s_p, strict=True):
        a = alpha or (weights_as_printed(g, tau) if layer_weights == "similarity" else [1 / 3] * 3)
        totals.append(sum(x * y for x, y in zip(a, losses_as_printed(g, p, tau), strict=True)))
    return sum(totals) / len(totals)


def represented(local, outputs):
    """z^k as the paper has it: flattened, through this model's own head."""
    heads = zip(local.projection_heads.values(), outputs, strict=True)
    return [head(h.reshape(len(h), -1)).detach() for head, h in heads]


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("layer_weights", ["similarity", "average"])
def test_penalty_equals_equations_2_to_6_as_printed(layer_weights, reduction, detach, batch_size):
    local, outputs, z_g, z_p = scene(batch_size)
    method = fedintr(mu=3.0, layer_weights=layer_weights, reduction=reduction, detach=detach)
    z = represented(local, outputs)
    expected = penalty_as_printed(z, z_g, z_p, TAU, layer_weights, reduction)
    got = penalty_of(method, local, outputs, z_g, z_p).item()
    assert got == pytest.approx(3 * expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("layer_weights", ["similarity", "average"])
def test_gradient_flows_through_losses_and_weights(layer_weights, reduction):
    local, outputs, z_g, z_p = scene(batch_size=2)
    method = fedintr(layer_weights=layer_weights, reduction=reduction)

    def penalty(*moved):
        return penalty_of(method, local, list(moved), z_g, z_p)

    assert torch.autograd.gradcheck(penalty, [h.requires_grad_() for h in outputs])


def test_detached_weights_are_constants_to_the_gradient():
    local, outputs, z_g, z_p = scene()
    h = outputs[1].requires_grad_()
    penalty_of(fedintr(detach=True), local, outputs, z_g, z_p).backward()
    s_g = mean_over_samples(similarities(represented(local, outputs), z_g))
    alpha = weights_as_printed(s_g, TAU)
    step = 1e-6
    for entry in [(0, 0), (2, 3), (4, 1)]:
        around = []
        for sign in (1, -1):
            moved = h.detach().clone()
            moved[entry] += sign * step
            z = represented(local, [outputs[0], moved, outputs[2]])
            around.append(penalty_as_printed(z, z_g, z_p, TAU, "similarity", "batch", alpha))
        slope = (around[0] - around[1]) / (2 * step)
        assert h.grad[entry].item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("layer_weights", ["similarity", "average"])
def test_first_participation_has_no_effect(layer_weights, reduction):
    local, outputs, z_g, z_p = scene(same_previous=True)
    for h in outputs:
        h.requires_grad_()
    method = fedintr(layer_weights=layer_weights, reduction=reduction)
    penalty = penalty_of(method, local, outputs, z_g, z_p)
    penalty.backward()
    assert penalty.item() == pytest.approx(math.log(2), rel=1e-12)
    assert all(h.grad.abs().max() < 1e-12 for h in outputs)
    assert all(p.grad.abs().max() < 1e-12 for p in local.projection_heads.parameters())


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedintr"},
        {"method": "moon", "moon__projection": "mlp-side"},
        {"method": "fedcka", "fedcka__projection": "mlp-side"},
    ],
    ids=lambda keys: keys["method"],
)
def test_projection_heads_stay_as_received_at_a_first_participation_alone(keys):
    config = make_config(**keys, **MOVING)
    w, previous = initial(config, seed=5), initial(config, seed=6)
    heads = {name for name in w if name.startswith("projection_heads.")}
    first = train(config, number=2, received=w).arrays
    assert heads
    assert_same_bits(first, w, heads)
    assert set(differ(first, w)) == set(w) - heads
    second = train(config, number=2, received=w, state={"previous": previous}).arrays
    assert set(differ(second, w)) == set(w)


def test_a_step_against_the_gradient_moves_towards_the_global_representations():
    local, outputs, z_g, z_p = scene()
    for h in outputs:
        h.requires_grad_()
    penalty_of(fedintr(layer_weights="average"), local, outputs, z_g, z_p).backward()

    def lead(moved):
        z = represented(local, moved)
        s_g, s_p = similarities(z, z_g), similarities(z, z_p)
        return sum(map(sum, s_g)) - sum(map(sum, s_p))

    moved = [(h - 0.1 * h.grad).detach() for h in outputs]
    assert lead(moved) > lead([h.detach() for h in outputs])


def test_frozen_representations_get_no_gradient_and_every_head_trains():
    local, outputs, z_g, z_p = scene()
    frozen = [z.requires_grad_() for z in [*z_g, *z_p]]
    penalty_of(fedintr(), local, outputs, z_g, z_p).backward()
    assert all(z.grad is None for z in frozen)
    assert all(p.grad.abs().max() > 0 for p in local.projection_heads.parameters())


def test_more_similar_layers_weigh_more_and_the_weights_add_up_to_one():
    s_g = torch.tensor([[0.9, -0.2], [0.1, 0.3], [-0.5, 0.3]], dtype=torch.float64)  # [K, B]
    alpha = similarity_weights(s_g, TAU)
    assert alpha[0, 0] > alpha[1, 0] > alpha[2, 0]
    torch.testing.assert_close(alpha.sum(0), torch.ones(2, dtype=torch.float64))


def test_a_representation_is_flattened_and_goes_through_the_head_of_that_very_model():
    method, outputs = fedintr(), random_outputs(1)
    for model in (model_with_heads(1), model_with_heads(2)):
        for z, expected in zip(
            method.represent(model, outputs), represented(model, outputs), strict=True
        ):
            torch.testing.assert_close(z, expected)


def test_all_stages_of_a_model_are_represented_but_not_an_added_projection():
    method = fedintr()
    assert method.model_parts() == ModelParts(projection="none", projection_heads=256)
    assert method.uses_global
    assert method.uses_previous
    model = build_model(
        "cnn-fedintr", num_classes=3, channels=3, image_size=32, seed=0, projection_heads=256
    )
    assert method.layers(model) == ["conv1", "conv2", "conv3", "fc1", "fc2"]
    _, outputs = model.run(torch.randn(2, 3, 32, 32), method.layers(model))
    assert [z.shape for z in method.represent(model, outputs)] == [(2, 256)] * 5
