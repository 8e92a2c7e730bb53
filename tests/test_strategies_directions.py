"""Norm of each update and its cosine with the mean of the others'."""

import math

import pytest
import torch

from strategies.directions import MAX_SIMULATED_VALUES, Directions


def test_norms_and_cosines_are_those_of_the_definition():
    generator = torch.Generator().manual_seed(1)
    names, weights = ["a", "b", "c"], [3.0, 0.5, 100.0]
    updates = [
        {
            "w": torch.randn(4, 5, generator=generator),
            "b": torch.randn(3, generator=generator),
            "statistics": torch.randn(7, generator=generator),
        }
        for _ in names
    ]
    found = Directions(3, updates[0], is_simulated=False)
    for name, update in zip(names, updates, strict=True):
        found.add(name, update, {"w", "b"})
    measured = found.of(names, weights)
    flat = [torch.cat([u["w"].double().flatten(), u["b"].double()]) for u in updates]
    for i, name in enumerate(names):
        others = sum(w * u for j, (w, u) in enumerate(zip(weights, flat, strict=True)) if j != i)
        cosine = torch.dot(flat[i], others) / flat[i].norm() / others.norm()
        assert measured[name]["norm"] == pytest.approx(float(flat[i].norm()), rel=1e-5)
        assert measured[name]["cosine"] == pytest.approx(float(cosine), abs=1e-4)


def test_what_has_no_direction_has_no_cosine():
    x = torch.ones(4)
    found = Directions(2, {"w": x}, is_simulated=True)
    found.add("a", {"w": x}, {"w"})
    assert found.of(["a"], [1.0]) == {"a": {"norm": 2.0}}
    found.add("b", {"w": 0 * x}, {"w"})
    assert found.of(["a", "b"], [1.0, 1.0]) == {"a": {"norm": 2.0}, "b": {"norm": 0.0}}
    found.add("b", {"w": -3 * x}, {"w"})
    assert math.isclose(found.of(["a", "b"], [1.0, 1.0])["a"]["cosine"], -1)
    assert found.of([], []) == {}


def test_large_simulations_are_not_measured_and_cost_nothing():
    sent = {"w": torch.empty(MAX_SIMULATED_VALUES // 10)}
    assert Directions(10, sent, is_simulated=True).is_on
    assert not Directions(11, sent, is_simulated=True).is_on
    assert Directions(11, sent, is_simulated=False).is_on
