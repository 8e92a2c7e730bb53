"""Tries to tell neighbouring data sets apart from everything that a client sends.

Neighbours: one image is replaced by another, the sizes are the same.
"""

import json
import logging
import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy
import torch
from client_fixtures import Client, initial, make_config, make_round, pictures
from method_fixtures import Forgetful, Leaky, Twice, with_method

import client_app.privacy as mechanism
from client_app.site_privacy import Ledger
from protocol.array_records import tensors
from protocol.discrete_gaussian import discrete_gaussian
from protocol.privacy import noise_sigma
from server_app.inline import run_inline

METHODS = ("fedavg", "fedavg-ft", "fedreco")
DIVERGING = {"fedreco__eta_u": 1e30, "fedreco__eta_v": 1e30}  # with a large lr
pytestmark = pytest.mark.end_to_end  # real local trainings, whole runs and thousands of draws


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Two files of 24 + 12 images: one training and one test image, and their labels, differ."""
    folder = tmp_path_factory.mktemp("sites")
    sources = []
    for number in (0, 1):
        (x, y), (x_test, y_test) = pictures(24, seed=5), pictures(12, seed=6)
        if number:
            x[3], y[3] = 255 - x[3], (y[3] + 1) % 3
            x_test[2], y_test[2] = 255 - x_test[2], (y_test[2] + 1) % 3
        np.savez(folder / f"{number}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
        sources.append(f"npz:{folder / f'{number}.npz'}")
    return sources


def received_by(config):
    """What a server of this method sends."""
    received = initial(config, seed=5)
    if config.rounds.method == "fedreco":
        received = {n: a for n, a in received.items() if not n.startswith("classifier")}
    return received


def sent_by(source, run_dir, **keys):
    """Everything in the replies of a site: query, and train and evaluate of two rounds."""
    keys = {"method": "fedavg", "privacy__epsilon": 0.5} | keys
    config = make_config(**keys)
    client = Client(
        config, run_dir, {"name": "site-a", "source": source, "state-dir": str(run_dir)}
    )
    received = received_by(config)
    yield client.ask("query").content
    for number in (1, 2):
        yield client.ask("train", number, received, evaluate=True).content
        yield client.ask("evaluate", number, received).content


def facts_of(contents: Iterator) -> list[object]:
    """All that an observer sees but the values of the noised arrays."""
    seen: list[object] = []
    for content in contents:
        for name, record in content.items():
            if name == "arrays":
                seen.append([(k, a.shape, a.dtype, len(a.data)) for k, a in record.items()])
                seen.append([(k, a.shape, a.dtype) for k, a in tensors(record).items()])
            else:
                seen.append((name, type(record).__name__, sorted(record.items())))
    return seen


def overrides_of(flat):
    """The keys of a run, without those that `run_inline` sets."""
    return {key: value for key, value in flat.items() if key not in ("num-clients", "resume")}


def num_charged():
    """Releases in the ledger."""
    path = Ledger().path
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("method", METHODS)
def test_all_but_the_noised_arrays_is_the_same_for_neighbours(method, sites, tmp_path):
    first, second = (
        facts_of(sent_by(source, tmp_path / str(n), method=method))
        for n, source in enumerate(sites)
    )
    assert first == second
    assert len(first) > 15


def test_with_exact_metrics_the_same_comparison_tells_neighbours_apart(sites, tmp_path):
    first, second = (
        facts_of(sent_by(source, tmp_path / str(n), privacy__metrics="exact"))
        for n, source in enumerate(sites)
    )
    assert first != second
    assert "loss.supervised" in str(first)
    assert "cpu-seconds" in str(first)


def test_a_failure_names_nothing_of_the_data(sites, tmp_path):
    """The reason of an error may quote the data: it stays in the client's log."""
    config = make_config(privacy__epsilon=0.5)
    node = {"name": "a", "source": sites[0], "state-dir": str(tmp_path)}
    before = num_charged()
    reply = Client(config, tmp_path, node).ask("train", 1, {"no": torch.zeros(1)})
    withheld = reply.error.reason
    assert "privacy.metrics" in withheld
    assert num_charged() == before + 1  # counted before the data is read
    config = make_config(privacy__epsilon=0.5, privacy__metrics="exact")
    reply = Client(config, tmp_path, node).ask("train", 1, {"no": torch.zeros(1)})
    assert reply.error.reason != withheld


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", [1, 2], ids=["at once", "after a round"])
def test_training_that_diverged_is_released_as_noise(method, first, sites, tmp_path):
    """An error, in this round or the next, would be an exact bit about the data."""
    home = {"name": "site-a", "source": sites[0], "state-dir": str(tmp_path)}
    config = make_config(method=method, privacy__epsilon=0.5, lr=1e30, **DIVERGING)
    calm = make_config(method=method, privacy__epsilon=0.5)
    received, before = received_by(config), num_charged()
    for number in (1, 2, 3):
        client = Client(config if number >= first else calm, tmp_path, home)
        train = client.ask("train", number, received, counted=number - 1)
        assert not train.has_error(), train.error.reason
        arrays = tensors(train.content["arrays"])
        assert all(array.isfinite().all() for array in arrays.values())
        assert not client.ask("evaluate", number, received, counted=number).has_error()
    assert num_charged() == before + 3


@pytest.mark.parametrize("method", [Leaky, Forgetful, Twice])
def test_a_method_that_sends_more_than_its_one_release_is_refused(
    sites, method, monkeypatch, tmp_path, caplog
):
    with_method(monkeypatch, "fedavg", method)
    config = make_config(method="fedavg", privacy__epsilon=0.5)
    node = {"name": "site-a", "source": sites[0], "state-dir": str(tmp_path)}
    reply = Client(config, tmp_path, node).ask("train", 1, received_by(config))
    assert reply.has_error()
    assert f"TypeError: {method.__name__}" in caplog.text


# --- the attack -----------------------------------------------------------------------------------

NUM_RELEASES = 100_000  # of each data set


def releases(arrays, config, num, words=mechanism.random_words):
    """`num` releases of the same arrays with a site's noise, flat, [num, entries].

    What `privatise` does, for many releases at once: the test below compares the two.
    """
    flat = torch.cat([a.double().flatten() for a in arrays.values()]).numpy()
    step = mechanism.granularity(config.privacy, flat.size)
    steps = mechanism.clip_to_grid(flat, config.privacy.clip_norm, step)
    sigma = mechanism.noise_sigma(config.privacy)
    noise = discrete_gaussian(sigma / step, num * flat.size, words).reshape(num, -1)
    return (steps + noise) * step


def test_the_releases_attacked_are_those_of_privatise(monkeypatch):
    config = make_config(privacy__epsilon=0.9)
    arrays, _ = worst_case(config)
    ctx = make_round(config, received={})
    object.__setattr__(ctx, "is_simulated", False)
    monkeypatch.setattr(mechanism, "random_words", mechanism.seeded_words(1))
    sent = torch.cat([a.flatten() for a in mechanism.privatise(arrays, ctx).values()])
    [expected] = releases(arrays, config, 1, mechanism.seeded_words(1))
    assert torch.equal(sent, torch.from_numpy(expected).to(sent.dtype))


def epsilon_lower_bound(scores, others, delta, confidence=0.999):
    """An epsilon that the releases exceed with this confidence, by Clopper and Pearson.

    scores, others: log likelihood ratios of the releases of two data sets. The threshold is chosen
    on one half of them and tested on the other, in both directions.
    """
    alpha = (1 - confidence) / 2

    def bound(hits, false_alarms, num):
        quantile = scipy.special.betaincinv  # of the beta distribution
        low = quantile(hits, num - hits + 1, alpha) if hits else 0.0
        high = quantile(false_alarms + 1, num - false_alarms, 1 - alpha)
        return math.log((low - delta) / high) if low > delta else 0.0

    best = 0.0
    for a, b in ((scores, others), (-others, -scores)):
        chosen, tested = (slice(0, None, 2), slice(1, None, 2))
        thresholds = np.quantile(np.concatenate([a[chosen], b[chosen]]), np.linspace(0, 1, 201))

        def at(threshold, part, a=a, b=b):
            hits, alarms = int((a[part] > threshold).sum()), int((b[part] > threshold).sum())
            return bound(hits, alarms, len(a[part]))

        best = max(best, at(max(thresholds, key=lambda t: at(t, chosen)), tested))
    return best


def attack(arrays, neighbour, config, num=NUM_RELEASES):
    """The empirical epsilon of releases of two sets of arrays.

    The likelihood ratio of two Gaussians depends on the position along their difference alone.
    """
    first, second = releases(arrays, config, num), releases(neighbour, config, num)
    flat = [torch.cat([a.flatten() for a in x.values()]).double() for x in (arrays, neighbour)]
    direction = (flat[0] - flat[1]).numpy()
    return epsilon_lower_bound(first @ direction, second @ direction, config.privacy.delta)


def worst_case(config):
    """Two releases that are as far apart as clipping allows."""
    x = torch.tensor([3.0, -4.0, 0.0, 12.0]) / 13 * config.privacy.clip_norm
    return {"a": x[:2], "b": x[2:]}, {"a": -x[:2], "b": -x[2:]}


@pytest.mark.parametrize(
    ("epsilon", "delta", "share"),
    [(0.9, 1e-5, 1), (0.2, 0.1, 1), (0.9, 1e-5, 0.1), (0.9, 1e-5, 1e-6)],
)
def test_the_attack_finds_the_stated_epsilon_only_with_a_share_of_the_noise(
    epsilon, delta, share, monkeypatch
):
    config = make_config(privacy__epsilon=epsilon, privacy__delta=delta)
    if share < 1:
        sigma = share * noise_sigma(config.privacy)
        monkeypatch.setattr(mechanism, "noise_sigma", lambda privacy: sigma)
        monkeypatch.setattr(mechanism, "granularity", lambda privacy, num: 2.0**-30)
    found = attack(*worst_case(config), config)
    print(f"stated ({epsilon}, {delta}), noise times {share}, found {found:.3f}")
    assert found <= epsilon if share == 1 else found > 2


# --- a whole run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "exempt"), [("fedreco", ["diagnostics"]), ("fedavg", []), ("fedavg-ft", [])]
)
def test_a_run_that_withholds_reports_the_global_accuracy_and_what_is_exempt(
    method, exempt, tmp_path, caplog
):
    """Diagnostics of FedReCo measure the models in client state, others the noised updates."""
    config = {
        **make_config(method=method, privacy__epsilon=0.5).flat,
        "num-rounds": 2, "local-test-fraction": 0.2, "output-dir": str(tmp_path),
        "diagnostics": "cka-clients" if method != "fedavg-ft" else "",
    }  # fmt: skip
    directory = run_inline(overrides_of(config), 3)
    lines = [json.loads(text) for text in (directory / "history.jsonl").read_text().splitlines()]
    assert all(line["losses"] == {} and "personal" not in line for line in lines)
    assert ("global" in lines[-1]) == (method != "fedreco")
    roster = json.loads((directory / "roster.json").read_text())
    assert all(row["label_counts"] == [] and row["num_train"] > 0 for row in roster)
    assert not (directory / "labels.png").exists()
    spent = json.loads((directory / "summary.json").read_text())["privacy"]
    assert spent["releases"] == 2
    guarantee = spent["guarantee"]
    assert guarantee["withheld"] == ["losses", "accuracies", "label counts", "times"]
    assert guarantee["exempt"] == exempt
    assert guarantee["unit"] == "one training sample"
    assert "one sample is replaced" in guarantee["neighbours"]
    assert spent["noise"]["added_to_delta"] < 1e-8
    assert any("privacy.metrics" in m for m in caplog.messages)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("diagnostics" in warning for warning in warnings) == bool(exempt)


@pytest.mark.parametrize("method", METHODS)
def test_withholding_metrics_changes_no_bit_of_what_is_trained(method, tmp_path, no_pictures):
    """Accuracies measured with exact metrics are therefore those of a run that withholds them."""
    saved = []
    for metrics in ("exact", "withheld"):
        config = {
            **make_config(method=method, privacy__epsilon=0.5, privacy__metrics=metrics).flat,
            "num-rounds": 2, "local-test-fraction": 0.2, "keep-state": True,
            "output-dir": str(tmp_path / metrics),
        }  # fmt: skip
        directory = run_inline(overrides_of(config), 3)
        files = directory.rglob("*.safetensors")
        saved.append({path.relative_to(directory): path.read_bytes() for path in files})
    assert saved[0] == saved[1]
    folders = {path.parts[0] for path in saved[0]}
    assert "checkpoints" in folders
    assert ("clients" in folders) == (method == "fedreco")


def test_sizes_are_public_and_count_for_weighting(sites, tmp_path):
    query, train, *_ = sent_by(sites[0], tmp_path)
    entry = json.loads(query["roster"]["entry"])
    assert (entry["num_train"], entry["num_test"]) == (24, 12)
    assert set(train["metrics"]) == {"num-examples", "num-steps", "num-test"}
