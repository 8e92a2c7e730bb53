"""FedReCo's server: eq. (8) by hand, on the shared extractor u_0 and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from run_fixtures import FACTS, answer, same_bits, sent
from torch import Tensor

from models import StagedModel, build_model
from protocol.array_records import array_record, tensors
from protocol.config import resolve_config
from protocol.messages import RosterEntry, TrainReply, TrainRequest, request_record
from strategies.fedreco import FedReCoServer

pytestmark = pytest.mark.usefixtures("task_identity")


def network(name: str = "cnn-fedreco", norm: str = "") -> StagedModel:
    return build_model(name, num_classes=10, channels=1, image_size=32, seed=2, norm=norm)


def server_of(model: StagedModel, num_clients: int = 3, **keys: object) -> FedReCoServer:
    given = {name.replace("__", ".").replace("_", "-"): value for name, value in keys.items()}
    config = resolve_config({"method": "fedreco", "model": model.name} | given)
    server = FedReCoServer(config, model)
    server.roster = {
        50 + i: RosterEntry(f"c{i}", [5], [1], [1, 32, 32], model.name, 8, "", num_clients)
        for i in range(num_clients)
    }
    return server


def gradients(expected: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(array.shape, generator=generator) * seed
        for name, array in expected.items()
    }


def after_a_round(
    server: FedReCoServer, u_0: dict[str, Tensor], updates: list[dict[str, Tensor]], counts: list
) -> dict[str, Tensor]:
    request = TrainRequest(server.config, FACTS, 1, [0], False, "/run")
    record = request_record(request)
    server.roster = {  # who says before round 1 what it trains on
        node: replace(server.roster[node], label_counts=[int(n)])
        for node, n in zip(server.roster, counts, strict=True)
    }
    # checked counts, which `max-weight-share` does not make equal
    server.partition_sizes = {e.client: e.num_examples for e in server.roster.values()}
    messages = sent(list(server.configure_train(1, array_record(u_0), record, grid=None)))
    replies = [
        answer(m, TrainReply("c", 1, g, {}, {"num-examples": n}))
        for m, g, n in zip(messages, updates, counts, strict=True)
    ]
    following, _ = server.aggregate_train(1, replies[::-1])
    return tensors(following)


@pytest.mark.parametrize("weighting", ["auto", "uniform"])
def test_u_0_steps_down_the_plain_mean_of_the_gradients_eq_8(weighting):
    model = network()
    server = server_of(model, weighting=weighting, fedreco__eta_0=0.3)
    u_0 = server.initial_arrays(model)
    g = [gradients(server.expected(u_0), seed) for seed in (1, 2, 3)]
    following = after_a_round(server, u_0, g, counts=[1.0, 500.0, 20.0])
    assert following.keys() == u_0.keys()
    rng = np.random.default_rng(0)
    for name, array in u_0.items():
        for at in [tuple(rng.integers(array.shape)) for _ in range(20)]:
            mean = sum(float(g_i[name][at]) for g_i in g) / 3  # whatever the example counts
            expected = float(array[at]) - 0.3 * mean
            assert float(following[name][at]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_split_shares_the_stages_up_to_it(stage):
    model = network()
    split = model.stage_names[stage]
    server = server_of(model, fedreco__split=split)
    u_0 = server.initial_arrays(model)
    wanted = {
        name
        for name in model.state_dict()
        if any(name.startswith(f"stages.{s}.") for s in model.stage_names[: stage + 1])
    }
    assert set(u_0) == wanted
    assert all(same_bits({n: a}, {n: model.state_dict()[n]}) for n, a in u_0.items())
