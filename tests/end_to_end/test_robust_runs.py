"""Robust means in whole runs with a client that lies."""

import pytest
from method_fixtures import METHODS
from run_fixtures import final_model, history_of, same_bits, summary_of

robust = {
    "median": {"aggregation": "median"},
    "trimmed-mean": {"aggregation": "trimmed-mean"},
    "krum": {"aggregation": "krum"},
    "multi-krum": {"aggregation": "multi-krum"},
}


liar = {
    "image-size": "32",
    "data-fraction": 0.4,
    "num-rounds": 4,
    "batch-size": 16,
    "partition": "iid",
}


@pytest.fixture
def lying(monkeypatch):
    """One client sends the opposite of its update, ten times."""
    train = METHODS["fedavg"].train

    def lie(method, now):
        update = train(method, now)
        if now.client == "client-0003":
            for name, array in update.arrays.items():
                update.arrays[name] = now.received[name] - 10 * (array - now.received[name])
        return update

    monkeypatch.setattr(METHODS["fedavg"], "train", lie)


@pytest.mark.parametrize("keys", robust.values(), ids=robust)
def test_a_client_that_lies_does_not_spoil_the_model(run, lying, keys):
    folder = run(liar | keys, 5)
    assert all(len(line["participants"]) == 5 for line in history_of(folder))
    assert summary_of(folder)["results"]["global.accuracy"]["final"] > 0.4


def test_the_mean_is_spoilt_by_such_a_client(run, lying):
    try:
        folder = run(liar, 5)
    except RuntimeError:
        return  # not even finite
    assert summary_of(folder)["results"]["global.accuracy"]["final"] < 0.3


@pytest.mark.parametrize(
    ("method", "server"), [("fedcr", "fedavg"), ("fedrep", "fedavgm"), ("fedavg", "fedacg")]
)
def test_it_combines_with_methods_and_server_steps(run, method, server):
    given = {"method": method, "server-optimizer": server, "local-test-fraction": 0.2}
    folder, mean = (
        run(given | {"aggregation": name, "num-rounds": 1}) for name in ("median", "mean")
    )
    assert all(array.isfinite().all() for array in final_model(folder).values())
    assert not same_bits(final_model(folder), final_model(mean))
