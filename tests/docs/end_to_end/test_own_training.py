"""The methods of docs/how-to/own-training.md, as files of a user, against their formulas."""

import copy
import re
from pathlib import Path

import pytest
import torch
from client_fixtures import initial, make_config, make_round
from torch.nn.functional import cross_entropy

from client_app.methods import method_of
from client_app.objective import Batch
from keel.cli.main import main
from server_app.inline import run_inline
from strategies import strategy_for

repository = Path(__file__).parents[3]
page = (repository / "docs/how-to/own-training.md").read_text()


@pytest.fixture
def spec(tmp_path):
    """spec(name): the page's method of this name, as `FILE.py:NAME`."""
    for name, text in re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.S):
        (tmp_path / name).write_text(text)
    return lambda name: f"{tmp_path / name.lower()}.py:{name}"


def one_batch(spec, **keys):
    """(config, what the method sends, the network with the initial weights, x, y) of one batch."""
    keys = {"batch_size": 64, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0} | keys
    config = make_config(method=spec, local_epochs=1, **keys)
    update = method_of(config).train(make_round(config))
    ctx = make_round(config)
    ctx.model.load_state_dict(initial(config))
    [step] = ctx.steps("batches", 1)
    return config, update, copy.deepcopy(ctx.model).train().requires_grad_(True), step.x, step.y


def gradients(model, x, y):
    model = copy.deepcopy(model)
    return torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))


@pytest.mark.parametrize("network", [{}, {"model": "resnet20", "norm": "batch"}])
def test_fedsam_takes_the_gradient_at_the_worst_weights_nearby(spec, network):
    keys = {"fedsam__rho": 0.5, **network}
    _, update, model, x, y = one_batch(spec("FedSAM"), **keys)
    first = gradients(model, x, y)
    norm = torch.cat([g.flatten() for g in first]).norm()
    worst = copy.deepcopy(model)
    with torch.no_grad():
        for p, g in zip(worst.parameters(), first, strict=True):
            p += 0.5 * g / norm
    for (name, p), g in zip(model.named_parameters(), gradients(worst, x, y), strict=True):
        torch.testing.assert_close(update.arrays[name], p.detach() - 0.1 * g, atol=1e-5, rtol=1e-4)
    model(x)  # once, as the running statistics follow the weights alone
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(update.arrays[name], buffer)


def test_the_loss_at_other_weights_is_differentiated_by_torch_func_with_batch_norm():
    ctx = make_round(config := make_config(model="resnet20", norm="batch"))
    ctx.model.load_state_dict(initial(config))
    step = next(ctx.steps("batches", 1))
    batch = Batch(ctx, step.x, step.y, step.x, [], [], [])
    ctx.model.train()
    weights = {name: p.detach() for name, p in ctx.model.named_parameters()}
    found = torch.func.grad(batch.loss_at)(weights)
    for expected, gradient in zip(
        gradients(ctx.model, step.x, step.y), found.values(), strict=True
    ):
        torch.testing.assert_close(gradient, expected)
    for name, buffer in initial(config).items():  # the running statistics too
        assert torch.equal(ctx.model.state_dict()[name], buffer)


def test_pfedme_follows_its_two_steps_and_the_server_its_share(spec):
    keys = {"pfedme__inner_steps": 3, "pfedme__eta": 0.02, "pfedme__lambda": 2.0}
    keys |= {"pfedme__beta": 0.25, "local_test_fraction": 0.2}
    config, update, theta, x, y = one_batch(spec("PFedMe"), **keys)
    w = [p.detach().clone() for p in theta.parameters()]
    for _ in range(3):
        found = gradients(theta, x, y)
        with torch.no_grad():
            for p, g, w_p in zip(theta.parameters(), found, w, strict=True):
                p -= 0.1 * (g + 2.0 * (p - w_p))
    for (name, p), w_p in zip(theta.named_parameters(), w, strict=True):
        torch.testing.assert_close(update.state["personal"][name], p.detach())
        torch.testing.assert_close(update.arrays[name], w_p - 0.02 * 2.0 * (w_p - p.detach()))
    server, current = strategy_for(config, theta), initial(config)
    server.average = lambda replies: update.arrays
    following = server.next_arrays(current, [])
    for name in dict(theta.named_parameters()):
        expected = 0.75 * current[name] + 0.25 * update.arrays[name]
        torch.testing.assert_close(following[name], expected)


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("name", ["FedSAM", "PFedMe"])
def test_they_pass_keel_check_method_and_train(spec, name, home, tmp_path):
    assert main(["check-method", spec(name)]) == 0
    keys = {"method": spec(name), "source": "digits", "model": "cnn-fedreco", "num-rounds": 2}
    keys |= {"local-test-fraction": 0.2, "data-fraction": 0.2, "output-dir": str(tmp_path / "runs")}
    assert run_inline(keys, num_clients=3)
