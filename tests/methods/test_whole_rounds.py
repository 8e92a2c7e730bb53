"""Local training of every local objective, two rounds long, against loops written from the papers.

Nothing of the code under test is used but the batches: the network is torch.conv2d and matmul, a
loss is a sum over samples or pairs, SGD has momentum, weight decay, clipping and both decays of its
rate written out. So these tests see what a test of a loss alone does not: which model is frozen,
where the previous one comes from, in which layer and with which rate.
"""

import math

import pytest
import torch
from client_fixtures import NUM_CLASSES, assert_close, initial, make_config, make_round
from method_fixtures import random

from client_app.methods import method_of

RATE, RHO, DECAY, CLIP = 0.05, 0.5, 0.01, 0.4
KEYS = {
    "lr": RATE,
    "momentum": RHO,
    "weight_decay": DECAY,
    "clip_norm": CLIP,  # of most steps
    "lr_decay": 0.8,
    "lr_decay_epoch": 0.7,
    "local_epochs": 2,
    "batch_size": 6,  # of 15 samples: the last batch has 3
    "num_rounds": 4,
}
PROTOTYPES = random(NUM_CLASSES, 256, seed=11, scale=3.0)
STAGES = ("conv1", "conv2", "fc1", "fc2")


def network(w, x, after="", h=None, has_unit_length=False):
    """The layers of cnn-fedreco by name, from the input, or from `h`, the output of `after`.

    has_unit_length: that of an added projection's output (FedProc).
    """
    layers, do = {}, not after
    for name in ("conv1", "conv2"):
        if do:
            pre = torch.conv2d(x, w[f"stages.{name}.body.weight"], w[f"stages.{name}.body.bias"])
            layers[f"{name}:pre"] = pre
            x = layers[name] = torch.max_pool2d(pre.clamp_min(0), 2)
        if name == after:
            x, do = h, True
    for name in ("fc1", "fc2"):
        if do:
            pre = x.flatten(1) @ w[f"stages.{name}.body.1.weight"].T
            pre = pre + w[f"stages.{name}.body.1.bias"]
            layers[f"{name}:pre"] = pre
            x = layers[name] = pre.clamp_min(0)
        if name == after:
            x, do = h, True
    if "stages.projection.body.1.weight" in w:
        for n, is_last in (("1", False), ("3", True)):
            x = (
                x @ w[f"stages.projection.body.{n}.weight"].T
                + w[f"stages.projection.body.{n}.bias"]
            )
            x = x if is_last else x.clamp_min(0)
        if has_unit_length:
            x = torch.stack([row / (row * row).sum().sqrt() for row in x])
    layers["features"] = x
    layers["logits"] = x @ w["classifier.weight"].T + w["classifier.bias"]
    return layers


def projected(w, stage, h):
    """The output of the stage's projection head."""
    name = f"projection_heads.{stage}"
    hidden = (h.flatten(1) @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]).clamp_min(0)
    return hidden @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]


def log_softmax(row):
    return row - row.exp().sum().log()


def cross_entropy(logits, y):
    return -sum(log_softmax(row)[label] for row, label in zip(logits, y, strict=True)) / len(y)


def cosine(a, b):
    return (a * b).sum() / (a * a).sum().sqrt() / (b * b).sum().sqrt()


def contrast(s_g, s_p, tau=1.0):
    return -((s_g / tau).exp() / ((s_g / tau).exp() + (s_p / tau).exp())).log()


def cka(x, y):
    """Eq. (3) by features."""
    x, y = (z.flatten(1) - z.flatten(1).mean(0) for z in (x, y))
    cross, own_x, own_y = y.T @ x, x.T @ x, y.T @ y
    norm = (own_x * own_x).sum().sqrt() * (own_y * own_y).sum().sqrt()
    return (cross * cross).sum() / norm


def pooled(h):
    return h.mean((2, 3)) if h.dim() == 4 else h


# Each returns the regulariser of one batch x, y from the options `o`, the weights w, w_g and w_p
# (None: first participation) and `now`, the layers of w.


def fedprox(o, w, w_g, **_):
    norms = [((w[n] - w_g[n]) ** 2).sum() for n in w]
    if not o["squared"]:
        norms = [v.sqrt() if v > 0 else v for v in norms]
    return o["mu"] / (2 if o["half"] else 1) * sum(norms)


def moon(o, w, w_g, w_p, x, now, **_):
    if w_p is None:
        return 0.0

    def z_of(weights, layers):
        side = o["projection"] == "mlp-side"
        return projected(weights, "fc2", layers["fc2"]) if side else layers["features"]

    z, z_g, z_p = z_of(w, now), z_of(w_g, network(w_g, x)), z_of(w_p, network(w_p, x))
    s_g = torch.stack([cosine(a, b) for a, b in zip(z, z_g, strict=True)])
    s_p = torch.stack([cosine(a, b) for a, b in zip(z, z_p, strict=True)])
    if o["reduction"] == "batch":
        s_g, s_p = s_g.mean(), s_p.mean()
    return o["mu"] * contrast(s_g, s_p, o["tau"]).mean()


def fedintr(o, w, w_g, w_p, x, now, **_):
    if w_p is None:
        return 0.0
    frozen_g, frozen_p = network(w_g, x), network(w_p, x)
    s_g, s_p = [], []
    for k in STAGES:
        z = projected(w, k, now[k])
        z_g, z_p = projected(w_g, k, frozen_g[k]), projected(w_p, k, frozen_p[k])
        s_g.append(torch.stack([cosine(a, b) for a, b in zip(z, z_g, strict=True)]))
        s_p.append(torch.stack([cosine(a, b) for a, b in zip(z, z_p, strict=True)]))
    if o["reduction"] == "batch":
        s_g, s_p = [[s.mean()[None] for s in each] for each in (s_g, s_p)]
    total = 0.0
    for b in range(len(s_g[0])):
        weights = [(s[b] / o["tau"]).exp() for s in s_g]
        alpha = [v / sum(weights) for v in weights]
        if o["layer_weights"] == "average":
            alpha = [1 / len(STAGES)] * len(STAGES)
        total = total + sum(
            a * contrast(g[b], p[b], o["tau"]) for a, g, p in zip(alpha, s_g, s_p, strict=True)
        )
    return o["mu"] * total / len(s_g[0])


def fedcka(o, w, w_g, w_p, x, now, **_):
    if w_p is None:
        return 0.0
    g, p, total = network(w_g, x), network(w_p, x), 0.0
    has_heads = o["projection"] == "mlp-side"
    for name in (*STAGES, "logits")[: o["num_layers"]]:
        a, a_g, a_p = (
            projected(weights, name, layers[name]) if has_heads else layers[name]
            for weights, layers in ((w, now), (w_g, g), (w_p, p))
        )
        total = total + contrast(cka(a, a_g), cka(a, a_p))
    return o["mu"] * total / o["num_layers"]


def fitnet(o, w_g, x, now, **_):
    g = network(w_g, x)
    levels = [f"{s}:pre" for s in STAGES] + ["logits"]
    distances = [((pooled(now[n]) - pooled(g[n])) ** 2).mean() for n in levels]
    return o["lambda_"] * sum(distances) / len(levels)


def fedntd(o, w_g, x, y, now, **_):
    g, total = network(w_g, x)["logits"], 0.0
    tau = 1.0 if o["convex"] else o["tau"]
    for row, row_g, label in zip(now["logits"], g, y.tolist(), strict=True):
        others = [c for c in range(NUM_CLASSES) if c != label]
        log_q, log_q_g = (log_softmax(r[others] / tau) for r in (row, row_g))
        total = total + (log_q_g.exp() * (log_q_g - log_q)).sum()
    ce = cross_entropy(now["logits"], y)
    return o["beta"] * tau**2 * total / len(y) - (o["beta"] * ce if o["convex"] else 0)


def feddecorr(o, now, **_):
    z = now["features"]
    n, d = z.shape
    x = (z - z.mean(0)) / (((z - z.mean(0)) ** 2).sum(0) / (n - 1) + 1e-8).sqrt()
    squares = (x.T @ x) ** 2
    if o["form"] == "paper":
        return o["beta"] * (squares / (n - 1) ** 2).sum() / d**2
    return o["beta"] * squares[~torch.eye(d, dtype=torch.bool)].mean() / n


def fedmlb(o, w_g, y, now, **_):
    hybrid, divergence = 0.0, 0.0
    for stage in STAGES:
        q = network(w_g, None, after=stage, h=now[stage])["logits"]
        hybrid = hybrid + cross_entropy(q, y) / len(STAGES)
        for row, main in zip(q, now["logits"], strict=True):
            log_q, log_p = (log_softmax(r) for r in (row, main))
            divergence = divergence + (log_q.exp() * (log_q - log_p)).sum() / len(y) / len(STAGES)
    return o["lambda1"] * hybrid + o["lambda2"] * divergence


def levels_of(o, now):
    names = STAGES[-1:] if o.get("levels") == "last" else STAGES
    for name in names:
        h = pooled(now[f"{name}:pre"])
        yield [row / (row * row).sum().sqrt() for row in h]


def fedrcl(o, y, now, **_):
    tau, y, losses = o["tau"], y.tolist(), []
    for phi in levels_of(o, now):
        terms = []
        for i in range(len(y)):
            same = [j for j in range(len(y)) if j != i and y[j] == y[i]]
            s = [(a * phi[i]).sum() for a in phi]
            one = math.exp(1 / tau)
            if o["mining"] == "all":
                if not same:
                    continue
                others = sum((s[k] / tau).exp() for k in range(len(y)) if k != i)
                near = [s[k] for k in same if s[k] > o["threshold"]]
                penalty = torch.log(sum(((v / tau).exp() for v in near), torch.tensor(one)))
                each = [-((s[j] / tau).exp() / others).log() + o["beta"] * penalty for j in same]
                terms.append(sum(each) / len(each))
            else:
                s_p = min((s[j] for j in same), default=torch.tensor(1.0))
                other = sorted((s[k] for k in range(len(y)) if y[k] != y[i]), reverse=True)[:2]
                total = sum((v / tau).exp() for v in [s_p, *other])
                term = -((s_p / tau).exp() / total).log()
                if same and s_p > o["threshold"]:
                    term = term + o["beta"] * ((s_p / tau).exp() + one).log()
                terms.append(term)
        losses.append(sum(terms) / len(terms) if terms else 0.0)
    return sum(losses) / len(losses)


def fedscl(o, **about):
    return fedrcl(o | {"beta": 0.0, "threshold": 0.5}, **about)


def fedcl(o, y, now, **_):
    tau, losses = o["tau"], []
    for phi in levels_of(o, now):
        for i in range(len(y)):
            s = sorted(((a * phi[i]).sum() for k, a in enumerate(phi) if k != i), reverse=True)
            total = math.exp(1 / tau) + sum((v / tau).exp() for v in s[:2])
            losses.append((total.log() - 1 / tau) / len(y))
    return sum(losses) / len(STAGES)


def fedlc(o, y, now, counts, **_):
    """What the calibrated loss has more than cross entropy."""
    total = 0.0
    for row, label in zip(now["logits"], y.tolist(), strict=True):
        a = torch.stack([z - o["tau"] * n**-0.25 for z, n in zip(row, counts, strict=True)])
        total = total + a.exp().sum().log() - a[label]
    return total / len(y) - cross_entropy(now["logits"], y)


def fedproc(o, y, now, number, **_):
    """What a_t CE + (1 - a_t) GPC has more than cross entropy; nothing in the first round."""
    a_t = 1.0 if number == 1 else (number - 1) / (o["schedule_rounds"] or KEYS["num_rounds"])
    c = [row / (row * row).sum().sqrt() for row in PROTOTYPES]
    total = 0.0
    for z, label in zip(now["features"], y.tolist(), strict=True):
        total = total - log_softmax(torch.stack([(z * each).sum() for each in c]))[label]
    return (1 - a_t) * (total / len(y) - cross_entropy(now["logits"], y))


def fedavg(o, **_):
    return 0.0


CASES = {
    "fedavg": (fedavg, [{}]),
    "fedprox": (fedprox, [{"mu": 0.7}, {"half": False}, {"squared": False, "mu": 0.7}]),
    "moon": (
        moon,
        [
            {"mu": 3.0},
            {"projection": "mlp-side", "reduction": "batch"},
            {"projection": "mlp", "tau": 0.1},
        ],
    ),
    "fedintr": (
        fedintr,
        [
            {"mu": 3.0},
            {"reduction": "sample"},
            {"layer_weights": "average"},
            {"tau": 0.1},
        ],
    ),
    "fedcka": (fedcka, [{"mu": 3.0}, {"num_layers": 5}, {"projection": "mlp-side"}]),
    "fitnet": (fitnet, [{"lambda_": 2.0}]),
    "fedntd": (fedntd, [{"beta": 2.0, "tau": 2.5}, {"convex": True, "beta": 0.3, "tau": 2.5}]),
    "feddecorr": (feddecorr, [{}, {"form": "paper"}]),
    "fedmlb": (fedmlb, [{}, {"lambda2": 3.0}]),
    "fedrcl": (
        fedrcl,
        [
            {"beta": 2.0},
            {"mining": "hard", "threshold": 0.2, "tau": 0.2},
            {"levels": "last", "tau": 0.5},
        ],
    ),
    "fedscl": (fedscl, [{}, {"mining": "hard"}]),
    "fedcl": (fedcl, [{"tau": 0.3}]),
    "fedproc": (fedproc, [{}, {"schedule_rounds": 8}]),
    "fedlc": (fedlc, [{"tau": 2.0}]),
}


def trained_by_hand(config, name, number, received, previous):
    """The weights after round `number`, how many steps were clipped, and the samples' mean loss."""
    now = make_round(config, number=number, received=received, of=4)
    options, regulariser = vars(method_of(config)), CASES[name][0]
    counts = [now.train_samples.labels.tolist().count(c) for c in range(NUM_CLASSES)]
    w, velocity, num_clipped = {n: a.clone() for n, a in received.items()}, {}, 0
    total = 0.0
    for step in now.steps("batches", KEYS["local_epochs"]):
        x, y = step.x, step.y
        leaves = {n: a.clone().requires_grad_() for n, a in w.items()}
        layers = network(leaves, x, has_unit_length=name == "fedproc")
        about = {"w": leaves, "w_g": received, "w_p": previous, "x": x, "y": y, "now": layers}
        about |= {"counts": counts, "number": number}
        loss = cross_entropy(layers["logits"], y) + regulariser(options, **about)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        g = {n: a for n, a in zip(w, found, strict=True) if a is not None}
        norm = math.sqrt(sum(float((a**2).sum()) for a in g.values()))
        total += loss.item() * len(y)
        num_clipped += norm > CLIP
        rate = RATE * 0.8 ** (number - 1) * 0.7**step.epoch
        for n, a in g.items():
            a = a * min(1, CLIP / (norm + 1e-6)) + DECAY * w[n]  # torch's clip has this 1e-6
            velocity[n] = RHO * velocity[n] + a if n in velocity else a
            w[n] = w[n] - rate * velocity[n]
    return w, num_clipped, total / len(now.train_samples) / KEYS["local_epochs"]


FORMS = [(name, form) for name, (_, forms) in CASES.items() for form in forms]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_two_rounds_of_local_training_are_those_of_the_papers_loops(name, form, in_float64):
    keys = {f"{name}__{k.rstrip('_')}": value for k, value in form.items()}
    config = make_config(method=name, **KEYS, **keys)
    w = {n: a.double() for n, a in initial(config).items()}
    state, previous = {}, None
    for number in (1, 2):
        extra = {"prototypes": PROTOTYPES} if name == "fedproc" else {}
        now = make_round(config, number=number, received=w, state=state, of=4, extra=extra)
        update = method_of(config).train(now)
        by_hand, num_clipped, mean_loss = trained_by_hand(config, name, number, w, previous)
        tolerance = 1e-7 if name == "fedlc" else 1e-10  # its margins are float32
        assert_close(update.arrays, by_hand, rtol=0, atol=tolerance)
        assert num_clipped > 0
        if name != "fedrcl":  # which omits a constant
            assert sum(update.terms.values()) == pytest.approx(mean_loss, rel=1e-5)
        state, previous = update.state, by_hand
        # another model is received than was trained
        w = {n: a + 0.02 * random(*a.shape, seed=k) for k, (n, a) in enumerate(by_hand.items())}
    assert update.num_steps == 6
