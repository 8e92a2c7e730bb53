"""FedReCo's server: eq. (8) by hand, on the shared extractor u_0 and nothing else."""

import pytest
import torch
from run_fixtures import FACTS, answer, same_bits, sent

from models import build_model
from protocol.array_records import array_record, tensors
from protocol.config import resolve_config
from protocol.messages import RosterEntry, TrainReply, TrainRequest, request_record
from strategies.fedreco import FedReCoServer


def server_of(**keys):
    """(the server half, its model) for three clients with 1, 500 and 20 samples."""
    model = build_model("cnn-fedreco", num_classes=10, channels=1, image_size=32, seed=2)
    server = FedReCoServer(resolve_config({"method": "fedreco"} | keys), model)
    server.roster = {
        50 + i: RosterEntry(f"c{i}", [count], [1], [1, 32, 32], model.name, 8, "", 3)
        for i, count in enumerate((1, 500, 20))
    }
    # checked counts, which `max-weight-share` does not make equal
    server.partition_sizes = {e.client: e.num_examples for e in server.roster.values()}
    return server, model


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("weighting", ["auto", "uniform"])
def test_u_0_steps_down_the_plain_mean_of_the_gradients_eq_8(weighting):
    server, model = server_of(weighting=weighting, **{"fedreco.eta-0": 0.3})
    u_0 = server.initial_arrays(model)
    generator = torch.Generator().manual_seed(1)
    g = [
        {n: torch.randn(a.shape, generator=generator) * scale for n, a in u_0.items()}
        for scale in (1, 2, 3)
    ]
    record = request_record(TrainRequest(server.config, FACTS, 1, [0], False, "/run"))
    messages = sent(list(server.configure_train(1, array_record(u_0), record, grid=None)))
    replies = [
        answer(m, TrainReply("c", 1, g_i, {}, {"num-examples": n}))
        for m, g_i, n in zip(messages, g, (1.0, 500.0, 20.0), strict=True)
    ]
    record, _ = server.aggregate_train(1, replies[::-1])
    following = tensors(record)
    assert following.keys() == u_0.keys()
    for name, array in u_0.items():  # whatever the example counts
        expected = array.double() - 0.3 * (sum(g_i[name].double() for g_i in g) / 3)
        torch.testing.assert_close(following[name].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_split_shares_the_stages_up_to_it(stage):
    _, model = server_of()
    server, _ = server_of(**{"fedreco.split": model.stage_names[stage]})
    shared = tuple(f"stages.{s}." for s in model.stage_names[: stage + 1])
    expected = {n: a for n, a in model.state_dict().items() if n.startswith(shared)}
    assert same_bits(server.initial_arrays(model), expected)
