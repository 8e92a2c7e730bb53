"""Local training with torch's optimizers and schedules, against loops with torch.optim."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from client_fixtures import assert_same_bits, initial, make_config, make_round, train

from client_app.methods import method_of
from client_app.objective import LocalObjective, minimise
from client_app.optimizers import SGD, lr_factor, optimizer_for
from protocol.options import ConfigError

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_torchs_own_loop(name):
    config = make_config(optimizer=name, lr=0.003, momentum=0.9, weight_decay=0.01, local_epochs=2)
    found = train(config).arrays
    ctx = make_round(config)
    ctx.model.load_state_dict(initial(config))
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    parameters = list(ctx.model.train().parameters())
    optimizer = OPTIMIZERS[name](parameters, lr=0.003, weight_decay=0.01, **momentum)
    for step in ctx.steps("batches", 2):
        optimizer.zero_grad()
        F.cross_entropy(ctx.model(step.x), step.y).backward()
        optimizer.step()
    assert_same_bits(found, ctx.model.state_dict())


def test_a_methods_own_loop_takes_the_runs_optimizer():
    assert isinstance(make_round(make_config()).optimizer([torch.zeros(1)]), SGD)
    ctx = make_round(make_config(optimizer="adam"))
    w, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = ctx.optimizer([w, other], weight_decay=0.0)
    w.grad = torch.tensor([3.0, -0.5])
    optimizer.step(0.1)  # Adam's first step is the rate, against the gradient's sign
    torch.testing.assert_close(w.detach(), torch.tensor([0.9, 1.1]))
    assert torch.equal(other, torch.ones(2))
    optimizer_for(ctx.config.train, []).step(0.1)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_decay": 0.5}, [1, 0.5, 0.25, 0.125]),
        ({"lr_decay": 0.5, "warmup_rounds": 2}, [0.5, 1, 0.5, 0.25]),
        ({"warmup_rounds": 4}, [0.25, 0.5, 0.75, 1]),
        ({"lr_schedule": "cosine"}, [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ({"lr_schedule": "cosine", "warmup_rounds": 2}, [0.5, 1, 0.75, 0.25]),
    ],
)
def test_the_learning_rate_of_each_round(keys, expected):
    config = make_config(num_rounds=4, **keys)
    factors = [lr_factor(config.train, number, 4) for number in range(1, 5)]
    assert factors == pytest.approx(expected)
    assert make_round(config, number=3).lr_factor == factors[2]


def test_scaffold_is_defined_for_sgd():
    with pytest.raises(ConfigError) as refused:
        method_of(make_config(method="scaffold", optimizer="adamw"))
    assert refused.value.key == "optimizer"


@dataclass(frozen=True)
class FedSAM(LocalObjective):
    """The gradient at w + rho g / ||g||, for g the gradient at w."""

    rho: ClassVar[float] = 0.05

    def supervised(self, batch):
        loss = super().supervised(batch)
        weights = dict(batch.ctx.model.named_parameters())
        g = torch.autograd.grad(loss, list(weights.values()))
        length = torch.stack([each.norm() for each in g]).norm()
        moved = zip(weights.items(), g, strict=True)
        return batch.loss_at({name: w + self.rho * each / length for (name, w), each in moved})


def test_a_second_gradient_is_taken_at_other_weights():
    """With BatchNorm, whose statistics the second pass leaves; in one step, for its rounding."""
    keys = {"momentum": 0.0, "weight_decay": 0.0, "width": 4, "batch_size": 30}
    config = make_config(model="resnet20", **keys)
    ctx = make_round(config)
    ctx.model.load_state_dict(initial(config))
    minimise(FedSAM(), ctx)
    found = {name: array.clone() for name, array in ctx.model.state_dict().items()}

    ctx = make_round(config)
    ctx.model.load_state_dict(initial(config))
    parameters = list(ctx.model.train().parameters())
    for step in ctx.steps("batches", 1):
        g = torch.autograd.grad(F.cross_entropy(ctx.model(step.x), step.y), parameters)
        statistics = {n: b.clone() for n, b in ctx.model.named_buffers()}
        length = torch.stack([each.norm() for each in g]).norm()
        with torch.no_grad():
            before = [p.clone() for p in parameters]
            for p, each in zip(parameters, g, strict=True):
                p.add_(FedSAM.rho * each / length)
        g = torch.autograd.grad(F.cross_entropy(ctx.model(step.x), step.y), parameters)
        ctx.model.load_state_dict(statistics, strict=False)
        with torch.no_grad():
            for p, old, each in zip(parameters, before, g, strict=True):
                p.copy_(old - 0.05 * each)
    for name, array in ctx.model.state_dict().items():
        torch.testing.assert_close(found[name], array, rtol=1e-4, atol=1e-6)
