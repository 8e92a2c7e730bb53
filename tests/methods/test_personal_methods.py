"""Personal methods without a server half of their own (and DP FedAvg), step by step by autograd."""

import math

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    train,
)

import client_app.privacy
from client_app.methods import method_of
from client_app.setup import build_network
from protocol.messages import TrainReply
from protocol.privacy import granularity, noise_sigma
from strategies import Average

HEAD = {"classifier.weight", "classifier.bias"}
MOVING = {"momentum": 0.5, "weight_decay": 0.01}  # what would move weights without a gradient


def body_part(weights):
    return {n: a for n, a in weights.items() if n not in HEAD}


def head_part(weights):
    return {n: weights[n] for n in HEAD}


def sgd_by_hand(config, weights, batches, names, lr, term=None, momentum=0.0, weight_decay=0.0):
    """SGD on cross entropy plus `term` over `names`: one autograd call a batch, in float64."""
    network = build_network(config, SHAPE, NUM_CLASSES).double()
    w = {n: a.double() for n, a in weights.items()}
    velocity = {n: torch.zeros_like(w[n]) for n in names}
    for step in batches:
        leaves = {n: w[n].clone().requires_grad_() for n in names}
        logits = torch.func.functional_call(network, w | leaves, (step.x.double(),))
        loss = F.cross_entropy(logits, step.y)
        if term:
            loss = loss + term(leaves)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for n, g in zip(leaves, gradients, strict=True):
            velocity[n] = momentum * velocity[n] + g + weight_decay * w[n]
            w[n] = w[n] - lr * velocity[n]
    return w


def batches_of(config, stream, epochs, **about):
    now = make_round(config, **about)
    return list(now.steps(stream, epochs))


# --- rates of a method's own ----------------------------------------------------------------------

DECAYS = {"lr_decay": 0.5, "lr_decay_epoch": 0.7}


@pytest.mark.parametrize(
    ("method", "options", "decays"),
    [
        ("fedbabu", {"fedbabu__lr": 0.03, "fedbabu__epochs": 2}, False),
        ("fedavg-ft", {"fedavg-ft__lr": 0.03, "fedavg-ft__epochs": 2}, False),
        ("fedavg-ft", {"fedavg-ft__lr": 0.0, "fedavg-ft__epochs": 2}, True),  # the run's own
    ],
)
def test_tuning_at_a_rate_of_its_own_is_the_same_in_every_round(method, options, decays):
    tuned = []
    for keys in ({}, DECAYS):
        config = make_config(method=method, seed=3, **options, **keys)
        now = make_round(config, number=4, received=initial(config, seed=5))
        tuned.append(method_of(config).personal_model(now, {}).state_dict())
    assert bool(differ(*tuned)) == decays


def test_fedpacs_head_rate_is_the_same_in_every_round():
    heads = []
    for keys in ({}, DECAYS):
        config = make_config(method="fedpac", fedpac__extractor_epochs=0, **keys)
        received = body_part(initial(config, seed=5))
        heads.append(train(config, number=4, received=received).state["head"])
    assert_same_bits(*heads)


# --- FedAvg-FT ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "moved"), [("head", HEAD), ("full", None)])
@pytest.mark.parametrize(("lr", "rate"), [(0.02, 0.02), (0.0, 0.05)])
def test_fedavg_ft_tunes_a_part_of_the_received_model(part, moved, lr, rate):
    """By SGD as in training, at a rate of its own; with 0 at the run's."""
    options = {"fedavg-ft__part": part, "fedavg-ft__epochs": 2, "fedavg-ft__lr": lr}
    config = make_config(method="fedavg-ft", **options, **MOVING)
    w = initial(config, seed=5)
    tuned = method_of(config).personal_model(make_round(config, received=w), {}).state_dict()
    names = sorted(moved or w)
    batches = batches_of(config, "fine-tuning", 2)
    by_hand = sgd_by_hand(config, w, batches, names, lr=rate, **MOVING)
    assert_close(tuned, by_hand, rtol=0, atol=1e-5)
    assert set(differ(tuned, w)) == set(names)


def test_fedavg_ft_of_no_epochs_is_the_received_model():
    config = make_config(**{"method": "fedavg-ft", "fedavg-ft__epochs": 0})
    w = initial(config, seed=5)
    now = make_round(config, received=w)
    assert_same_bits(method_of(config).personal_model(now, {}).state_dict(), w)


# --- Ditto ----------------------------------------------------------------------------------------


def ditto(**keys):
    base = {"momentum": 0.0, "weight_decay": 0.0, "ditto__lambda": 0.7}
    return make_config(method="ditto", **base | keys)


def test_dittos_personal_steps_are_the_formula_around_the_rounds_first_model():
    config = ditto(ditto__personal_epochs=2)
    w, v = initial(config, seed=5), initial(config, seed=6)
    update = train(config, received=w, state={"personal": v})

    def term(leaves):  # its gradient is lambda (v - w)
        return 0.7 / 2 * sum(((leaves[n] - w[n]) ** 2).sum() for n in leaves)

    batches = batches_of(config, "personal", 2)
    expected = sgd_by_hand(config, v, batches, sorted(v), lr=0.05, term=term)
    assert len(batches) == 8
    assert_close(update.state["personal"], expected, rtol=0, atol=2e-6)
    assert update.num_steps == 4 + 8


def test_dittos_step_with_eta_lambda_1_lands_beside_w():
    """v = w - eta grad CE(v_old)."""
    config = ditto(ditto__lambda=20.0, batch_size=100)  # lr = 0.05
    w, v = initial(config, seed=5), initial(config, seed=6)
    update = train(config, received=w, state={"personal": v})
    (batch,) = batches_of(config, "personal", 1)
    moved = sgd_by_hand(config, v, [batch], sorted(v), lr=0.05)
    expected = {n: w[n] + moved[n] - v[n] for n in v}
    assert_close(update.state["personal"], expected, rtol=0, atol=2e-6)


def test_dittos_global_model_is_fedavgs_for_any_lambda():
    w = initial(make_config(), seed=5)
    keys = {"momentum": 0.9, "local_epochs": 2}
    plain = train(make_config(**keys), received=w)
    for lam in (0.0, 5.0):
        update = train(ditto(ditto__lambda=lam, **keys, weight_decay=1e-5), received=w)
        assert_same_bits(update.arrays, plain.arrays)


def test_ditto_without_lambda_is_local_training():
    """One batch an epoch, so that the order of samples does not matter."""
    keys = {"batch_size": 100, "momentum": 0.5, "weight_decay": 0.0}
    config = ditto(ditto__lambda=0.0, ditto__personal_epochs=3, **keys)
    alone = make_config(method="local", local_epochs=3, **keys)
    mine, state = {}, {}
    for number in (1, 2):
        about = {"number": number, "received": initial(config, seed=number + 5)}
        mine = train(config, state=mine, **about).state
        state = train(alone, number=number, received={}, state=state).state
    assert_close(mine["personal"], state["model"], rtol=0, atol=1e-6)
    assert differ(mine["personal"], initial(config))


def test_dittos_personal_model_is_what_was_kept_at_first_the_runs_weights():
    config = ditto()
    now = make_round(config, received=initial(config, seed=5))
    method = method_of(config)
    assert_same_bits(method.personal_model(now, {}).state_dict(), initial(config))
    kept = initial(config, seed=8)
    assert_same_bits(method.personal_model(now, {"personal": kept}).state_dict(), kept)


# --- local only -----------------------------------------------------------------------------------


def test_local_training_goes_on_from_its_own_model():
    config = make_config(method="local", momentum=0.5, weight_decay=0.01, local_epochs=2)
    update = train(config, received={})
    names = sorted(initial(config))
    about = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    w = sgd_by_hand(config, initial(config), batches_of(config, "batches", 2), names, **about)
    assert update.arrays == {}
    assert_close(update.state["model"], w, rtol=0, atol=5e-6)
    second = train(config, number=2, received={}, state=update.state)
    batches = batches_of(config, "batches", 2, number=2)
    w = sgd_by_hand(config, update.state["model"], batches, names, **about)
    assert_close(second.state["model"], w, rtol=0, atol=5e-6)


# --- FedRep and FedBABU ---------------------------------------------------------------------------


def test_fedrep_trains_the_head_then_the_body():
    config = make_config(
        method="fedrep", fedrep__head_epochs=2, fedrep__extractor_epochs=3, lr_decay=0.5, **MOVING
    )
    w, head = initial(config, seed=5), head_part(initial(config, seed=6))
    about = {"number": 2, "received": body_part(w), "state": {"head": head}}
    update = train(config, **about)
    lr = 0.05 * 0.5
    by_hand = w | head
    for stream, epochs, names in (("head", 2, HEAD), ("batches", 3, set(w) - HEAD)):
        batches = batches_of(config, stream, epochs, number=2)
        by_hand = sgd_by_hand(config, by_hand, batches, sorted(names), lr=lr, **MOVING)
    assert update.arrays.keys() == set(w) - HEAD
    assert update.state.keys() == {"head"}
    assert_close(update.arrays, by_hand, rtol=0, atol=5e-6)
    assert_close(update.state["head"], by_hand, rtol=0, atol=5e-6)
    assert update.state["head"].keys() == HEAD
    assert update.num_steps == 20


@pytest.mark.parametrize("model", ["cnn-fedreco", "resnet20"])
def test_fedrep_of_no_body_epochs_leaves_the_body_and_its_statistics(model):
    config = make_config(
        method="fedrep", fedrep__extractor_epochs=0, model=model, batch_size=15, **MOVING
    )
    w = body_part(initial(config, seed=5))
    update = train(config, received=w)
    assert_same_bits(update.arrays, w)
    assert set(differ(update.state["head"], initial(config))) == HEAD


def test_fedrep_of_no_head_epochs_is_fedbabu_to_the_bit():
    rep = make_config(method="fedrep", fedrep__head_epochs=0, fedrep__extractor_epochs=2, **MOVING)
    babu = make_config(method="fedbabu", local_epochs=2, **MOVING)
    body, state = body_part(initial(rep, seed=5)), {}
    for number in (1, 2):
        one = train(rep, number=number, received=body, state=state)
        two = train(babu, number=number, received=body)
        assert_same_bits(one.arrays, two.arrays)
        assert_same_bits(one.state["head"], head_part(initial(rep)))
        assert two.state == {}
        assert len(differ(one.arrays, body)) == len(body)
        body, state = one.arrays, one.state


def test_all_heads_begin_the_same():
    config = make_config(method="fedrep")
    for partition in (0, 1):
        now = make_round(config, partition=partition, received=body_part(initial(config, seed=5)))
        model = method_of(config).personal_model(now, {})
        assert_same_bits(model.state_dict(), initial(config), names=HEAD)
        assert_same_bits(model.state_dict(), initial(config, seed=5), names=set(now.received))


@pytest.mark.parametrize(("number", "moved"), [(2, set()), (3, HEAD)])
def test_fedreps_final_epochs_tune_the_head_after_the_last_round_alone(number, moved):
    config = make_config(method="fedrep", fedrep__final_head_epochs=2, num_rounds=3)
    w = initial(config, seed=5)
    now = make_round(config, number=number, received=body_part(w))
    tuned = method_of(config).personal_model(now, {"head": head_part(w)}).state_dict()
    assert set(differ(tuned, w)) == moved


@pytest.mark.parametrize("part", ["full", "head", "extractor"])
def test_fedbabus_tuning_moves_the_part_that_is_asked_for(part):
    config = make_config(method="fedbabu", fedbabu__part=part, fedbabu__epochs=1)
    w = initial(config)
    body = body_part(initial(config, seed=5))
    tuned = method_of(config).personal_model(make_round(config, received=body), {}).state_dict()
    wanted = {"full": set(w), "head": HEAD, "extractor": set(body)}[part]
    assert set(differ(tuned, w | body)) == wanted
    batches = batches_of(config, "fine-tuning", 1)
    by_hand = sgd_by_hand(config, w | body, batches, sorted(wanted), lr=0.001, momentum=0.9)
    assert_close(tuned, by_hand, rtol=0, atol=1e-6)


def test_a_fedper_like_fedbabu_trains_head_and_body_together_and_keeps_the_head():
    config = make_config(method="fedbabu", fedbabu__fedper_like=True)
    w = initial(config, seed=5)
    update = train(config, received=body_part(w), state={"head": head_part(w)})
    plain = train(make_config(), received=w)
    assert_same_bits(update.arrays | update.state["head"], plain.arrays)


def test_only_bodies_travel_and_the_servers_step_takes_them():
    """With FedAvgM too: what is not sent has no momentum."""
    config = make_config(method="fedrep", server_optimizer="fedavgm")
    model = build_network(config, SHAPE, NUM_CLASSES)
    body = Average(config, model).initial_arrays(model)
    assert body.keys() == initial(config).keys() - HEAD
    server = Average(config, model)
    replies = [
        TrainReply(str(k), 1, {n: a + k for n, a in body.items()}, {}, {"num-examples": 1})
        for k in (1, 3)
    ]
    first = server.next_arrays(body, replies)
    assert_close(first, {n: a + 2 for n, a in body.items()}, rtol=0, atol=1e-5)
    assert server.server_optimizer.state().keys() == body.keys()


# --- private FedAvg -------------------------------------------------------------------------------


def private(**keys):
    return make_config(**{"method": "fedavg", "privacy__epsilon": 0.5} | keys)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_with_a_rate_of_zero_pure_noise_is_uploaded(method):
    config = private(method=method, lr=0.0, privacy__clip_norm=0.3)
    w = initial(config, seed=5)
    update = train(config, received=w)
    noise = torch.cat([(update.arrays[n] - w[n]).flatten().double() for n in w])
    sigma = 2 * 0.3 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    assert noise_sigma(config.privacy) == pytest.approx(sigma)
    assert noise.std().item() == pytest.approx(sigma, rel=4 / math.sqrt(2 * len(noise)))
    assert abs(noise.mean().item()) < 4 * sigma / math.sqrt(len(noise))
    half = train(
        private(method=method, lr=0.0, privacy__clip_norm=0.3, privacy__epsilon=0.25), received=w
    )
    twice = torch.cat([(half.arrays[n] - w[n]).flatten().double() for n in w])
    assert twice.std().item() == pytest.approx(2 * sigma, rel=4 / math.sqrt(2 * len(twice)))


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_without_noise_the_difference_is_clipped_in_its_own_direction(method, monkeypatch):
    monkeypatch.setattr(client_app.privacy, "discrete_gaussian", lambda s, num, words: 0)
    w = initial(make_config(), seed=5)
    plain = train(make_config(), received=w)
    difference = {n: plain.arrays[n] - w[n] for n in w}
    norm = math.sqrt(sum(d.double().square().sum().item() for d in difference.values()))
    for clip in (norm / 4, norm * 1.01):
        update = train(private(method=method, privacy__clip_norm=clip), received=w)
        scale = min(1, clip / norm)
        wanted = {n: w[n] + scale * d for n, d in difference.items()}
        step = granularity(
            private(privacy__clip_norm=clip).privacy, sum(a.numel() for a in w.values())
        )
        assert_close(update.arrays, wanted, rtol=0, atol=1e-6 + step)


def test_without_epsilon_fedavg_is_as_it_was():
    w = initial(make_config(), seed=5)
    a, b = train(make_config(), received=w), train(private(privacy__epsilon=0.0), received=w)
    assert_same_bits(a.arrays, b.arrays)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_a_private_run_of_a_network_with_batch_norms_is_refused(method):
    with pytest.raises(ValueError, match=r"privacy\.epsilon = 0\.5: resnet20 .*norm has to be"):
        private(method=method, model="resnet20", local_test_fraction=0.2)
