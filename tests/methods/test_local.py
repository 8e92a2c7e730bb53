"""Training without a server, step by step by autograd."""

from client_fixtures import assert_close, initial, make_config, train
from method_fixtures import batches_of, sgd_by_hand


def test_local_training_goes_on_from_its_own_model(in_float64):
    config = make_config(method="local", momentum=0.5, weight_decay=0.01, local_epochs=2)
    update = train(config, received={})
    names = sorted(initial(config))
    about = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    w = sgd_by_hand(config, initial(config), batches_of(config, "batches", 2), names, **about)
    assert update.arrays == {}
    assert_close(update.state["model"], w, rtol=0, atol=1e-12)
    second = train(config, number=2, received={}, state=update.state)
    batches = batches_of(config, "batches", 2, number=2)
    w = sgd_by_hand(config, update.state["model"], batches, names, **about)
    assert_close(second.state["model"], w, rtol=0, atol=1e-12)
