"""What observers are told, and what those of Keel print, log and write."""

import json
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from run_fixtures import SMALL, history_of, resume, summary_of

from protocol.config import resolve_config
from server_app.audit import audit_problem
from server_app.federation import run_federation
from server_app.inline import run_inline
from server_app.observers import (
    RoundLog,
    RunInfo,
    RunObserver,
    SummaryTable,
    print_summary,
    round_text,
)
from server_app.run_directory import new_run_directory
from server_app.summary import has_finished, read_manifest

quick = {"local-epochs": 0, "num-rounds": 2}


class Recorder:
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def on_run_start(self, info):
        self.calls.append(("start", info))

    def on_round(self, line):
        self.calls.append(("round", line))

    def on_run_end(self, summary):
        self.calls.append(("end", summary))


class ReplyRecorder(Recorder):
    """Notes the replies too."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[tuple[str, int, int]] = []

    def on_replies(self, what, num_replies, num_asked):
        self.replies.append((what, num_replies, num_asked))


@pytest.fixture
def observed(no_pictures, tmp_path):
    """(run directory, calls) of a run that a Recorder follows."""
    from run_fixtures import NUM_CLIENTS, SMALL

    recorder: RunObserver = Recorder()
    keys = SMALL | quick | {"fraction-train": 0.5, "output-dir": str(tmp_path / "runs")}
    directory = run_inline(keys, NUM_CLIENTS, observers=[recorder])
    return directory, recorder.calls


def test_observers_get_the_config_that_is_saved(observed):
    """Trackers were told `num-clients` 0, and that of the clients only after a resume."""
    directory, calls = observed
    config = calls[0][1].config
    assert config == json.loads((directory / "config.json").read_text())["config"]
    assert config["num-clients"] == calls[0][1].num_clients


def test_a_round_that_ends_after_the_signal_does_not_make_a_stopped_run_running(
    no_pictures, tmp_path, monkeypatch
):
    """Under `flwr run` the signal comes in another thread, while the rounds go on for a moment."""
    from run_fixtures import NUM_CLIENTS, SMALL

    monkeypatch.setattr("server_app.report.WRITE_EVERY_S", 0.0)
    at_exit: list[Callable[[], None]] = []
    noting = partial(run_federation, at_exit=at_exit.append)
    monkeypatch.setattr("server_app.inline.run_federation", noting)
    seen = []

    class Signal(Recorder):
        def on_round(self, line):
            if line["round"] == 1:
                at_exit[0]()
            (directory,) = tmp_path.iterdir()
            seen.append(summary_of(directory)["status"])

    run_inline(SMALL | quick | {"output-dir": str(tmp_path)}, NUM_CLIENTS, observers=[Signal()])
    assert seen == ["stopped", "stopped"]


def test_an_observer_is_told_what_will_run_then_every_round_then_the_summary(observed):
    directory, calls = observed
    assert [name for name, _ in calls] == ["start", "round", "round", "end"]
    info = calls[0][1]
    assert isinstance(info, RunInfo)
    assert (info.method, info.server_optimizer, info.source) == ("fedavg", "fedavg", "digits")
    assert (info.num_train, info.num_test, info.image_shape) == (287, 359, (1, 32, 32))
    assert (info.model, info.num_parameters) == ("cnn-fedreco", 61_706)
    assert (info.num_clients, info.clients_per_round, info.num_rounds) == (4, 2, 2)
    assert (info.directory, info.history, info.last_round) == (directory, (), 0)
    assert [line for name, line in calls if name == "round"] == history_of(directory)
    assert calls[-1][1] == summary_of(directory)


def test_an_observer_may_follow_the_replies_within_a_round(no_pictures, tmp_path):
    keys = quick | {"source": "digits", "model": "cnn-fedreco", "output-dir": str(tmp_path)}
    recorder = ReplyRecorder()
    run_inline(
        keys | {"num-rounds": 1, "evaluate-clients": "all", "local-test-fraction": 0.2},
        3,
        observers=[recorder],
    )
    assert recorder.replies == [
        *(("round 1", number, 3) for number in range(4)),
        *(("the evaluation of round 1", number, 3) for number in range(4)),
    ]


def test_a_long_round_is_logged_every_ten_seconds(monkeypatch, caplog):
    times = iter([0.0, 4.0, 11.0, 12.0, 30.0, 31.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))  # other threads have the real one
    monkeypatch.setattr("server_app.observers.time", clock)
    log = RoundLog()
    with caplog.at_level(logging.INFO, logger="keel.server"):
        for number in range(6):
            log.on_replies("round 3", number, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "round 3: 2 of 5 clients have answered",
        "round 3: 4 of 5 clients have answered",
    ]


def test_after_a_resume_an_observer_knows_the_rounds_before(observed):
    directory, _ = observed
    recorder = Recorder()
    run_inline({"resume": str(directory), "num-rounds": 3}, 4, observers=[recorder])
    info = recorder.calls[0][1]
    assert (info.last_round, len(info.history)) == (2, 2)
    assert [line["round"] for name, line in recorder.calls if name == "round"] == [3]


def test_an_observer_is_told_of_the_end_of_a_run_that_fails(run, tmp_path, monkeypatch):
    recorder = Recorder()

    def fail(line):
        raise KeyboardInterrupt  # as Ctrl-C while the round is shown

    monkeypatch.setattr(recorder, "on_round", fail)
    with pytest.raises(KeyboardInterrupt):
        run_inline(quick | {"output-dir": str(tmp_path / "runs")}, 2, observers=[recorder])
    name, summary = recorder.calls[-1]
    assert (name, summary["status"], summary["rounds"]) == ("end", "stopped", 1)
    assert summary["ended"]


def test_every_round_is_one_plain_line_of_the_log(run, caplog):
    with caplog.at_level(logging.INFO, logger="keel.server"):
        folder = run({"num-rounds": 2})
    first, second = (text for text in caplog.messages if text.startswith("round "))
    accuracies = [100 * line["global"]["accuracy"] for line in history_of(folder)]
    assert first.startswith(
        f"round 1/2: accuracy {accuracies[0]:.2f} % (global model, test set), loss "
    )
    assert first.endswith(" left")  # the time that is left
    assert second.startswith(f"round 2/2: accuracy {accuracies[1]:.2f} %")
    assert second.endswith(" s")
    about = "\n".join(caplog.messages)
    assert "data digits: 287 training and 359 test images, 1 x 32 x 32, 10 classes" in about
    assert "model cnn-fedreco: 61,706 parameters" in about
    assert f"run directory {folder}" in about


def test_a_round_without_an_evaluation_and_with_a_loss_that_is_not_finite(tmp_path):
    info = RunInfo(tmp_path, *("m", "o", "s"), 1, 1, (1, 2, 3), 2, "net", 5, 2, 2, num_rounds=3)
    line = {"round": 1, "losses": {"supervised": None}, "left_out": {"a": "late"}}
    text = round_text(line | {"seconds": {"training": 1.26}}, info, 65.0)
    assert text == "round 1/3: loss not finite, 1 left out, 1.3 s, 1 min 5 s left"


def test_the_table_shows_every_figure_of_the_summary(run, capsys):
    keys = {"method": "fedreco", "privacy.epsilon": 0.5, "local-test-fraction": 0.2}
    folder = run(keys | {"num-rounds": 2})
    summary = summary_of(folder)
    capsys.readouterr()
    print_summary(summary, "a title")
    shown = capsys.readouterr().out
    assert shown.startswith("a title")
    for result in summary["results"].values():
        for key in ("final", "best"):
            assert f"{100 * result[key]:.2f}" in shown
    assert "finished: 2 rounds" in shown
    assert "privacy: epsilon 0.5, delta 1e-05 a release; composed over 2 releases" in shown
    assert f"run directory: {folder}" in shown


def test_what_looks_like_markup_is_shown_as_it_is(run, tmp_path, capsys):
    """A path, which may have any characters, is not a tag of the terminal library."""
    folder = run({"num-rounds": 1, "output-dir": str(tmp_path / "a[/b]c[bold]")})
    print_summary(summary_of(folder) | {"status": "failed: [/x]"}, "a [/title]")
    shown = capsys.readouterr().out
    assert shown.startswith("a [/title]")
    assert "failed: [/x]: 1 round, " in shown
    assert f"run directory: {folder}" in shown


class Broken(RunObserver):
    def on_run_end(self, summary):
        raise RuntimeError("no terminal")


def test_an_observer_that_fails_at_the_end_leaves_the_run_complete(tmp_path, no_pictures):
    keys = SMALL | {"num-rounds": 1, "output-dir": str(tmp_path), "run-name": "whole"}
    with pytest.raises(RuntimeError, match="no terminal"):
        run_inline(keys, 2, observers=[Broken()])
    folder = tmp_path / "whole"
    assert summary_of(folder)["status"] == "finished"
    assert has_finished(folder)
    assert audit_problem(folder, read_manifest(folder)["audit"]) == ""


def test_the_table_is_printed_at_the_end_only(capsys):
    table = SummaryTable()
    table.on_round({"round": 1})
    assert capsys.readouterr().out == ""


# --- run-name ------------------------------------------------------------------------------------


def test_run_name_names_the_run_directory_which_must_not_exist(run, tmp_path):
    folder = run(quick | {"run-name": "a.b_C-1"})
    assert folder == tmp_path / "a.b_C-1"
    with pytest.raises(ValueError, match=r"run-name = 'a\.b_C-1': .* exists: choose another name"):
        run(quick | {"run-name": "a.b_C-1"})
    resume(folder, num_rounds=3)
    assert len(history_of(folder)) == 3
    done = quick | {"run-name": "done", "keep-state": False}
    run(done)
    with pytest.raises(ValueError, match="or remove that run, which has finished"):
        run(done)  # nothing could be resumed


@pytest.mark.parametrize("name", [".", "..", ".hidden", "a/b", "a b", "ä", "x" * 65])
def test_a_run_name_that_is_no_plain_file_name_is_refused(run, name):
    with pytest.raises(ValueError, match=r"run-name = .*1 to 64 of the characters"):
        run({"run-name": name})


@pytest.mark.parametrize(
    "name", ["reset-state", "run-id", "state-was-reset-1", f"round-00001-{'0' * 16}.old"]
)
def test_a_run_name_that_every_client_of_a_deployment_would_refuse_is_refused_first(run, name):
    """Its clients failed in round 1, and the run with them."""
    with pytest.raises(ValueError, match=r"run-name = .* not the name of a file of client state"):
        run({"run-name": name})


def test_an_output_dir_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ValueError, match=r"output-dir: .* cannot be made: File exists"):
        new_run_directory(resolve_config({"output-dir": str(tmp_path / "runs")}))
