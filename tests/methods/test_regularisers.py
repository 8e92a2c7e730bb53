"""The local objectives the papers compare against, each by its formula in loops and float64."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    assert_same_bits,
    batch_of,
    differ,
    initial,
    make_config,
    make_round,
    train,
)

from client_app.method import ModelParts
from client_app.methods import method_of
from client_app.methods.fedavg import FedAvg
from client_app.methods.fedcl import FedCL, repulsion
from client_app.methods.feddecorr import FedDecorr, decorrelation
from client_app.methods.fedlc import FedLC, calibrated, loss_without_true_class, margins
from client_app.methods.fedmlb import FedMLB, hybrid_cross_entropy, pathway_divergence
from client_app.methods.fedntd import FedNTD, not_true_divergence
from client_app.methods.fedproc import FedProc, prototype_contrast, schedule
from client_app.methods.fedrcl import FedRCL
from client_app.methods.fedscl import FedSCL
from client_app.methods.fitnet import FitNet, feature_distance
from client_app.setup import build_network
from client_app.similarity import spatial_mean, unit_features


def random(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def labels(size, classes, seed=9):
    return torch.randint(classes, (size,), generator=torch.Generator().manual_seed(seed))


def softmax(row):
    return [math.exp(v) / sum(math.exp(u) for u in row) for v in row]


def cross_entropy(logits, y):
    """Mean over the batch of -log softmax(row)[label]."""
    pairs = zip(logits.tolist(), y.tolist(), strict=True)
    return sum(-math.log(softmax(row)[label]) for row, label in pairs) / len(y)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


# --- FitNet ---------------------------------------------------------------------------------------


def fitnet(**options):
    return FitNet(**({"lambda_": 0.3, "logits": True, "pooled": True} | options))


def test_fitnets_distance_is_a_mean_over_entries_then_over_levels():
    shapes = [(3, 2), (3, 7), (3, 2, 2, 2)]  # unequal sizes: a mean over all entries is another
    f = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    f_g = [random(*shape, seed=n + 9) for n, shape in enumerate(shapes)]
    levels = []
    for a, b in zip(f, f_g, strict=True):
        pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
        levels.append(sum((p - q) ** 2 for p, q in pairs) / a.numel())
    assert feature_distance(f, f_g).item() == pytest.approx(sum(levels) / 3, rel=1e-12)


def test_fitnet_pools_positions_and_nothing_else():
    tap = random(2, 3, 2, 5, seed=1)
    got = spatial_mean(tap)
    assert got.shape == (2, 3)
    for b in range(2):
        for c in range(3):
            mean = sum(v for row in tap[b, c].tolist() for v in row) / 10
            assert got[b, c].item() == pytest.approx(mean, rel=1e-12)
    assert spatial_mean(tap[:, :, 0, 0]) is not None
    assert torch.equal(spatial_mean(tap[:, :, 0, 0]), tap[:, :, 0, 0])


@pytest.mark.parametrize("is_pooled", [True, False])
def test_fitnets_penalty_is_lambda_times_the_distance_of_what_it_compares(is_pooled):
    method = fitnet(pooled=is_pooled)
    f = [random(4, 3, 2, 2, seed=1), random(4, 5, seed=2)]
    g = [random(4, 3, 2, 2, seed=3), random(4, 5, seed=4)]
    maps, maps_g = (
        [t.mean((2, 3)) if t.ndim > 2 and is_pooled else t for t in ts] for ts in (f, g)
    )
    expected = sum(((a - b) ** 2).mean() for a, b in zip(maps, maps_g, strict=True)) / 2
    got = method.penalty(batch_of(method.represent(None, f), method.represent(None, g)))
    assert got.item() == pytest.approx(0.3 * expected.item(), rel=1e-12)


def test_fitnets_gradient_goes_to_the_local_features_alone():
    f, g = random(3, 4, seed=1).requires_grad_(), random(3, 4, seed=2).requires_grad_()
    feature_distance([f], [g]).backward()
    torch.testing.assert_close(f.grad, 2 * (f - g).detach() / 12)
    assert g.grad is None


@pytest.mark.parametrize("with_logits", [True, False])
def test_fitnets_levels_are_all_stages_before_their_activation_and_the_logits(with_logits):
    model = build_network(make_config(method="fitnet"), SHAPE, NUM_CLASSES)
    layers = fitnet(logits=with_logits).layers(model)
    assert layers[:4] == ["conv1:pre", "conv2:pre", "fc1:pre", "fc2:pre"]
    assert layers[4:] == (["logits"] if with_logits else [])


# --- FedMLB ---------------------------------------------------------------------------------------


def two_networks():
    """The same network with two sets of weights, in float64: local and global."""
    config = make_config(method="fedmlb")
    return [build_network(config, SHAPE, NUM_CLASSES, seed=s).double().eval() for s in (1, 2)]


def pathways_by_mixing(local, frozen, x):
    """q_j as the forward pass of one network with stages 1..j of the local one, the rest global."""
    q, mixed = [], dict(frozen.named_parameters())
    for stage in local.stage_names:
        own = {n: p for n, p in local.named_parameters() if n.startswith(f"stages.{stage}.")}
        mixed = mixed | own
        q.append(torch.func.functional_call(frozen, mixed, (x,)))
    return q


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_fedmlb_is_the_formula_on_mixed_networks_value_and_gradient(detach, temperature):
    local, frozen = two_networks()
    frozen.requires_grad_(False)
    x, y = random(5, *SHAPE, seed=3), labels(5, NUM_CLASSES)
    method = FedMLB(lambda1=0.4, lambda2=7.0, temperature=temperature, detach_target=detach)
    logits, outputs = local.run(x, method.layers(local))
    got = method.penalty(batch_of(outputs, y=y, logits=logits, global_model=frozen))

    q = pathways_by_mixing(local, frozen, x)
    assert len(q) == 4
    hybrid = sum(cross_entropy(q_j, y) for q_j in q) / 4
    divergence = 0.0
    for q_j in q:
        for a, b in zip(q_j.tolist(), logits.tolist(), strict=True):
            rows = ([v / temperature for v in row] for row in (a, b))
            divergence += kl(*(softmax(row) for row in rows)) / 5 / 4
    assert divergence > 1e-6
    assert got.item() == pytest.approx(0.4 * hybrid + 7 * divergence, rel=1e-9)

    p = local(x)
    reference = 0.0
    for q_j in q:
        target = F.softmax((q_j.detach() if detach else q_j) / temperature, 1)
        log_p = F.log_softmax(p / temperature, 1)
        reference += 0.4 / 4 * F.cross_entropy(q_j, y)
        reference += 7 / 4 * (target * (target.log() - log_p)).sum() / 5
    weights = list(local.parameters())
    wanted = torch.autograd.grad(reference, weights, allow_unused=True)
    gradients = torch.autograd.grad(got, weights, allow_unused=True)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_fedmlb_at_the_global_weights_has_no_divergence_and_one_cross_entropy_more():
    local, frozen = two_networks()
    frozen.load_state_dict(local.state_dict())
    frozen.requires_grad_(False)
    x, y = random(4, *SHAPE, seed=3), labels(4, NUM_CLASSES)
    logits, outputs = local.run(x, local.stage_names)
    q = [frozen.resume(h, after=s) for s, h in zip(local.stage_names, outputs, strict=True)]
    assert pathway_divergence(q, logits, 1.0).item() == pytest.approx(0, abs=1e-14)
    loss = F.cross_entropy(logits, y)
    assert hybrid_cross_entropy(q, y).item() == pytest.approx(loss.item(), rel=1e-12)
    names = [n for n, _ in local.named_parameters()]
    weights = list(local.parameters())
    of_p = dict(zip(names, torch.autograd.grad(loss, weights, retain_graph=True), strict=True))
    for j, stage in enumerate(local.stage_names):
        one = F.cross_entropy(q[j], y)
        of_q = torch.autograd.grad(one, weights, retain_graph=True, allow_unused=True)
        before = tuple(f"stages.{s}." for s in local.stage_names[: j + 1])
        for name, gradient in zip(names, of_q, strict=True):
            if name.startswith(before):
                torch.testing.assert_close(gradient, of_p[name], rtol=1e-9, atol=1e-14)
            else:
                assert gradient is None or gradient.abs().max() == 0, (stage, name)


def test_fedmlbs_target_carries_gradient_unless_detached():
    p, q = random(3, 4, seed=1).requires_grad_(), random(3, 4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: pathway_divergence([a, b], a + b, 1.5), (p, q))
    of_q = torch.autograd.grad(pathway_divergence([q], p, 1.0), q)[0]
    assert of_q.abs().max() > 1e-3


# --- FedLC ----------------------------------------------------------------------------------------


def fedlc(**options):
    return FedLC(**({"tau": 1.0, "exclude_true": False} | options))


def loss_of(method, logits, y, counts):
    prepared = method.begin_round(SimpleNamespace(label_counts=torch.tensor(counts)))
    return method.supervised(batch_of(y=y, logits=logits, prepared=prepared))


@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize("exclude", [False, True])
def test_fedlc_is_the_formula_in_loops(tau, exclude):
    z, counts = random(6, 4, seed=1, scale=2), [1, 16, 500, 3]
    y = torch.tensor([0, 1, 2, 3, 1, 0])
    total = 0.0
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        a = [v - tau * n ** (-1 / 4) for v, n in zip(row, counts, strict=True)]
        others = [math.exp(v) for c, v in enumerate(a) if not (exclude and c == label)]
        total += math.log(sum(others)) - a[label]
    got = loss_of(fedlc(tau=tau, exclude_true=exclude), z, y, counts)
    assert got.item() == pytest.approx(total / 6, rel=1e-6)  # it works in float32


@pytest.mark.parametrize(
    ("label", "exclude", "value"), [(0, False, 0.779949), (1, False, 0.613282), (0, True, 1 / 6)]
)
def test_fedlcs_known_numbers(label, exclude, value):
    method = fedlc(exclude_true=exclude)
    got = loss_of(method, torch.zeros(3, 2), torch.full((3,), label), [16, 81])
    assert got.item() == pytest.approx(value, abs=5e-7)


def test_fedlc_leaves_an_absent_class_out_and_gives_it_no_gradient():
    z = random(5, 4, seed=1).float().requires_grad_()
    y, counts = torch.tensor([0, 1, 3, 3, 0]), [5, 2, 0, 40]
    loss = loss_of(fedlc(), z, y, counts)
    loss.backward()
    assert (z.grad[:, 2] == 0).all()
    assert z.grad.isfinite().all()
    present = [0, 1, 3]
    without = loss_of(fedlc(), z.detach()[:, present], torch.tensor([0, 1, 2, 2, 0]), [5, 2, 40])
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)
    assert (calibrated(z, margins(torch.tensor(counts), 1.0))[:, 2] == -torch.inf).all()


def test_fedlc_without_tau_or_with_equal_counts_is_cross_entropy():
    z, y = random(5, 3, seed=2), labels(5, 3)
    expected = cross_entropy(z, y)
    assert loss_of(fedlc(tau=0.0), z, y, [1, 9, 0]).item() == pytest.approx(expected, rel=1e-12)
    assert loss_of(fedlc(), z, y, [7, 7, 7]).item() == pytest.approx(expected, rel=1e-6)


def test_fedlcs_rarer_class_has_the_larger_margin():
    z = torch.zeros(1, 2)
    a = calibrated(z, margins(torch.tensor([2, 200]), 1.0))
    assert a[0, 0] < a[0, 1] < 0


def test_fedlc_reads_the_clients_own_training_counts():
    now = make_round(make_config(method="fedlc", partition="classes", classes_per_client=2))
    own = [now.train_samples.labels.tolist().count(c) for c in range(3)]
    assert now.label_counts.tolist() == own
    assert 0 in own


def test_the_papers_fedlc_has_no_true_class_in_its_gradient_of_the_sum():
    assert torch.autograd.gradcheck(
        lambda a: loss_without_true_class(a, torch.tensor([0, 2])),
        random(2, 3, seed=1).requires_grad_(),
    )


# --- FedNTD ---------------------------------------------------------------------------------------


def ntd_in_loops(z, z_g, y, tau):
    """Mean over the batch of KL(q_g || q_l), the true class's entry left out of both."""
    total = 0.0
    for row, row_g, label in zip(z.tolist(), z_g.tolist(), y.tolist(), strict=True):
        local, of_global = (
            softmax([v / tau for c, v in enumerate(r) if c != label]) for r in (row, row_g)
        )
        total += kl(of_global, local)
    return total / len(y)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_fedntds_divergence_is_the_formula_in_loops(tau):
    z, z_g, y = random(6, 5, seed=1, scale=2), random(6, 5, seed=2, scale=2), labels(6, 5)
    expected = ntd_in_loops(z, z_g, y, tau)
    assert not_true_divergence(z, z_g, y, tau).item() == pytest.approx(expected, rel=1e-12)


def test_fedntds_known_number():
    z, z_g = torch.tensor([[5.0, 0, 0]]), torch.tensor([[-3.0, math.log(3), 0]])
    got = not_true_divergence(z, z_g, torch.tensor([0]), 1.0).item()
    assert got == pytest.approx(0.130812, abs=5e-7)
    assert got == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)


def test_fedntd_knows_no_true_class_and_nothing_of_two_classes():
    z, z_g, y = random(4, 3, seed=1), random(4, 3, seed=2), labels(4, 3)
    rows = torch.arange(4)
    moved, moved_g = z.clone(), z_g.clone()
    moved[rows, y] += 3.7
    moved_g[rows, y] -= 2.1
    before = not_true_divergence(z, z_g, y, 1.0)
    assert not_true_divergence(moved, moved_g, y, 1.0).item() == pytest.approx(before.item())
    two = not_true_divergence(z[:, :2], z_g[:, :2], labels(4, 2), 1.0)
    assert two.item() == pytest.approx(0, abs=1e-15)


def test_fedntd_at_the_global_logits_is_zero_with_gradient_zero():
    z, y = random(4, 5, seed=1).requires_grad_(), labels(4, 5)
    z_g = z.detach().clone().requires_grad_()
    loss = not_true_divergence(z, z_g, y, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-14)
    assert z.grad.abs().max() < 1e-14
    assert z_g.grad is None
    assert torch.autograd.gradcheck(
        lambda a: not_true_divergence(a, random(4, 5, seed=2), y, 2.0), z
    )


@pytest.mark.parametrize("convex", [False, True])
def test_fedntds_two_forms(convex):
    method = FedNTD(beta=0.3, tau=2.0, convex=convex)
    z, z_g, y = random(4, 5, seed=1), random(4, 5, seed=2), labels(4, 5)
    batch = batch_of([z], [z_g], y=y, logits=z)
    ce = cross_entropy(z, y)
    if convex:  # (1 - beta) CE + beta KL with tau 1, no tau^2
        expected = 0.7 * ce, 0.3 * ntd_in_loops(z, z_g, y, 1.0)
    else:
        expected = ce, 0.3 * 4 * ntd_in_loops(z, z_g, y, 2.0)
    got = method.supervised(batch).item(), method.penalty(batch).item()
    assert got == pytest.approx(expected, rel=1e-11)
    assert method.layers(None) == ["logits"]


# --- FedProc --------------------------------------------------------------------------------------


def unit(rows):
    return rows / rows.norm(dim=1, keepdim=True)


def contrast_in_loops(z, y, c):
    """Mean of -log( e^{z.c_y} / sum_k e^{z.c_k} ) over known prototypes, scaled to length 1."""
    known = {k: row for k, row in enumerate(c.tolist()) if any(row)}
    directions = {k: [v / math.sqrt(sum(u * u for u in r)) for v in r] for k, r in known.items()}
    losses = []
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        dots = {k: sum(a * b for a, b in zip(row, d, strict=True)) for k, d in directions.items()}
        if label in dots:
            total = sum(math.exp(v) for v in dots.values())
            losses.append(-math.log(math.exp(dots[label]) / total))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("unknown", [[], [1], [0, 3], [0, 1, 2, 3]])
def test_fedprocs_contrast_is_the_formula_in_loops(unknown):
    z, c = unit(random(7, 3, seed=1)), random(4, 3, seed=2, scale=5)
    c[unknown] = 0
    y = torch.tensor([0, 1, 2, 3, 1, 2, 2])
    z.requires_grad_()
    loss = prototype_contrast(z, y, c)
    assert loss.item() == pytest.approx(contrast_in_loops(z, y, c), rel=1e-12)
    loss.backward()
    assert z.grad.isfinite().all()
    if unknown:  # nothing pulls the samples of a class without a prototype
        assert z.grad[[n for n in range(7) if int(y[n]) in unknown]].abs().max() == 0


def test_fedprocs_known_numbers():
    c = torch.eye(10, dtype=torch.float64)
    y = labels(6, 10)
    assert prototype_contrast(c[y], y, 4 * c).item() == pytest.approx(1.461150, abs=5e-7)
    z = unit(random(6, 10, seed=1)).requires_grad_()
    loss = prototype_contrast(z, y, c[:1].expand(10, 10))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(10), rel=1e-12)
    assert z.grad.abs().max() < 1e-15


def test_fedprocs_prototypes_are_constants_and_pull():
    z, c = unit(random(5, 3, seed=1)).requires_grad_(), random(4, 3, seed=2).requires_grad_()
    y = labels(5, 4)
    prototype_contrast(z, y, c).backward()
    assert c.grad is None
    moved = z.detach() - 0.1 * z.grad
    towards = (moved * unit(c.detach())[y]).sum() - (z.detach() * unit(c.detach())[y]).sum()
    assert towards > 0


@pytest.mark.parametrize(("t", "value"), [(0, 1.0), (1, 0.1), (5, 0.5), (10, 1.0), (25, 1.0)])
def test_fedprocs_schedule(t, value):
    assert schedule(t, 10) == pytest.approx(value)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_fedprocs_loss_moves_from_contrast_to_cross_entropy(number):
    z, c, y = unit(random(5, 3, seed=1)), random(4, 3, seed=2), labels(5, 4)
    logits = random(5, 4, seed=3)
    ctx = SimpleNamespace(
        round=number,
        config=SimpleNamespace(rounds=SimpleNamespace(num_rounds=8)),
        extra={"prototypes": c},
    )
    a_t = 1.0 if number == 1 else (number - 1) / 8
    method = FedProc(schedule_rounds=0)
    batch = batch_of([z], y=y, logits=logits, ctx=ctx, prepared=method.begin_round(ctx))
    supervised = a_t * cross_entropy(logits, y)
    assert method.supervised(batch).item() == pytest.approx(supervised, rel=1e-12)
    penalty = method.penalty(batch)
    if number == 1:
        assert penalty is None
    else:
        assert penalty.item() == pytest.approx((1 - a_t) * contrast_in_loops(z, y, c), rel=1e-12)


@pytest.mark.parametrize("rounds", [1, 100])
def test_fedprocs_schedule_may_be_shorter_or_longer_than_the_run(rounds):
    """T = 100 in the authors' code; with T = 1 every round is cross entropy alone, the control."""
    config = make_config(method="fedproc", num_rounds=5, fedproc__schedule_rounds=rounds)
    method = method_of(config)
    ctx = dataclasses.replace(make_round(config, 3), extra={"prototypes": torch.ones(3, 256)})
    assert method.begin_round(ctx) == pytest.approx(2 / 100 if rounds == 100 else 1.0)
    assert not method.depends_on_num_rounds()
    terms = method.train(ctx).terms
    assert ("penalty" in terms) == (rounds == 100)


def test_fedprocs_first_round_is_fedavgs_on_the_same_network(monkeypatch):
    config = make_config(method="fedproc", num_rounds=5)
    now = make_round(config)
    now = dataclasses.replace(now, extra={"prototypes": torch.ones(3, 256)})
    update = method_of(config).train(now)
    monkeypatch.setattr(FedAvg, "model_parts", lambda self: ModelParts("mlp-normalised"))
    plain = train(make_config(num_rounds=5))
    assert_same_bits(update.arrays, plain.arrays)


def test_fedproc_sends_the_class_sums_of_the_model_it_ends_with():
    config = make_config(method="fedproc", flip=True)  # not of augmented images
    now = dataclasses.replace(make_round(config), extra={"prototypes": torch.ones(3, 256)})
    update = method_of(config).train(now)
    network = build_network(config, SHAPE, NUM_CLASSES).eval()
    network.load_state_dict(update.arrays)
    sums, counts = torch.zeros(3, 256), [0, 0, 0]
    for x, y in now.train_samples.in_order(1):
        z = network.extract(x, "projection").detach()[0]
        assert z.norm().item() == pytest.approx(1, rel=1e-5)
        sums[int(y)] += z
        counts[int(y)] += 1
    assert update.extra["counts"].tolist() == counts
    torch.testing.assert_close(update.extra["sums"], sums, rtol=1e-4, atol=1e-5)


# --- FedDecorr ------------------------------------------------------------------------------------


def decorrelation_in_loops(z, form):
    """From the correlation matrix, entry by entry."""
    rows = z.tolist()
    n, d = z.shape
    columns = [[row[j] for row in rows] for j in range(d)]
    means = [sum(column) / n for column in columns]

    def covariance(j, k):
        pairs = zip(columns[j], columns[k], strict=True)
        return sum((a - means[j]) * (b - means[k]) for a, b in pairs) / (n - 1)

    total = 0.0
    for j in range(d):
        for k in range(d):
            if form == "paper" or j != k:
                squares = (covariance(j, j) + 1e-8) * (covariance(k, k) + 1e-8)  # as the code
                corr = covariance(j, k) / math.sqrt(squares)
                total += corr**2
    return total / d**2 if form == "paper" else (n - 1) ** 2 / n * total / (d * (d - 1))


@pytest.mark.parametrize("form", ["code", "paper"])
@pytest.mark.parametrize(("n", "d"), [(2, 3), (5, 4), (9, 2)])
def test_feddecorr_is_the_formula_in_loops(form, n, d):
    z = 5 + random(n, d, seed=1)  # 5: centring must matter
    expected = decorrelation_in_loops(z, form)
    assert decorrelation(z, form).item() == pytest.approx(expected, rel=1e-9)
    moved = z * torch.tensor([3.0, -0.5, 7.0, 2.0])[:d] + torch.tensor([1.0, -4.0, 0.0, 9.0])[:d]
    assert decorrelation(moved, form).item() == pytest.approx(expected, rel=1e-4)


def test_feddecorrs_known_numbers():
    column = random(5, 1, seed=1)
    alike = torch.cat([column, -2 * column], dim=1)
    assert decorrelation(alike, "code").item() == pytest.approx(3.2, rel=1e-6)
    assert decorrelation(alike, "paper").item() == pytest.approx(1.0, rel=1e-6)
    apart = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    assert decorrelation(apart, "code").item() == pytest.approx(0, abs=1e-12)
    assert decorrelation(apart, "paper").item() == pytest.approx(1 / 2, rel=1e-6)


@pytest.mark.parametrize("form", ["code", "paper"])
def test_feddecorrs_gradient_goes_through_mean_and_variance(form):
    z = random(4, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: decorrelation(a, form), z)
    one = random(1, 3, seed=1).requires_grad_()
    loss = decorrelation(one, form)
    loss.backward()
    assert loss.item() == 0
    assert (one.grad == 0).all()
    dead = torch.cat([random(4, 2, seed=1), torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    dead.requires_grad_()
    decorrelation(dead, form).backward()
    assert dead.grad.isfinite().all()


def test_feddecorrs_penalty_is_beta_times_that_of_the_classifiers_input():
    z = random(5, 3, seed=1)
    method = FedDecorr(beta=0.3, form="code")
    expected = 0.3 * decorrelation_in_loops(z, "code")
    assert method.penalty(batch_of([z])).item() == pytest.approx(expected, rel=1e-9)
    assert method.layers(None) == ["features"]


# --- FedSCL and FedCL -----------------------------------------------------------------------------

LEVELS = {"levels": "all", "pre_activation": True}


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_fedscl_is_fedrcl_without_its_penalty_to_the_bit(mining):
    y, outputs = (
        torch.tensor([0, 1, 0, 2, 1, 0]),
        [random(6, 3, 2, 2, seed=1), random(6, 5, seed=2)],
    )
    results = []
    for method in (
        FedSCL(tau=0.2, mining=mining, **LEVELS),
        FedRCL(tau=0.2, threshold=0.3, beta=0.0, mining=mining, **LEVELS),
    ):
        leaves = [t.clone().requires_grad_() for t in outputs]
        loss = method.penalty(batch_of(method.represent(None, leaves), y=y))
        loss.backward()
        results.append((loss, leaves[0].grad, leaves[1].grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][0] > 0.1


def test_fedscl_trains_as_fedrcl_without_its_penalty_to_the_bit():
    one = train(make_config(method="fedscl"))
    two = train(make_config(method="fedrcl", fedrcl__beta=0.0))
    assert_same_bits(one.arrays, two.arrays)


@pytest.mark.parametrize(("mining", "value"), [("all", math.log(5)), ("hard", math.log(3))])
def test_fedscl_of_identical_features(mining, value):
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    z = random(1, 4, seed=1).expand(6, 4)
    method = FedSCL(tau=0.05, mining=mining, **LEVELS)
    got = method.penalty(batch_of(method.represent(None, [z, 3 * z]), y=y))
    assert got.item() == pytest.approx(value, rel=1e-9)


def test_fedscl_of_one_class_mined_hard_is_zero():
    method = FedSCL(tau=0.05, mining="hard", **LEVELS)
    reps = method.represent(None, [random(5, 4, seed=1)])
    penalty = method.penalty(batch_of(reps, y=torch.zeros(5)))
    assert penalty.item() == pytest.approx(0, abs=1e-12)


def repulsion_in_loops(phi, tau, negatives):
    rows = phi.tolist()
    total = 0.0
    for i, a in enumerate(rows):
        s = [sum(p * q for p, q in zip(a, b, strict=True)) for j, b in enumerate(rows) if j != i]
        s = sorted(s)[-2:] if negatives == "hard" else s
        one = math.exp(1 / tau)
        total -= math.log(one / (one + sum(math.exp(v / tau) for v in s)))
    return total / len(rows)


@pytest.mark.parametrize("negatives", ["hard", "all"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_fedcl_is_the_formula_in_loops(negatives, size):
    phi = unit(random(size, 3, seed=1))
    expected = repulsion_in_loops(phi, 0.3, negatives)
    assert repulsion(phi, 0.3, negatives).item() == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(("negatives", "value"), [("hard", math.log(3)), ("all", math.log(6))])
def test_fedcls_known_numbers(negatives, value):
    tap = random(1, 4, seed=1).expand(6, 4)
    assert repulsion(unit_features(tap), 0.05, negatives).item() == pytest.approx(value, rel=1e-9)
    apart = torch.eye(6, dtype=torch.float64)
    assert 0 <= repulsion(apart, 0.05, "hard").item() < 1e-8


def test_fedcl_pushes_apart_and_its_positive_pulls_nothing():
    phi = unit(random(4, 3, seed=1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: repulsion(p, 0.5, "all"), phi)
    loss = repulsion(phi, 0.5, "all")
    (gradient,) = torch.autograd.grad(loss, phi)
    moved = unit(phi.detach() - 0.05 * gradient)
    off = ~torch.eye(4, dtype=torch.bool)
    assert (moved @ moved.T)[off].sum() < (phi @ phi.T)[off].sum()
    one = unit(random(1, 3, seed=1)).requires_grad_()
    repulsion(one, 0.5, "hard").backward()
    assert (one.grad == 0).all()


def test_fedcl_means_over_levels_and_reads_no_label():
    outputs = [random(5, 3, 2, 2, seed=1), random(5, 4, seed=2)]
    method = FedCL(tau=0.3, negatives="hard", **LEVELS)
    expected = sum(
        repulsion_in_loops(unit(t), 0.3, "hard") for t in (outputs[0].mean((2, 3)), outputs[1])
    )
    assert method.penalty(batch_of(method.represent(None, outputs))).item() == pytest.approx(
        expected / 2
    )


# --- all of them: nothing added is FedAvg ---------------------------------------------------------

LONG = {"local_epochs": 2, "momentum": 0.5}  # eight steps: most are away from the global weights
NOTHING_ADDED = {
    "fitnet": {"fitnet__lambda": 0.0},
    "fedmlb": {"fedmlb__lambda1": 0.0, "fedmlb__lambda2": 0.0},
    "fedlc": {"fedlc__tau": 0.0},
    "fedntd": {"fedntd__beta": 0.0},
    "fedntd convex": {"fedntd__beta": 0.0, "fedntd__convex": True},
    "feddecorr": {"feddecorr__beta": 0.0},
    "fedprox": {"fedprox__mu": 0.0},
    "ditto": {},
    "fedavg-ft": {},
}


@pytest.mark.parametrize("case", NOTHING_ADDED)
def test_without_its_term_a_method_is_fedavg_to_the_bit(case):
    received = initial(make_config(), seed=5)
    config = make_config(method=case.split()[0], **LONG, **NOTHING_ADDED[case])
    plain = train(make_config(**LONG), received=received)
    assert_same_bits(train(config, received=received).arrays, plain.arrays)


@pytest.mark.parametrize("method", ["fitnet", "fedmlb", "fedlc", "fedntd", "feddecorr", "fedcl"])
def test_with_its_term_it_is_not(method):
    received = initial(make_config(), seed=5)
    plain = train(make_config(**LONG), received=received)
    assert differ(train(make_config(method=method, **LONG), received=received).arrays, plain.arrays)


@pytest.mark.parametrize("method", ["fitnet", "fedntd"])
def test_distilling_from_the_model_one_starts_from_leaves_the_first_step(method):
    one_step = {"batch_size": 100, "fitnet__lambda": 50.0, "fedntd__beta": 50.0}
    received = initial(make_config(), seed=5)
    plain = train(make_config(**one_step), received=received)
    update = train(make_config(method=method, **one_step), received=received)
    assert update.num_steps == 1
    assert update.terms["penalty"] == pytest.approx(0, abs=1e-6)
    assert_close(update.arrays, plain.arrays, rtol=0, atol=1e-6)


def test_fedmlbs_first_step_is_of_two_cross_entropies_on_the_lower_stages():
    """At theta = w the term of the first batch is lambda1 CE, the divergence is 0."""
    config = make_config(method="fedmlb", batch_size=100, fedmlb__lambda1=0.6)
    update = train(config, received=initial(config, seed=5))
    assert update.terms["penalty"] == pytest.approx(0.6 * update.terms["supervised"], rel=1e-5)
