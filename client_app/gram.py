"""The Gram matrix of a batch's centred features: one product forward, one backward."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class CentredGram(torch.autograd.Function):
    """K = X X' of X = A - (mean of A over the batch), [B, P] -> [B, B].

    Autograd would make two products of the gradient, G X and G' X, and centre [B, P] once more;
    with S = G + G' the gradient is (S - its column means) X.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, a: Tensor) -> tuple[Tensor, Tensor]:
        """K, and the mean of A, [P], without gradient."""
        mean = a.mean(0)
        x = a - mean
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(mean)
        return x @ x.T, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> Tensor:
        """The gradient for A, [B, P]."""
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]  # what forward saved
        both = grad + grad.T
        product: Tensor = (both - both.mean(0)) @ x
        return product


def centred_gram(a: Tensor) -> tuple[Tensor, Tensor]:
    """K = X X', [B, B], of the centred features of a [B, P]; and the mean that was taken off, [P].

    The mean carries no gradient, and K none beyond the first.
    """
    pair: tuple[Tensor, Tensor] = CentredGram.apply(a)
    return pair
