"""The distance of a model's weights from others, for FedProx, Ditto and FedACG."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


class SquaredDistance(torch.autograd.Function):
    """||w - w_g||^2 and its gradient, in a few kernels for all arrays together."""

    @staticmethod
    def forward(ctx: FunctionCtx, w_g: list[Tensor], *w: Tensor) -> Tensor:
        """A scalar."""
        drift = torch._foreach_sub(w, w_g)
        ctx.save_for_backward(*drift)
        return torch.stack(torch._foreach_norm(drift)).square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """None for w_g; the gradient for each of w."""
        drift = list(ctx.saved_tensors)  # type: ignore[attr-defined]  # saved by forward
        return None, *torch._foreach_mul(drift, 2 * grad)


def squared_distance(w: list[Tensor], w_g: list[Tensor]) -> Tensor:
    """||w - w_g||^2, a scalar: summed over every entry of every array, no averaging.

    Gradient 2 (w - w_g) for `w`, and 0, not NaN, where they are equal; none for `w_g`.
    """
    distance: Tensor = SquaredDistance.apply([array.detach() for array in w_g], *w)
    return distance


def drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """`squared_distance` of the model's trained parameters to the arrays of the same names."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return squared_distance(list(trained.values()), [arrays[n] for n in trained])


def unsquared_drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """sum_k ||w^k - w_g^k|| over the model's trained parameters w^k, a scalar.

    The gradient of a norm is taken to be 0, not NaN, where the arrays are equal.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return torch.stack([torch.linalg.vector_norm(p - arrays[n]) for n, p in trained.items()]).sum()
