"""FedPer's clients share the extractor, and each has a head of its own."""

import torch
from fedper import FedPer

import keel


def test_clients_differ_in_their_heads_alone(tmp_path):
    keys = {"num-rounds": 2, "data-fraction": 0.4, "lr": 0.05, "output-dir": str(tmp_path)}
    run = keel.run(keys | {"local-test-fraction": 0.2, "alpha": 5.0}, method=FedPer, clients=2)
    one, two = (run.model(f"client-000{n}").network.state_dict() for n in range(2))
    for name, array in one.items():
        assert torch.equal(array, two[name]) != name.startswith("classifier."), name
