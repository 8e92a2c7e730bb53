"""`keel status`, `list`, `stop`, `compare`, `predict`, `export`: reading whatever runs hold."""

import csv
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from run_fixtures import history_of, summary_of, without_pictures

import server_app.report
from keel.cli.main import main
from keel.cli.status import status_lines, status_row
from keel.cli.stop import is_flower
from keel.results import label_of
from keel.saved_runs import (
    SavedRun,
    all_runs,
    differing_keys,
    find_run,
    holders,
    is_locked,
    setting_of,
)
from server_app.load_model import load_model
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
    """Two runs in the home, equal but for lr."""
    for name, lr in (("one", 0.1), ("other", 0.2)):
        copy = shutil.copytree(trained, home / "runs" / name)
        config = json.loads((copy / "config.json").read_text())
        config["config"]["lr"] = lr
        (copy / "config.json").write_text(json.dumps(config))
    return home / "runs"


# --- status --------------------------------------------------------------------------------------


def test_the_status_is_that_of_every_round_names_failures_and_changes_nothing(
    run, failing, printed, monkeypatch
):
    seen, done = [], server_app.report.Reporter.round_done

    def look(reporter, line):
        done(reporter, line)
        seen.append(status_row(SavedRun(reporter.info.directory)))

    monkeypatch.setattr(server_app.report.Reporter, "round_done", look)
    directory = run(quick | {"num-rounds": 3})
    assert [(row["state"], row["rounds"]) for row in seen] == [("running", n) for n in (1, 2, 3)]
    files = [path for path in directory.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    shown = printed("status", str(directory))
    for line in history_of(directory):
        assert f"round {line['round']}: {100 * line['global']['accuracy']:.2f} %" in shown
    assert "round 2: client-0001: no power" in shown
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    status = json.loads(printed("status", str(directory), "--json"))
    assert (status["state"], status["rounds"], status["num_rounds"]) == ("finished", 3, 3)
    assert status["accuracy"] == history_of(directory)[-1]["global"]["accuracy"]
    assert status["left_out"] == {"1": {}, "2": {"client-0001": "no power"}, "3": {}}


def test_the_status_has_the_privacy_spent(run, printed):
    directory = run(quick | {"method": "fedreco", "privacy.epsilon": 0.5, "privacy.delta": 1e-6})
    spent = summary_of(directory)["privacy"]
    assert f"epsilon {spent['composed']['epsilon']:.2f}" in printed("status", str(directory))
    assert json.loads(printed("status", str(directory), "--json"))["privacy"] == spent


def test_runs_are_found_by_path_name_and_unique_beginning(two, tmp_path, printed):
    assert find_run(two / "one").directory == find_run("one").directory == two / "one"
    assert find_run("ot").name == "other"
    for name in ("o", "third", tmp_path):
        with pytest.raises(ValueError, match=str(name)):
            find_run(name)
    os.utime(two / "one" / "history.jsonl", (time.time() + 60, time.time() + 60))
    assert printed("status").startswith(f"run       {two / 'one'}\n")  # that changed last
    assert [run.name for run in all_runs()] == ["one", "other"]


def test_a_run_elsewhere_is_named_by_its_path(two, tmp_path):
    elsewhere = shutil.copytree(two / "one", tmp_path / "my runs" / "one")
    for directory, reference in ((two / "one", "one"), (elsewhere, f"'{elsewhere}'")):
        (directory / "summary.json").write_text('{"status": "stopped"}')
        assert status_lines(SavedRun(directory))[-1].endswith(f" keel resume {reference}")


# --- list ----------------------------------------------------------------------------------------


def test_the_list_shows_method_data_rounds_accuracy_and_state(two, printed):
    _, header, _, *rows = printed("list").splitlines()
    assert header.split() == ["run", "method", "data", "rounds", "accuracy", "state", "age"]
    accuracy = f"{100 * history_of(two / 'one')[-1]['global']['accuracy']:.2f}"
    found = {row.split()[0]: row.split()[1:7] for row in rows if row}
    expected = ["fedavg", "digits", "2/2", accuracy, "%", "finished"]
    assert found == {"one": expected, "other": expected}
    [row] = json.loads(printed("list", "--json", "--limit", "1"))
    assert (row["method"], row["rounds"], row["state"]) == ("fedavg", 2, "finished")


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "summary.json", "history.jsonl"])
@pytest.mark.parametrize("content", ["", "[]", '{"round": 2}\n'])
def test_a_damaged_file_breaks_no_list(two, printed, capsys, monkeypatch, name, content):
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    (two / "one" / name).write_text(content)
    states = {row["run"]: row["state"] for row in json.loads(printed("list", "--json"))}
    assert states["other"] == "finished"
    assert "one" in printed("list")
    for command in (["status", "one"], ["compare", "one", "other"], ["export", "one", "--to=csv"]):
        main(command)  # whatever it answers, no traceback
        assert capsys.readouterr().err.count("\n") <= 1
    if name == "history.jsonl":
        assert name in states["one"]


def test_a_home_without_runs_and_a_run_of_another_layout_are_one_line(home, refusal, printed):
    assert str(home / "runs") in refusal("status")
    assert str(home / "runs") in printed("list")
    assert "/nowhere" in refusal("list", "/nowhere")
    manifest = make_run(home / "runs" / "one", {}, 1) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"layout": 1}))
    [row] = json.loads(printed("list", "--json"))
    assert "layout 1" in row["state"]
    assert "layout 1" in refusal("status", "one")


def test_a_runs_files_send_the_terminal_no_control_characters(two, capsys, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    hostile, one = "\x1b]0;title\x07\x1b[31m[red]", two / "one"
    config = json.loads((one / "config.json").read_text())
    config["config"] |= {"method": hostile, "source": hostile, "model": hostile}
    (one / "config.json").write_text(json.dumps(config))
    (one / "summary.json").write_text(json.dumps({"status": hostile}))
    line = line_of(3, random.Random(0)) | {"left_out": {hostile: hostile}, "backed_off": [hostile]}
    append_round(one, line)
    one.rename(two / f"one{hostile}")
    for command in (["list"], ["status", "one"], ["compare", "one", "other"], ["stop", "one"]):
        main(command)
        shown = "".join(capsys.readouterr())
        assert "title" in shown
        assert "\x1b" not in shown
        assert "\x07" not in shown


# --- stop ----------------------------------------------------------------------------------------


def test_stop_and_resume_need_no_name_where_one_run_alone_is_meant(two, refusal, monkeypatch):
    asked = []
    monkeypatch.setattr("keel.cli.run.executed", lambda overrides, options: asked.append(overrides))
    for command in ("stop", "resume"):
        refusal(command)
    (two / "one" / "summary.json").unlink()
    assert main(["resume", "num-rounds=5"]) == 0
    assert asked == [{"resume": str(two / "one"), "num-rounds": 5}]
    (two / "other" / "summary.json").unlink()
    assert "one" in refusal("resume")


def test_the_process_that_holds_a_lock_is_found(trained):
    lock = trained / ".lock"
    code = f"import fcntl; f = open({str(lock)!r}, 'a'); fcntl.flock(f, 2); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert is_locked(lock)
        assert SavedRun(trained).state == "running"
        assert holders(lock) == [process.pid]
        assert not is_flower(process.pid)
        process.communicate(b"\n")
    assert not is_locked(lock)


def test_a_run_of_flwr_run_is_left_to_flwr_stop(two, tmp_path, refusal):
    script = tmp_path / "flower-superexec"
    script.write_text("import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print()\n"
                      "input()")  # fmt: skip
    with subprocess.Popen(
        [sys.executable, script, two / "one" / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        assert "flwr stop" in refusal("stop", "one")
        process.communicate(b"\n")


# --- compare -------------------------------------------------------------------------------------


def test_compare_is_a_table_with_the_keys_that_differ_and_a_plot(two, tmp_path, printed):
    table, plot = tmp_path / "t.csv", tmp_path / "p.png"
    shown = printed("compare", "one", "other", "--csv", str(table), "-o", str(plot))
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


def test_compare_names_runs_without_an_evaluation_and_accuracies_of_different_models(
    tmp_path, printed, caplog
):
    make_run(tmp_path / "one", {}, 2)
    make_run(tmp_path / "own", {}, 2, curve="personal.mean")
    make_run(tmp_path / "started", {}, 2, num_written=0, status="stopped")
    shown = printed("compare", *(str(tmp_path / name) for name in ("one", "own", "started")))
    *_, different, _ = shown.splitlines()
    assert "one" in different
    assert "own" in different
    [warning] = caplog.messages
    assert warning.endswith(": started")


@pytest.mark.parametrize("name", ["", "bare", "plot.xyz"])
def test_a_plot_is_a_file_of_a_known_format(two, tmp_path, refusal, name):
    assert f"--output {tmp_path / name}" in refusal("compare", "one", "-o", str(tmp_path / name))


def test_options_of_other_methods_are_left_out(tmp_path):
    for name, method, mu in (("a", "fedavg", 0.01), ("b", "fedprox", 0.1), ("c", "fedprox", 1.0)):
        make_run(tmp_path / name, {"method": method, "fedprox.mu": mu}, 1)
    table, names = tmp_path / "t.csv", [str(tmp_path / name) for name in "abc"]
    assert main(["compare", *names, "--csv", str(table)]) == 0
    with table.open() as file:
        assert [row["fedprox.mu"] for row in csv.DictReader(file)] == ["", "0.1", "1.0"]
    found = [find_run(name) for name in names]
    keys = differing_keys([setting_of(run) for run in found], frozenset())
    assert keys == ["fedprox.mu", "method"]
    labels = ["fedavg", "fedprox.mu=0.1, fedprox", "fedprox.mu=1.0, fedprox"]
    assert [label_of(run, keys) for run in found] == labels


def test_runs_that_differ_in_an_own_methods_option_are_lines_of_their_own(
    tmp_path, printed, monkeypatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *where, **how: drawn.append(figure))
    make_run(tmp_path / "plain", {}, 2)
    for mu in (0.1, 1.0):
        make_run(tmp_path / f"m{mu}", {"method": "mine.py:FedPull", "fedpull.mu": mu}, 2)
    printed("compare", *(str(tmp_path / name) for name in ("plain", "m0.1", "m1.0")))
    assert len(drawn[0].axes[0].get_legend().get_texts()) == 3


def test_a_comparison_does_not_overwrite_the_plot_of_another(two, home, printed, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *where, **how: None)
    plots = [
        printed("compare", *names).splitlines()[-1].removeprefix("plot: ")
        for names in (["one", "other"], ["one"], ["other", "one"], ["one", "other"])
    ]
    assert plots[0] == plots[3]  # the same comparison, drawn again
    assert {str(path) for path in (home / "comparisons").iterdir()} == set(plots)


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


@pytest.mark.parametrize("content", [None, b"", b"no image"])
def test_what_is_no_image_is_one_line_naming_it(trained, tmp_path, refusal, content):
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in refusal("predict", str(trained), str(path))


def test_an_export_to_a_directory_or_of_a_client_s_history_is_refused(trained, tmp_path, refusal):
    words = ["export", str(trained), "--to"]
    assert str(tmp_path) in refusal(*words, "onnx", "-o", str(tmp_path))
    assert "--client" in refusal(*words, "csv", "--client", "foo")


def test_a_run_exports_as_csv_without_formulas_and_numbers_that_are_not_finite(tmp_path, printed):
    run, path = make_run(tmp_path / "a", {"method": "fedavg"}, 1, status="stopped"), tmp_path / "c"
    more = {
        "global": {"accuracy": 0.1, "loss": math.nan},
        "losses": {"supervised": "=HYPERLINK(1)"},
    }
    append_round(run, line_of(2, random.Random(0)) | more)
    printed("export", str(run), "--to", "csv", "-o", str(path))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for row, line in zip(rows, history_of(run), strict=True):
        assert int(row["round"]) == line["round"]
        assert float(row["accuracy/global.accuracy"]) == line["global"]["accuracy"]
    assert (rows[1]["loss/global.loss"], rows[1]["loss/supervised"]) == ("", "'=HYPERLINK(1)")
