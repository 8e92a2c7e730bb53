"""Class sums on a client."""

import torch
from client_fixtures import assert_same_bits, make_config, make_round

from client_app.prototypes import class_sums, feature_sums


def test_class_sums_are_of_the_model_in_eval_mode_and_leave_its_mode(monkeypatch):
    monkeypatch.setattr("client_app.samples.evaluation_batch", 7)  # of 30 samples
    config = make_config(model="resnet20")
    now = make_round(config)
    now.model.train()
    statistics = {n: b.clone() for n, b in now.model.named_buffers()}
    sums, counts, mean_square = feature_sums(now.model, now.train_samples)
    assert now.model.training
    assert_same_bits(dict(now.model.named_buffers()), statistics)
    (x, y) = next(now.train_samples.in_order())
    with torch.no_grad():
        f = now.model.eval().extract(x, now.model.stage_names[-1])
    for k in range(3):
        torch.testing.assert_close(sums[k], f[y == k].sum(0), rtol=1e-4, atol=1e-4)
        assert counts[k] == (y == k).sum()
    torch.testing.assert_close(mean_square, f.square().sum(1).mean())
    assert all(map(torch.equal, class_sums(now.model, now.train_samples), (sums, counts)))
