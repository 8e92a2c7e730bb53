"""MOON against its loss as printed, in loops, and against cases whose value is on paper."""

import math
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import batch_of

from client_app.method import ModelParts
from client_app.methods.moon import MOON, model_contrastive_loss
from models import build_model


def random_features(batch_size, width, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, width, generator=generator, dtype=torch.float64)


def moon(**options):
    defaults = {"mu": 1.0, "tau": 0.5, "projection": "none", "first_use": "received"}
    return MOON(**(defaults | options))


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def loss_as_printed(z, z_g, z_p, tau):
    """Mean over b of -log( e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau}) )."""
    total = 0.0
    for a, g, p in zip(z.tolist(), z_g.tolist(), z_p.tolist(), strict=True):
        like_global, like_previous = math.exp(cosine(a, g) / tau), math.exp(cosine(a, p) / tau)
        total -= math.log(like_global / (like_global + like_previous))
    return total / len(z)


@pytest.mark.parametrize(("batch_size", "width"), [(1, 3), (5, 5), (6, 2)])
@pytest.mark.parametrize("tau", [0.5, 0.07])
def test_loss_equals_the_formula_in_loops(batch_size, width, tau):
    z, z_g, z_p = (random_features(batch_size, width, seed) for seed in (1, 2, 3))
    expected = loss_as_printed(z, z_g, z_p, tau)
    assert model_contrastive_loss(z, z_g, z_p, tau).item() == pytest.approx(expected, rel=1e-12)


def test_penalty_is_mu_times_the_loss_with_global_and_previous_in_their_places():
    z, z_g, z_p = (random_features(5, 4, seed) for seed in (1, 2, 3))
    penalty = moon(mu=5.0, tau=0.2).penalty(batch_of([z], [z_g], [z_p]))
    assert penalty.item() == pytest.approx(5 * loss_as_printed(z, z_g, z_p, 0.2), rel=1e-12)


def test_at_the_global_features_with_previous_ones_at_right_angles():
    z = torch.tensor([[2.0, 0.0], [0.0, -3.0]], dtype=torch.float64)
    z_p = torch.tensor([[0.0, 1.0], [5.0, 0.0]], dtype=torch.float64)
    assert model_contrastive_loss(z, 7 * z, z_p, 0.5).item() == pytest.approx(0.126928, abs=5e-7)


def test_first_participation_has_no_say():
    z, z_g = random_features(8, 4, seed=1).requires_grad_(), random_features(8, 4, seed=2)
    loss = model_contrastive_loss(z, z_g, z_g, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-12)
    assert z.grad.abs().max() < 1e-15


def test_mu_of_zero_adds_exactly_nothing():
    z, z_g, z_p = (random_features(5, 4, seed) for seed in (1, 2, 3))
    penalty = moon(mu=0.0).penalty(batch_of([z.requires_grad_()], [z_g], [z_p]))
    penalty.backward()
    assert penalty.item() == 0
    assert z.grad.abs().max() == 0


def test_a_step_against_the_gradient_moves_towards_the_global_features():
    z, z_g, z_p = (random_features(5, 4, seed) for seed in (1, 2, 3))
    moon().penalty(batch_of([z.requires_grad_()], [z_g], [z_p])).backward()

    def lead(features):
        def mean_cosine(other):
            return sum(map(cosine, features.tolist(), other.tolist())) / len(features)

        return mean_cosine(z_g) - mean_cosine(z_p)

    assert lead(z.detach() - 0.1 * z.grad) > lead(z.detach())


def test_gradient_is_that_of_the_loss_and_only_for_the_local_features():
    z, z_g, z_p = (random_features(4, 3, seed).requires_grad_() for seed in (1, 2, 3))
    assert torch.autograd.gradcheck(
        lambda a: model_contrastive_loss(a, z_g.detach(), z_p.detach(), 0.5), z
    )
    model_contrastive_loss(z, z_g, z_p, 0.5).backward()
    assert z_g.grad is None
    assert z_p.grad is None


def test_a_low_temperature_does_not_overflow():
    z = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = model_contrastive_loss(z, -z.detach(), z.detach(), tau=1e-3)
    loss.backward()
    assert loss.item() == pytest.approx(2000)
    assert z.grad.isfinite().all()


def test_a_sample_whose_units_are_all_dead_gives_nothing():
    raw = torch.tensor([[-1.0, -2.0], [1.0, 2.0]], requires_grad=True)
    z_g, z_p = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    model_contrastive_loss(raw.relu(), z_g, z_p, 0.5).backward()
    assert (raw.grad[0] == 0).all()
    assert (raw.grad[1] != 0).all()


@pytest.mark.parametrize("projection", ["none", "mlp"])
def test_what_is_compared_is_the_classifiers_input(projection):
    method = moon(projection=projection)
    assert method.model_parts() == ModelParts(projection=projection, projection_heads=False)
    model = build_model(
        "cnn-fedcka", num_classes=3, channels=1, image_size=28, seed=0, projection=projection
    )
    logits, (z,) = model.run(torch.randn(2, 1, 28, 28), method.layers(model))
    torch.testing.assert_close(model.classifier(z), logits)
    assert method.uses_global
    assert method.uses_previous


@pytest.mark.parametrize(
    ("first_use", "server_round", "has_negative"),
    [("received", 1, False), ("received", 7, False), ("official", 1, False), ("official", 7, True)],
)
def test_only_officially_and_after_round_1_a_first_participation_has_a_negative(
    first_use, server_round, has_negative
):
    ctx = SimpleNamespace(round=server_round, random_weights=lambda *names: {"stream": names})
    drawn = {"stream": ("first-use",)}
    assert moon(first_use=first_use).first_previous(ctx) == (drawn if has_negative else None)
