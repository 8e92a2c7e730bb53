"""Class means of features, which FedProc and FedPAC exchange."""

import functools

import torch
from torch import Tensor

from client_app.samples import Samples
from models import StagedModel


@torch.no_grad()
def feature_sums(model: StagedModel, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """(sums [C, d], counts [C], mean of ||f||^2) of the classifier's input f, in eval mode."""
    was_training = model.training
    model.eval()
    like = model.classifier.weight
    sums = like.new_zeros(model.num_classes, model.feature_width)
    counts, squares = like.new_zeros(model.num_classes), like.new_zeros(())
    read = functools.partial(model.run, layers=["features"], to_logits=False)
    for (_, (features,)), y in samples.outputs(read):
        sums.index_add_(0, y, features)
        counts.index_add_(0, y, torch.ones_like(y, dtype=counts.dtype))
        squares += features.square().sum()
    model.train(was_training)
    return sums, counts, squares / len(samples)


def class_sums(model: StagedModel, samples: Samples) -> tuple[Tensor, Tensor]:
    """(sums [C, d], counts [C]) of the classifier's input over all samples, in eval mode."""
    sums, counts, _ = feature_sums(model, samples)
    return sums, counts


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """[C, d]; a row of zeros for a class without samples."""
    return sums / counts.clamp_min(1)[:, None]
