"""FedCR's server under a norm bound: one client must not dictate the product of Gaussians."""

import pytest
import torch

from client_app.methods import method_of
from models import build_model
from protocol.config import resolve_config
from protocol.messages import RosterEntry, TrainReply
from strategies.fedcr import FedCRServer
from strategies.validation import beyond_median, norm


def test_a_client_of_tiny_deviations_does_not_rule_the_product_under_a_norm_bound():
    """S = 1e-9 would make its M everybody's; more samples make S smaller, and are no reason."""
    model = build_model("cnn-fedreco", num_classes=3, channels=1, image_size=32, seed=1)
    config = resolve_config({"method": "fedcr", "norm-bound": "median"})
    method_of(config)  # registers the method's options
    server = FedCRServer(config, model)
    counts = {"a": 4, "b": 10_000, "c": 9, "d": 4}
    server.roster = {
        n: RosterEntry(client, [count] * 3, [], [1, 32, 32], "cnn-fedreco", 8, "", 0)
        for n, (client, count) in enumerate(counts.items())
    }

    def norm_of(client, s):
        extra = {"M": torch.ones_like(server.m), "S": torch.full_like(server.s, s)}
        extra["seen"] = torch.ones(3)
        return norm(server.checked_extra(TrainReply(client, 1, {}, extra, {})))

    honest = {client: norm_of(client, 0.5 / count**0.5) for client, count in counts.items()}
    assert list(honest.values()) == pytest.approx([honest["a"]] * 4)
    assert beyond_median(honest) == {}
    assert beyond_median(honest | {"d": norm_of("d", 1e-9)}).keys() == {"d"}
