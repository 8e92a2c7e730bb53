"""`stacked-runs`: runs that train together, against each alone."""

import itertools
import json
import logging
import re
import shutil
from types import SimpleNamespace

import pytest
from client_fixtures import assert_close, small_source
from method_fixtures import METHODS
from rich.console import Console
from run_fixtures import final_model, history_of, same_bits, without_pictures, without_times

import server_app.stacked_runs
from client_app import handlers
from client_app.stacked import train_stacked
from keel.experiments.verify import verify
from protocol.config import presets, resolve_config
from protocol.files import digest
from server_app.inline import run_inline
from server_app.stacked_runs import (
    Request,
    check_group,
    proceed_together,
    resume_rounds,
    run_stacked,
    trained_together,
)
from server_app.summary import read_manifest, read_summary, round_of
from strategies.average import TooFewRepliesError

NUM_CLIENTS = 3
end_to_end = pytest.mark.end_to_end


def keys_of(folder, **keys):
    """A run of two rounds of three clients of unequal sizes."""
    given = {
        "source": small_source(), "model": "cnn-fedreco", "partition": "dirichlet", "alpha": 5.0,
        "min-samples": 5, "num-rounds": 2, "local-epochs": 1, "batch-size": 16, "method": "fedprox",
        "output-dir": str(folder), "local-test-fraction": 0.2, "evaluate-clients": "all",
        "device": "cpu", "keep-state": True,
    }  # fmt: skip
    return given | keys


def alone(folder, runs):
    with without_pictures():
        return [run_inline(keys_of(folder, **run), NUM_CLIENTS) for run in runs]


def together(folder, runs, **keys):
    stacked = [keys_of(folder, **{"stacked-runs": 8} | run | keys) for run in runs]
    with without_pictures():
        return run_stacked(stacked, NUM_CLIENTS)


def assert_same_runs(ones, others, tolerance):
    for one, other in zip(ones, others, strict=True):
        assert_close(*(final_model(run) for run in (other, one)), rtol=tolerance, atol=tolerance)
        for line, stacked in zip(*map(history_of, (one, other)), strict=True):
            assert stacked.keys() == line.keys()
            assert stacked["participants"] == line["participants"]
            assert not stacked["left_out"]
            assert stacked["losses"] == pytest.approx(line["losses"], rel=tolerance)


OPTIONS = {  # the numbers that differ between the two runs of a group
    "fedavg": {},
    "fedprox": {"fedprox.mu": (0.5, 0.01)},
    "fedlc": {"fedlc.tau": (0.0, 0.5)},
    "moon": {"moon.mu": (1.0, 5.0), "moon.tau": (0.5, 0.2)},
    "fedcka": {"fedcka.mu": (3.0, 0.0)},
    "fedntd": {"fedntd.beta": (1.0, 0.3), "fedntd.tau": (1.0, 2.0)},
    "fedmlb": {"fedmlb.lambda2": (1.0, 0.5)},
    "fedproc": {},
    "fedrcl": {"fedrcl.beta": (1.0, 0.5), "fedrcl.threshold": (0.7, 0.5)},
    "scaffold": {"scaffold.lr-global": (1.0, 0.5)},
    "ditto": {"ditto.lambda": (1.0, 0.1)},
    "fedrep": {},
    "fedpac": {"fedpac.lambda": (1.0, 0.1), "fedpac.head-lr": (0.1, 0.05)},
    "fedcr": {"fedcr.beta": (1e-4, 1e-2)},
    "fedreco": {"fedreco.lambda": (1.0, 0.1), "fedreco.eta-u": (0.05, 0.02)},
}


@end_to_end
@pytest.mark.parametrize("method", OPTIONS)
def test_runs_trained_together_are_those_trained_alone(method, request, tmp_path):
    if method != "fedcr":  # the types of its arrays are fixed
        request.getfixturevalue("in_float64")
    values = OPTIONS[method]
    runs = [
        {"method": method, "seed": 3 + n} | {key: pair[n] for key, pair in values.items()}
        for n in (0, 1)
    ]
    tolerance = {"fedlc": 1e-5, "fedcr": 1e-4}.get(method, 1e-9)
    assert_same_runs(alone(tmp_path / "a", runs), together(tmp_path / "b", runs), tolerance)


@end_to_end
def test_runs_with_batches_of_one_sample_under_batch_norm(in_float64, tmp_path):
    keys = {"model": "resnet20", "width": 4, "norm": "batch", "partition": "iid", "batch-size": 15}
    runs = [keys | {"seed": 3 + n, "fedprox.mu": mu} for n, mu in enumerate((0.5, 0.01))]
    assert_same_runs(alone(tmp_path / "a", runs), together(tmp_path / "b", runs), 1e-9)


# --- each its own -------------------------------------------------------------------------------

TWO = [{"seed": 1, "fedprox.mu": 0.1}, {"seed": 2}]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A group of two runs of four rounds."""
    return together(tmp_path_factory.mktemp("group"), TWO, **{"num-rounds": 4})


@end_to_end
def test_each_run_has_its_own_directory_history_manifest_and_log(group):
    manifests = [read_manifest(path) for path in group]
    assert len({path.resolve() for path in group}) == 2
    assert len({manifest["stacked"]["group"] for manifest in manifests}) == 1
    for n, (path, manifest) in enumerate(zip(group, manifests, strict=True)):
        config, summary = (
            json.loads((path / f"{name}.json").read_text()) for name in ("config", "summary")
        )
        assert config["config"]["seed"] == summary["seed"] == n + 1
        assert config["config"]["stacked-runs"] == 8
        assert summary["status"] == "finished"
        assert [line["round"] for line in history_of(path)] == [1, 2, 3, 4]
        assert manifest["stacked"]["place"] == n
        assert [run["seed"] for run in manifest["stacked"]["runs"]] == [1, 2]
        assert manifest["files"]["history.jsonl"] == digest((path / "history.jsonl").read_bytes())
        log = (path / "run.log").read_text()
        assert [f"round {r}/4" in log for r in (1, 4)] == [True, True]
        assert log.count("round 4/4") == 1
    assert manifests[0]["split"] != manifests[1]["split"]


@end_to_end
def test_a_run_is_verified_without_its_group_by_its_accuracies(group, capsys):
    assert verify(group[0], 2, Console()) == 0
    assert "trained together with 1 other" in capsys.readouterr().out


@end_to_end
def test_a_group_of_one_has_the_bits_of_a_run_alone(tmp_path):
    (one,), (other,) = alone(tmp_path / "a", TWO[:1]), together(tmp_path / "b", TWO[:1])
    assert same_bits(*(final_model(run) for run in (one, other)))
    assert read_manifest(other)["stacked"]["runs"] == [{"seed": TWO[0]["seed"]}]


def test_several_clients_of_each_run_train_together(tmp_path, monkeypatch):
    sizes = []

    def counted(methods, ctxs):
        sizes.append(len(ctxs))
        logging.getLogger("keel.client").info("%d clients train", len(ctxs))
        return train_stacked(methods, ctxs)

    monkeypatch.setattr(handlers, "train_stacked", counted)
    monkeypatch.setattr(logging.getLogger("keel"), "level", logging.NOTSET)
    paths = together(tmp_path, TWO, **{"clients-per-step": 2, "num-rounds": 1})
    assert logging.getLogger("keel").level == logging.NOTSET  # again
    assert sizes == [4, 2]  # two clients of each run, then the third ones
    assert all("4 clients train" in (path / "run.log").read_text() for path in paths)


# --- resume -------------------------------------------------------------------------------------


def interrupted(folder, at_training, runs=TWO, **keys):
    """The directories of a group that Ctrl-C ends before this training; 3 trainings are a round."""
    numbers = itertools.count(1)

    def trained(requests):
        if next(numbers) == at_training:
            raise KeyboardInterrupt
        return trained_together(requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app.stacked_runs, "trained_together", trained)
        with pytest.raises(KeyboardInterrupt):
            together(folder, runs, **keys)
    paths = [path.parent for path in folder.glob("*/config.json")]
    return sorted(paths, key=lambda path: read_manifest(path)["stacked"]["place"])


def resumed(paths):
    with without_pictures():
        return run_stacked([{"resume": str(path)} for path in paths], NUM_CLIENTS)


def assert_same_bits(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert same_bits(*(final_model(run) for run in (one, other)))
        assert without_times(history_of(one)) == without_times(history_of(other))


def lose_last_round(path):
    """As if it had been killed before its last round was written."""
    max((path / "checkpoints").glob("round-*"), key=round_of).unlink()
    lines = (path / "history.jsonl").read_text().splitlines(keepends=True)
    (path / "history.jsonl").write_text("".join(lines[:-1]))


@end_to_end
@pytest.mark.parametrize(("at_training", "behind"), [(1, None), (5, 1), (8, None), (11, 0)])
def test_a_resumed_group_has_the_bits_of_one_that_was_not_interrupted(
    at_training, behind, group, tmp_path
):
    paths = interrupted(tmp_path, at_training, **{"num-rounds": 4})
    assert [read_summary(path)["status"] for path in paths] == ["stopped"] * 2
    if behind is not None:
        lose_last_round(paths[behind])
    assert resumed(paths) == paths
    assert_same_bits(group, paths)


@end_to_end
def test_a_run_that_finished_before_the_others_were_killed_stays(group, tmp_path):
    paths = interrupted(tmp_path, 13, **{"num-rounds": 4})  # all wait after their last round
    assert [len(history_of(path)) for path in paths] == [4, 4]
    first = read_summary(paths[0]) | {"status": "finished"}
    (paths[0] / "summary.json").write_text(json.dumps(first))
    assert resumed(paths) == paths
    assert_same_bits(group, paths)


@pytest.mark.parametrize(("interval", "expected"), [(3, {2, 4}), (4, {0, 2, 4})])
def test_a_run_resumes_from_whole_checkpoints_of_rounds_in_its_history(
    interval, expected, group, tmp_path
):
    """From the start only if it was killed before its first checkpoint."""
    (tmp_path / "checkpoints").mkdir()
    for number, content in ((2, b"2"), (3, b"damaged"), (4, b"4"), (6, b"6")):
        name = f"round-{number:05d}-{digest(str(number).encode())}.safetensors"
        (tmp_path / "checkpoints" / name).write_bytes(content)
    shutil.copy(group[0] / "history.jsonl", tmp_path)  # of 4 rounds
    assert resume_rounds(tmp_path, interval) == expected


def test_a_preset_may_be_spelled_out_in_one_run_of_a_group():
    together = {"stacked-runs": 8}
    by_name = {"preset": "fedcka-table1-cifar10"} | together
    spelled_out = presets()["fedcka-table1-cifar10"] | together
    check_group([resolve_config(by_name), resolve_config(spelled_out)])


def test_a_group_without_a_common_checkpoint_is_refused(tmp_path):
    paths = interrupted(tmp_path, 11, **{"num-rounds": 4})
    for checkpoint in (paths[1] / "checkpoints").glob("round-*"):
        checkpoint.unlink()
    with pytest.raises(ValueError, match=r"no round of which all runs .*: 2, 3; .*: none") as e:
        resumed(paths)
    assert "\n" not in str(e.value)
    assert "restore their checkpoints, or start the unfinished runs again" in str(e.value)


@end_to_end
def test_part_of_a_group_is_not_resumed(tmp_path):
    paths = interrupted(tmp_path, 5, **{"num-rounds": 4})
    for given in (paths[:1], paths[::-1]):
        with pytest.raises(ValueError, match=r"a group of runs \(.*\): resume all of them, in thi"):
            resumed(given)
    with pytest.raises(ValueError, match=r"stacked-runs = 8: .* repeat that command"):
        run_inline({"resume": str(paths[0])}, NUM_CLIENTS)
    other = interrupted(tmp_path / "other", 5, **{"num-rounds": 4})
    with pytest.raises(ValueError, match="did not train with"):
        resumed([paths[0], other[1]])


# --- a run that fails ---------------------------------------------------------------------------


@end_to_end
def test_a_run_that_diverges_fails_alone(tmp_path):
    runs = [{"seed": 1, "fedprox.mu": 1e30}, *TWO]
    bad, *good = together(tmp_path / "b", runs, **{"min-replies": NUM_CLIENTS})
    assert isinstance(bad, TooFewRepliesError)
    assert "the bound on values" in str(bad)
    assert_same_runs(alone(tmp_path / "a", TWO), good, 1e-4)


@end_to_end
@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_group_resumes_with_a_run_that_failed_if_its_last_round_is_repeated(
    is_repeated, tmp_path, monkeypatch
):
    """Either way the bits are those of the group that was not interrupted."""

    def finish(self, update, ctx):
        if (ctx.round, ctx.config.rounds.seed) == (2, 7):
            raise ValueError("no labels")
        return update

    monkeypatch.setattr(METHODS["fedprox"], "finish", finish)
    runs = [TWO[0], {"seed": 7}, TWO[1]]
    whole = together(tmp_path / "a", runs, **{"num-rounds": 4})
    paths = interrupted(tmp_path / "b", 8, runs, **{"num-rounds": 4})  # in round 3
    if is_repeated:  # as if killed after one has failed and before the others have ended the round
        lose_last_round(paths[0])
        lose_last_round(paths[2])
    outcomes = resumed(paths)
    assert "no labels" in str(outcomes[1])
    assert isinstance(outcomes[1], TooFewRepliesError) == is_repeated
    assert_same_bits([whole[0], whole[2]], [outcomes[0], outcomes[2]])


@end_to_end
def test_a_run_that_fails_before_round_1_is_not_missed_at_a_resume(tmp_path):
    (tmp_path / "taken").mkdir()
    runs = [{"seed": 0, "run-name": "taken"}, *TWO]
    first, *others = together(tmp_path, runs)
    assert "run-name = 'taken'" in str(first)
    assert [read_manifest(path)["stacked"]["absent"] for path in others] == [[0], [0]]
    assert resumed(others) == others  # all have finished


def test_an_error_of_one_clients_method_is_its_own(tmp_path, monkeypatch):
    def begin_round(self, ctx):
        if ctx.config.rounds.seed == 2 and ctx.client == "client-0001":
            raise ValueError("no labels")

    monkeypatch.setattr(METHODS["fedprox"], "begin_round", begin_round)
    lines = [history_of(path) for path in together(tmp_path, TWO)]
    assert [line["left_out"] for line in lines[0]] == [{}, {}]
    assert all("no labels" in line["left_out"]["client-0001"] for line in lines[1])


def test_runs_in_the_lowest_round_train_first(monkeypatch):
    asked = []

    def trained(requests):
        asked.append([request.round for request in requests])
        return [None] * len(requests)

    monkeypatch.setattr(server_app.stacked_runs, "trained_together", trained)
    following = iter([Request(2)]), iter([])
    members = [SimpleNamespace(proceed=lambda _, own=own: next(own, None)) for own in following]
    proceed_together(members, {0: Request(1), 1: Request(2)})
    assert asked == [[1], [2, 2]]


# --- refusals -----------------------------------------------------------------------------------

REFUSED = {
    "epochs": ([{}, {"local-epochs": 2}], "local-epochs is 1 in one run and 2 in another: only fe"),
    "a switch": ([{}, {"fedprox.half": False}], "fedprox.half is True in one run and False"),
    "a whole number": (
        [{"method": "ditto"}, {"method": "ditto", "ditto.personal-epochs": 7}],
        r"ditto.personal-epochs is \d+ in one run and 7 in another: only ditto.lambda, seed may",
    ),
    "a network": ([{}, {"model": "cnn-fedintr"}], "model is 'cnn-fedreco' in one run"),
    "too many": ([{}] * 9, "stacked-runs = 8: 9 runs were to train together"),
}


@pytest.mark.parametrize(("runs", "message"), REFUSED.values(), ids=REFUSED)
def test_runs_that_cannot_train_together_are_refused(runs, message, tmp_path):
    with pytest.raises(ValueError, match=message) as raised:
        together(tmp_path, runs)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_method_that_cannot_be_stacked_is_refused_before_round_1(tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS["fedprox"], "train", lambda self, ctx: None)
    for error in together(tmp_path, TWO):
        assert re.match(r"stacked-runs = 8: method = 'fedprox' overrides `train`", str(error))
    assert not list(tmp_path.iterdir())


def test_a_loss_that_reads_what_differs_between_runs_is_refused(tmp_path, monkeypatch):
    def reads_config(self, batch):
        return batch.ctx.config.method_options().mu * batch.logits.sum()

    def branches(self, batch):
        return batch.logits.sum() if self.mu else None

    for penalty, message in (
        (reads_config, "fedprox.mu is missing from the config"),
        (branches, "stacked-runs: mu of FedProx differs between runs"),
    ):
        monkeypatch.setattr(METHODS["fedprox"], "penalty", penalty)
        for error in together(tmp_path / message[:5], TWO):
            assert re.search(message, str(error))
            assert "\n" not in str(error)
