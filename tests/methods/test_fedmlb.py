"""FedMLB against the formula on mixed networks, value and gradient."""

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import NUM_CLASSES, SHAPE, batch_of, initial, make_config, train
from method_fixtures import cross_entropy, kl, labels, random, softmax

from client_app.methods.fedmlb import FedMLB, hybrid_cross_entropy, pathway_divergence
from client_app.setup import build_network


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


def test_fedmlbs_first_step_is_of_two_cross_entropies_on_the_lower_stages():
    """At theta = w the term of the first batch is lambda1 CE, the divergence is 0."""
    config = make_config(method="fedmlb", batch_size=100, fedmlb__lambda1=0.6)
    update = train(config, received=initial(config, seed=5))
    assert update.terms["penalty"] == pytest.approx(0.6 * update.terms["supervised"], rel=1e-5)
