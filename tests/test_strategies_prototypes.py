"""Prototypes on the server: means over all clients' samples."""

import torch

from strategies.prototypes import Prototypes


def test_prototypes_are_means_over_all_samples_and_stay_where_nobody_reports():
    kept = Prototypes(3, 2)
    assert not kept.is_known.any()
    sums = [torch.tensor([[2.0, 4], [0, 0], [3, 3]]), torch.tensor([[4.0, 0], [0, 0], [0, 0]])]
    kept.update(sums, [torch.tensor([1.0, 0, 3]), torch.tensor([3.0, 0, 0])])
    assert kept.values.tolist() == [[1.5, 1], [0, 0], [1, 1]]
    assert kept.is_known.tolist() == [1, 0, 1]
    kept.update([torch.tensor([[0.0, 0], [9, 6], [0, 0]])], [torch.tensor([0.0, 3, 0])])
    assert kept.values.tolist() == [[1.5, 1], [3, 2], [1, 1]]
    assert kept.is_known.tolist() == [1, 1, 1]
