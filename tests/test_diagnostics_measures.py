"""Every measure against its definition as printed, in loops and float64."""

import math

import numpy as np
import pytest
import torch
from printed_formulas import cosine, covariances

from server_app.diagnostics.measures import (
    between_class_trace,
    deviation_bounds,
    effective_rank,
    variability_collapse_index,
    weight_drift,
    within_class_trace,
)


def features(n, d, seed, low=-1.0):
    """Features of mixed signs and unlike scales, [n, d], float64."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.rand(n, d, generator=generator, dtype=torch.float64) * (1 - low) + low
    return phi * torch.linspace(0.3, 2, d, dtype=torch.float64) + 0.4


def unequal_labels(n, num_classes, seed):
    """Labels of classes of unlike size, each there at least twice, in no order."""
    y = np.r_[np.arange(num_classes).repeat(2), np.zeros(n - 2 * num_classes, int)]
    y[2 * num_classes :: 3] = 1
    return torch.from_numpy(np.random.default_rng(seed).permutation(y))


# --- covariances -----------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d", "num_classes"), [(40, 5, 3), (15, 30, 6)])
def test_traces_are_those_of_the_covariances_summed_sample_by_sample(n, d, num_classes):
    phi, y = features(n, d, seed=n), unequal_labels(n, num_classes, seed=d)
    sigma_w, sigma_b, sigma_t = covariances(phi, y)
    within, between = within_class_trace(phi, y), between_class_trace(phi, y)
    assert within == pytest.approx(sigma_w.trace(), rel=1e-12)
    assert between == pytest.approx(sigma_b.trace(), rel=1e-12)
    assert within + between == pytest.approx(sigma_t.trace(), rel=1e-12)


@pytest.mark.parametrize(("n", "d"), [(40, 5), (12, 30)])
def test_effective_rank_is_definition_2_of_the_covariance(n, d):
    phi = features(n, d, seed=3)
    _, _, sigma_t = covariances(phi, torch.zeros(n, dtype=torch.int64))
    singular = np.linalg.svd(sigma_t, compute_uv=False)
    entropy = 0.0
    for value in singular:
        p = value / sum(singular)
        if p > 1e-15:
            entropy -= p * math.log(p)
    assert effective_rank(phi) == pytest.approx(math.exp(entropy), rel=1e-9)


@pytest.mark.parametrize(("n", "d", "num_classes"), [(40, 5, 3), (60, 8, 12)])
def test_vci_is_as_printed(n, d, num_classes):
    phi, y = features(n, d, seed=n), unequal_labels(n, num_classes, seed=d)
    _, sigma_b, sigma_t = covariances(phi, y)
    rank = np.linalg.matrix_rank(sigma_b)
    assert rank == min(d, num_classes - 1)
    expected = 1 - np.trace(np.linalg.pinv(sigma_t) @ sigma_b) / rank
    assert variability_collapse_index(phi, y) == pytest.approx(expected, rel=1e-9)
    assert variability_collapse_index(phi.float(), y) == pytest.approx(expected, rel=1e-4)


def test_vci_is_0_where_classes_are_points_and_undefined_where_it_says_nothing():
    y = unequal_labels(40, 3, seed=1)
    points = features(3, 5, seed=2)[y]
    assert variability_collapse_index(points, y) == pytest.approx(0, abs=1e-9)
    assert variability_collapse_index(features(40, 40, seed=3), y) is None  # 0 for any features
    assert variability_collapse_index(features(40, 5, seed=3), torch.zeros(40).long()) is None
    assert variability_collapse_index(torch.full((40, 5), 0.1), y) is None


# --- deviation bound -------------------------------------------------------------------------


def deviation_bound_as_printed(x, phi, p, y, num_classes):
    """Eq. (4) for sample x, term by term."""
    members = {j: [i for i in range(len(y)) if y[i] == j] for j in range(num_classes)}

    def score(z, j):  # P_z^(j)
        return sum(float(p[i, z]) for i in members[j]) / len(members[j])

    def norm(j):  # Phi_j
        return sum(math.sqrt(float(phi[i] @ phi[i])) for i in members[j]) / len(members[j])

    def similarity(j):  # S_j(x)
        own = phi[x].tolist()
        return sum(cosine(own, phi[i].tolist()) for i in members[j]) / len(members[j])

    r = int(y[x])
    above = (1 - score(r, r)) * norm(r) * len(members[r]) * similarity(r)
    below = sum(
        score(r, j) * norm(j) * len(members[j]) * similarity(j)
        for j in range(num_classes)
        if j != r and members[j]
    )
    return above / below


def test_deviation_bound_is_equation_4_as_printed():
    y, num_classes = unequal_labels(20, 4, seed=1), 6  # of two classes there are no samples
    phi = features(20, 7, seed=2, low=0.0)
    p = features(20, num_classes, seed=3).softmax(1)
    found = deviation_bounds(phi, p, y)
    for x in range(20):
        expected = deviation_bound_as_printed(x, phi, p, y, num_classes)
        assert found[x].item() == pytest.approx(expected, rel=1e-12)


# --- drift -----------------------------------------------------------------------------------


def test_drift_is_the_2_norm_over_all_entries():
    generator = torch.Generator().manual_seed(1)
    w = {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(4, generator=generator)}
    w_g = {k: torch.randn(v.shape, generator=generator) for k, v in w.items()}
    w_g["not trained"] = torch.full((2,), 100.0)
    pairs = [(u, v) for k in w for u, v in zip(w[k].flatten(), w_g[k].flatten(), strict=True)]
    distance = math.sqrt(sum((float(u) - float(v)) ** 2 for u, v in pairs))
    origin = math.sqrt(sum(float(v) ** 2 for _, v in pairs))
    assert weight_drift(w, w_g) == pytest.approx((distance, distance / origin), rel=1e-12)
    assert weight_drift(w, w)[0] == 0
