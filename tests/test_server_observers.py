"""What observers are told, and what those of Keel print, log and write."""

import json
import logging

import pytest
from run_fixtures import NUM_CLIENTS, SMALL, history_of, resume, summary_of

from server_app.inline import run_inline
from server_app.observers import RunObserver, SummaryTable
from server_app.run_reader import RunReader

quick = {"local-epochs": 0, "num-rounds": 2}


class Recorder(RunObserver):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def on_run_start(self, info):
        self.calls.append(("start", info))

    def on_replies(self, what, num_replies, num_asked):
        self.calls.append(("replies", (what, num_replies, num_asked)))

    def on_round(self, line):
        self.calls.append(("round", line))

    def on_run_end(self, summary):
        self.calls.append(("end", summary))

    def told(self, name: str) -> list:
        return [about for kind, about in self.calls if kind == name]


def test_an_observer_is_told_what_will_run_then_every_round_then_the_summary(no_pictures, tmp_path):
    recorder, resumed = Recorder(), Recorder()
    keys = SMALL | quick | {"train-fraction": 0.5, "output-dir": str(tmp_path / "runs")}
    directory = run_inline(keys, NUM_CLIENTS, observers=[recorder])
    names = [name for name, _ in recorder.calls if name != "replies"]
    assert names == ["start", "round", "round", "end"]
    [info] = recorder.told("start")
    assert (info.method, info.server_optimizer, info.source) == ("fedavg", "fedavg", "digits")
    assert (info.num_train, info.num_test, info.image_shape) == (143, 359, (1, 16, 16))
    assert (info.model, info.num_parameters) == ("cnn-fedreco", 15_626)
    assert (info.num_clients, info.clients_per_round, info.num_rounds) == (4, 2, 2)
    assert (info.directory, info.history, info.last_round) == (directory, (), 0)
    assert info.config == json.loads((directory / "config.json").read_text())["config"]
    assert recorder.told("replies") == [(f"round {n}", i, 2) for n in (1, 2) for i in range(3)]
    assert recorder.told("round") == RunReader(directory).history
    assert recorder.told("end") == [summary_of(directory)]
    run_inline({"resume": str(directory), "num-rounds": 3}, NUM_CLIENTS, observers=[resumed])
    [info] = resumed.told("start")
    assert (info.last_round, len(info.history)) == (2, 2)
    assert [line["round"] for line in resumed.told("round")] == [3]


def test_an_observer_is_told_of_the_end_of_a_run_that_is_interrupted(tmp_path, no_pictures):
    class Interrupting(Recorder):
        def on_round(self, line):
            raise KeyboardInterrupt  # as Ctrl-C while the round is shown

    recorder = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        run_inline(quick | {"output-dir": str(tmp_path / "runs")}, 2, observers=[recorder])
    [summary] = recorder.told("end")
    assert (summary["status"], summary["rounds"]) == ("stopped", 1)
    assert summary["ended"]


def test_every_round_is_one_line_of_the_log_which_a_resume_continues(run, caplog):
    with caplog.at_level(logging.INFO, logger="keel.server"):
        folder = run({"num-rounds": 2, "local-epochs": 0})
    rounds = [text for text in caplog.messages if text.startswith("round ")]
    for text, line in zip(rounds, history_of(folder), strict=True):
        assert text.startswith(f"round {line['round']}/2: ")
        assert f"{100 * line['global']['accuracy']:.2f} %" in text
    before = (folder / "run.log").read_text()
    assert all(f" {folder.name} INFO {text}" in before for text in rounds)
    resume(folder, num_rounds=3)
    after = (folder / "run.log").read_text()
    assert after.startswith(before)
    assert "round 3/3: " in after


def test_the_table_shows_every_figure_of_the_summary(run, tmp_path, capsys):
    keys = {"method": "fedreco", "privacy.epsilon": 0.5, "local-test-fraction": 0.2}
    folder = run(keys | {"num-rounds": 2, "output-dir": str(tmp_path / "a[/b]c[bold]")})
    summary = summary_of(folder)
    capsys.readouterr()
    table = SummaryTable()
    table.title = "a [/title]"
    table.on_run_end(summary)
    shown = capsys.readouterr().out
    assert shown.startswith("a [/title]")  # what looks like markup is shown as it is
    for result in summary["results"].values():
        for key in ("final", "best"):
            assert f"{100 * result[key]:.2f}" in shown
    assert f"{summary['privacy']['composed']['epsilon']:.2f}" in shown
    assert str(folder) in shown
