"""SCAFFOLD: whole runs with partial participation against Algorithm 1 in plain loops in float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_same_bits,
    initial,
    make_config,
    make_round,
    small_source,
)
from run_fixtures import all_models, history_of

from client_app.methods import method_of
from client_app.setup import build_network, client_indices
from protocol.config import resolve_config
from protocol.messages import TrainReply
from server_app.inline import run_inline
from strategies.scaffold import ScaffoldServer

KEYS = {
    "method": "scaffold",
    "model": "cnn-fedreco",
    "partition": "dirichlet",
    "alpha": 1.0,
    "min-samples": 4,
    "seed": 3,
    "train-fraction": 0.6,  # two of three clients
    "num-rounds": 4,
    "local-epochs": 2,
    "batch-size": 9,
    "lr": 0.02,
    "momentum": 0.0,
    "weight-decay": 0.01,
    "device": "cpu",
    "keep-state": True,
}
MOMENTUM = {"momentum": 0.9, "lr": 0.005}
NIID = {"scaffold.momentum-form": "niid-bench"}
DECAY = {"lr-decay": 0.5, "lr-decay-epoch": 0.5}
CASES = [
    {},
    {"scaffold.lr-global": 0.5, "weighting": "uniform"},
    {"scaffold.control-weighting": "uniform"},
    DECAY,
    MOMENTUM | DECAY,
    MOMENTUM | DECAY | NIID,
]


def trained(config, number, i, w, c, c_i):
    """(w_i, c_i^+) of a client, lines 7 to 13; with momentum as the method's docstring says."""
    flat, network = config.flat, build_network(config, SHAPE, NUM_CLASSES).double()
    now = make_round(config, number, partition=i, of=3)
    is_corrected = flat["scaffold.momentum-form"] == "corrected"
    w_i, velocity, etas, rho = w, dict.fromkeys(w, 0.0), [], flat["momentum"]
    for step in now.steps("batches", flat["local-epochs"]):
        etas.append(
            flat["lr"] * flat["lr-decay"] ** (number - 1) * flat["lr-decay-epoch"] ** step.epoch
        )
        leaves = {n: a.clone().requires_grad_() for n, a in w_i.items()}
        logits = torch.func.functional_call(network, leaves, (step.x.double(),))
        found = torch.autograd.grad(F.cross_entropy(logits, step.y), list(leaves.values()))
        for n, g in zip(w, found, strict=True):
            offset = c[n] - c_i[n]
            velocity[n] = rho * velocity[n] + g + flat["weight-decay"] * w_i[n]
            velocity[n] = velocity[n] + (offset if is_corrected else 0.0)
            w_i = w_i | {n: w_i[n] - etas[-1] * (velocity[n] + (0 if is_corrected else offset))}
    k_eta = sum(etas)
    if is_corrected:  # the total weight of the gradients
        k_eta = sum(eta * rho**m for k, eta in enumerate(etas) for m in range(k + 1))
    return w_i, {n: c_i[n] - c[n] + (w[n] - w_i[n]) / k_eta for n in w}


def algorithm_1(config, cohorts):
    """w, and the c_i of all clients, after rounds of these cohorts."""
    flat, sizes = config.flat, [len(client_indices(config, i, 3)[0]) for i in range(3)]
    counts = [1, 1, 1] if flat["weighting"] == "uniform" else sizes
    control = flat["scaffold.control-weighting"]
    p = counts if control == "auto" else [1, 1, 1]
    w = {n: a.double() for n, a in initial(config).items()}
    c, c_i = {n: a * 0 for n, a in w.items()}, [{n: a * 0 for n, a in w.items()}] * 3
    for number, cohort in enumerate(cohorts, 1):
        models, changes = {}, {}
        for i in cohort:
            models[i], after = trained(config, number, i, w, c, c_i[i])
            changes[i] = {n: after[n] - c_i[i][n] for n in w}
            c_i[i] = after
        for n in w:
            mean = sum(counts[i] * models[i][n] for i in cohort) / sum(counts[i] for i in cohort)
            w[n] = w[n] + flat["scaffold.lr-global"] * (mean - w[n])
            c[n] = c[n] + sum(p[i] * changes[i][n] for i in cohort) / sum(p)
    return w, c_i


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounds_with_partial_participation_are_algorithm_1(case, tmp_path, no_pictures, in_float64):
    keys = KEYS | {"source": small_source()} | case
    run = run_inline(keys | {"output-dir": str(tmp_path)}, 3)
    cohorts = [
        [int(client.removeprefix("client-")) for client in line["participants"]]
        for line in history_of(run)
    ]
    assert {len(cohort) for cohort in cohorts} == {2}
    assert len(set(map(tuple, cohorts))) > 1
    w, c_i = algorithm_1(resolve_config(keys), cohorts)
    found = all_models(run)
    for n, array in w.items():
        torch.testing.assert_close(found[f"model/{n}"].double(), array, rtol=0, atol=1e-6, msg=n)
    for i in {i for cohort in cohorts for i in cohort}:
        (folder,) = {name.rpartition("/control/")[0] for name in found
                     if name.startswith(f"client-{i:04}/") and "/control/" in name}  # fmt: skip
        for n, array in c_i[i].items():
            control = found[f"{folder}/control/{n}"].double()
            torch.testing.assert_close(control, array, rtol=0, atol=1e-5, msg=n)


def test_a_client_whose_last_update_was_not_aggregated_goes_back_to_the_control_before():
    config = make_config(method="scaffold")
    old, new = initial(config, seed=6), initial(config, seed=7)
    extra = {f"c.{n}": a for n, a in initial(config, seed=5).items()}

    def arrays_of(control, before, accepted):
        made = {"round": torch.tensor(3)}
        state = {"control": control, "control-before": before, "control-made": made}
        ctx = make_round(config, 5, state=state, extra=extra)
        return method_of(config).train(replace(ctx, last_accepted_round=accepted)).arrays

    assert_same_bits(arrays_of(new, old, accepted=2), arrays_of(old, new, accepted=3))


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, ["from 2 (b) to 22 (a)", "batches-per-epoch"]),
        ({"batch_size": 11}, []),  # ten times as many
        ({"batches_per_epoch": 3}, []),
    ],
)
def test_numbers_of_steps_that_differ_by_more_than_ten_times_are_named(keys, found):
    config = make_config(method="scaffold", **{"batch_size": 10, "local_epochs": 2} | keys)
    warning = method_of(config).warning(config, {"a": 105, "b": 8, "c": 60})
    assert all(part in warning for part in found)
    assert bool(warning) == bool(found)


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
