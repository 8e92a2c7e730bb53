"""The Gram matrix of a batch's centred features: one product forward, one backward."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Below this share of varying energy, centring a product of uncentred features costs digits.
varies_enough = 1e-3


def centred(gram: Tensor) -> Tensor:
    """H G H of a symmetric G [B, B], where H = I - 1 1'/B takes means off; in place."""
    means = gram.mean(0)
    return gram.sub_(means).sub_(means[:, None]).add_(means.mean())


class CentredGram(torch.autograd.Function):
    """K = X X' of X = H A, [B, P] -> [B, B].

    With S = G + G' of K's gradient G, A's is H S X = (H S H) A, one product where autograd would
    make two. K itself is H (A A') H, so that nothing of size [B, P] has to be centred or copied;
    where A hardly varies that would cancel, and A is centred first. (Only on a CPU: elsewhere
    asking whether it varies waits for the device, and centring is cheap.)
    """

    @staticmethod
    def forward(ctx: FunctionCtx, a: Tensor) -> tuple[Tensor, Tensor]:
        """K, and the length of the mean of A (a scalar), which carries no gradient."""
        kept = a
        if a.device.type == "cpu":
            gram = a @ a.T
            energy = gram.trace()
            length = gram.mean().clamp_min(0).sqrt()
            gram = centred(gram)
            is_exact = bool(gram.trace() > varies_enough * energy)
        else:
            is_exact = False
        if not is_exact:
            mean = a.mean(0)
            kept = a - mean
            gram, length = kept @ kept.T, mean.norm()
        ctx.save_for_backward(kept)
        ctx.mark_non_differentiable(length)
        return gram, length

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> Tensor:
        """The gradient for A, [B, P]."""
        (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]  # what forward saved
        product: Tensor = centred(grad + grad.T) @ kept
        return product


def centred_gram(a: Tensor) -> tuple[Tensor, Tensor]:
    """K = X X', [B, B], of the centred features of a [B, P]; the length of their mean, a scalar.

    The length carries no gradient, and K none beyond the first.
    """
    pair: tuple[Tensor, Tensor] = CentredGram.apply(a)
    return pair
