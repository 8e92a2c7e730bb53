"""MOON against its loss as printed, in loops, and against cases whose value is on paper."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import assert_same_bits, batch_of, initial, make_config, make_round
from printed_formulas import cosine

from client_app.method import ModelParts
from client_app.methods import method_of
from client_app.methods.moon import MOON, model_contrastive_loss
from client_app.objective import frozen_representations
from models import build_model


def random_features(batch_size, width, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, width, generator=generator, dtype=torch.float64)


def moon(**options):
    defaults = {"mu": 1.0, "tau": 0.5, "projection": "none", "first_use": "received"}
    defaults["reduction"] = "sample"
    return MOON(**(defaults | options))


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


# --- the rows of MOON in FedIntR's tables, as its code has them -----------------------------------


def loss_of_batch_means(z, z_g, z_p, tau):
    """-log( e^p / (e^p + e^n) ) with p and n the batch means of the cosines over tau."""
    p = sum(cosine(a, b) / tau for a, b in zip(z.tolist(), z_g.tolist(), strict=True)) / len(z)
    n = sum(cosine(a, b) / tau for a, b in zip(z.tolist(), z_p.tolist(), strict=True)) / len(z)
    return -math.log(math.exp(p) / (math.exp(p) + math.exp(n)))


@pytest.mark.parametrize("tau", [0.5, 0.07])
def test_with_batch_means_the_loss_is_that_of_fedintrs_code(tau):
    z, z_g, z_p = (random_features(7, 5, seed) for seed in (1, 2, 3))
    expected = loss_of_batch_means(z, z_g, z_p, tau)
    assert model_contrastive_loss(z, z_g, z_p, tau, "batch").item() == pytest.approx(
        expected, abs=1e-15
    )
    assert abs(expected - loss_as_printed(z, z_g, z_p, tau)) > 1e-3


def step_of_fedintrs_code(w, w_g, w_p, x, y, mu, tau):
    """CE + mu times the contrast of fc2's side branch, from arrays by name, in plain functions."""

    def run(w):
        h = x
        for n in (1, 2, 3):
            name = f"stages.conv{n}.body"
            h = F.max_pool2d(F.conv2d(h, w[f"{name}.weight"], w[f"{name}.bias"]).relu(), 2)
        h = h.flatten(1)
        for n in (1, 2):
            h = F.linear(h, w[f"stages.fc{n}.body.1.weight"], w[f"stages.fc{n}.body.1.bias"]).relu()
        side = "projection_heads.fc2"
        hidden = F.linear(h, w[f"{side}.0.weight"], w[f"{side}.0.bias"]).relu()
        z = F.linear(hidden, w[f"{side}.2.weight"], w[f"{side}.2.bias"])
        return F.linear(h, w["classifier.weight"], w["classifier.bias"]), z

    def mean_cosine(a, b):
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean()

    (logits, z), (_, z_g), (_, z_p) = run(w), run(w_g), run(w_p)
    p, n = mean_cosine(z, z_g).div(tau).exp(), mean_cosine(z, z_p).div(tau).exp()
    return F.cross_entropy(logits, y) - mu * torch.log(p / (p + n))


def test_loss_and_gradient_of_a_step_with_a_side_branch_are_those_of_fedintrs_code():
    method = moon(mu=5.0, projection="mlp-side", reduction="batch")
    parts = method.model_parts()
    about = {"num_classes": 4, "channels": 3, "image_size": 32, "head_stages": parts.head_stages}
    models = [
        build_model(
            "cnn-fedintr", seed=n, projection_heads=parts.projection_heads, **about
        ).double()
        for n in (1, 2, 3)
    ]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 32, 32, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (6,), generator=generator)
    reps = []
    for model in models:
        logits, outputs = model.run(x, method.layers(model))
        reps.append(method.represent(model, outputs))
    logits = models[0](x)
    loss = F.cross_entropy(logits, y) + method.penalty(batch_of(*reps))
    loss.backward()
    w, w_g, w_p = (
        {k: v.detach().clone().requires_grad_(m is models[0]) for k, v in m.state_dict().items()}
        for m in models
    )
    expected = step_of_fedintrs_code(w, w_g, w_p, x, y, 5.0, 0.5)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=4e-15)
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(parameter.grad, w[name].grad, rtol=0, atol=1e-14)
    assert models[0].projection_heads["fc2"][0].weight.grad.abs().max() > 1e-3


def test_only_the_contrast_reads_the_side_branch():
    """In line it is another network. With mu = 0 it trains as FedAvg: see test_methods.py."""
    configs = (make_config(method="moon", moon__projection=p) for p in ("mlp-side", "mlp"))
    received, in_line = map(initial, configs)
    shared = initial(make_config())
    assert_same_bits(received, shared, names=shared)
    heads = [name for name in received if name.startswith("projection_heads.fc2.")]
    assert len(heads) == 4
    assert received.keys() == shared.keys() | set(heads)
    assert "stages.projection.body.1.weight" in in_line


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_frozen_models_use_their_own_statistics_or_each_batchs(statistics):
    config = make_config(
        method="moon", model="resnet20", width=4, local_epochs=2, frozen_statistics=statistics
    )
    ctx = make_round(config)
    step = next(ctx.steps("batches", 1))
    w_p = initial(config, seed=5)
    found = frozen_representations(method_of(config), ctx, "previous", w_p)
    twice = [found.of(step)[0], found.of(step)[0]]
    model = make_round(config).network("other")
    model.load_state_dict(w_p)
    with torch.no_grad():
        _, (expected,) = model.train(statistics == "batch").run(step.x, ["features"])
        _, (other,) = model.train(statistics != "batch").run(step.x, ["features"])
    for z in twice:
        torch.testing.assert_close(z, expected)
    assert (expected - other).abs().max() > 1e-2
    assert found.is_cached == (statistics == "running")
    assert not any(p.requires_grad for p in ctx.network("previous").parameters())


def test_a_network_without_batch_norm_is_cached_with_batch_statistics_too():
    config = make_config(method="moon", local_epochs=2, frozen_statistics="batch")
    ctx = make_round(config)
    assert frozen_representations(method_of(config), ctx, "global", ctx.received).is_cached


@pytest.mark.parametrize("method", ["moon", "fedintr", "fedcka"])
def test_from_round_2_a_first_participation_may_be_against_the_initial_weights(method):
    config = make_config(method=method, **{f"{method}__first_use": "initial"})
    received = initial(config, seed=5)
    chosen = method_of(config).first_previous(make_round(config, 2, received))
    assert_same_bits(chosen, initial(config))
    assert method_of(config).first_previous(make_round(config, 1)) is None
    own = make_config(method=method, **{f"{method}__first_use": "received"})
    assert method_of(own).first_previous(make_round(own, 2, received)) is None


def test_a_side_branch_flattens_a_last_stage_that_has_positions():
    method = moon(projection="mlp-side")
    about = {"num_classes": 3, "channels": 1, "image_size": 28, "seed": 0}
    model = build_model("resnet20", projection_heads=5, head_stages=(-1, None), **about)
    _, (h,) = model.run(torch.randn(2, 1, 28, 28), method.layers(model))
    (z,) = method.represent(model, [h])
    (head,) = model.projection_heads.values()
    assert h.dim() == 4
    torch.testing.assert_close(z, torch.stack([head(each.reshape(-1)) for each in h]))


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
