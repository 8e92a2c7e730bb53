"""FedReCo's client half against Algorithm 1 written out in float64, line by line."""

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    add_small_cnn,
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
)

from client_app.methods import method_of
from client_app.setup import build_network, representation_width

LAYERS = ("conv1", "conv2", "fc1", "fc2", "classifier")


def reco(**keys):
    """A config of FedReCo, without momentum unless asked for."""
    base = {"momentum": 0.0, "weight_decay": 0.0, "fedreco__lambda": 0.7}
    rates = {"fedreco__eta_u": 0.03, "fedreco__eta_v": 0.2}
    return make_config(method="fedreco", **base | rates | keys)


def shared_part(config, weights):
    """u_0 of these weights."""
    network = build_network(config, SHAPE, NUM_CLASSES)
    return {
        key: weights[key] for key in network.extractor_keys(config.flat["fedreco.split"] or "fc2")
    }


def u_0_of(config, seed):
    """A shared extractor that is not the run's initial one."""
    return shared_part(config, initial(config, seed=seed))


def run_round(config, u_0=None, **about):
    """The update of one round on what the server sends; u_0: by default the run's initial one."""
    received = shared_part(config, initial(config)) if u_0 is None else u_0
    now = make_round(config, received=received, **about)
    return method_of(config).train(now)


# --- Algorithm 1, written out for cnn-fedreco ---------------------------------------------------


def layer(name, w, b, x):
    """One layer of the network of section 6.1: two convolutions, three fully connected."""
    if name.startswith("conv"):
        return F.relu(F.max_pool2d(F.conv2d(x, w, b), 2))
    x = x.flatten(1) @ w.T + b
    return x if name == "classifier" else F.relu(x)


def key_of(name, kind):
    if name == "classifier":
        return f"classifier.{kind}"
    inner = "body" if name.startswith("conv") else "body.1"
    return f"stages.{name}.{inner}.{kind}"


def through(arrays, names, x):
    for name in names:
        x = layer(name, arrays[key_of(name, "weight")], arrays[key_of(name, "bias")], x)
    return x


def big_h(h, h_0):
    """H_i of a batch, eq. (5): for every sample the sum over entries, then the mean."""
    return ((h - h_0) ** 2).sum() / len(h)


def algorithm_1(now, model, u_0, batches, k_v, k_u, split="fc2", momentum=0.0):
    """(u_i, v_i) as one dict, and g_i: lines 7 to 18 in float64.

    batches: indices of every batch, k_v for the head, k_u for the extractor, one to release.
    """
    o = method_of(now.config)
    mean, std = now.train_samples.pixels.mean[0], now.train_samples.pixels.std[0]
    images = (now.train_samples.images.double() / 255 - mean) / std
    labels = now.train_samples.labels
    until = LAYERS.index(split) + 1
    w = {name: array.double().clone() for name, array in model.items()}
    u_0 = {name: array.double() for name, array in u_0.items()}
    u_names = [key_of(n, kind) for n in LAYERS[:until] for kind in ("weight", "bias")]
    v_names = [key_of(n, kind) for n in LAYERS[until:] for kind in ("weight", "bias")]

    def step(names, objective, rate, velocity):
        point = w | {n: w[n].clone().requires_grad_() for n in names}
        gradients = torch.autograd.grad(objective(point), [point[n] for n in names])
        for n, g in zip(names, gradients, strict=True):
            velocity[n] = momentum * velocity.get(n, 0) + g
            w[n] = w[n] - rate * velocity[n]

    batches, velocity = list(batches), {}
    for _ in range(k_v):  # lines 8 to 11
        b = batches.pop(0)
        x, y = images[b], labels[b]
        step(v_names, lambda p: F.cross_entropy(through(p, LAYERS, x), y), o.eta_v, velocity)  # noqa: B023
    for _ in range(k_u):  # lines 13 to 16
        b = batches.pop(0)
        x, y = images[b], labels[b]

        def objective(p, x=x, y=y):
            f_i = F.cross_entropy(through(p, LAYERS, x), y)
            h, h_0 = through(p, LAYERS[:until], x), through(u_0, LAYERS[:until], x)
            return f_i + o.lambda_ / 2 * big_h(h, h_0)

        step(u_names, objective, o.eta_u, velocity)
    (b,) = batches  # line 18
    point = {n: u_0[n].clone().requires_grad_() for n in u_names}
    h = through(w, LAYERS[:until], images[b])
    distance = big_h(h, through(point, LAYERS[:until], images[b]))
    gradients = torch.autograd.grad(distance, list(point.values()))
    return w, dict(zip(point, gradients, strict=True))


@pytest.mark.parametrize(
    ("keys", "split"),
    [
        ({}, "fc2"),
        ({"fedreco__k_v": "2 epochs", "fedreco__k_u": "3 epochs", "momentum": 0.5}, "fc2"),
        ({"fedreco__split": "conv2", "fedreco__lambda": 0.2}, "conv2"),
        ({"fedreco__split": "fc1", "fedreco__k_v": "7 steps", "fedreco__k_u": "3 steps"}, "fc1"),
    ],
    ids=["as published", "epochs and momentum", "split in the convolutions", "steps"],
)
def test_a_round_is_algorithm_1(keys, split):
    config = reco(**keys, batch_size=12)  # three batches an epoch: 12, 12, 6
    u_0, kept = u_0_of(config, seed=3), initial(config, seed=4)
    now = make_round(config, number=2, received=u_0, state={"model": kept})
    update = method_of(config).train(now)
    counts = {"1 epoch": 3, "2 epochs": 6, "3 epochs": 9, "7 steps": 7, "3 steps": 3}
    k_v, k_u = (counts[config.flat[f"fedreco.{key}"]] for key in ("k-v", "k-u"))
    assert update.num_steps == k_v + k_u
    streams = (("head", k_v), ("extractor", k_u), ("release", 1))
    batches = [step.index for stream, n in streams for step in now.steps(stream, n, "steps")]
    assert len({tuple(index.tolist()) for index in batches}) == len(batches)
    momentum = config.train.momentum
    model, g_i = algorithm_1(now, kept, u_0, batches, k_v, k_u, split, momentum=momentum)
    assert update.arrays.keys() == g_i.keys() == u_0.keys()
    assert_close(update.state["model"], model, rtol=0, atol=2e-6)
    for name, g in g_i.items():
        assert g.abs().max() > 1e-4, f"{name}: nothing to compare"
    assert_close(update.arrays, g_i, rtol=1e-4, atol=5e-6)
    # far enough from where it began, and from a round without consensus, for this to mean something
    assert min((model[n] - kept[n]).abs().max() for n in model) > 1e-3


# --- who moves what -------------------------------------------------------------------------------


def split_names(config):
    u = set(shared_part(config, initial(config)))
    return u, initial(config).keys() - u


# what would move weights that get no gradient
MOVING = {"batch_size": 16, "momentum": 0.9, "weight_decay": 0.01}
NETWORKS = pytest.mark.parametrize(
    "keys",
    [
        {},
        {"fedreco__split": "conv2"},
        {"model": "resnet20", "norm": "group", "fedreco__split": "conv2_x"},
    ],
    ids=["cnn", "cnn split early", "resnet20 split early"],
)


@NETWORKS
def test_each_phase_moves_its_part_alone(keys):
    kept = initial(reco(**keys), seed=4)
    u, v = split_names(reco(**keys))
    for part, rest, none in ((v, u, "fedreco__k_u"), (u, v, "fedreco__k_v")):
        config = reco(**keys, **MOVING, **{none: "0 epochs"})
        state = run_round(config, u_0_of(config, seed=3), state={"model": kept}).state["model"]
        assert_same_bits(state, kept, names=rest)
        moved = set(differ(state, kept))
        assert {n for n in part if "conv" in n and n.endswith("weight")} <= moved <= part
        assert moved


def test_a_clients_own_extractor_is_never_overwritten():
    config = reco(fedreco__eta_u=0.0, fedreco__eta_v=0.0)
    first = run_round(config, u_0_of(config, seed=3))
    second = run_round(config, u_0_of(config, seed=6), number=2, state=first.state)
    assert_same_bits(second.state["model"], first.state["model"])
    # ... nor where the server's arrays come along for an evaluation
    now = make_round(config, number=2, received=u_0_of(config, seed=7), state=first.state)
    personal = method_of(config).personal_model(now, first.state)
    assert_same_bits(personal.state_dict(), first.state["model"])


def test_first_contact_takes_u_0_and_a_head_from_the_runs_seed():
    config = reco(fedreco__eta_u=0.0, fedreco__eta_v=0.0, seed=11)
    u_0 = u_0_of(config, seed=3)
    u, v = split_names(config)
    assert u | v == initial(config).keys()
    for partition in (0, 1):
        update = run_round(config, u_0, number=5, partition=partition)
        assert_same_bits(update.state["model"], u_0, names=u)
        assert_same_bits(update.state["model"], initial(config), names=v)
    other = reco(fedreco__eta_u=0.0, fedreco__eta_v=0.0, seed=12)
    assert differ(initial(other), initial(config)) != []


# --- another architecture -------------------------------------------------------------------------


@pytest.fixture
def small_cnn(monkeypatch):
    """`small-cnn`: one convolution, one fully connected layer, as wide as cnn-fedreco's 84."""
    add_small_cnn(monkeypatch)
    return "small-cnn"


def test_a_client_of_another_architecture_shares_the_representation_alone(small_cnn):
    config = reco(client_models=f"cnn-fedreco, {small_cnn}", batch_size=100)
    u_0 = u_0_of(config, seed=3)
    now = make_round(config, received=u_0, partition=1)
    assert now.model.name == small_cnn
    assert representation_width(config, now.model) == 84
    update = method_of(config).train(now)
    own = build_network(config, SHAPE, NUM_CLASSES, small_cnn)
    assert update.state["model"].keys() == own.state_dict().keys()
    assert differ(update.state["model"], own.state_dict())
    # g_i, by autograd: u_0's names and shapes, the representation of the other network
    shared = build_network(config, SHAPE, NUM_CLASSES)
    shared.load_state_dict(initial(config) | u_0)
    own.load_state_dict(update.state["model"])
    (x, _) = next(now.train_samples.in_order())
    h = own.extract(x, "fc1").detach()
    distance = (shared.extract(x, "fc2") - h).square().sum() / len(x)
    distance.backward()
    wanted = {name: p.grad for name, p in shared.named_parameters() if p.grad is not None}
    assert update.arrays.keys() == wanted.keys() == u_0.keys()
    assert_close(update.arrays, wanted, rtol=1e-3, atol=1e-5)
    # its second participation starts from its own state
    still = reco(client_models=f"cnn-fedreco, {small_cnn}", fedreco__eta_u=0.0, fedreco__eta_v=0.0)
    second = run_round(still, u_0, number=2, partition=1, state=update.state)
    assert_same_bits(second.state["model"], update.state["model"])
