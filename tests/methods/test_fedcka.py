"""FedCKA's similarities as printed, and degenerate inputs; test_whole_rounds.py has the loss."""

import math
import statistics

import pytest
import torch
from client_fixtures import make_config
from method_fixtures import random
from printed_formulas import cka_as_printed, cosine

from client_app.methods import method_of
from client_app.methods.fedcka import SIMILARITIES, cka_contrast
from models import build_model

CKA_NAMES = ["linear-cka", "kernel-cka"]


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


DEGENERATE = {
    "one sample": random(1, 4, seed=1),
    "all units dead": torch.zeros(9, 2),
    "the same for every sample": torch.full((7, 40), 0.1),  # 7 * 0.1 / 7 is not 0.1 in binary
    "the same, nearly dead": random(1, 100, seed=1).mul(1e-5).repeat(64, 1),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("name", CKA_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_layer_is_like_nothing_and_gets_no_gradient(name, dtype, kind):
    a = DEGENERATE[kind].clone().to(dtype)
    # the last bit, as a matrix product may leave it
    a *= 1 + torch.finfo(dtype).eps * random(*a.shape, seed=4).sign().to(dtype)
    a.requires_grad_()
    g, p = (random(*a.shape, seed=s).to(dtype) for s in (2, 3))
    assert alike(name, a, g).item() == alike(name, g, a).item() == 0
    loss = cka_contrast([a], [g], [p], SIMILARITIES[name])
    if loss.requires_grad:
        loss.backward()
        assert (a.grad == 0).all()  # NaN would not be equal
    assert loss.item() == pytest.approx(math.log(2))


def test_layers_are_the_layers_nearest_the_input_and_the_logits_the_last():
    model = build_model("cnn-fedcka", num_classes=3, channels=3, image_size=32, seed=0)

    def layers(num_layers):
        config = make_config(method="fedcka", fedcka__num_layers=num_layers)
        return method_of(config).layers(model)

    assert layers(2) == ["conv1", "conv2"]
    assert layers(7) == ["conv1", "conv2", "fc1", "fc2", "fc3", "fc4", "logits"]
    with pytest.raises(ValueError, match=r"fedcka\.num-layers"):
        layers(8)
