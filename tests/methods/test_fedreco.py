"""Whole runs of FedReCo, three clients over three rounds, against plain loops in float64.

The loops follow Algorithm 1 with its options: splits, steps, momentum, decay, and what is known of
the authors' code: losses summed over samples, g_i of a client's whole training set, the server's
step clipped, heads trained longer in the last round, training and test images split together.
Nothing of the code under test is used but batches, splits and initial weights.
"""

from itertools import pairwise

import numpy as np
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
    folder,
    initial,
    make_config,
    make_round,
    small_source,
)
from run_fixtures import all_models, resume

from client_app.methods import method_of
from client_app.privacy import privatise
from client_app.setup import build_network, client_indices, open_source, representation_width
from protocol.config import resolve_config
from protocol.options import ConfigError
from server_app.inline import run_inline

STAGES = ("conv1", "conv2", "fc1", "fc2")
ARRAYS = [
    *(
        f"stages.{stage}.body.{inner}{kind}"
        for stage, inner in zip(STAGES, ("", "", "1.", "1."), strict=True)
        for kind in ("weight", "bias")
    ),
    *("classifier.weight", "classifier.bias"),
]
EXTRACTOR = ARRAYS[:-2]
PAPER = {
    "method": "fedreco",
    "model": "cnn-fedreco",
    "partition": "iid",
    "local-test-fraction": 0.3,
    "num-rounds": 3,
    "batch-size": 6,  # of 14 training samples: the last batch has 2
    "lr": 0.05,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "fedreco.lambda": 0.5,
    "fedreco.eta-u": 0.05,
    "fedreco.eta-v": 0.1,
    "fedreco.eta-0": 0.2,
    "device": "cpu",
}
OPTIONS = {
    "reduction": {"fedreco.reduction": "sum", "fedreco.lambda": 0.1, "fedreco.eta-0": 0.01},
    "g of all samples": {"fedreco.g-samples": "all"},
    "clipped server step": {"fedreco.clip-g": 0.05},
    "final round": {"fedreco.final-head-epochs": 9},
    "all images": {"pool-test": True, "evaluate-global": False},
    "split in the convolutions": {
        **{"fedreco.split": "conv2", "momentum": 0.5, "weight-decay": 0.01},
        **{"fedreco.lambda": 0.02, "fedreco.eta-0": 0.002, "fedreco.eta-v": 0.03},
    },
    "steps": {
        **{"fedreco.split": "fc1", "fedreco.k-v": "7 steps", "fedreco.k-u": "2 epochs"},
        **{"fedreco.lambda": 0.1, "fedreco.eta-0": 0.02},
    },
}
OF_CODE = ("reduction", "g of all samples", "clipped server step", "final round", "all images")
CODE = {
    **{key: value for name in OF_CODE for key, value in OPTIONS[name].items()},
    "layer-widths": "4,12,32,32",
    "normalise": "half",
    "clip-norm": 0.5,
    "fedreco.clip-g": 0.5,
}
CASES = {"as published": {}} | OPTIONS | {"all of the code's": CODE}


def output(w, names, x):
    """The representation of x, or the logits where the classifier's arrays are among the names."""
    for weight, bias in pairwise(names):
        if not weight.endswith("weight"):
            continue
        if "conv" in weight:
            x = F.max_pool2d(torch.relu(F.conv2d(x, w[weight], w[bias])), 2)
        else:
            x = x.flatten(1) @ w[weight].T + w[bias]
            x = x if weight == "classifier.weight" else torch.relu(x)
    return x


def gradients(w, names, loss):
    """The gradient of loss(w) with respect to the arrays of these names."""
    point = w | {name: w[name].clone().requires_grad_() for name in names}
    found = torch.autograd.grad(loss(point), [point[name] for name in names])
    return dict(zip(names, found, strict=True))


def clipped(g, largest):
    """g scaled down to this norm; 0: as it is."""
    norm = sum((array**2).sum() for array in g.values()) ** 0.5
    return {n: a * (min(1.0, largest / norm.item()) if largest else 1.0) for n, a in g.items()}


def split_of(flat):
    """The names of the extractor's arrays, and of the head's."""
    num = 2 * STAGES.index(flat["fedreco.split"] or "fc2") + 2
    return ARRAYS[:num], ARRAYS[num:]


def big_h(h, h_0, reduction):
    """H_i of these samples."""
    of_samples = [((a - b) ** 2).sum() for a, b in zip(h, h_0, strict=True)]
    return sum(of_samples) / (len(of_samples) if reduction == "mean" else 1)


def client_round(now, w, u_0):
    """(w, g_i) of one client after lines 7 to 18; w is (u_i, v_i)."""
    flat, num_rounds = now.config.flat, now.config.rounds.num_rounds
    mean, std = now.train_samples.pixels.mean[0], now.train_samples.pixels.std[0]
    images, labels = (
        (now.train_samples.images.double() / 255 - mean) / std,
        now.train_samples.labels,
    )
    final, how = flat["fedreco.final-head-epochs"], flat["fedreco.reduction"]
    extractor, head = split_of(flat)

    def batches(stream, duration):
        num, unit = duration.split()
        for step in now.steps(stream, int(num), "steps" if unit == "steps" else "epochs"):
            yield images[step.index], labels[step.index]

    def descend(w, names, loss_of, phase, rate):
        velocity = dict.fromkeys(names, 0.0)
        for x, y in phase:
            g = gradients(w, names, lambda p, x=x, y=y: loss_of(p, x, y))
            g = clipped(g, flat["clip-norm"])
            g = {n: g[n] + flat["weight-decay"] * w[n] for n in names}
            velocity = {n: flat["momentum"] * velocity[n] + g[n] for n in names}
            w = w | {n: w[n] - rate * velocity[n] for n in names}
        return w

    def f_i(p, x, y):
        return F.cross_entropy(output(p, ARRAYS, x), y)

    def with_consensus(p, x, y):
        h_i = big_h(output(p, extractor, x), output(u_0, extractor, x), how)
        return f_i(p, x, y) + flat["fedreco.lambda"] / 2 * h_i

    k_v = f"{final} epochs" if final and now.round == num_rounds else flat["fedreco.k-v"]
    w = descend(w, head, f_i, batches("head", k_v), flat["fedreco.eta-v"])
    phase = batches("extractor", flat["fedreco.k-u"])
    w = descend(w, extractor, with_consensus, phase, flat["fedreco.eta-u"])
    x = images
    if flat["fedreco.g-samples"] == "batch":
        [(x, _)] = batches("release", "1 steps")
    h = output(w, extractor, x)
    return w, gradients(u_0, extractor, lambda p: big_h(h, output(p, extractor, x), how))


def plain_run(config):
    """u_0 and each client's model after all rounds."""
    start = {name: array.double() for name, array in initial(config).items()}
    extractor, _ = split_of(config.flat)
    u_0, models = {name: start[name] for name in extractor}, [start] * 3
    for number in range(1, config.rounds.num_rounds + 1):
        received, gs = u_0, []
        for i in range(3):
            now = make_round(config, number, partition=i, of=3)
            models[i], g_i = client_round(now, models[i], received)
            gs.append(g_i)
        g = {name: sum(g_i[name] for g_i in gs) / 3 for name in extractor}
        g = clipped(g, config.flat["fedreco.clip-g"])
        u_0 = {name: u_0[name] - config.flat["fedreco.eta-0"] * g[name] for name in extractor}
    found = {f"model/{name}": array for name, array in u_0.items()}
    for i, model in enumerate(models):
        found |= {f"client-{i:04}/round-00003/model/{n}": a for n, a in model.items()}
    return found


@pytest.fixture(scope="module")
def published():
    """The plain loops' result as published."""
    return plain_run(resolve_config(PAPER | {"source": small_source()}))


@pytest.mark.parametrize("case", CASES)
def test_three_rounds_of_three_clients_are_those_of_plain_loops(
    case, published, tmp_path, no_pictures
):
    keys = PAPER | {"source": small_source(), "keep-state": True} | CASES[case]
    expected = plain_run(resolve_config(keys))
    found = all_models(run_inline(keys | {"output-dir": str(tmp_path)}, 3))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        torch.testing.assert_close(found[name].double(), array, rtol=0, atol=2e-6, msg=name)
    far = [
        name
        for name, array in expected.items()
        if name not in published
        or array.shape != published[name].shape
        or (array - published[name]).abs().max() > 1e-3
    ]
    assert bool(far) == (case != "as published")  # each option matters here


def test_all_images_are_split_and_each_client_tests_on_its_own_share():
    keys = PAPER | OPTIONS["all images"] | {"source": small_source()}
    config = resolve_config(keys)
    with np.load(f"{folder().name}/small.npz") as data:
        images = np.concatenate([data["x_train"], data["x_test"]])[:, None]
    assert np.array_equal(open_source(config).train.images, images)
    assert len(open_source(config).test.labels) == 18  # for diagnostics
    parts = [client_indices(config, i, 3) for i in range(3)]
    assert sorted(np.concatenate([p for pair in parts for p in pair])) == list(range(78))
    assert [len(train) + len(test) for train, test in parts] == [26] * 3
    assert {len(test) for _, test in parts} <= {7, 8}


def test_g_of_all_samples_is_clipped_before_its_noise_so_that_its_sensitivity_is_as_before():
    """Whatever the data: at most C from zero, and 2C from each other."""
    keys = PAPER | OPTIONS["g of all samples"] | {"source": small_source()}
    noised = keys | {"privacy.epsilon": 0.5, "privacy.clip-norm": 0.01}
    u_0 = {name: initial(resolve_config(keys))[name] for name in EXTRACTOR}
    plain, private = (make_round(resolve_config(each), received=u_0) for each in (keys, noised))
    g = method_of(plain.config).train(plain).arrays
    noise = privatise({name: torch.zeros_like(array) for name, array in g.items()}, private)
    sent = method_of(private.config).train(private).arrays
    for name, array in clipped(g, 0.01).items():
        torch.testing.assert_close(sent[name] - noise[name], array, rtol=0, atol=1e-4)
    assert sum((a**2).sum() for a in g.values()) ** 0.5 > 0.1


# --- first contact, and another architecture ------------------------------------------------------


def still(**keys):
    """A config with which a round moves nothing."""
    return make_config(method="fedreco", fedreco__eta_u=0.0, fedreco__eta_v=0.0, **keys)


def test_first_contact_takes_u_0_and_a_head_from_the_runs_seed():
    """In any round; a later participation, and the personal model, are of the client's own."""
    config = still(seed=11)
    u_0, other = ({n: initial(config, seed=s)[n] for n in EXTRACTOR} for s in (3, 6))
    ctx = make_round(config, 5, received=u_0)
    first = method_of(config).train(ctx)
    assert_same_bits(first.state["model"], initial(config) | u_0)
    assert differ(initial(still(seed=12)), initial(config))
    ctx = make_round(config, 6, received=other, state=first.state)
    assert_same_bits(method_of(config).train(ctx).state["model"], first.state["model"])
    personal = method_of(config).personal_model(ctx, first.state)
    assert_same_bits(personal.state_dict(), first.state["model"])


def test_a_client_of_another_architecture_shares_the_representation_alone(monkeypatch):
    add_small_cnn(monkeypatch)
    keys = {"method": "fedreco", "client_models": "cnn-fedreco, small-cnn", "batch_size": 100}
    config = make_config(**keys)
    u_0 = {n: initial(config, seed=3)[n] for n in EXTRACTOR}
    now = make_round(config, received=u_0, partition=1)
    assert now.model.name == "small-cnn"
    assert representation_width(config, now.model) == 84
    update = method_of(config).train(now)
    own = build_network(config, SHAPE, NUM_CLASSES, "small-cnn")
    assert update.state["model"].keys() == own.state_dict().keys()
    assert differ(update.state["model"], own.state_dict())
    # g_i, by autograd: u_0's names and shapes, the representation of the other network
    own.load_state_dict(update.state["model"])
    (x, _) = next(now.train_samples.in_order())
    h = own.extract(x, "fc1").detach()
    point = {n: a.double() for n, a in u_0.items()}
    g = gradients(point, EXTRACTOR, lambda p: big_h(h, output(p, EXTRACTOR, x.double()), "mean"))
    assert update.arrays.keys() == g.keys()
    assert_close(update.arrays, g, rtol=1e-3, atol=1e-5)


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"pool-test": True, "evaluate-global": True}, "evaluate-global"),
        ({"layer-widths": "4,12,1024"}, "layer-widths"),
        ({"layer-widths": "4,12,1024,0"}, "layer-widths"),
        ({"layer-widths": "4,13,120,84"}, "layer-widths"),
        ({"layer-widths": "4;12"}, "layer-widths"),
        ({"layer-widths": "4,12,1024,1024", "model": "resnet20"}, "layer-widths"),
        ({"variant": "fedrcl"}, "variant"),
        ({"variant": "fedavg", "model": "vgg9"}, "variant"),
        ({"fedreco.clip-g": -1.0}, "fedreco.clip-g"),
        ({"fedreco.g-samples": "some"}, "fedreco.g-samples"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_is_refused_by_its_key(keys, key, tmp_path):
    with pytest.raises(ConfigError) as refused:
        run_inline(PAPER | {"source": "digits", "output-dir": str(tmp_path)} | keys, 3)
    assert refused.value.key == key
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("keys", "key"), [({"layer-widths": "4,12,120,80"}, "layer-widths"), ({}, "client-models")]
)
def test_representations_of_two_widths_are_refused_before_round_1(keys, key, tmp_path):
    mixed = {"client-models": "cnn-fedreco, cnn-fedcka"} | keys
    with pytest.raises(ConfigError) as refused:
        run_inline(PAPER | {"source": "digits", "output-dir": str(tmp_path)} | mixed, 3)
    assert refused.value.key == key
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_run_with_a_final_round_is_not_continued_past_it(tmp_path):
    keys = PAPER | OPTIONS["final round"] | {"source": small_source(), "keep-state": True}
    path = run_inline(keys | {"output-dir": str(tmp_path)}, 3)
    with pytest.raises(ValueError, match=r"^num-rounds = 5: .*fedreco"):
        resume(path, 3, num_rounds=5)
