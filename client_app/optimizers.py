"""The optimizers of local training, and the learning rate of each round.

torch.optim imports torch's compiler, which takes 1 to 2 seconds in every new process, and in
deployment every message starts one. `SGD` calls the kernel behind torch's `fused=True`, which does
not need that import; Adam and AdamW are torch's own.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from protocol.config_keys import TrainConfig


class Optimizer(Protocol):
    """What takes a step on some parameters from their gradients."""

    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient; the others stay as they are."""


def optimizer_for(
    train: TrainConfig,
    parameters: Sequence[Tensor],
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Optimizer:
    """The run's `optimizer`. momentum (of SGD), weight_decay: the run's if None."""
    decay = train.weight_decay if weight_decay is None else weight_decay
    if train.optimizer == "sgd":
        return SGD(parameters, train.momentum if momentum is None else momentum, decay)
    return TorchOptimizer(train.optimizer, parameters, decay)


class SGD:
    """g += decay * w; m = momentum * m + g; w -= lr * m, for parameters of one type and device.

    Bit-identical to torch.optim.SGD.

    Their memory must have no gaps: clone a parameter that is, say, a slice of columns.
    """

    def __init__(self, parameters: Sequence[Tensor], momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.velocities: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient; the others keep value and momentum."""
        with_gradient = [n for n, p in enumerate(self.parameters) if p.grad is not None]
        if not with_gradient:
            return
        if self.momentum and not self.velocities:  # zeros: the first step gives m = g, as in torch
            self.velocities = [torch.zeros_like(p) for p in self.parameters]
        torch._fused_sgd_(
            [self.parameters[n] for n in with_gradient],
            [self.parameters[n].grad for n in with_gradient],  # type: ignore[misc]  # not None, as selected
            [self.velocities[n] for n in with_gradient] if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class TorchOptimizer:
    """torch.optim.Adam or AdamW with torch's defaults, begun anew in each call of `fit`."""

    def __init__(self, name: str, parameters: Sequence[Tensor], weight_decay: float) -> None:
        from torch import optim

        kind = {"adam": optim.Adam, "adamw": optim.AdamW}[name]
        # without parameters there is nothing to do, which torch refuses
        self.optimizer = kind(parameters, weight_decay=weight_decay) if parameters else None

    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient; the others keep value and moments."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


def lr_factor(train: TrainConfig, number: int, num_rounds: int) -> float:
    """The factor on every learning rate of round `number`, from 1.

    It rises from 1 / warmup-rounds to 1 in the first rounds, and falls after them: by lr-decay
    each round, or along half a cosine that would reach 0 in the round after the last.
    """
    warm = train.warmup_rounds
    if number < warm:
        return number / warm
    t = number - max(1, warm)  # rounds since the peak
    if train.lr_schedule == "exponential":
        return float(train.lr_decay**t)
    return (1 + math.cos(math.pi * t / (num_rounds - max(1, warm) + 1))) / 2
