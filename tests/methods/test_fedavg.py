"""FedAvg against what it must be: the mean cross entropy and nothing else."""

import math

import pytest
import torch
from client_fixtures import batch_of

from client_app.methods.fedavg import FedAvg


def random_batch(batch_size, num_classes):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch_size, num_classes, generator=generator, dtype=torch.float64)
    y = torch.randint(num_classes, (batch_size,), generator=generator)
    return batch_of(y=y, logits=3 * logits)


def test_loss_is_the_mean_negative_log_probability_of_the_labels():
    batch = random_batch(batch_size=7, num_classes=4)
    total = 0.0
    for row, label in zip(batch.logits.tolist(), batch.y.tolist(), strict=True):
        total -= math.log(math.exp(row[label]) / sum(math.exp(logit) for logit in row))
    assert FedAvg().supervised(batch).item() == pytest.approx(total / 7, rel=1e-12)


def test_nothing_is_added_and_nothing_is_asked_of_the_trainer():
    method = FedAvg()
    assert method.penalty(random_batch(2, 3)) is None
    assert method.layers(None) == []
    assert not method.uses_global
    assert not method.uses_previous
