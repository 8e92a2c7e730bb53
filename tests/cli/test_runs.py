"""`keel status`, `list`, `stop`, `compare`, `predict`, `export`: reading whatever runs hold."""

import csv
import errno
import fcntl
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import ExifTags, Image
from run_fixtures import history_of, without_pictures

import keel.runs
import server_app.report
from keel.cli.main import main
from keel.cli.plots import labels_of
from keel.cli.progress import Terminal
from keel.cli.runs import PLACES, is_flower, status_lines
from keel.deployment.simulation import MARK, engine_folder
from keel.runs import SavedRun, all_runs, differing_keys, find_run, is_locked, lock_holder
from protocol.config import app_folder
from server_app.load_model import load_model
from server_app.run_directory import RunDirectory, read_arrays, save_arrays
from tests.tools.run_directories import append_round, line_of, make_run

quick = {"local-epochs": 0, "num-rounds": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of two rounds."""
    from server_app.inline import run_inline

    keys = {"source": "digits", "model": "cnn-fedreco", "num-rounds": 2, "batch-size": 64}
    keys |= {"keep-state": True, "data-fraction": 0.4}
    with without_pictures():
        return run_inline(keys | {"output-dir": str(tmp_path_factory.mktemp("trained"))}, 3)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty Keel home."""
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)  # `keel export` writes there
    (tmp_path / "home" / "runs").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def two(home, trained):
    """Two runs in the home, equal but for lr and their curves."""
    for name, lr in (("one", 0.1), ("other", 0.2)):
        copy = home / "runs" / name
        shutil.copytree(trained, copy)
        config = json.loads((copy / "config.json").read_text())
        config["config"]["lr"] = lr
        (copy / "config.json").write_text(json.dumps(config))
    return home / "runs"


# --- status --------------------------------------------------------------------------------------


def test_the_status_can_be_read_after_every_round_while_it_runs(run, monkeypatch):
    seen, done = [], server_app.report.Reporter.round_done

    def look(reporter, line):
        done(reporter, line)
        seen.append(status_lines(SavedRun(reporter.info.directory)))

    monkeypatch.setattr(server_app.report.Reporter, "round_done", look)
    directory = run(quick)
    for number, lines in enumerate(seen, start=1):
        assert "state     running" in lines
        assert any(line.startswith(f"round     {number} of 2") for line in lines)
    assert len(seen) == 2
    assert "state     finished" in status_lines(SavedRun(directory))


def test_the_status_names_recent_failures_and_changes_nothing(run, failing, printed, capsys):
    directory = run(quick | {"num-rounds": 3})
    files = [path for path in directory.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    capsys.readouterr()
    shown = printed("status", str(directory)).splitlines()
    accuracies = [100 * line["global"]["accuracy"] for line in history_of(directory)]
    points = ", ".join(f"round {n}: {value:.2f} %" for n, value in enumerate(accuracies, start=1))
    assert shown[0] == f"run       {directory}"
    assert shown[1] == "config    fedavg, digits, cnn-fedreco"
    assert shown[3].startswith("round     3 of 3, ")
    assert "so far" not in shown[3]  # it has finished
    assert f"accuracy  global model, test set: {points}" in shown
    assert "left out  round 2: client-0001: no power" in shown
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_status_has_the_privacy_spent_so_far(run, printed, monkeypatch):
    seen, done = [], server_app.report.Reporter.round_done

    def look(reporter, line):
        done(reporter, line)
        seen.append(status_lines(SavedRun(reporter.info.directory)))

    monkeypatch.setattr(server_app.report, "WRITE_EVERY_S", -1)
    monkeypatch.setattr(server_app.report.Reporter, "round_done", look)
    directory = run(quick | {"method": "fedreco", "privacy.epsilon": 0.5, "privacy.delta": 1e-6})
    spent = json.loads((directory / "summary.json").read_text())["privacy"]
    release, sentence = "privacy   epsilon 0.5, delta 1e-06 a release; composed over", "releases:"
    (first,), (last,) = ([x for x in lines if x.startswith("privacy")] for lines in seen)
    assert first.startswith(f"{release} 1 {sentence} epsilon 0.50, delta 1e-06")
    total = f"epsilon {spent['composed']['epsilon']:.2f}, delta 1e-06"
    assert last == f"{release} 2 {sentence} {total}"
    assert json.loads(printed("status", str(directory), "--json"))["privacy"] == spent
    (directory / "summary.json").write_text('{"status": "finished", "privacy": {"composed": 1}}')
    assert not any(line.startswith("privacy") for line in status_lines(SavedRun(directory)))


def test_the_status_can_be_read_by_a_program(trained, printed):
    status = json.loads(printed("status", str(trained), "--json"))
    history = history_of(trained)
    assert (status["state"], status["rounds"], status["num_rounds"]) == ("finished", 2, 2)
    assert status["accuracy"] == history[-1]["global"]["accuracy"]
    seconds = sum(sum(line["seconds"].values()) for line in history)
    assert status["seconds"] == pytest.approx(seconds, abs=0.01)
    assert status["left_out"] == {"1": {}, "2": {}}


@pytest.mark.parametrize("command", [["status"], ["watch", "--once"]])
def test_a_history_that_is_shorter_than_its_finished_run_is_named(two, printed, command):
    """The run was shown as finished, in round 0 of all."""
    (two / "one" / "history.jsonl").write_text("")
    lost = "history.jsonl ends at round 0, but the run has finished"
    assert lost in " ".join(printed(*command, str(two / "one")).split())
    assert lost not in " ".join(printed(*command, str(two / "other")).split())


@pytest.mark.parametrize("command", ["list", "compare"])
def test_tables_name_a_history_that_is_shorter_than_its_finished_run(two, printed, command):
    """Its last round looked like the run's: without a word, as the final accuracy."""
    path = two / "one" / "history.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    runs = ["one", "other"] if command == "compare" else []
    lines = printed(command, *runs).splitlines()
    found = [line.partition(": ") for line in lines if "are lost" in line]
    assert [(name, text[:46]) for name, _, text in found] == [
        ("one", "history.jsonl ends at round 1, but the run has")
    ]


@pytest.mark.parametrize("command", ["list", "compare"])
def test_tables_name_a_history_that_lacks_rounds_before_its_last(two, printed, command):
    """A run resumed after damage: the best accuracy, for example, may have been in a lost round."""
    path = two / "one" / "history.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    runs = ["one", "other"] if command == "compare" else []
    lines = [line for line in printed(command, *runs).splitlines() if "history.jsonl" in line]
    (name, _, found), *others = (line.partition(": ") for line in lines)
    assert (name, others) == ("one", [])
    assert found.startswith("history.jsonl lacks 1 of the first 2 rounds: the best accuracy and")
    assert status_lines(SavedRun(two / "one"))[-1] == f"damaged   {found}"


def test_a_program_reads_that_a_history_is_shorter_than_its_finished_run(two, printed):
    (two / "one" / "history.jsonl").write_text("")
    (two / "other" / "config.json").write_text("damaged")
    lost = {row["run"]: row["lost_rounds"] for row in json.loads(printed("list", "--json"))}
    assert (lost["one"][:33], lost["other"]) == ("history.jsonl ends at round 0, bu", "")


def test_a_damaged_line_of_a_history_is_named_in_the_list(two, printed):
    """It said that the history ends at round 0, although only one line was damaged."""
    path = two / "one" / "history.jsonl"
    path.write_text("damaged\n" + "".join(path.read_text().splitlines(keepends=True)[1:]))
    (line,) = (line for line in printed("list").splitlines() if "history.jsonl" in line)
    assert line.startswith("one: history.jsonl, line 1 is damaged: ")
    assert line.endswith("; put back a copy of the file if there is one")


def test_a_run_elsewhere_is_named_by_its_path(two, tmp_path, capsys):
    elsewhere = tmp_path / "my runs" / "one"
    shutil.copytree(two / "one", elsewhere)
    for directory, reference in ((two / "one", "one"), (elsewhere, f"'{elsewhere}'")):
        terminal = Terminal(2)
        terminal.begin(directory, 2)
        terminal.finished()
        terminal.stopped()
        said = capsys.readouterr().out
        assert f"see keel status, compare, predict, export {reference}\n" in said
        assert f"to continue: keel resume {reference}\n" in said
        (directory / "summary.json").write_text('{"status": "stopped"}')
        assert status_lines(SavedRun(directory))[-1] == f"resume    keel resume {reference}"


def test_without_a_name_the_status_is_of_the_run_that_changed_last(two, printed):
    later = time.time() + 60
    for name in ("one", "other"):
        os.utime(two / name / "history.jsonl", (later, later))
        later += 60
        assert printed("status").startswith(f"run       {two / name}\n")


def test_runs_are_found_by_path_name_and_unique_beginning(two, tmp_path):
    assert find_run(two / "one").directory == find_run("one").directory == two / "one"
    assert find_run("ot").name == "other"
    with pytest.raises(ValueError, match="'o' begins the names of 2 runs: one, other"):
        find_run("o")
    with pytest.raises(ValueError, match="there is no run 'third'"):
        find_run("third")
    (two / "oth").mkdir()  # a run that lost its config: "other" is not meant
    for name in (tmp_path, "oth"):
        with pytest.raises(ValueError, match=r"has no config\.json"):
            find_run(name)


@pytest.mark.parametrize("command", [["diagnose"], ["experiments", "verify"], ["status"]])
def test_every_command_finds_a_run_by_its_name(two, command, refusal, capsys):
    (two / "one" / "model.safetensors").unlink()  # enough to tell that it was found
    (two / "one" / "history.jsonl").write_text("{}\n")
    assert main([*command, "on"]) in (1, 2)
    captured = capsys.readouterr()
    assert str(two / "one") in " ".join((captured.out + captured.err).split())
    assert refusal(*command, "nope") == (
        f"error: there is no run 'nope' in {two}; `keel list` shows what there is\n"
    )


def test_no_name_is_the_run_that_changed_last_and_not_this_directory(two, monkeypatch, printed):
    monkeypatch.chdir(two)
    os.utime(two / "one" / "history.jsonl", (2e9, 2e9))
    assert printed("status").startswith(f"run       {two / 'one'}\n")


def test_a_damaged_manifest_is_set_aside_on_a_resume(home, trained, no_pictures, caplog):
    copy = shutil.copytree(trained, home / "runs" / "one")
    (copy / "manifest.json").write_text("[]")
    assert main(["resume", "one", "num-rounds=3"]) == 0
    assert "manifest.json is damaged: it is not a JSON object" in caplog.text
    assert (copy / "manifest.json.damaged").read_text() == "[]"


def test_a_cluster_that_is_gone_leaves_the_run_as_it_was(home, trained, refusal):
    copy = shutil.copytree(trained, home / "runs" / "one")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal("resume", "one", "num-rounds=3", "--engine", "flower", "--ray", address)
    assert said.startswith(f"error: --ray {address}: nothing listens there")
    files = sorted(path.relative_to(trained) for path in trained.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file())
    assert all((trained / name).read_bytes() == (copy / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("home", "code"), [("{}/file/home", 1), ("/proc/none", 2), ("/proc/none/home", 2)]
)
def test_a_directory_that_cannot_be_written_names_its_variable(
    home, code, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KEEL_HOME", home.format(tmp_path))
    assert main(["run", "source=digits", f"output-dir={tmp_path}/runs"]) == code
    error = capsys.readouterr().err
    failed = f"{tmp_path}/file/home/" if code == 1 else "/proc/none: "
    assert error.startswith(f"error: {failed}")
    assert "set KEEL_HOME" in error
    assert error.count("\n") == 1


def test_a_home_without_runs_is_one_line(home, refusal, printed):
    assert refusal("status") == (
        f"error: there is no run in {home / 'runs'} yet; `keel run` starts one\n"
    )
    assert f"no runs in {home / 'runs'} yet" in printed("list")
    assert refusal("list", "/nowhere") == "error: /nowhere is not a directory\n"
    assert refusal("status", "/no/where") == "error: /no/where does not exist\n"
    assert refusal("status", __file__) == f"error: {__file__} is a file: expected a run directory\n"


# --- list ----------------------------------------------------------------------------------------


def test_the_list_shows_method_data_rounds_accuracy_and_state(two, printed):
    header, *rows = printed("list").splitlines()
    assert header.split() == ["run", "method", "data", "rounds", "accuracy", "state", "age"]
    accuracy = f"{100 * history_of(two / 'one')[-1]['global']['accuracy']:.2f}"
    found = {row.split()[0]: row.split()[1:7] for row in rows}
    expected = ["fedavg", "digits", "2/2", accuracy, "%", "finished"]
    assert found == {"one": expected, "other": expected}
    [row] = json.loads(printed("list", "--json", "--limit", "1"))
    assert (row["method"], row["rounds"], row["state"]) == ("fedavg", 2, "finished")
    assert main(["list", "--limit", "-1"]) == 2


def test_the_list_holds_one_history_at_a_time(two, monkeypatch, capsys):
    read, found = keel.runs.read_history, []

    class Lines(list):  # a plain list has no weak references
        pass

    def noted(path):
        assert not [lines for each in found if (lines := each()) is not None]
        lines = Lines(read(path))
        found.append(weakref.ref(lines))
        return lines

    monkeypatch.setattr(keel.runs, "read_history", noted)
    assert main(["list"]) == 0
    assert len(found) == 2


LINE = {"round": 1, "losses": {}, "seconds": {}, "left_out": {}}  # as none is written: shorter
DAMAGE = {
    "summary.json": ("", "{", "[]", '{"status": 3}', "\x00"),
    "config.json": ("", "{}", "[]", '{"config": 3}', '{"config": {}, "overrides": []}'),
    "history.jsonl": (
        *("5\n", "{\n", '{"round": "x"}\n', "[]\n{}\n"),
        f"{json.dumps(LINE | {'seconds': {'a': math.inf}})}\n",
        f"{json.dumps(LINE | {'backed_off': [1]})}\n",
        f"{json.dumps(LINE)}\n",
    ),
    "roster.json": ("", "{"),
}


@pytest.mark.parametrize(("file", "content"), [(f, c) for f in DAMAGE for c in DAMAGE[f]])
def test_a_damaged_file_breaks_no_list(two, printed, capsys, monkeypatch, file, content):
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    (two / "one" / file).write_text(content)
    shown = printed("list")
    assert "one " in shown
    assert "other" in shown
    states = {row["run"]: row["state"] for row in json.loads(printed("list", "--json"))}
    assert states["other"] == "finished"
    if file == "config.json" and content != '{"config": {}, "overrides": []}':
        assert states["one"] == "config.json is damaged"
    for command in (["status", "one"], ["compare", "one", "other"], ["export", "one", "--to=csv"]):
        main(command)  # whatever it answers, no traceback
        assert capsys.readouterr().err.count("\n") <= 1


def test_the_plot_tells_repeated_runs_apart(two):
    """Two curves had the same label."""
    shutil.copytree(two / "one", two / "again")
    runs = [SavedRun(two / name) for name in ("one", "again", "other")]
    assert labels_of(runs, ["lr"]) == ["one", "again", "lr 0.2"]


def test_every_run_is_in_the_legend_of_a_comparison_whatever_its_name(two, monkeypatch, capsys):
    """matplotlib left out `_one`, and ended in a traceback at bytes that are no text."""
    odd, shown = ["_one", os.fsdecode(b"b\xffd"), "long-" * 48], []
    for name in odd:
        shutil.copytree(two / "one", two / name)
    saved = Figure.savefig

    def looking(figure, *what, **how):
        shown.extend(text.get_text() for text in figure.axes[0].get_legend().get_texts())
        saved(figure, *what, **how)

    monkeypatch.setattr(Figure, "savefig", looking)
    assert main(["compare", "one", *odd]) == 0
    assert shown[:3] == ["one", " _one", "b d"]
    assert re.fullmatch("(long-)+.*….*-long-", shown[3])
    assert len(shown[3]) == 60


def test_a_command_quotes_the_name_of_a_directory_that_was_renamed(two):
    (two / "one").rename(two / "my run")
    assert SavedRun(two / "my run").reference == "'my run'"


@pytest.mark.parametrize(
    ("file", "state"),
    [
        ("config.json", "config.json: Permission denied"),
        ("summary.json", "summary.json: Permission denied"),
        ("manifest.json", "finished"),
        ("history.jsonl", "finished"),
    ],
)
def test_a_run_of_another_user_breaks_no_list(two, printed, monkeypatch, file, state):
    """Where its config or manifest may not be read, no run was listed."""
    refused = two / "one" / file
    (two / "one" / "manifest.json").touch()

    def refusing(read):
        def read_or_refuse(path, *how):
            if path == refused:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path, *how)

        return read_or_refuse

    for name in ("read_text", "read_bytes"):  # the tests may run as root, who may read all
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    rows = {row["run"]: row for row in json.loads(printed("list", "--json"))}
    assert {run: row["state"] for run, row in rows.items()} == {"one": state, "other": "finished"}
    # nothing of it is lost
    assert rows["one"]["lost_rounds"] in ("", "history.jsonl: Permission denied")


def test_a_run_directory_is_not_called_empty(two, printed, refusal, tmp_path):
    """`keel run` was said to start a run there."""
    run, empty = two / "one", tmp_path / "empty"
    empty.mkdir()
    said = f"error: {run} is a run directory: `keel status {run}` shows it\n"
    assert refusal("list", str(run)) == said
    assert printed("list", str(empty)) == f"no runs in {empty}\n"


def test_one_very_long_name_hides_no_column(two, printed, monkeypatch):
    """Of all runs only the names were listed."""
    name = "long-" * 50
    (two / "one").rename(two / name)
    lines = printed("list").splitlines()
    assert lines[0].split() == ["run", "method", "data", "rounds", "accuracy", "state", "age"]
    [row] = [line for line in lines if "…" in line]
    beginning = row.partition("…")[0]
    assert name.startswith(beginning)
    assert len(beginning) == 119
    assert f"{two / name}" in printed("status", beginning)
    assert "state" in printed("compare", beginning, "other").splitlines()[0]


def test_a_directory_that_cannot_be_looked_into_is_listed(two, printed, monkeypatch, refusal):
    """It was left out, as if it were not there."""
    theirs, stat = two / "theirs", os.stat
    theirs.mkdir()

    def refusing(call):
        def call_or_refuse(path, *args, **options):
            if Path(str(path)).parent == theirs:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **options)

        return call_or_refuse

    monkeypatch.setattr(os, "access", lambda path, mode: theirs not in (path, *path.parents))
    monkeypatch.setattr(os, "stat", refusing(stat))
    monkeypatch.setattr(Path, "read_text", refusing(Path.read_text))
    monkeypatch.setattr(Path, "read_bytes", refusing(Path.read_bytes))
    states = {row["run"]: row["state"] for row in json.loads(printed("list", "--json"))}
    refused = "config.json: Permission denied"
    assert states == {"theirs": refused, "one": "finished", "other": "finished"}
    assert refusal("stop") == (
        f"error: no run in {two} can be stopped; `keel list` shows what there is\n"
    )
    assert "can be resumed; `keel list` shows" in refusal("resume")


@pytest.mark.parametrize("file", ["summary.json", "history.jsonl", "config.json", ".lock"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_plain_file_breaks_no_list(two, printed, capsys, monkeypatch, file, make):
    """A pipe was waited for; `keel watch` ended with a StopIteration."""
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    path = two / "one" / file
    path.unlink(missing_ok=True)
    make(path)
    rows = {row["run"]: row for row in json.loads(printed("list", "--json"))}
    assert rows["other"]["state"] == "finished"
    if file.endswith(".json"):
        assert rows["one"]["state"] == f"{file} is damaged"
    for command in (["status", "one"], ["compare", "one", "other"], ["watch", "one"]):
        main(command)  # whatever it answers, no traceback
        assert capsys.readouterr().err.count("\n") <= 1


def test_a_runs_files_send_the_terminal_no_control_characters(two, capsys, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    hostile, one = "\x1b]0;title\x07\x1b[31m[red]", two / "one"
    config = json.loads((one / "config.json").read_text())
    config["config"] |= {"method": hostile, "source": hostile, "model": hostile}
    (one / "config.json").write_text(json.dumps(config))
    (one / "summary.json").write_text(json.dumps({"status": hostile, "num_rounds": 2}))
    line = LINE | {"round": 3, "left_out": {hostile: hostile}, "backed_off": [hostile]}
    append_round(one, line)
    one.rename(two / f"one{hostile}")
    for command in (["list"], ["status", "one"], ["compare", "one", "other"], ["stop", "one"]):
        main(command)
        shown = "".join(capsys.readouterr())
        assert "title" in shown
        assert "\x1b" not in shown
        assert "\x07" not in shown


@pytest.mark.parametrize("file", ["summary.json", "history.jsonl", "roster.json"])
def test_a_missing_file_breaks_no_list(two, printed, file):
    (two / "one" / file).unlink()
    assert "one " in printed("list")
    if file == "summary.json":
        assert SavedRun(two / "one").state == "interrupted"


def test_a_finished_run_has_a_status_whatever_num_rounds_is(two, printed):
    (two / "one" / "config.json").write_text('{"config": {"num-rounds": "many"}, "overrides": {}}')
    assert "round     2 of many" in printed("status", "one")


def test_runs_are_sorted_by_their_last_change(two):
    os.utime(two / "one" / "history.jsonl", (time.time() + 60, time.time() + 60))
    assert [run.name for run in all_runs()] == ["one", "other"]


# --- stop ----------------------------------------------------------------------------------------


def test_a_run_that_is_removed_while_runs_are_listed_breaks_no_list(two, monkeypatch, printed):
    find, one = Path.glob, two / "one"

    def removed_once_found(base, pattern):
        found = list(find(base, pattern))
        shutil.rmtree(one, ignore_errors=True)
        return iter(found)

    monkeypatch.setattr(Path, "glob", removed_once_found)
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as it was a moment ago
    assert "other" in printed("list")


def test_a_run_that_is_not_running_cannot_be_stopped(two, refusal):
    assert refusal("stop", "one") == "error: one is not running: finished\n"


@contextmanager
def left_over(name: str, sockets: Path | str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that a killed `keel run --engine flower` of this run left behind.

    sockets: the folder of Ray's.
    """
    folder, mark = engine_folder(name), f"left-over-{name}-{os.getpid()}"
    folder.mkdir(parents=True)
    (folder / "mark").write_text(f"{mark}\n{sockets}" if sockets else mark)
    with subprocess.Popen(["sleep", "100"], env=os.environ | {MARK: mark}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_stop_ends_the_superlink_of_a_killed_keel_run_after_its_run_has_finished(
    two, home, printed, refusal
):
    sockets = home / "keel-ray-x"
    (sockets / "session").mkdir(parents=True)
    with left_over("one", sockets) as process:
        text = printed("stop", str(two / "one"))
        assert text == "one: finished; ended the Flower processes that it left behind\n"
        assert process.wait(10)
    assert not sockets.exists()
    assert "one is not running: finished" in refusal("stop", str(two / "one"))


def test_stop_ends_a_killed_keel_run_that_has_no_run_directory_yet(home, printed, refusal):
    """Flower takes half a minute to start, and the run would begin after that."""
    assert "there is no run 'new'" in refusal("stop", "new")
    with left_over("new") as process:
        text = printed("stop", "new")
        assert text == "new: had not started; ended the Flower processes that it left behind\n"
        assert process.wait(10)
    assert "there is no run 'new'" in refusal("stop", "new")


def test_stop_and_resume_need_no_name_where_one_run_alone_is_meant(two, refusal, monkeypatch):
    asked = []
    monkeypatch.setattr("keel.cli.run.executed", lambda overrides, options: asked.append(overrides))
    for command in ("stop", "resume"):
        assert f"error: no run in {two} can be {command}" in refusal(command)
    (two / "one" / "summary.json").unlink()
    assert main(["resume", "num-rounds=5"]) == 0
    assert asked == [{"resume": str(two / "one"), "num-rounds": 5}]
    (two / "one" / ".lock").write_text("1")  # a process's id
    with (two / "one" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refusal("resume")  # it is running
        monkeypatch.setattr("keel.cli.runs.is_flower", lambda pid: True)
        assert "one was started by `flwr run`" in refusal("stop")
    (two / "other" / "summary.json").unlink()
    said = refusal("resume")
    assert said.startswith("error: 2 runs can be resumed: ")
    assert said.endswith("; name one: keel resume RUN\n")


def test_the_process_that_holds_a_lock_is_found(trained):
    lock = trained / ".lock"
    code = f"import fcntl; f = open({str(lock)!r}, 'a'); fcntl.flock(f, 2); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert is_locked(lock)
        assert SavedRun(trained).state == "running"
        assert lock_holder(lock) == process.pid
        assert not is_flower(process.pid)
        process.communicate(b"\n")
    assert not is_locked(lock)


def test_reading_a_run_keeps_nobody_from_writing_it(trained):
    assert SavedRun(trained).state == "finished"
    RunDirectory(trained).close()


# --- compare -------------------------------------------------------------------------------------


def test_compare_is_a_table_with_the_keys_that_differ_and_a_plot(two, tmp_path, printed):
    table, plot = tmp_path / "t.csv", tmp_path / "p.png"
    shown = printed("compare", "one", "other", "--csv", str(table), "--plot", str(plot))
    assert "lr=0.1" in shown
    assert "lr=0.2" in shown
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["lr"], row["rounds"]) for row in rows] == [
        ("one", "0.1", "2"),
        ("other", "0.2", "2"),
    ]
    values = [line["global"]["accuracy"] for line in history_of(two / "one")]
    assert float(rows[0]["final"]) == values[-1]
    assert float(rows[0]["best"]) == max(values)
    with Image.open(plot) as image:
        assert image.width > 500


def test_compare_names_runs_without_an_evaluation_and_accuracies_of_different_models(two, printed):
    assert "accuracies of" not in printed("compare", "one", "other")
    shutil.copytree(two / "one", two / "started")
    (two / "started" / "history.jsonl").write_text("")
    path = two / "other" / "history.jsonl"
    lines = [
        line | {"personal": {"mean": 0.5, "worst_decile": 0.1}}
        for line in map(json.loads, path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = printed("compare", "one", "other", "started").splitlines()
    assert "no evaluation yet, so not in the plot: started" in shown
    assert (
        "accuracies of different models: global model, test set: one; "
        "personal models, clients' test parts: other" in shown
    )


def test_a_plot_is_a_file_with_a_suffix(two, tmp_path, refusal):
    bare = tmp_path / "bare"  # Matplotlib would append the suffix
    for given, example in ((tmp_path, tmp_path / "plot.png"), (bare, tmp_path / "bare.png")):
        said = refusal("compare", "one", "-o", str(given))
        assert said == f"error: --output {given}: name a file, such as {example}\n"


def test_a_plot_of_an_unknown_format_is_refused_with_the_option(two, tmp_path, refusal):
    """It was Matplotlib's message alone."""
    plot = tmp_path / "plot.xyz"
    said = refusal("compare", "one", "-o", str(plot))
    assert said.startswith(f"error: --output {plot}: Format 'xyz' is not supported")
    assert not plot.exists()


def test_a_run_without_a_round_has_no_seconds_per_round(tmp_path, printed):
    """They were 0.00, less than those of any other run."""
    make_run(tmp_path / "failed", {"method": "moon"}, 2, num_written=0)
    make_run(tmp_path / "done", {"method": "moon"}, 2)
    table = tmp_path / "table.csv"
    shown = printed(
        "compare", *(str(tmp_path / n) for n in ("failed", "done")), "--csv", str(table)
    )
    assert shown.splitlines()[1].split() == ["failed", "0", "finished"]
    seconds = [row["seconds_per_round"] for row in csv.DictReader(table.open())]
    assert seconds[0] == ""
    assert float(seconds[1]) > 1


def test_a_name_in_the_table_of_compare_is_no_formula(two, tmp_path):
    (two / "one").rename(two / "=HYPERLINK(1)")
    config = two / "other" / "config.json"
    saved = json.loads(config.read_text())
    config.write_text(json.dumps(saved | {"config": saved["config"] | {"=A1": "+A1"}}))
    table = tmp_path / "t.csv"
    assert main(["compare", "=HYPERLINK(1)", "other", "--csv", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["'=HYPERLINK(1)", "other"]
    assert rows[1]["'=A1"] == "'+A1"


def test_table_and_plot_of_compare_leave_out_options_of_other_methods(tmp_path):
    for name, method, mu in (("a", "fedavg", 0.01), ("b", "fedprox", 0.1), ("c", "fedprox", 1.0)):
        make_run(tmp_path / name, {"method": method, "fedprox.mu": mu}, 1)
    table, names = tmp_path / "t.csv", [str(tmp_path / name) for name in "abc"]
    assert main(["compare", *names, "--csv", str(table)]) == 0
    with table.open() as file:
        assert [row["fedprox.mu"] for row in csv.DictReader(file)] == ["", "0.1", "1.0"]
    labels = labels_of([find_run(name) for name in names], ["method", "fedprox.mu"])
    fedprox = [f"method fedprox, fedprox.mu {mu}" for mu in (0.1, 1.0)]
    assert labels == ["method fedavg", *fedprox]


def test_a_comparison_does_not_overwrite_the_plot_of_another(two, home, printed):
    plots = []
    for names in (["one", "other"], ["one"], ["other", "one"], ["one", "other"]):
        plots.append(printed("compare", *names).splitlines()[-1].removeprefix("plot: "))
    assert plots[0] == plots[3]  # the same comparison, drawn again
    assert len(set(plots)) == 3
    assert {str(path) for path in (home / "comparisons").iterdir()} == set(plots)


def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_name(two, monkeypatch, printed):
    long = "20261123-120000-fedintr-table1-cifar100-second"
    (two / "one").rename(two / long)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["list"], ["compare", long, "other"]):
        lines = re.sub(r"\x1b\[[\d;]*m", "", printed(*words)).splitlines()
        assert max(map(len, lines[:3])) <= 80
        row = next(line.split() for line in lines if line.startswith(long))
        assert "finished" in row
        assert "…" not in row
        assert f"{100 * history_of(two / long)[-1]['global']['accuracy']:.2f}" in row
        assert any(line.startswith("Hidden at this width: ") for line in lines)
    assert f"{long}: lr=0.1" in lines


@pytest.mark.parametrize("width", [1, 20, 30, 40])
def test_a_terminal_as_narrow_as_a_name_gets_the_names(two, monkeypatch, printed, width):
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    (two / "one").rename(two / "one-of-a-long-name")
    for words in (["list"], ["compare", "one", "other"]):
        assert "one-of-a-long-name" in printed(*words)


def test_compare_names_an_option_only_of_the_method_that_has_it(two):
    path = two / "other" / "config.json"
    config = json.loads(path.read_text())
    config["config"] |= {"method": "fedcka", "fedcka.mu": 7.0, "moon.mu": 7.0}
    path.write_text(json.dumps(config))
    configs = [find_run(name).config for name in ("one", "other")]
    assert differing_keys(configs, PLACES) == ["lr", "method"]


# --- predict and export --------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    """Two grey images and a coloured one, of different sizes, as files."""
    rng = np.random.default_rng(0)
    paths = []
    for name, shape in {"a": (32, 32), "b": (50, 40), "c": (28, 28, 3)}.items():
        paths.append(tmp_path / f"{name}.png")
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(paths[-1])
    return paths


def test_predict_says_what_the_model_does(trained, images, printed):
    rows = json.loads(printed("predict", str(trained), *map(str, images), "--json"))
    model = load_model(trained)
    for row, path in zip(rows, images, strict=True):
        probabilities = model.probabilities(np.array(Image.open(path))[None])[0]
        assert row["class"] == model.class_names[int(probabilities.argmax())]
        assert row["probability"] == pytest.approx(float(probabilities.max()), abs=1e-4)


def test_names_in_a_model_of_another_s_are_printed_without_control_characters(two, images, printed):
    (two / "one" / "manifest.json").unlink()
    path = two / "one" / "model.safetensors"
    arrays, about = read_arrays(path)
    num_classes = len(about["classes"].split("\n"))
    names = "\n".join(f"\x1b[2J\x1b[31m\u202e{n}" for n in range(num_classes))
    save_arrays(path, arrays, about | {"classes": names})
    [line] = printed("predict", "one", str(images[0])).splitlines()
    image, name, _ = line.split("\t")
    assert image == str(images[0])
    assert name.isprintable()


def test_a_model_that_was_never_trained_is_refused(two, images, capsys):
    (two / "one" / "history.jsonl").write_text("")  # as of a run that was stopped in round 1
    (two / "one" / "summary.json").write_text('{"status": "stopped"}')
    for words in (["predict", "one", str(images[0])], ["diagnose", "one"]):
        assert main(words) == 2
        assert capsys.readouterr() == (
            "",
            f"error: {two / 'one'}: no round has finished, so its model is not trained; "
            "continue the run with `keel resume one`\n",
        )


def test_the_model_of_a_stopped_run_is_named_as_such(two, images, caplog):
    path = two / "one" / "history.jsonl"
    assert main(["predict", "one", str(images[0])]) == 0
    assert caplog.messages == []
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    (two / "one" / "summary.json").write_text('{"status": "stopped"}')
    assert main(["predict", "one", str(images[0])]) == 0
    assert caplog.messages == [f"{two / 'one'} has finished 1 of 2 rounds: its model is not final"]


@pytest.mark.parametrize("content", [None, b"", b"no image"])
def test_what_is_no_image_is_one_line_naming_it(trained, tmp_path, refusal, content):
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    said = refusal("predict", str(trained), str(path))
    assert str(path) in said


def test_a_named_pipe_is_refused_as_an_image_and_not_waited_for(trained, tmp_path, refusal):
    path = tmp_path / "x.png"
    os.mkfifo(path)
    said = refusal("predict", str(trained), str(path))
    assert said == f"error: {path}: not a plain file: write the image to one\n"


def test_predict_reads_an_image_as_training_does(trained, tmp_path, refusal, capsys):
    """Turned as its EXIF data says; not with 16 bits."""
    grey = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright, turned, deep = (tmp_path / f"{name}.png" for name in ("upright", "turned", "deep"))
    Image.fromarray(grey).save(upright)
    Image.fromarray(grey).transpose(Image.Transpose.ROTATE_90).save(turned, exif=exif)
    assert main(["predict", str(trained), str(upright), str(turned), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["probability"] == second["probability"]
    Image.fromarray(grey.astype(np.uint16) * 257).save(deep)
    assert f"{deep}: its pixels have Pillow's mode 'I;16'; expected" in refusal(
        "predict", str(trained), str(deep)
    )


def test_an_export_to_a_directory_or_of_a_client_s_history_is_refused(trained, tmp_path, refusal):
    assert f"{tmp_path} is a directory: name a file, such as" in refusal(
        "export", str(trained), "--to", "torchscript", "-o", str(tmp_path)
    )
    assert "--client does not apply to --to csv" in refusal(
        "export", str(trained), "--to", "csv", "--client", "foo"
    )


def test_a_run_exports_as_csv(trained, tmp_path, capsys):
    path = tmp_path / "run.csv"
    assert main(["export", str(trained), "--to", "csv", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote 2 rounds of {trained.name}: {path}\n"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for row, line in zip(rows, history_of(trained), strict=True):
        assert int(row["round"]) == line["round"]
        assert float(row["accuracy/global.accuracy"]) == line["global"]["accuracy"]
        assert float(row["loss/global.loss"]) == line["global"]["loss"]


def test_the_csv_has_an_evaluation_s_bytes_and_no_loss_that_is_not_finite(tmp_path):
    run, path = make_run(tmp_path / "a", {"method": "fedavg"}, 1), tmp_path / "run.csv"
    more = {"evaluation_bytes_down": 7, "global": {"accuracy": 0.1, "loss": math.nan}}
    append_round(run, line_of(2, random.Random(0)) | more)
    assert main(["export", str(run), "--to", "csv", "-o", str(path)]) == 0
    with path.open() as file:
        first, second = csv.DictReader(file)
    assert (first["evaluation_bytes_down"], second["evaluation_bytes_down"]) == ("", "7")
    assert second["loss/global.loss"] == ""


def test_the_csv_of_a_run_from_elsewhere_has_no_formula(tmp_path):
    run, path = make_run(tmp_path / "a", {"method": "fedavg"}, 1), tmp_path / "run.csv"
    losses = {"losses": {"supervised": "=HYPERLINK(1)", "penalty": -0.5}}
    append_round(run, line_of(2, random.Random(0)) | losses)
    assert main(["export", str(run), "--to", "csv", "-o", str(path)]) == 0
    with path.open() as file:
        _, row = csv.DictReader(file)
    assert (row["loss/supervised"], row["loss/penalty"]) == ("'=HYPERLINK(1)", "-0.5")


def expected_logits(directory, pixels):
    model = load_model(directory)
    with torch.no_grad():
        return model.network(model.pixels.normalise(pixels)).numpy()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # TorchScript is what is tested
def test_torchscript_gives_the_models_logits(trained, tmp_path):
    path = tmp_path / "model.pt"
    assert main(["export", str(trained), "--to", "torchscript", "-o", str(path)]) == 0
    extra = {"classes.json": ""}
    exported = torch.jit.load(str(path), _extra_files=extra)
    pixels = torch.randint(0, 256, (5, 1, 32, 32), generator=torch.manual_seed(0)).float()
    with torch.no_grad():
        found = exported(pixels).numpy()
    np.testing.assert_allclose(found, expected_logits(trained, pixels), atol=1e-4)
    assert tuple(json.loads(extra["classes.json"])) == load_model(trained).class_names
    with zipfile.ZipFile(path) as exported_files:
        content = b"".join(map(exported_files.read, exported_files.namelist()))
    assert str(app_folder).encode() not in content  # where Keel is may name a user
    assert str(Path(torch.__file__).parent).encode() not in content


@pytest.mark.end_to_end  # imports torch's exporter
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        ["export", "one", "--to", "csv", "--output"],
        ["export", "one", "--to", "torchscript", "--output"],
        ["compare", "one", "other", "--output"],
        ["compare", "one", "other", "--output", "plot.png", "--csv"],
    ],
)
def test_a_full_disk_leaves_the_file_that_was_there(two, words, tmp_path, monkeypatch, capsys):
    """Part of the new one was left, and torch printed a page of C++."""
    path = tmp_path / "file.png"
    path.write_text("old")

    def full(number):
        if path.name in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main([*words, str(path)]) == 1
    assert capsys.readouterr().err == f"error: {path}: No space left on device\n"
    assert path.read_text() == "old"
    assert not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    assert main(["export", str(two / "one"), "--to", "csv", "--output", "/dev/full"]) == 1
    assert capsys.readouterr().err == "error: /dev/full: No space left on device\n"


def test_onnx_gives_the_models_logits(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    path = tmp_path / "model.onnx"
    assert main(["export", str(trained), "--to", "onnx", "-o", str(path)]) == 0
    pixels = torch.randint(0, 256, (5, 1, 32, 32), generator=torch.manual_seed(0)).float()
    [found] = ReferenceEvaluator(str(path)).run(None, {"pixels": pixels.numpy()})
    np.testing.assert_allclose(found, expected_logits(trained, pixels), atol=1e-4)
    [metadata] = [p for p in onnx.load(str(path)).metadata_props if p.key == "classes"]
    assert tuple(json.loads(metadata.value)) == load_model(trained).class_names
    for place in (app_folder, Path(torch.__file__).parent):  # which may name a user
        assert str(place).encode() not in path.read_bytes()


def test_without_the_extra_the_export_says_what_to_install(trained, tmp_path, monkeypatch, refusal):
    monkeypatch.setattr("keel.cli.export.is_installed", lambda name: False)
    assert refusal("export", str(trained), "--to", "onnx", "-o", str(tmp_path / "m")) == (
        "error: --to onnx needs onnx and onnxscript: pip install onnx onnxscript "
        "(Keel's extra export)\n"
    )


def test_an_onnxscript_that_does_not_fit_torch_is_one_line(trained, tmp_path, monkeypatch, refusal):
    """As after an upgrade of torch alone."""

    def export(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'onnxscript.torch_9_9'")

    pytest.importorskip("onnx")
    monkeypatch.setattr("torch.onnx.export", export)
    said = refusal("export", str(trained), "--to", "onnx", "-o", str(tmp_path / "m"))
    assert said.startswith("error: --to onnx: No module named 'onnxscript.torch_9_9'")
    assert "pip install --upgrade onnx onnxscript" in said
    assert said.count("\n") == 1
