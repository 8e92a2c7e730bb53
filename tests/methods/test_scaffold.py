"""SCAFFOLD against Algorithm 1 in plain numbers."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    initial,
    make_config,
    make_round,
)
from torch import nn

from client_app.methods import method_of
from client_app.methods.scaffold import Scaffold
from client_app.optimizers import optimizer_for
from client_app.samples import Step
from client_app.setup import build_network
from protocol.messages import TrainReply
from strategies.scaffold import ScaffoldServer

# --- clients with one parameter and a quadratic loss ----------------------------------------------


class Number(nn.Module):
    """A network that says theta, whatever it is shown."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    @property
    def tensors(self):
        return {"theta": self.theta}

    def run(self, x, layers=(), *, to_logits=True):
        return self.theta, []


def quadratic(batch):
    """a / 2 (theta - b)^2, the batch being (a, b)."""
    a, b = batch.x
    return (a / 2 * (batch.logits - b) ** 2).sum()


class QuadraticScaffold(Scaffold):
    def supervised(self, batch):
        return quadratic(batch)


class Federation:
    """Real server and client halves on quadratic clients [(a_i, b_i), ...], one batch an epoch."""

    def __init__(
        self,
        clients,
        form="corrected",
        lr_global=1.0,
        sizes=None,
        control_weighting="auto",
        **train,
    ):
        self.clients = dict(enumerate(clients))
        self.sizes = sizes or [1] * len(clients)
        base = {"lr": 0.05, "local_epochs": 5, "momentum": 0.0, "weight_decay": 0.0}
        options = {"scaffold__momentum_form": form, "scaffold__lr_global": lr_global}
        options["scaffold__control_weighting"] = control_weighting
        weighting = {"weighting": "examples" if sizes else "uniform"}
        self.config = make_config(method="scaffold", **base | options | weighting | train)
        model = Number()
        self.server = ScaffoldServer(self.config, model)
        self.server.roster = {
            i: SimpleNamespace(client=str(i), num_examples=n) for i, n in enumerate(self.sizes)
        }
        self.server.partition_sizes = {str(i): n for i, n in enumerate(self.sizes)}
        self.objective = QuadraticScaffold(
            lr_global=lr_global, momentum_form=form, control_weighting=control_weighting
        )
        self.w = {"theta": torch.zeros(1, dtype=torch.float64)}
        self.kept, self.counted, self.round = {}, {}, 0

    def now(self, client):
        batch = torch.tensor(self.clients[client], dtype=torch.float64)
        none = torch.empty(0, dtype=torch.int64)
        step = Step(batch, torch.zeros(1), none, none)
        return SimpleNamespace(
            config=self.config,
            model=Number(),
            received=self.w,
            extra=self.server.extra(),
            state=self.kept.get(client, {}),
            last_accepted_round=self.counted.get(str(client), 0),
            client=str(client),
            round=self.round,
            device=torch.device("cpu"),
            precision="fp32",
            lr_factor=self.config.train.lr_decay ** (self.round - 1),
            seed=lambda *names: 0,
            optimizer=partial(optimizer_for, self.config.train),
            plan=lambda stream, count, unit: SimpleNamespace(
                epochs=list(range(count)), index=[none] * count
            ),
            train_samples=SimpleNamespace(
                batch=lambda plan: None, step=lambda plan, number, batch: step
            ),
        )

    def play(self, cohort=None, lost=()):
        """One round; returns the updates. The replies of clients in `lost` do not arrive."""
        self.round += 1
        updates = {}
        for client in self.clients if cohort is None else cohort:
            now = self.now(client)
            updates[client] = self.objective.train(now)
            self.kept[client] = updates[client].state
        replies = [
            TrainReply(str(c), self.round, u.arrays, u.extra, {"num-examples": self.sizes[c]})
            for c, u in updates.items()
            if c not in lost
        ]
        self.server.current = self.server.sent = self.w
        self.w = self.server.next_arrays(self.w, replies)
        self.counted |= {r.client: r.round for r in replies}
        return updates

    @property
    def theta(self):
        return self.w["theta"].item()

    @property
    def c(self):
        return self.server.c["theta"].item()

    def c_of(self, client):
        state = self.kept.get(client, {})
        return state["control"]["theta"].item() if state else 0.0

    def accepted_c_of(self, client):
        """The newest c_i of which the server knows."""
        state = self.kept.get(client, {})
        if not state:
            return 0.0
        is_known = int(state["control-made"]["round"]) <= self.counted.get(str(client), 0)
        return state["control" if is_known else "control-before"]["theta"].item()


def algorithm_1(
    clients,
    cohorts,
    *,
    lr,
    steps,
    momentum=0.0,
    form="corrected",
    eta_g=1.0,
    decay=1.0,
    step_decay=1.0,
):
    """Lines 1 to 17 with option II on quadratics; with momentum as the file's top comment says."""
    w, c, c_i = 0.0, 0.0, dict.fromkeys(range(len(clients)), 0.0)
    for number, cohort in enumerate(cohorts):
        etas = [lr * decay**number * step_decay**j for j in range(steps)]
        models, changes = [], []
        for i in cohort:
            a, b = clients[i]
            theta, velocity = w, 0.0
            for eta in etas:
                gradient = a * (theta - b)
                if form == "corrected":
                    gradient = gradient - c_i[i] + c
                velocity = momentum * velocity + gradient
                theta = theta - eta * velocity
                if form == "niid-bench":
                    theta = theta - eta * (c - c_i[i])
            k_eta = sum(etas)
            if form == "corrected":  # the total weight of the gradients
                k_eta = sum(eta * momentum**n for j, eta in enumerate(etas) for n in range(j + 1))
            new = c_i[i] - c + (w - theta) / k_eta
            models.append(theta)
            changes.append(new - c_i[i])
            c_i[i] = new
        w = w + eta_g * (sum(models) / len(cohort) - w)
        c = c + sum(changes) / len(clients)
    return w, c, c_i


COHORTS = [(0, 2), (1, 2), (0, 1), (2,), (0, 1, 2)]
THREE = [(1.0, 0.0), (4.0, 3.0), (2.0, -5.0)]


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "form": "niid-bench"},
        {"form": "niid-bench"},
        {"lr_global": 0.5},
        {"lr_decay": 0.5},
        {"lr_decay_epoch": 0.5},
        {"lr_decay_epoch": 0.5, "momentum": 0.9},
        {"lr_decay_epoch": 0.5, "momentum": 0.9, "form": "niid-bench"},
    ],
    ids=str,
)
def test_rounds_with_partial_participation_are_algorithm_1(about):
    federation = Federation(THREE, lr=0.02, local_epochs=4, **about)
    for cohort in COHORTS:
        federation.play(cohort)
    renamed = {"lr_global": "eta_g", "lr_decay": "decay", "lr_decay_epoch": "step_decay"}
    options = {renamed.get(k, k): v for k, v in about.items()}
    w, c, c_i = algorithm_1(THREE, COHORTS, lr=0.02, steps=4, **options)
    assert federation.theta == pytest.approx(w, rel=1e-9)
    assert federation.c == pytest.approx(c, rel=1e-9)
    for client in range(3):
        assert federation.c_of(client) == pytest.approx(c_i[client], rel=1e-9)


@pytest.mark.parametrize(
    ("weighting", "p"),
    [("auto", [0.1, 0.2, 0.7]), ("examples", [0.1, 0.2, 0.7]), ("uniform", [1 / 3, 1 / 3, 1 / 3])],
)
def test_c_stays_the_weighted_sum_of_all_c_i_whoever_takes_part(weighting, p):
    federation = Federation(
        THREE, momentum=0.9, lr=0.01, sizes=[10, 20, 70], control_weighting=weighting
    )
    seen = []
    for cohort in [*COHORTS, (1,), (1,), (0, 2)]:
        federation.play(cohort, lost=cohort[:1] if len(seen) == 2 else ())
        c_i = [federation.accepted_c_of(i) for i in range(3)]
        assert federation.c == pytest.approx(sum(a * b for a, b in zip(p, c_i, strict=True)))
        seen.append(federation.c)
    assert min(map(abs, seen)) > 1e-3


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, ["from 2 (b) to 22 (a)", "batches-per-epoch"]),
        ({"batch_size": 9}, ["from 2 (b) to 24 (a)"]),
        ({"batch_size": 11}, []),  # ten times as many
        ({"batch_size": 40}, []),
        ({"batches_per_epoch": 3}, []),
    ],
)
def test_numbers_of_steps_that_differ_by_more_than_ten_times_are_named(keys, found):
    config = make_config(method="scaffold", **{"batch_size": 10, "local_epochs": 2} | keys)
    warning = method_of(config).warning(config, {"a": 105, "b": 8, "c": 60})
    assert all(part in warning for part in found)
    assert bool(warning) == bool(found)


# --- on a network ---------------------------------------------------------------------------------


def scaffold_round(config, received, c=None, c_i=None, **about):
    zeros = {n: torch.zeros_like(a) for n, a in received.items()}
    extra = {f"c.{n}": a for n, a in (c or zeros).items()}
    made = {"round": torch.tensor(3)}
    state = {"control": c_i, "control-before": zeros, "control-made": made} if c_i else {}
    now = make_round(config, received=received, state=state, **about)
    return method_of(config).train(
        dataclasses.replace(now, extra=extra, last_accepted_round=3 if c_i else 0)
    )


def test_one_full_batch_step_keeps_the_gradient_at_w():
    """c_i^+ = grad f_i(w) + decay w, whatever c and c_i were; w_i = w - eta (it - c_i + c)"""
    config = make_config(method="scaffold", momentum=0.0, weight_decay=0.01, batch_size=100)
    received, c, c_i = (initial(config, seed=s) for s in (5, 6, 7))
    update = scaffold_round(config, received, c, c_i)
    network = build_network(config, SHAPE, NUM_CLASSES)
    network.load_state_dict(received)
    (x, y) = next(make_round(config).train_samples.in_order())
    F.cross_entropy(network(x), y).backward()
    gradient = {n: p.grad + 0.01 * p.detach() for n, p in network.named_parameters()}
    w_i = {n: received[n] - 0.05 * (g - c_i[n] + c[n]) for n, g in gradient.items()}
    assert_close(update.arrays, w_i, rtol=0, atol=1e-6)
    assert_close(update.state["control"], gradient, rtol=0, atol=2e-5)
    assert {n.removeprefix("dc.") for n in update.extra} == set(gradient)
    for n, array in update.extra.items():
        change = update.state["control"][n.removeprefix("dc.")] - c_i[n.removeprefix("dc.")]
        torch.testing.assert_close(array, change)


def test_control_variates_are_of_parameters_and_buffers_are_averaged():
    config = make_config(method="scaffold", model="resnet20", scaffold__lr_global=0.5)
    model = build_network(config, SHAPE, NUM_CLASSES)
    server = ScaffoldServer(config, model)
    server.roster = {i: SimpleNamespace(client=str(i), num_examples=1) for i in range(4)}
    assert set(server.c) == {n for n, _ in model.named_parameters()}
    current = {n: a.clone() for n, a in model.state_dict().items()}
    replies = []
    for k in (1, 3):
        arrays = {n: a + k for n, a in current.items()}
        extra = {f"dc.{n}": torch.full_like(a, k) for n, a in server.c.items()}
        replies.append(TrainReply(str(k), 1, arrays, extra, {"num-examples": 1}))
    server.current = server.sent = current
    following = server.next_arrays(current, replies)
    buffers = set(current) - set(server.c)
    assert any("running_var" in n for n in buffers)
    for n, a in following.items():
        moved = (a - current[n]).double()  # the mean of 1 and 3, times eta_g for parameters
        torch.testing.assert_close(moved, torch.full_like(moved, 2.0 if n in buffers else 1.0))
    assert all(torch.equal(a, torch.ones_like(a)) for a in server.c.values())  # (1 + 3) / N
