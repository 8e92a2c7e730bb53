"""Every method in whole runs: partial participation, a newcomer, a resume, options that clash."""

import json
import math

import pytest
import torch
from client_fixtures import assert_same_bits, differ
from method_fixtures import METHODS
from run_fixtures import history_of, without_times
from safetensors.torch import load_file

from client_app.evaluation import evaluate
from client_app.methods import method_of
from client_app.process_cache import ProcessCache
from client_app.samples import Samples
from client_app.setup import dataset_spec_of, model_for, open_source, pixels_of
from protocol.config import resolve_config
from protocol.options import ConfigError
from server_app.checks import config_warnings, refuse_unused
from server_app.inline import run_inline
from server_app.load_model import load_model
from server_app.run_directory import RunDirectory

BASE = {
    "source": "digits",
    "data-fraction": 0.4,
    "model": "cnn-fedreco",
    "partition": "iid",
    "train-fraction": 0.67,  # two of three
    "batch-size": 256,
    "lr": 0.05,
    "device": "cpu",
    "local-test-fraction": 0.2,
    "seed": 1,  # with it client-0001 first takes part in round 2
    "num-rounds": 2,
    "fedcr.samples": 4,
    "fedavg-ft.epochs": 2,
    "fedbabu.epochs": 1,
    "keep-state": True,
}
CLIENTS = [f"client-{n:04d}" for n in range(3)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def at_home(home, monkeypatch, no_pictures):
    """One home for all runs here: the source is decoded once."""
    monkeypatch.setenv("KEEL_HOME", str(home))


finished = {}


def run(method, **keys):
    """The folder of a run, made once."""
    given = {k.replace("__", ".").replace("_", "-"): v for k, v in keys.items()}
    key = (method, tuple(sorted(given.items())))
    if key not in finished:
        finished[key] = run_inline(BASE | {"method": method} | given, num_clients=3)
    return finished[key]


def checkpoint(path, number):
    """(global arrays, what the strategy keeps) after a round."""
    (file,) = (path / "checkpoints").glob(f"round-{number:05d}*.safetensors")
    flat = load_file(file)
    return (
        {k.removeprefix(p): v for k, v in flat.items() if k.startswith(p)}
        for p in ("model/", "state/")
    )


def model_after(path, number=2):
    arrays, _ = checkpoint(path, number)
    return arrays


# --- every registered method ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_of_three_clients_one_of_which_joins_late(method):
    path = run(method)
    lines = history_of(path)
    assert [line["participants"] for line in lines] == [
        ["client-0000", "client-0002"],
        ["client-0001", "client-0002"],
    ]
    about = method_of(resolve_config(BASE | {"method": method}))
    for line in lines:
        assert line["left_out"] == {}
        assert line["losses"]
        assert all(math.isfinite(value) for value in line["losses"].values())
        assert ("personal" in line) == about.is_personal
        assert ("global" in line) == about.has_global_model
        if about.is_personal:  # the one that has not yet joined is judged too
            assert sorted(line["personal"]["clients"]) == CLIENTS
    kept = {p.name for p in (path / "clients").iterdir()} if (path / "clients").exists() else set()
    if not about.is_stateful:
        assert kept == set()
    else:
        assert kept == set(CLIENTS)


# --- what is FedAvg to the bit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ditto", {}),
        ("fedavg-ft", {}),
        ("fedavg", {"server-optimizer": "fedacg", "fedacg__lambda": 0.0, "fedacg__beta": 0.0}),
    ],
    ids=str,
)
def test_the_global_models_are_fedavgs_to_the_bit(method, keys):
    plain, path = run("fedavg"), run(method, **keys)
    for number in (1, 2):
        assert_same_bits(model_after(path, number), model_after(plain, number))
    ours, theirs = ([line["global"] for line in history_of(each)] for each in (path, plain))
    assert ours == theirs


def test_scaffolds_first_round_is_fedavgs():
    ours, plain = model_after(run("scaffold"), 1), model_after(run("fedavg"), 1)
    for name, array in ours.items():  # w + 1 (A - w) is A but for rounding
        torch.testing.assert_close(array, plain[name], rtol=0, atol=1e-6)
    assert differ(model_after(run("scaffold"), 2), model_after(run("fedavg"), 2))


def test_fedavg_ft_of_no_epochs_is_judged_as_the_global_model():
    for line in history_of(run("fedavg-ft", **{"fedavg-ft__epochs": 0})):
        assert line["personal"] == line["local_global"]
    tuned = history_of(run("fedavg-ft"))[-1]
    assert tuned["personal"] != tuned["local_global"]


# --- FedACG sends one model and is judged by another ----------------------------------------------


def test_fedacg_with_another_loss_sends_wh_and_judges_w(monkeypatch):
    cls, received = METHODS["fedrcl"], {}
    train = cls.train

    def noted(method, ctx):
        received[ctx.round] = {name: array.clone() for name, array in ctx.received.items()}
        return train(method, ctx)

    monkeypatch.setattr(cls, "train", noted)
    path = run("fedrcl", server_optimizer="fedacg", fedacg__beta=0.001, num_rounds=3)
    assert history_of(path)[0]["losses"]["look-ahead"] >= 0
    w, state = checkpoint(path, 2)
    for name, array in received[3].items():
        ahead = w[name] + 0.85 * state[f"step/{name}"]
        torch.testing.assert_close(array, ahead, rtol=0, atol=1e-7)
        assert not torch.equal(array, w[name])
    assert_same_bits(load_file(path / "model.safetensors"), model_after(path, 3))
    config = resolve_config(BASE | {"method": "fedrcl"})
    source = open_source(config)
    test = Samples(
        source.test.images, source.test.labels, pixels_of(config, source), torch.device("cpu")
    )
    model = model_for(config, source)
    model.load_state_dict(model_after(path, 3))
    score = evaluate(model, test)
    assert history_of(path)[-1]["global"] == {"accuracy": score.accuracy, "loss": score.loss}


# --- what is kept ---------------------------------------------------------------------------------


def test_fedbabus_heads_never_change():
    keys = {"momentum": 0.9, "weight_decay": 0.1}
    path = run("fedbabu", **keys)
    config = resolve_config(BASE | {"method": "fedbabu"})
    start = model_for(config, open_source(config)).state_dict()
    final = load_file(path / "model.safetensors")
    head = {"classifier.weight", "classifier.bias"}
    assert_same_bits(final, start, names=head)
    assert set(differ(final, start)) == start.keys() - head
    assert model_after(path).keys() == start.keys() - head


def test_heads_tuned_for_the_last_evaluation_are_not_handed_out_as_if_they_were_kept():
    path = run("fedrep", **{"fedrep.final-head-epochs": 1})
    with pytest.raises(ValueError, match=r"fedrep\.final-head-epochs"):
        load_model(path, client="client-0000")


@pytest.mark.parametrize("epochs", [0, 5])
def test_a_loaded_model_without_the_fine_tuning_of_its_evaluation_is_warned_of(epochs, caplog):
    keys = {"fedbabu.fedper-like": True, "fedbabu.epochs": epochs}
    load_model(run("fedbabu", **keys), client="client-0000")
    assert ("client-0000" in caplog.text) == (epochs > 0)


def test_private_heads_leave_no_global_model_and_load_as_they_were_judged():
    path = run("fedbabu", **{"fedbabu.fedper-like": True, "fedbabu.epochs": 0})
    assert all("global" not in line for line in history_of(path))
    with pytest.raises(ValueError, match="client"):
        load_model(path)
    config = resolve_config(BASE | {"method": "fedbabu"})
    judged = history_of(path)[-1]["personal"]["clients"]
    assert len(set(judged.values())) > 1
    for partition, client in enumerate(CLIENTS):
        node = {"partition-id": partition, "num-partitions": 3}
        _, test = ProcessCache().samples(
            config, dataset_spec_of(config, open_source(config)), node, torch.device("cpu")
        )
        network = load_model(path, client=client).network
        assert evaluate(network, test).accuracy == judged[client]


class Killed(RuntimeError):
    pass


STATEFUL = {
    "scaffold": {"momentum": 0.9},
    "fedproc": {},
    "fedpac": {},
    "fedcr": {"fedcr.final-head-epochs": 1},
    "fedbabu with private heads": {"fedbabu.fedper-like": True},
    "fedrep under fedavgm": {"server-optimizer": "fedavgm", "fedrep.final-head-epochs": 1},
    "ditto under fedadam": {"server-optimizer": "fedadam"},
}


@pytest.mark.parametrize("case", STATEFUL)
def test_a_run_killed_in_its_third_round_ends_as_if_it_had_not_been(case, home, monkeypatch):
    """Killed after the clients have kept what round 3 left them, before the server has."""
    given = BASE | {"method": case.split()[0], "num-rounds": 4, "evaluate-every": 4}
    given |= {"local-test-fraction": 0.6} | STATEFUL[case]
    whole = run_inline(given, num_clients=3)
    save = RunDirectory.save_checkpoint

    def killed(self, point):
        if point.round == 3:
            raise Killed
        return save(self, point)

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "save_checkpoint", killed)
        with pytest.raises(Killed):
            run_inline(given | {"output-dir": str(home / case)}, num_clients=3)
    (path,) = (home / case).iterdir()
    assert run_inline({"resume": str(path)}, num_clients=3) == path
    for number in (3, 4):
        for one, two in zip(checkpoint(path, number), checkpoint(whole, number), strict=True):
            assert_same_bits(one, two)
    _, state = checkpoint(path, 4)
    is_kept_by_server = case.split()[0] not in ("ditto", "fedrep", "fedbabu", "local")
    accepted = json.loads(bytes(state["clients"].tolist()))["accepted"]
    assert set(accepted.values()) <= {1, 2, 3, 4}
    assert 4 in accepted.values()
    kept = [name for name in state if name.startswith(("own/", "step/"))]
    assert bool(kept) == (is_kept_by_server or "under" in case)
    # a version's name holds the digest of what it holds
    kept = [sorted(p.name for p in (f / "clients").rglob("*.safetensors")) for f in (path, whole)]
    assert kept[0] == kept[1]
    # a message down holds the folder's name, as long as it is
    lines, others = (without_times(history_of(f)) for f in (path, whole))
    assert lines == others
    assert len({tuple(line["participants"]) for line in lines}) > 1


def test_a_run_whose_schedule_depends_on_its_length_cannot_be_made_longer():
    with pytest.raises(ValueError, match="num-rounds"):
        run_inline({"resume": str(run("fedproc")), "num-rounds": 4}, num_clients=3)


# --- options that make no sense together ----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "fedmlb", "fedlc.tau": 3.0}, ["fedlc.tau"]),
        ({"fedavgm.beta": 0.9}, ["fedavgm.beta"]),
        ({"server-optimizer": "fedavgm", "fedavgm.beta": 0.9, "lr": 0.1}, []),
        ({"partition": "iid", "alpha": 0.1, "min-samples": 5}, ["alpha", "min-samples"]),
        ({"partition": "dirichlet", "alpha": 0.1, "min-samples": 5}, []),
        ({"partition": "dirichlet", "shards-per-client": 3}, ["shards-per-client"]),
        ({"partition": "shards", "shards-per-client": 3}, []),
        ({"preset": "fedrcl-table1-cifar10", "batch-size": 32}, ["batch-size"]),
        ({"preset": "fedrcl-table1-cifar10", "batch-size": 32, "batches-per-epoch": 0}, []),
        ({"method": "fedreco", "local-epochs": 5, "lr": 0.1}, ["local-epochs", "lr"]),
        ({"method": "fedreco", "momentum": 0.5, "cache-mb": 5, "precision": "bf16"}, []),
        ({"method": "fedpac", "local-epochs": 5, "lr": 0.1}, ["local-epochs"]),
        ({"method": "ditto", "clip-norm": 1.0, "lr-decay": 0.9, "local-epochs": 2}, []),
        ({"method": "scaffold", "momentum": 0.5, "weight-decay": 0.1, "lr": 0.1}, []),
        ({"method": "fedbabu", "batch-size": 5, "momentum": 0.5, "lr": 0.1}, []),
        ({"cache-mb": 5, "frozen-statistics": "batch"}, ["cache-mb", "frozen-statistics"]),
        ({"method": "moon", "cache-mb": 5, "frozen-statistics": "batch"}, []),
        ({"optimizer": "adam", "momentum": 0.5}, ["momentum"]),
        ({"norm-bound-value": 1.0}, ["norm-bound-value"]),
        ({"norm-bound": "median", "norm-bound-value": 1.0}, []),
        ({"num-malicious": 2}, ["num-malicious"]),
        ({"aggregation": "median", "weighting": "examples"}, ["weighting"]),
        ({"method": "local", "weighting": "uniform"}, ["weighting"]),
        ({"method": "local", "norm-bound": "median"}, ["norm-bound"]),
        ({"aggregation": "trimmed-mean", "trim-fraction": 0.4}, []),
        ({"privacy.clip-norm": 2.0}, ["privacy.clip-norm"]),
        ({"diagnostics-every": 2}, ["diagnostics-every"]),
    ],
)
def test_a_key_that_is_set_and_not_used_is_refused(given, named):
    config = resolve_config(BASE | given)
    if not named:
        refuse_unused(config, given)
        return
    with pytest.raises(ConfigError) as refusal:
        refuse_unused(config, given)
    assert refusal.value.key == named[0]
    assert all(f"{key} = {given[key]!r}" in str(refusal.value) for key in named)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "ditto", "evaluate-clients": "none"}, ["personal models"]),
        ({"evaluate-global": False}, ["evaluated"]),
        ({"evaluate-global": False, "evaluate-clients": "all"}, []),
    ],
)
def test_what_is_never_judged_is_warned_of(given, named):
    lines = config_warnings(resolve_config(BASE | given))
    assert len(lines) == len(named)
    assert all(name in line for name, line in zip(named, lines, strict=True))
