"""Ditto: personal steps by the formula, and the global model beside them."""

from client_fixtures import (
    assert_close,
    assert_same_bits,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import batches_of, sgd_by_hand

from client_app.methods import method_of


def ditto(**keys):
    base = {"momentum": 0.0, "weight_decay": 0.0, "ditto__lambda": 0.7}
    return make_config(method="ditto", **base | keys)


def test_dittos_personal_steps_are_the_formula_around_the_rounds_first_model(in_float64):
    config = ditto(ditto__personal_epochs=2)
    w, v = initial(config, seed=5), initial(config, seed=7)
    update = train(config, received=w, state={"personal": v})

    def term(leaves):  # its gradient is lambda (v - w)
        return 0.7 / 2 * sum(((leaves[n] - w[n]) ** 2).sum() for n in leaves)

    batches = batches_of(config, "personal", 2)
    expected = sgd_by_hand(config, v, batches, sorted(v), lr=0.05, term=term)
    assert len(batches) == 8
    assert_close(update.state["personal"], expected, rtol=0, atol=1e-12)
    assert update.num_steps == 4 + 8


def test_dittos_global_model_is_fedavgs_for_any_lambda():
    w = initial(make_config(), seed=5)
    keys = {"momentum": 0.9, "local_epochs": 2}
    plain = train(make_config(**keys), received=w)
    for lam in (0.0, 5.0):
        update = train(ditto(ditto__lambda=lam, **keys, weight_decay=1e-5), received=w)
        assert_same_bits(update.arrays, plain.arrays)


def test_dittos_personal_model_is_what_was_kept_at_first_the_runs_weights():
    config = ditto()
    now = make_round(config, received=initial(config, seed=5))
    method = method_of(config)
    assert_same_bits(method.personal_model(now, {}).state_dict(), initial(config))
    kept = initial(config, seed=8)
    assert_same_bits(method.personal_model(now, {"personal": kept}).state_dict(), kept)
