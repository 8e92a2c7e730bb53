"""Whole runs on the inline engine, and on sites in this process."""

import logging
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_fixtures import METHODS
from run_fixtures import (
    NUM_CLIENTS,
    SMALL,
    all_models,
    assert_same_run,
    audit_of,
    final_model,
    history_of,
    resume,
    same_bits,
    summary_of,
)

from client_app.setup import model_for, open_source, pixels_of
from protocol.config import resolve_config
from server_app.report import DivergedError
from strategies import Average
from strategies.validation import TooFewRepliesError

HALF = {"train-fraction": 0.5, "local-test-fraction": 0.2}


@pytest.fixture
def spoil(monkeypatch):
    """spoil(bad): what becomes of a client's round, by bad(client, round): "", "raise", "nan"."""
    trains = {cls: cls.train for cls in METHODS.values()}

    def train_or_fail(cls, bad):
        def train(method, ctx):
            what = bad(ctx.client, ctx.round)
            if what == "raise":
                raise RuntimeError(f"{ctx.client} has no\npower left")
            update = trains[cls](method, ctx)
            if what == "nan":
                update.arrays = {n: a * torch.nan for n, a in update.arrays.items()}
            return update

        return train

    def spoil_with(bad):
        for cls in METHODS.values():
            monkeypatch.setattr(cls, "train", train_or_fail(cls, bad))

    return spoil_with


# --- what a run computes --------------------------------------------------------------------------


def digits_of(config):
    source = open_source(config)
    x = pixels_of(config, source).normalise(torch.tensor(np.array(source.train.images)))
    return source, x, torch.tensor(np.array(source.train.labels))


def test_one_full_batch_step_on_every_client_is_one_centralised_step(run):
    """With weights n_i / n, whatever the split: eq. (1) of FedAvg with K = 1."""
    keys = {"num-rounds": 1, "batch-size": 2000, "momentum": 0.0, "weight-decay": 0.0, "alpha": 0.3}
    keys |= {"data-fraction": 1.0}
    folder = run(keys)
    config = resolve_config(SMALL | keys)
    source, x, y = digits_of(config)
    model = model_for(config, source)
    F.cross_entropy(model(x), y).backward()
    for name, array in final_model(folder).items():
        weight = model.get_parameter(name)
        expected = (weight - 0.05 * weight.grad).detach()
        torch.testing.assert_close(array, expected, rtol=1e-4, atol=1e-6)


def test_a_line_says_who_trained_on_what_and_how_it_went(run):
    history = history_of(
        run({"num-rounds": 3, "evaluate-every": 2, "evaluate-clients": "all"} | HALF)
    )
    names = {f"client-{i:04d}" for i in range(NUM_CLIENTS)}
    assert [line["round"] for line in history] == [1, 2, 3]
    assert [line["round"] for line in history if "global" in line] == [2, 3]
    assert len({tuple(line["participants"]) for line in history}) > 1
    for line in history:
        assert len(line["participants"]) == 2
        assert line["participants"] == sorted(line["participants"])
        assert line["seconds"].keys() >= {"training", "aggregation"}
        assert line["bytes_down"] > 0 < line["bytes_up"]
    for line in history[1:]:
        assert line["local_global"]["clients"].keys() == names
        values = sorted(line["local_global"]["clients"].values())
        assert line["local_global"]["mean"] == pytest.approx(sum(values) / 4)
        assert line["local_global"]["worst_decile"] == values[0]


@pytest.mark.parametrize(
    ("method", "whom", "num"),
    [("fedavg", "none", 0), ("fedavg", "cohort", 2), ("fedreco", "all", 4)],
)
def test_the_models_and_clients_that_the_config_names_are_evaluated(run, method, whom, num):
    keys = HALF | {"method": method, "evaluate-clients": whom, "evaluate-global": whom != "none"}
    for line in history_of(run(keys)):
        assert ("global" in line) == (method == "fedavg" and whom != "none")
        found = line.get("local_global" if method == "fedavg" else "personal", {})
        assert len(found.get("clients", {})) == num


# --- the same again, and resumed ------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_seed_another(run):
    one, again, other = run(HALF), run(HALF), run(HALF | {"seed": 1})
    assert one != again
    assert_same_run(one, again)
    assert not same_bits(final_model(one), final_model(other))


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "moon", "server-optimizer": "fedacg", "norm-bound": "median"},
        {"method": "fedavg", "server-optimizer": "fedavgm"},
        {"method": "scaffold"},
        {"method": "fedreco", "privacy.epsilon": 0.9},
        {"method": "fedintr", "server-optimizer": "fedadam"},
    ],
    ids=lambda keys: keys["method"],
)
def test_two_rounds_and_two_more_are_four(run, keys):
    whole = run(keys | HALF | {"num-rounds": 4})
    parts = run(keys | HALF | {"num-rounds": 2})
    assert resume(parts, num_rounds=4) == parts
    assert_same_run(parts, whole)
    assert summary_of(parts)["results"] == summary_of(whole)["results"]


# --- clients that fail ----------------------------------------------------------------------------

NO_POWER = "RuntimeError: client-0001 has no power left"


@pytest.mark.parametrize(
    ("method", "what", "words"),
    [("fedreco", "raise", NO_POWER), ("moon", "nan", "values that are not finite")],
)
def test_a_client_that_fails_is_left_out_and_named_and_the_run_goes_on(
    run, spoil, caplog, method, what, words
):
    spoil(lambda client, number: what if (client, number) == ("client-0001", 2) else "")
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run({"method": method, "num-rounds": 3, "local-test-fraction": 0.2})
    history = history_of(folder)
    assert [len(line["participants"]) for line in history] == [4, 3, 4]
    assert words in history[1]["left_out"]["client-0001"]
    [line] = [text for text in caplog.messages if "left out" in text]
    assert "client-0001" in line
    assert (summary_of(folder)["left_out"], summary_of(folder)["status"]) == (1, "finished")


def test_when_all_fail_the_run_ends_with_its_checkpoint_and_can_be_resumed(run, spoil, tmp_path):
    keys = {"method": "moon", "num-rounds": 4, "checkpoint-every": 3, "local-test-fraction": 0.2}
    whole = run(keys)
    is_broken = True
    spoil(lambda client, number: "raise" if number == 3 and is_broken else "")
    with pytest.raises(TooFewRepliesError) as caught:
        run(keys | {"run-name": "broken"})
    assert all(f"client-000{i}" in str(caught.value) for i in range(4))
    broken = tmp_path / "broken"
    assert summary_of(broken)["status"] == f"failed: {caught.value}"
    assert [line["round"] for line in history_of(broken)] == [1, 2]
    [rejected] = audit_of(broken, "rejected")
    assert (rejected["round"], len(rejected["clients"])) == (3, 4)
    is_broken = False
    resume(broken)
    assert_same_run(broken, whole)


def test_a_model_that_diverges_ends_the_run_with_its_checkpoint_of_the_round_before(
    run, monkeypatch, tmp_path
):
    step, calls = Average.next_arrays, []

    def diverges(self, current, replies):
        calls.append(1)
        arrays = step(self, current, replies)
        return {n: a * torch.inf for n, a in arrays.items()} if len(calls) == 3 else arrays

    monkeypatch.setattr(Average, "next_arrays", diverges)
    with pytest.raises(DivergedError):
        run({"method": "fedavg", "num-rounds": 4, "evaluate-every": 4, "run-name": "cut"})
    assert [line["round"] for line in history_of(tmp_path / "cut")] == [1, 2]
    monkeypatch.setattr(Average, "next_arrays", step)
    with pytest.raises(ValueError, match="num-rounds=3"):  # round 2 was not evaluated
        resume(tmp_path / "cut", num_rounds=2)
    resume(tmp_path / "cut")
    assert same_bits(all_models(tmp_path / "cut"), all_models(run({"num-rounds": 4})))


def test_a_client_that_lost_its_state_is_named_and_left_out_until_it_is_reset(run):
    folder = run({"method": "moon"})
    lost = folder / "clients" / "client-0002"
    shutil.rmtree(lost)
    resume(folder, num_rounds=3)
    last = history_of(folder)[-1]
    assert last["reset_needed"] == ["client-0002"]
    assert "client-0002" in last["left_out"]
    (lost / "reset-state").touch()
    resume(folder, num_rounds=4)
    assert len(history_of(folder)[-1]["participants"]) == 4
