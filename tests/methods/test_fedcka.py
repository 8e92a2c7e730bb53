"""FedCKA against eq. (2) and (3) as printed, the invariances of CKA, and degenerate inputs."""

import dataclasses
import math
import statistics

import pytest
import torch
from client_fixtures import batch_of
from method_fixtures import random
from printed_formulas import cka_as_printed, cosine

from client_app.method import ModelParts
from client_app.methods.fedcka import SIMILARITIES, FedCKA, cka_contrast
from client_app.similarity import centred_gram
from models import build_model

CKA_NAMES = ["linear-cka", "kernel-cka"]


def random_rotation(width, seed):
    rotation, _ = torch.linalg.qr(random(width, width, seed=seed))
    return rotation


def fedcka(**options):
    defaults = {"mu": 1.0, "num_layers": 2, "similarity": "linear-cka", "projection": "none"}
    return FedCKA(**(defaults | {"first_use": "received"} | options))


def alike(name, x, y):
    similarity = SIMILARITIES[name]
    return similarity.compare(similarity.view(x), similarity.view(y))


def kernel_cka_as_printed(x, y):
    """Kornblith et al. 2019: HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), HSIC = tr(K H L H)."""
    size = len(x)
    centring = torch.eye(size, dtype=torch.float64) - torch.ones(size, size).double() / size

    def rbf(a):
        distance = [[math.dist(p, q) for q in a.tolist()] for p in a.tolist()]
        width = statistics.median_low(distance[i][j] for i in range(size) for j in range(i))
        entries = [[math.exp(-(d**2) / (2 * width**2)) for d in row] for row in distance]
        return torch.tensor(entries, dtype=torch.float64)

    def hsic(k, m):
        return torch.trace(k @ centring @ m @ centring).item()

    k, m = rbf(x), rbf(y)
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


def cosine_as_printed(x, y):
    return cosine(x.flatten().tolist(), y.flatten().tolist())


def negative_mean_square_as_printed(x, y):
    a, b = x.flatten().tolist(), y.flatten().tolist()
    return -sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) / len(a)


AS_PRINTED = {
    "linear-cka": cka_as_printed,
    "kernel-cka": kernel_cka_as_printed,
    "cosine": cosine_as_printed,
    "frobenius": negative_mean_square_as_printed,
}


# Gram matrices from 2 P = B on, features below
@pytest.mark.parametrize(("size", "width"), [(2, 3), (5, 4), (8, 4), (16, 20), (9, 4), (16, 3)])
@pytest.mark.parametrize("name", AS_PRINTED)
def test_similarity_equals_its_formula_as_printed(name, size, width):
    x, y = random(size, width, seed=1), 3 + random(size, width, seed=2)  # 3: centring
    assert alike(name, x, y).item() == pytest.approx(AS_PRINTED[name](x, y), rel=1e-11)


@pytest.mark.parametrize(("p", "q"), [(4, 9), (20, 3)])
def test_linear_cka_compares_layers_of_unequal_width(p, q):
    x, y = random(6, p, seed=1), 3 + random(6, q, seed=2)
    assert alike("linear-cka", x, y).item() == pytest.approx(cka_as_printed(x, y), rel=1e-12)


def test_a_narrow_layer_is_compared_by_its_features_and_a_wide_one_by_its_gram_matrix():
    view = SIMILARITIES["linear-cka"].view
    assert view(random(9, 4, seed=1)).shape == (9, 4)
    assert view(random(9, 5, seed=1)).shape == (9, 9)


@pytest.mark.parametrize("width", [3, 20])
@pytest.mark.parametrize("name", CKA_NAMES)
def test_cka_is_one_for_itself_and_invariant_to_rotation_scale_and_shift(name, width):
    x, y = random(12, width, seed=1), 3 + random(12, width, seed=2)
    same = alike(name, x, y).item()
    assert 0 < same < 0.99
    assert alike(name, x, x).item() == pytest.approx(1, rel=1e-12)
    assert alike(name, y, x).item() == pytest.approx(same, rel=1e-12)
    assert alike(name, -7 * x, 0.01 * y).item() == pytest.approx(same, rel=1e-9)
    rotation = random_rotation(width, seed=3)
    assert alike(name, x @ rotation, y).item() == pytest.approx(same, rel=1e-9)
    shift = random(1, width, seed=4)
    assert alike(name, x + shift, y).item() == pytest.approx(same, rel=1e-9)
    stretched = x * torch.linspace(1, 9, width, dtype=torch.float64)  # not invariant to this
    assert abs(alike(name, stretched, y).item() - same) > 1e-3


@pytest.mark.parametrize("width", [2, 40])
@pytest.mark.parametrize("name", CKA_NAMES)
def test_cka_lies_between_zero_and_one(name, width):
    for seed in range(20):
        x, y = random(10, width, seed=seed), random(10, width, seed=100 + seed) ** 3
        assert 0 <= alike(name, x, y).item() <= 1


@pytest.mark.parametrize("offset", [0, 3, 30, 1e3])  # uncentred products would cancel
def test_gram_matrix_in_float32_and_its_gradient_are_those_of_centred_features(offset):
    a = (offset + random(12, 40, seed=1)).float()
    weights = random(12, 12, seed=2)  # not symmetric
    exact = a.double().requires_grad_()
    x = exact - exact.mean(0)
    ((x @ x.T) * weights).sum().backward()
    a.requires_grad_()
    gram, mean = centred_gram(a)
    (gram * weights.float()).sum().backward()
    error = 1e-5 if offset < 100 else 1e-3  # float32 itself has few digits there
    assert (gram - x @ x.T).abs().max() < error * (x @ x.T).max()
    assert (a.grad - exact.grad).abs().max() < error * exact.grad.abs().max()
    assert (mean - exact.mean(0)).abs().max() < 1e-6 * max(1, offset)


def test_linear_cka_of_features_that_do_not_correlate_is_zero():
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    y = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    assert alike("linear-cka", x, y).item() == 0


@pytest.mark.parametrize("width", [3, 9])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_gradient_is_that_of_the_penalty(name, width):
    a, g, p = (random(7, width, seed=s) for s in (1, 2, 3))
    similarity = SIMILARITIES[name]
    assert torch.autograd.gradcheck(
        lambda z: cka_contrast([z], [g], [p], similarity), a.requires_grad_()
    )


@pytest.mark.parametrize("name", SIMILARITIES)
def test_penalty_equals_equation_2_as_printed(name):
    reps, reps_global, reps_previous = (
        [random(6, 2, 2, 2, seed=s), 2 + random(6, 5, seed=s + 1)] for s in (1, 3, 5)
    )
    expected = 0.0
    for a, a_g, a_p in zip(reps, reps_global, reps_previous, strict=True):
        a, a_g, a_p = (t.reshape(6, -1) for t in (a, a_g, a_p))
        c_g, c_p = AS_PRINTED[name](a, a_g), AS_PRINTED[name](a, a_p)
        expected -= math.log(math.exp(c_g) / (math.exp(c_g) + math.exp(c_p)))
    method = fedcka(mu=5.0, num_layers=2, similarity=name)
    penalty = method.penalty(batch_of(reps, reps_global, reps_previous))
    assert penalty.item() == pytest.approx(5 * expected / 2, rel=1e-11)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_first_participation_has_no_say(name):
    a, g = random(8, 4, seed=1).requires_grad_(), random(8, 4, seed=2)
    loss = cka_contrast([a, a], [g, g], [g, g], SIMILARITIES[name])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert a.grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", SIMILARITIES)
def test_a_step_against_the_gradient_moves_towards_the_global_layer(name):
    a, g, p = (random(8, 4, seed=s) for s in (1, 2, 3))
    a.requires_grad_()
    cka_contrast([a], [g], [p], SIMILARITIES[name]).backward()

    def lead(z):
        return alike(name, z, g) - alike(name, z, p)

    assert lead(a.detach() - 0.1 * a.grad) > lead(a.detach())


@pytest.mark.parametrize("name", SIMILARITIES)
def test_mu_of_zero_adds_exactly_nothing_and_frozen_layers_get_no_gradient(name):
    a, g, p = (random(8, 4, seed=s).requires_grad_() for s in (1, 2, 3))
    penalty = fedcka(mu=0.0, num_layers=1, similarity=name).penalty(batch_of([a], [g], [p]))
    penalty.backward()
    assert penalty.item() == 0
    assert (a.grad == 0).all()
    assert g.grad is None
    assert p.grad is None


@pytest.mark.parametrize("name", CKA_NAMES)
@pytest.mark.parametrize("has_outlier", [False, True])
def test_gradient_in_float32_holds_where_frozen_models_nearly_agree(name, has_outlier):
    """It is of the difference of two Gram matrices: digits lost in them would be all of it."""
    shared = 15 + random(64, 300, seed=1)
    if has_outlier:
        shared[1:] = 15 + 0.05 * (shared[1:] - 15)
    a, g, p = (shared + 1e-2 * random(64, 300, seed=s) for s in (2, 3, 4))
    gradients = []
    for dtype in (torch.float32, torch.float64):
        z = a.float().to(dtype).requires_grad_()
        frozen = [[t.float().to(dtype)] for t in (g, p)]
        cka_contrast([z], *frozen, SIMILARITIES[name]).backward()
        gradients.append(z.grad)
    found, exact = gradients
    assert (found - exact).norm() < 1e-2 * exact.norm()


DEGENERATE = {
    "one sample": random(1, 4, seed=1),
    "all units dead": torch.zeros(9, 4),
    "all units dead, few of them": torch.zeros(9, 2),
    "the same for every sample": torch.full((7, 40), 0.1),  # 7 * 0.1 / 7 is not 0.1 in binary
    "the same for every sample, few units": torch.full((7, 3), 0.1),
    "the same for every sample, nearly dead": random(1, 100, seed=1).mul(1e-5).repeat(64, 1),
}


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("name", CKA_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_layer_is_like_nothing_and_gets_no_gradient(name, dtype, kind, is_exact):
    a = DEGENERATE[kind].clone().to(dtype)
    if not is_exact:  # the last bit, as a matrix product may leave it
        a *= 1 + torch.finfo(dtype).eps * random(*a.shape, seed=4).sign().to(dtype)
    a.requires_grad_()
    g, p = (random(*a.shape, seed=s).to(dtype) for s in (2, 3))
    assert alike(name, a, g).item() == 0
    assert alike(name, g, a).item() == 0
    loss = cka_contrast([a], [g], [p], SIMILARITIES[name])
    if loss.requires_grad:
        loss.backward()
        assert (a.grad == 0).all()  # NaN would not be equal
    assert loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("entry", [1e-3, 1e-10, 1e-12, 1e-20])
@pytest.mark.parametrize("name", CKA_NAMES)
def test_a_layer_that_is_dead_but_for_one_entry_gets_a_finite_gradient(name, entry):
    a = torch.zeros(16, 100)
    a[3, 7] = entry
    g, p = (random(*a.shape, seed=s).float() for s in (2, 3))
    cka_contrast([a.requires_grad_()], [g], [p], SIMILARITIES[name]).backward()
    assert a.grad.isfinite().all()


def test_cosine_of_dead_units_is_zero_with_no_gradient():
    a = torch.zeros(4, 3, requires_grad=True)
    g, p = random(4, 3, seed=1).float(), random(4, 3, seed=2).float()
    cka_contrast([a], [g], [p], SIMILARITIES["cosine"]).backward()
    assert alike("cosine", a, g).item() == 0
    assert (a.grad == 0).all()


def test_a_dead_frozen_layer_leaves_the_other_comparison():
    a, g, p = random(6, 8, seed=1), random(6, 8, seed=2), torch.zeros(6, 8).double()
    expected = -math.log(1 / (1 + math.exp(-cka_as_printed(a, g))))
    assert cka_contrast([a], [g], [p]).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", CKA_NAMES)
def test_tiny_and_huge_layers_are_still_compared(name):
    x, y = random(9, 20, seed=1), random(9, 20, seed=2)
    want = alike(name, x, y).item()
    for scale in (1e-8, 1e8):
        got = alike(name, (scale * x).float(), (scale * y).float()).item()
        assert got == pytest.approx(want, rel=1e-4)


def test_kernel_cka_where_most_samples_coincide_tells_the_others_apart_at_any_scale():
    g, p = random(8, 3, seed=1).float(), random(8, 3, seed=2).float()
    found = []
    for scale in (1e-4, 1.0, 1e4):
        x = torch.zeros(8, 3)
        x[0] = scale
        cka_contrast([x.requires_grad_()], [g], [p], SIMILARITIES["kernel-cka"]).backward()
        assert x.grad.isfinite().all()
        found.append(alike("kernel-cka", x, g).item())
    two_places = torch.zeros(8, 8).double()  # the kernel of infinitely narrow width
    two_places[1:, 1:] = two_places[0, 0] = 1
    gram = two_places - two_places.mean(0) - two_places.mean(1, keepdim=True) + two_places.mean()
    expected = cosine_as_printed(gram, SIMILARITIES["kernel-cka"].view(g.double()))
    assert found == pytest.approx([expected] * 3, rel=1e-5)


def test_layers_are_the_layers_nearest_the_input_and_the_logits_the_last():
    model = build_model("cnn-fedcka", num_classes=3, channels=3, image_size=32, seed=0)

    def reps(num_layers):
        method = fedcka(mu=1.0, num_layers=num_layers, similarity="linear-cka")
        return method.layers(model)

    assert reps(2) == ["conv1", "conv2"]
    assert reps(7) == ["conv1", "conv2", "fc1", "fc2", "fc3", "fc4", "logits"]
    with pytest.raises(ValueError, match=r"fedcka\.num-layers = 8.*cnn-fedcka.*7 layers"):
        reps(8)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_all_layers_of_a_real_model_train(name):
    method = fedcka(mu=1.0, num_layers=7, similarity=name)
    assert method.uses_global
    assert method.uses_previous
    x = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    models = [
        build_model("cnn-fedcka", num_classes=3, channels=1, image_size=28, seed=seed)
        for seed in (1, 2, 3)
    ]
    reps = [model.run(x, method.layers(model))[1] for model in models]
    method.penalty(batch_of(*reps)).backward()
    local, *frozen = models
    assert all(p.grad.isfinite().all() and p.grad.any() for p in local.stages.parameters())
    assert all(p.grad is None for model in frozen for p in model.parameters())


def test_with_a_side_branch_the_projected_outputs_are_compared():
    """FedIntR's code, for its rows of FedCKA: heads at the first M stages, CKA after them."""
    method = fedcka(mu=3.0, projection="mlp-side")
    assert method.model_parts() == ModelParts(projection_heads=256, head_stages=(None, 2))
    assert fedcka(mu=3.0).model_parts() == ModelParts()
    about = {"num_classes": 3, "channels": 3, "image_size": 32, "projection_heads": 5}
    models = [
        build_model("cnn-fedintr", seed=seed, head_stages=(None, 2), **about).double()
        for seed in (1, 2, 3)
    ]
    x = random(6, 3, 32, 32, seed=4)
    reps = [method.represent(m, m.run(x, method.layers(m))[1]) for m in models]
    total = 0.0
    for name in ("conv1", "conv2"):
        z = []
        for model in models:
            (h,) = model.run(x, [name])[1]
            first, _, last = model.projection_heads[name]
            hidden = (h.flatten(1) @ first.weight.T + first.bias).clamp_min(0)
            z.append((hidden @ last.weight.T + last.bias).detach())
        c_g, c_p = cka_as_printed(z[0], z[1]), cka_as_printed(z[0], z[2])
        total -= math.log(math.exp(c_g) / (math.exp(c_g) + math.exp(c_p))) / 2
    assert method.penalty(batch_of(*reps)).item() == pytest.approx(3 * total, rel=1e-12)
    with pytest.raises(ValueError, match=r"num-layers = 6.*cnn-fedintr.*5 layers"):
        fedcka(num_layers=6, projection="mlp-side").layers(models[0])


def test_every_similarity_is_a_choice_and_the_other_way_round():
    (field,) = (f for f in dataclasses.fields(FedCKA) if f.name == "similarity")
    assert field.metadata["constraint"].choices == tuple(SIMILARITIES)
