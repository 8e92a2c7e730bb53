"""The distance of a model's weights from others, for FedProx, Ditto and FedACG."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from client_app.round import RoundContext
from protocol.server_optimizers import SERVER_OPTIMIZERS


class SquaredDistance(torch.autograd.Function):
    """||w - w_g||^2 and its gradient, in a few kernels for all arrays together."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arrays: Tensor) -> Tensor:
        """A scalar. arrays: each of w, then each of w_g."""
        half = len(arrays) // 2
        drift = torch._foreach_sub(arrays[:half], arrays[half:])
        ctx.save_for_backward(*drift)
        return torch.stack(torch._foreach_norm(drift)).square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for each of w; None for w_g."""
        drift = list(ctx.saved_tensors)  # type: ignore[attr-defined]  # saved by forward
        return *torch._foreach_mul(drift, 2 * grad), *(None for _ in drift)


def squared_distance(w: list[Tensor], w_g: list[Tensor]) -> Tensor:
    """||w - w_g||^2, a scalar: summed over every entry of every array, no averaging.

    Gradient 2 (w - w_g) for `w`, and 0, not NaN, where they are equal; none for `w_g`.
    """
    distance: Tensor = SquaredDistance.apply(*w, *(array.detach() for array in w_g))
    return distance


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """`squared_distance` of the model's trained parameters to the arrays of the same names."""
    trained = trained_parameters(model)
    return squared_distance(list(trained.values()), [arrays[n] for n in trained])


def unsquared_drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """sum_k ||w^k - w_g^k|| over the model's trained parameters w^k, a scalar.

    The gradient of a norm is taken to be 0, not NaN, where the arrays are equal.
    """
    trained = trained_parameters(model)
    return torch.stack([torch.linalg.vector_norm(p - arrays[n]) for n, p in trained.items()]).sum()


def server_optimizer_terms(ctx: RoundContext, model: nn.Module) -> dict[str, Tensor]:
    """FedACG's term of every local objective; {} with beta 0 and for other server optimizers.

    Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR
    2024, arXiv 2201.03172: beta ||theta - wh||^2, a scalar, for the look-ahead model wh that the
    server (`FedACGStep` in strategies/server_optimizers.py) sends; without 1/2 as in their code.
    """
    term = SERVER_OPTIMIZERS[ctx.config.rounds.server_optimizer].client_term
    beta = getattr(ctx.config.server_optimizer_options(), term) if term else 0
    return {"look-ahead": beta * drift_from(model, ctx.received)} if beta else {}
