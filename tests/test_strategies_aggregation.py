"""Robust aggregation: Flower's own, and what a bad client can do under each."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, MultiKrum
from run_fixtures import random_arrays, same_bits, sent

from protocol.config import resolve_config
from protocol.exact_sum import ExactSum
from protocol.messages import TrainReply
from strategies.aggregation import RunningMean, aggregate, coordinate_wise, krum_selection

shapes = {"conv": (2, 3, 1), "fc": (4,)}


def rounds_of(**given):
    return resolve_config({k.replace("_", "-"): v for k, v in given.items()}).rounds


def replies_of(count, seed=0):
    return [
        TrainReply(f"c{i}", 1, random_arrays(shapes, seed + i), {}, {"num-examples": 3.0 + i})
        for i in range(count)
    ]


def messages_of(replies):
    """The replies as Flower's own strategies want them."""
    asked = sent(
        [Message(RecordDict(), dst_node_id=7, message_type=MessageType.TRAIN) for _ in replies]
    )
    return [
        Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({n: a.clone() for n, a in reply.arrays.items()}),
                    "metrics": MetricRecord(dict(reply.metrics)),
                }
            ),
            reply_to=message,
        )
        for message, reply in zip(asked, replies, strict=True)
    ]


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("count", [1, 2, 5, 10])
@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({"aggregation": "median"}, FedMedian()),
        ({"aggregation": "trimmed-mean", "trim_fraction": 0.3}, FedTrimmedAvg(beta=0.3)),
    ],
    ids=["median", "trimmed-mean"],
)
def test_the_result_is_that_of_flowers_own_strategy(count, given, strategy):
    replies = replies_of(count)
    theirs, _ = strategy.aggregate_train(1, messages_of(replies))
    ours = coordinate_wise(replies, rounds_of(**given))
    for name, array in ours.items():
        assert array.dtype == torch.float64
        assert np.array_equal(array.numpy(), theirs[name].numpy())


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("name", ["krum", "multi-krum"])
def test_krums_choice_is_that_of_flowers_own_strategy(name):
    replies = replies_of(7)
    select = MultiKrum(num_malicious_nodes=2, num_nodes_to_select=1 if name == "krum" else 3)
    theirs, _ = select.aggregate_train(1, messages_of(replies))
    rounds = rounds_of(aggregation=name, num_malicious=2, num_selected=3)
    counts = [r.metrics["num-examples"] for r in replies]
    mean = aggregate(replies, counts, rounds, lambda reply: reply.arrays)
    for key, array in mean.items():
        assert array.numpy() == pytest.approx(theirs[key].numpy(), rel=1e-12)


def test_the_mean_does_not_depend_on_the_order_in_which_a_set_has_the_clients():
    """Which differs between processes. Weights that `max-weight-share` has cut are no integers."""
    weights = {f"c{i}": 10.0 ** (i % 7) / 3 for i in range(21)}
    arrays = {"w": torch.linspace(-3, 3, 50, dtype=torch.float64)}
    kept, means = [*weights][:20], []
    for clients in (kept, kept[::-1], sorted(kept, key=weights.get)):
        running = RunningMean(weights, {"w": 1e5})
        for client in kept:
            running.add(client, arrays, {})
        running.added = dict.fromkeys(clients).keys()
        means.append(running.mean(arrays))
    assert same_bits(means[0], means[1])
    assert same_bits(means[0], means[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_an_exact_sum_does_not_modify_what_it_adds(dtype):
    """In one process, they may be the client's state or the received arrays."""
    arrays = {"w": torch.tensor([1, 2], dtype=dtype)}
    ExactSum({"w": 1e4}).add(arrays, 0.5)
    assert arrays["w"].tolist() == [1, 2]


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_an_exact_sum_takes_every_value_within_its_limit_and_names_others(value):
    total = ExactSum({"w": 1e5})
    whole = {"w": torch.tensor([value, 1e-3]), "steps": torch.tensor(2**40)}
    for _ in range(10):
        total.add(whole, 0.1)
    found = total.scaled(1.0, whole)
    torch.testing.assert_close(found["w"], whole["w"], rtol=1e-7, atol=0)
    assert found["steps"] == 2**40
    for bad in (math.nan, math.inf, 1.1 * value):
        with pytest.raises(ValueError, match="array 'w' holds"):
            total.add({"w": torch.tensor([bad])}, 0.1)
    with pytest.raises(ValueError, match="'steps' holds"):
        total.add({"steps": torch.tensor(2**40 + 2)}, 0.1)
    assert total.sums == {}  # nothing of a refused client


def krum_scores(updates, f):
    """Sum of the squared distances to the n - f - 2 nearest others, in loops."""
    flat = [np.concatenate([a.numpy().ravel() for a in u.values()]) for u in updates]
    scores = []
    for i, x in enumerate(flat):
        distances = sorted(float(((x - y) ** 2).sum()) for j, y in enumerate(flat) if j != i)
        scores.append(sum(distances[: len(flat) - f - 2]))
    return scores


def test_krum_takes_the_update_nearest_to_its_neighbours_also_of_tiny_updates():
    """In float32 the squares of distances this small would be lost beside those of the norms."""
    base = {"w": torch.full((1000,), 3.0, dtype=torch.float64)}
    updates = []
    for i in range(7):
        noise = random_arrays({"w": (1000,)}, i)["w"] * 1e-6 * (1 + i)
        updates.append({"w": (base["w"] + noise).float()})
    chosen = krum_selection(updates, rounds_of(aggregation="krum", num_malicious=2))
    in_double = [{"w": update["w"].double()} for update in updates]
    assert chosen == [int(np.argmin(krum_scores(in_double, 2)))]


def test_multi_krum_takes_all_but_the_malicious_by_default():
    rounds = rounds_of(aggregation="multi-krum", num_malicious=2)
    updates = [r.arrays for r in replies_of(7)]
    chosen = krum_selection(updates, rounds)
    assert chosen == sorted(np.argsort(krum_scores(updates, 2))[:5])


@pytest.mark.parametrize(
    ("keys", "num_honest"),
    [
        ({"aggregation": "trimmed-mean", "trim_fraction": 0.2}, 3),
        ({"aggregation": "krum", "num_malicious": 1}, 3),
        ({"aggregation": "krum", "num_malicious": 1}, 2),
        ({"aggregation": "multi-krum", "num_malicious": 1}, 3),
        ({"aggregation": "multi-krum", "num_malicious": 1, "num_selected": 4}, 2),
    ],
)
def test_with_replies_missing_the_median_tolerates_the_liar_that_is_left(keys, num_honest, caplog):
    """Trimmed mean and Krum were the plain mean then, or the liar's update alone."""
    values = [-100.0, *(1 + 0.01 * i for i in range(num_honest))]
    replies = [
        TrainReply(f"c{i}", 1, {"w": torch.tensor([v])}, {}, {"num-examples": 1.0})
        for i, v in enumerate(values)
    ]
    found = aggregate(replies, [1.0] * len(replies), rounds_of(**keys), lambda r: r.arrays)
    assert float(found["w"]) == pytest.approx(np.median(values))
    expected = f"only {len(replies)} replies: {keys['aggregation']} needs more; this round uses "
    assert expected in caplog.text


def test_multi_krum_never_takes_as_many_as_may_be_malicious():
    """One of six replies is missing: num-selected = 5 would take the liar's too."""
    updates = [{"w": torch.tensor([v])} for v in (-100.0, 1.0, 1.01, 1.02, 1.03)]
    rounds = rounds_of(aggregation="multi-krum", num_malicious=1, num_selected=5)
    assert krum_selection(updates, rounds) == [1, 2, 3, 4]


def test_whole_numbers_are_rounded_and_keep_their_type():
    counts = [
        TrainReply("c", 1, {"steps": torch.tensor([n, -n])}, {}, {"num-examples": 1.0})
        for n in (1, 2, 5, 9)
    ]
    found = coordinate_wise(counts, rounds_of(aggregation="median"))["steps"]
    assert found.dtype == torch.int64
    assert found.tolist() == [4, -4]


@pytest.mark.parametrize(
    "keys", [{"aggregation": "median"}, {"aggregation": "trimmed-mean", "trim_fraction": 0.3}]
)
def test_bfloat16_is_aggregated_and_keeps_its_type(keys):
    """NumPy lacks it: round 1 ended in a traceback."""
    replies = [
        TrainReply("c", 1, {"w": torch.tensor([n], dtype=torch.bfloat16)}, {}, {})
        for n in (-1.0, 1.5, 2.5, 90.0)
    ]
    found = coordinate_wise(replies, rounds_of(**keys))["w"]
    assert found.dtype is torch.bfloat16
    assert found.tolist() == [2.0]


@pytest.mark.parametrize("num_clients", [3, 7, 8, 300])
def test_the_smallest_share_to_trim_that_is_named_is_enough(num_clients):
    """Of three clients, 0.33 trims none."""
    keys = {"aggregation": "trimmed-mean", "trim_fraction": 1e-4}
    problem = rounds_of(**keys).aggregation_problem(num_clients)
    named = float(str(problem).rpartition(" ")[2])
    assert not rounds_of(**keys | {"trim_fraction": named}).aggregation_problem(num_clients)
    assert named < 1 / num_clients + 0.001


def test_no_share_to_trim_is_named_for_two_clients():
    """It would be 0.5, which is refused."""
    problem = rounds_of(aggregation="trimmed-mean").aggregation_problem(2)
    assert problem.key == "aggregation"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"method": "scaffold", "aggregation": "median"}, "aggregation = 'median': scaffold has a"),
        (
            {"method": "fedreco", "aggregation": "krum"},
            "aggregation = 'krum': fedreco has a server",
        ),
        ({"aggregation": "krum"}, "num-malicious = 1: krum needs 2 * 1 + 3 = 5 clients a round"),
        (
            {"aggregation": "trimmed-mean"},
            "trim-fraction = 0.2: of 4 clients a round it trims none",
        ),
        (
            {"aggregation": "median", "fraction-train": 0.5},
            "aggregation = 'median': needs 3 clients a round, there are 2",
        ),
        ({"aggregation": "mode"}, "aggregation = 'mode': expected one of mean, median"),
        ({"norm-bound": "mean"}, "norm-bound = 'mean': expected one of off, fixed, median"),
        ({"norm-bound-value": 0.0}, "norm-bound-value = 0.0: expected a finite number > 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(run, keys, line):
    with pytest.raises(ValueError) as caught:
        run({"local-test-fraction": 0.2} | keys)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
