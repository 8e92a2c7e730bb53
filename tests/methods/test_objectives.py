"""Local objectives where whole rounds of ordinary data do not lead: edges, first participations."""

import math

import pytest
import torch
from client_fixtures import (
    assert_same_bits,
    batch_of,
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import MOVING, random
from torch import nn

from client_app.drift import drift_from, squared_distance, unsquared_drift_from
from client_app.methods import method_of
from client_app.methods.fedcl import repulsion
from client_app.methods.feddecorr import decorrelation
from client_app.methods.fedlc import margins
from client_app.methods.fedproc import prototype_contrast
from client_app.methods.fedrcl import MINING
from client_app.methods.moon import model_contrastive_loss
from client_app.objective import frozen_representations
from client_app.similarity import unit_features

# --- the previous model ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("method", ["moon", "fedintr", "fedcka"])
def test_from_round_2_a_first_participation_may_be_against_the_initial_weights(method):
    config = make_config(method=method, **{f"{method}__first_use": "initial"})
    received = initial(config, seed=5)
    chosen = method_of(config).first_previous(make_round(config, 2, received))
    assert_same_bits(chosen, initial(config))
    assert method_of(config).first_previous(make_round(config, 1)) is None
    own = make_config(method=method, **{f"{method}__first_use": "received"})
    assert method_of(own).first_previous(make_round(own, 2, received)) is None


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


# --- losses at their edges ------------------------------------------------------------------------


def test_moons_contrast_does_not_overflow_at_a_low_temperature():
    z = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = model_contrastive_loss(z, -z.detach(), z.detach(), tau=1e-3)
    loss.backward()
    assert loss.item() == pytest.approx(2000)
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("mining", MINING)
def test_fedrcl_of_a_batch_without_any_positive(mining):
    """All pairs: nothing. Hard: each anchor is its own positive, pushed from its two neighbours."""
    phi = nn.functional.normalize(random(4, 6, seed=1), dim=1).requires_grad_()
    loss = MINING[mining](phi, torch.arange(4), 0.5, -1.0, 3.0)
    loss.backward()
    if mining == "all":
        assert loss.item() == 0
        assert not phi.grad.any()
        return
    s, expected = (phi @ phi.T).tolist(), 0.0
    for i in range(4):
        near = sorted((s[i][k] for k in range(4) if k != i), reverse=True)[:2]
        total = math.exp(2) + sum(math.exp(2 * v) for v in near)
        expected += math.log(total) - 2
    assert loss.item() == pytest.approx(expected / 4, rel=1e-9)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_fedrcl_where_all_features_are_one_is_log_3_plus_beta_log_2(beta):
    phi, y = torch.tensor([[0.6, 0.8]]).double().repeat(6, 1), torch.tensor([0, 0, 1, 1, 2, 2])
    loss = MINING["hard"](phi, y, 0.05, 0.7, beta).item()
    assert loss == pytest.approx(math.log(3) + beta * math.log(2), rel=1e-6)


def test_units_that_are_all_dead_have_no_direction_and_no_gradient():
    z = torch.zeros(2, 3, 4, 4)
    z[1] = 1.0
    z.requires_grad_()
    phi = unit_features(z)
    phi.sum().backward()
    assert not phi[0].any()
    assert not z.grad[0].any()
    torch.testing.assert_close(phi[1].norm(), torch.tensor(1.0))


def test_a_batch_of_one_has_no_negative_and_no_correlation():
    z = random(1, 5, seed=1).requires_grad_()
    loss = repulsion(unit_features(z), 0.05, "hard") + decorrelation(z, "code")
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert not z.grad.any()


def test_fedlc_leaves_an_absent_class_out_and_gives_it_no_gradient():
    method = method_of(make_config(method="fedlc", fedlc__tau=1.0))
    z = random(5, 4, seed=1).float().requires_grad_()
    counts = torch.tensor([5, 2, 0, 40])
    y = torch.tensor([0, 1, 3, 3, 0])
    loss = method.supervised(batch_of(y=y, logits=z, prepared=margins(counts, 1.0)))
    loss.backward()
    present = torch.tensor([0, 1, 3])
    rest = batch_of(
        y=torch.tensor([0, 1, 2, 2, 0]),
        logits=z.detach()[:, present],
        prepared=margins(counts[present], 1.0),
    )
    assert loss.item() == pytest.approx(method.supervised(rest).item(), rel=1e-6)
    assert not z.grad[:, 2].any()
    assert z.grad.isfinite().all()


def test_fedproc_leaves_out_classes_without_a_prototype_and_their_samples():
    z = nn.functional.normalize(random(4, 3, seed=1), dim=1)
    c, y = random(3, 3, seed=2), torch.tensor([0, 1, 2, 0])
    c[1] = 0
    kept = [0, 2, 3]
    expected = prototype_contrast(z[kept], torch.tensor([0, 1, 0]), c[[0, 2]])
    assert prototype_contrast(z, y, c).item() == pytest.approx(expected.item(), rel=1e-12)
    assert prototype_contrast(z, y, 0 * c).item() == 0


def test_fedntds_convex_form_needs_beta_below_1_and_ignores_tau():
    with pytest.raises(ValueError, match="beta"):
        make_config(method="fedntd", fedntd__convex=True, fedntd__beta=1.0).method_options()
    config = make_config(method="fedntd", fedntd__convex=True, fedntd__beta=0.3, fedntd__tau=2.0)
    assert "fedntd.tau" in method_of(config).warning(config, {})
    other = make_config(method="fedntd", fedntd__convex=True, fedntd__beta=0.3, fedntd__tau=1.0)
    assert method_of(other).warning(other, {}) == ""


# --- the distance of weights ----------------------------------------------------------------------


def test_the_distance_of_weights_and_its_gradient():
    w = [random(3, 2, seed=1).requires_grad_(), random(4, seed=2).requires_grad_()]
    w_g = [random(3, 2, seed=3), random(4, seed=4)]
    total = 0.0
    for p, q in zip(w, w_g, strict=True):
        for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True):
            total += (a - b) ** 2
    assert squared_distance(w, w_g).item() == pytest.approx(total, rel=1e-12)
    assert torch.autograd.gradcheck(lambda *p: squared_distance([*p], w_g), w)


@pytest.mark.parametrize("distance", [drift_from, unsquared_drift_from])
def test_the_distance_is_of_trained_parameters_and_its_gradient_at_no_distance_is_zero(distance):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    at = {n: a.detach().clone() for n, a in model.state_dict().items()}
    distance(model, at).backward()
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)
    far = {n: a + 9.0 if n.startswith("2.") or "running" in n else a for n, a in at.items()}
    assert distance(model, far).item() == 0


# --- local training alone -------------------------------------------------------------------------


def test_local_training_goes_on_from_its_own_model():
    config = make_config(method="local", **MOVING)
    first = train(config, number=1)
    assert first.arrays == {}
    second = train(config, number=2, state=first.state)
    alone = make_config(**MOVING)
    assert_same_bits(first.state["model"], train(alone, received=initial(alone)).arrays)
    again = train(alone, number=2, received=first.state["model"])
    assert_same_bits(second.state["model"], again.arrays)


def test_a_side_branch_flattens_a_last_stage_that_has_positions():
    config = make_config(method="moon", model="resnet20", width=4, moon__projection="mlp-side")
    method, model = method_of(config), make_round(config).model
    _, (h,) = model.run(torch.randn(2, 1, 28, 28), method.layers(model))
    (z,) = method.represent(model, [h])
    (head,) = model.projection_heads.values()
    assert h.dim() == 4
    torch.testing.assert_close(z, torch.stack([head(each.reshape(-1)) for each in h]))
