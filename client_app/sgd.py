"""SGD with momentum and weight decay in one fused kernel, bit-identical to torch.optim.SGD.

torch.optim imports torch's compiler, which takes 1 to 2 seconds in every new process, and in
deployment every message starts one. The kernel behind `fused=True` does not need that import.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SGD:
    """g += decay * w; m = momentum * m + g; w -= lr * m, for parameters of one type and device.

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
