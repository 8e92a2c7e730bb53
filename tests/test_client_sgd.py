"""The fused step against torch.optim.SGD bit for bit, and a start that loads no compiler."""

import pytest
import torch

from client_app.sgd import SGD


def parameters():
    generator = torch.Generator().manual_seed(3)
    shapes = [(8, 3, 3, 3), (17,), (5, 7), ()]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("fused", [True, False])
def test_ten_steps_are_torchs_own(momentum, weight_decay, fused):
    ours, theirs = parameters(), parameters()
    sgd = SGD(ours, momentum, weight_decay)
    plain = torch.optim.SGD(
        theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=fused
    )
    generator = torch.Generator().manual_seed(4)
    for step in range(10):
        rate = 0.1 * 0.5**step
        plain.param_groups[0]["lr"] = rate
        for n, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(p.shape, generator=generator)
            # the second one gets its gradients late, where torch's can do that
            has = fused or n != 1 or step > 2
            p.grad, q.grad = (gradient.clone(), gradient.clone()) if has else (None, None)
        sgd.step(rate)
        plain.step()
        for p, q in zip(ours, theirs, strict=True):
            if fused:
                assert torch.equal(p, q)
            else:  # multiplies and adds in one go
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_what_has_no_gradient_stays_and_nothing_at_all_is_no_error():
    first = parameters()[0]
    sgd = SGD([first], momentum=0.9, weight_decay=0.5)
    before = first.detach().clone()
    sgd.step(1.0)
    assert torch.equal(first, before)
