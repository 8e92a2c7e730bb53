"""Class means of features, which FedProc and FedPAC exchange."""

import torch
from torch import Tensor

from client_app.samples import Samples
from models import StagedModel


@torch.no_grad()
def class_sums(model: StagedModel, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Of the classifier's input f over all samples, in eval mode.

    Per class, the sum of f [C, d] and the number of samples [C]; over all, the mean of ||f||^2.
    """
    was_training = model.training
    model.eval()
    like = model.classifier.weight
    sums = like.new_zeros(model.num_classes, model.feature_width)
    counts, squares = like.new_zeros(model.num_classes), like.new_zeros(())
    for x, y in samples.in_order():
        _, (features,) = model.run(x, ["features"], to_logits=False)
        sums.index_add_(0, y, features)
        counts.index_add_(0, y, torch.ones_like(y, dtype=counts.dtype))
        squares += features.square().sum()
    model.train(was_training)
    return sums, counts, squares / len(samples)


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """[C, d]; a row of zeros for a class without samples."""
    return sums / counts.clamp_min(1)[:, None]
