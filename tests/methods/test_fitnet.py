"""FitNet: its distance in loops and float64."""

import pytest
import torch
from client_fixtures import NUM_CLASSES, SHAPE, batch_of, make_config
from method_fixtures import random

from client_app.methods.fitnet import FitNet, feature_distance
from client_app.setup import build_network
from client_app.similarity import spatial_mean


def fitnet(**options):
    return FitNet(**({"lambda_": 0.3, "logits": True, "pooled": True} | options))


def test_fitnets_distance_is_a_mean_over_entries_then_over_levels():
    shapes = [(3, 2), (3, 7), (3, 2, 2, 2)]  # unequal sizes: a mean over all entries is another
    f = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    f_g = [random(*shape, seed=n + 9) for n, shape in enumerate(shapes)]
    levels = []
    for a, b in zip(f, f_g, strict=True):
        pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
        levels.append(sum((p - q) ** 2 for p, q in pairs) / a.numel())
    assert feature_distance(f, f_g).item() == pytest.approx(sum(levels) / 3, rel=1e-12)


def test_fitnet_pools_positions_and_nothing_else():
    rep = random(2, 3, 2, 5, seed=1)
    got = spatial_mean(rep)
    assert got.shape == (2, 3)
    for b in range(2):
        for c in range(3):
            mean = sum(v for row in rep[b, c].tolist() for v in row) / 10
            assert got[b, c].item() == pytest.approx(mean, rel=1e-12)
    assert spatial_mean(rep[:, :, 0, 0]) is not None
    assert torch.equal(spatial_mean(rep[:, :, 0, 0]), rep[:, :, 0, 0])


@pytest.mark.parametrize("is_pooled", [True, False])
def test_fitnets_penalty_is_lambda_times_the_distance_of_what_it_compares(is_pooled):
    method = fitnet(pooled=is_pooled)
    f = [random(4, 3, 2, 2, seed=1), random(4, 5, seed=2)]
    g = [random(4, 3, 2, 2, seed=3), random(4, 5, seed=4)]
    maps, maps_g = (
        [t.mean((2, 3)) if t.ndim > 2 and is_pooled else t for t in ts] for ts in (f, g)
    )
    expected = sum(((a - b) ** 2).mean() for a, b in zip(maps, maps_g, strict=True)) / 2
    got = method.penalty(batch_of(method.represent(None, f), method.represent(None, g)))
    assert got.item() == pytest.approx(0.3 * expected.item(), rel=1e-12)


def test_fitnets_gradient_goes_to_the_local_features_alone():
    f, g = random(3, 4, seed=1).requires_grad_(), random(3, 4, seed=2).requires_grad_()
    feature_distance([f], [g]).backward()
    torch.testing.assert_close(f.grad, 2 * (f - g).detach() / 12)
    assert g.grad is None


@pytest.mark.parametrize("with_logits", [True, False])
def test_fitnets_levels_are_all_stages_before_their_activation_and_the_logits(with_logits):
    model = build_network(make_config(method="fitnet"), SHAPE, NUM_CLASSES)
    layers = fitnet(logits=with_logits).layers(model)
    assert layers[:4] == ["conv1:pre", "conv2:pre", "fc1:pre", "fc2:pre"]
    assert layers[4:] == (["logits"] if with_logits else [])
