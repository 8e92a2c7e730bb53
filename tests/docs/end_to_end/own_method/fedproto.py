"""FedProto against local training, and its penalty against loops."""

import numpy as np
import pytest
import torch
from fedproto import FedProto, prototype_distance

import keel

keys = {"num-rounds": 3, "data-fraction": 0.4, "lr": 0.05, "model": "cnn-fedreco", "alpha": 5.0}


def history(tmp_path, method):
    keys_here = keys | {"local-test-fraction": 0.2, "output-dir": str(tmp_path)}
    return keel.run(keys_here, method=method, clients=3).history


def test_lambda_0_trains_as_local_only_to_the_bit(tmp_path):
    ours, local = history(tmp_path, FedProto(lambda_=0.0)), history(tmp_path, "local")
    for column in ("loss/supervised", "accuracy/personal.mean"):
        assert ours[column].tolist() == local[column].tolist()


def test_the_penalty_acts_from_the_second_round(tmp_path):
    penalties = history(tmp_path, FedProto())["loss/penalty"].tolist()
    assert penalties[0] == 0.0
    assert all(penalty > 0 for penalty in penalties[1:])


def test_the_penalty_is_the_equation():
    random = np.random.default_rng(0)
    z, prototypes = random.normal(size=(4, 3)), random.normal(size=(5, 3))
    y, is_known = [2, 0, 4, 2], [1.0, 1.0, 1.0, 1.0, 0.0]
    expected = 0.0
    for b in range(4):
        for j in range(3):
            expected += is_known[y[b]] * (z[b, j] - prototypes[y[b], j]) ** 2 / (4 * 3)
    ours = prototype_distance(*(torch.as_tensor(v) for v in (z, y, prototypes, is_known)))
    assert ours.item() == pytest.approx(expected, rel=1e-12)
