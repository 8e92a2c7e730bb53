"""Evaluation: accuracy and mean cross entropy of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_app.networks import of_evaluation, products
from client_app.samples import Samples


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1] and mean cross entropy over the samples."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, precision: str = "fp32") -> Score:
    """The model's score in eval mode; its mode is restored. ValueError without samples.

    precision: the precision of training; see `of_evaluation`.
    """
    if len(samples) == 0:
        raise ValueError("there are no samples to evaluate on")
    correct = torch.zeros((), dtype=torch.int64, device=samples.labels.device)
    loss = torch.zeros((), device=samples.labels.device)
    for logits, y in predictions(model, samples, precision):
        correct += (logits.argmax(1) == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum")
    n = len(samples)
    return Score(correct.item() / n, loss.item() / n)


@torch.no_grad()
def predictions(
    model: nn.Module, samples: Samples, precision: str = "fp32"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits [B, K], labels [B]) of each batch in eval mode; `precision` as `evaluate`."""
    was_training = model.training
    model.eval()
    try:
        with products(of_evaluation(precision)):
            yield from samples.outputs(model)
    finally:
        model.train(was_training)
