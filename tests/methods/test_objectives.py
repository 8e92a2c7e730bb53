"""Local objectives where whole rounds do not lead: first participations, absent classes."""

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

from client_app.methods import method_of
from client_app.methods.fedlc import margins
from client_app.methods.fedproc import prototype_contrast
from client_app.objective import LocalObjective, frozen_representations, minimise

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


def test_fedintrs_projection_heads_decay_at_a_first_participation_if_asked():
    """The authors' code: in each step m <- rho m + decay q, then q <- q - lr m."""
    keys = {"momentum": 0.5, "weight_decay": 0.1, "lr": 0.05, "batch_size": 10, "local_epochs": 2}
    config = make_config(method="fedintr", fedintr__decay_heads=True, **keys)
    w = initial(config, seed=5)
    arrays = train(config, received=w).arrays
    heads = {name: q.double() for name, q in w.items() if name.startswith("projection_heads.")}
    for name, q in heads.items():
        m = torch.zeros_like(q)
        for _ in range(6):  # 2 epochs of 30 samples
            m = 0.5 * m + 0.1 * q
            q = q - 0.05 * m
        torch.testing.assert_close(arrays[name].double(), q, rtol=1e-5, atol=1e-8)
    without = train(make_config(method="fedintr", **keys), received=w).arrays
    assert set(differ(arrays, without)) == heads.keys()


@pytest.mark.parametrize("method", ["moon", "fedcka"])
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


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "found"), [(0.0, "0.0"), (torch.zeros(3), "[3]")])
def test_a_penalty_that_is_no_scalar_is_named(value, found):
    class Mine(LocalObjective):
        def penalty(self, batch):
            return value

    with pytest.raises(TypeError) as error:
        minimise(Mine(), make_round(make_config()))
    assert f"Mine.penalty returned {found}" in str(error.value)
