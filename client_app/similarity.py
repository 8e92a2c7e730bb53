"""Similarities of representations, for methods, diagnostics and tests.

Linear CKA: Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
arXiv 1905.00414. It is computed from Gram matrices, ||Y'X||_F^2 = <XX', YY'>, which is cheaper
wherever a representation has more entries than the batch has samples.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def spatial_mean(z: Tensor) -> Tensor:
    """A representation [B, C, H, W], or [B, N, C] of tokens, averaged over positions, [B, C]."""
    if z.ndim == 3:
        return z.mean(1)
    return z.flatten(2).mean(2) if z.ndim > 3 else z


def unit_features(z: Tensor) -> Tensor:
    """A representation averaged over positions and scaled to unit length, [B, C].

    A row of zeros stays one, with gradient 0.
    """
    phi = spatial_mean(z)
    length = phi.norm(dim=1, keepdim=True)
    return torch.where(length > 0, phi / torch.where(length > 0, length, 1.0), 0.0)


def flat_features(z: Tensor) -> Tensor:
    """A representation [B, ...] as [B, P], features in memory order, to which CKA is invariant."""
    return torch.movedim(z, 1, -1).flatten(1)  # no copy of a channels-last representation


def rounding(mean: Tensor, batch_size: int) -> Tensor:
    """Bound on the norm of equal rows minus their mean [P], which only rounding makes, a scalar."""
    length: Tensor = mean.norm()
    return 4 * torch.finfo(mean.dtype).eps * math.sqrt(batch_size) * length


def inverse(length: Tensor, power: float = 1.0) -> Tensor:
    """1 / length^power, a scalar; 0, with gradient 0, for a negligible length.

    Negligible: below the square root of the smallest number, as the gradient has 1 / length^2.
    """
    counts = length > math.sqrt(torch.finfo(length.dtype).tiny)
    return torch.where(counts, torch.where(counts, length, 1.0) ** -power, 0.0)


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Cosine similarity of two tensors of one shape, taken as vectors, a scalar.

    0, with gradient 0, if either is all zeros.
    """
    return (x * y).sum() * inverse(x.norm()) * inverse(y.norm())


def linear_view(z: Tensor) -> Tensor:
    """The factor of linear CKA that depends on one representation z [B, ...] alone.

    With X, z flattened and centred: X X' / ||X X'||_F, [B, B]; if z is narrow, X / sqrt(||X'X||_F),
    [B, P], which is then cheaper.
    All zeros if z is constant over the batch (B = 1, dead units), up to rounding.
    """
    x = flat_features(z)
    batch_size, width = x.shape
    if 2 * width < batch_size:
        mean = x.mean(0)
        view = x - mean
        varies = view.norm() > rounding(mean.detach(), batch_size)
        length, power = (view.T @ view).norm(), 0.5
    else:
        view, mean = centred_gram(x)
        varies = view.trace().sqrt() > rounding(mean, batch_size)
        length, power = view.norm(), 1.0
    return view * inverse(torch.where(varies, length, 0.0), power)


def linear_alignment(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA from the `linear_view`s of two representations, a scalar in [0, 1].

    Invariant to orthogonal transforms and isotropic scaling of either.

    If the views differ in form, because only one representation is narrow, its view is replaced by
    its Gram matrix.
    """
    if (x.shape[0] == x.shape[1]) != (y.shape[0] == y.shape[1]):
        x, y = (view if view.shape[0] == view.shape[1] else view @ view.T for view in (x, y))
    if x.shape[0] == x.shape[1]:
        return (x * y).sum()  # ||Y'X||_F^2 = <XX', YY'>, and ||X'X||_F = ||XX'||_F
    return (y.T @ x).square().sum()


def kernel_view(z: Tensor) -> Tensor:
    """The centred RBF Gram matrix of z [B, ...], [B, B]; kernel CKA is the alignment of two."""
    dots, mean = centred_gram(flat_features(z))
    varies = dots.trace().sqrt() > rounding(mean, len(dots))
    norms = dots.diagonal()
    distances = (norms[:, None] + norms - 2 * dots).clamp_min(0)  # squared, [B, B]
    rows, columns = torch.triu_indices(len(dots), len(dots), offset=1, device=dots.device)
    if len(rows) == 0:
        return torch.zeros_like(dots)
    # if half of the pairs coincide the median is 0: use a small width
    width = distances[rows, columns].median().clamp_min(1e-6 * distances.mean())
    gram = torch.exp(-distances / (2 * torch.where(width > 0, width, 1.0)))
    gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    return torch.where(varies, gram, 0.0)


class CentredGram(torch.autograd.Function):
    """K = X X' of X = A - (mean of A over the batch), [B, P] -> [B, B].

    Autograd would make two products of the gradient, G X and G' X, and centre [B, P] once more;
    with S = G + G' the gradient is (S - its column means) X.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, a: Tensor) -> tuple[Tensor, Tensor]:
        """K; and the mean of A, [P], without gradient."""
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
    """K = X X', [B, B], of the centred features of a [B, P], and the mean that was subtracted, [P].

    The mean carries no gradient, and K no second derivative.
    """
    gram, mean = CentredGram.apply(a)
    return gram, mean
