"""Class means of features, which FedProc and FedPAC exchange."""

import torch
from torch import Tensor

from client_app.samples import Samples
from models import StagedModel


@torch.no_grad()
def class_sums(model: StagedModel, samples: Samples) -> tuple[Tensor, Tensor]:
    """(sums [C, d], counts [C]) of the classifier's input over all samples, in eval mode."""
    was_training = model.training
    model.eval()
    like = model.classifier.weight
    sums = like.new_zeros(model.num_classes, model.feature_width)
    counts = like.new_zeros(model.num_classes)
    for x, y in samples.in_order():
        _, (features,) = model.run(x, ["features"], to_logits=False)
        sums.index_add_(0, y, features)
        counts.index_add_(0, y, torch.ones_like(y, dtype=counts.dtype))
    model.train(was_training)
    return sums, counts


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """[C, d]; a row of zeros for a class without samples."""
    return sums / counts.clamp_min(1)[:, None]
