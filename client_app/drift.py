"""How far a model's weights are from others: what FedProx, Ditto and FedACG penalise."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def squared_distance(w: list[Tensor], w_g: list[Tensor]) -> Tensor:
    """||w - w_g||^2, a scalar: summed over every entry of every array, no averaging.

    Gradient 2 (w - w_g) for `w`, and 0, not NaN, where they are equal; none for `w_g`.
    """
    drift = torch._foreach_sub(w, [array.detach() for array in w_g])  # a few kernels for them all
    norms: tuple[Tensor, ...] = torch._foreach_norm(drift)
    return torch.stack(norms).square().sum()


def drift_from(model: nn.Module, arrays: Mapping[str, Tensor]) -> Tensor:
    """`squared_distance` of the model's trained parameters to the arrays of the same names."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return squared_distance(list(trained.values()), [arrays[n] for n in trained])
