"""Evaluation: accuracy, mean cross entropy and other scores of a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_app.networks import of_evaluation, products
from client_app.samples import Samples
from client_app.scores import Function, confusion_matrix, measured


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1] and mean cross entropy over the samples.

    confusion: samples by label and predicted class, [C, C]; None of more than 200 classes. others:
    of the scores that were asked for, those that have a number. faults: by name, why one has none.
    """

    accuracy: float
    loss: float
    confusion: np.ndarray | None
    others: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: Samples,
    precision: str = "fp32",
    functions: Mapping[str, Function] | None = None,
) -> Score:
    """The model's score in eval mode; its mode is restored. ValueError without samples.

    precision: the precision of training; see `of_evaluation`. functions: of other scores, by name.
    """
    if len(samples) == 0:
        raise ValueError("there are no samples to evaluate on")
    correct = torch.zeros((), dtype=torch.int64, device=samples.labels.device)
    loss = torch.zeros((), device=samples.labels.device)
    predicted, probabilities = list[Tensor](), list[Tensor]()
    for logits, y in predictions(model, samples, precision):
        classes = logits.argmax(1)
        correct += (classes == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum")
        predicted.append(classes)
        if functions:
            probabilities.append(torch.softmax(logits.double(), 1))
    n, labels = len(samples), samples.labels.cpu().numpy()
    matrix = confusion_matrix(torch.cat(predicted).cpu().numpy(), labels, logits.shape[1])
    score = Score(correct.item() / n, loss.item() / n, matrix)
    if not functions:
        return score
    others, faults = measured(functions, torch.cat(probabilities).cpu().numpy(), labels)
    return replace(score, others=others, faults=faults)


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
