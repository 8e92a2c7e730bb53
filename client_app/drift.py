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
    def forward(*arrays: Tensor) -> tuple[Tensor, ...]:
        """arrays: each of w, then each of w_g. A scalar, then w - w_g of each, without gradient."""
        half = len(arrays) // 2
        drift = torch._foreach_sub(arrays[:half], arrays[half:])
        return torch.stack(torch._foreach_norm(drift)).square().sum(), *drift

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> None:
        """Saves w - w_g."""
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for each of w; None for w_g."""
        drift = list(ctx.saved_tensors)  # type: ignore[attr-defined]  # saved by setup_context
        return *torch._foreach_mul(drift, 2 * grad), *(None for _ in drift)

    @staticmethod
    def vmap(
        info: object, in_dims: tuple[int | None, ...], *arrays: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """The same for stacked clients, as a plain sum: [k], and each w - w_g [k, ...]."""
        stacked = [
            a[None] if dim is None else a.movedim(dim, 0)
            for a, dim in zip(arrays, in_dims, strict=True)
        ]
        half = len(arrays) // 2
        drift = [w - w_g for w, w_g in zip(stacked[:half], stacked[half:], strict=True)]
        # [k] each; a scalar parameter has no dimension to flatten, hence the None
        squares = [d[..., None].flatten(1).square().sum(1) for d in drift]
        distance = torch.stack(squares).sum(0)
        return (distance, *drift), (0,) * (1 + half)


def squared_distance(w: list[Tensor], w_g: list[Tensor]) -> Tensor:
    """||w - w_g||^2, a scalar: summed over every entry of every array, no averaging.

    Gradient 2 (w - w_g) for `w`, and 0, not NaN, where they are equal; none for `w_g`.
    """
    distance: Tensor
    distance, *_ = SquaredDistance.apply(*w, *(array.detach() for array in w_g))
    return distance


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name.

    All parameters for stacked clients (client_app/stacked.py), whose tensors do not carry the flag.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    return {n: p for n, p in named.items() if p.requires_grad} or named


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
