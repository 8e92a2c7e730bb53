"""What can be seen of a run while it runs and after: logs, status, summary, roster, events."""

import fcntl
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from run_fixtures import SMALL, history_of, resume, summary_of, wait_until

import server_app.trackers
from client_app.methods.moon import MOON
from keel.runs import SavedRun
from protocol.config import keel_version
from server_app.inline import InlineGrid, run_inline
from server_app.run_directory import RunDirectory
from strategies.average import TooFewRepliesError

root = Path(__file__).parents[2]
quick = {"local-epochs": 0, "num-rounds": 2}


# --- run.log --------------------------------------------------------------------------------------


def test_run_log_has_run_round_and_client_in_every_line_that_is_about_them(run, failing):
    folder = run(quick | {"num-rounds": 3})
    lines = (folder / "run.log").read_text().splitlines()
    form = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ {folder.name} (INFO|WARNING|ERROR) .+"
    assert all(re.fullmatch(form, line) for line in lines)
    assert [line for line in lines if "left out client client-0001: no power" in line]
    for number in (1, 2, 3):
        assert any(f"round {number}/3: " in line for line in lines)
    assert lines[-1].endswith(" INFO finished")


def test_an_error_in_a_methods_file_has_its_line_and_a_traceback_in_run_log(tmp_path, monkeypatch):
    """Two layers for one: `(z,) = batch.reps` is a ValueError, as the mistake of a user is."""
    monkeypatch.setattr(MOON, "layers", lambda self, model: ["conv1", "conv2"])
    with pytest.raises(TooFewRepliesError, match=r"\(client_app/methods/moon.py:\d+\): .*unpack "):
        run_inline(SMALL | {"method": "moon", "output-dir": str(tmp_path)}, 2)
    (log,) = tmp_path.glob("*/run.log")
    assert 'client_app/methods/moon.py", line ' in log.read_text()


def test_a_resumed_run_goes_on_in_the_same_log_and_others_do_not_write_there(run):
    level = logging.getLogger("keel").level
    folder = run(quick)
    before = (folder / "run.log").read_text()
    resume(folder, num_rounds=3)
    run(quick)
    text = (folder / "run.log").read_text()
    assert text.startswith(before)
    assert text.count("finished") == 2
    assert logging.getLogger("keel").level == level


def test_a_look_at_the_status_keeps_nobody_out(run):
    folder = run(quick)
    with (folder / ".lock").open() as held:  # as the status does, for a moment
        fcntl.flock(held, fcntl.LOCK_SH)
        timer = threading.Timer(0.05, fcntl.flock, (held, fcntl.LOCK_UN))
        timer.start()
        RunDirectory(folder).close()
        timer.join(timeout=10)


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(1), "stopped"),
        (MemoryError(), "failed: MemoryError:"),
        (KeyError("no such\nthing"), r"failed: KeyError: 'no such\nthing'"),
        (OSError(28, "No space left on device"), "failed: OSError: [Errno 28] No space left on"),
    ],
)
def test_whatever_ends_a_run_is_in_its_summary(run, tmp_path, monkeypatch, error, status):
    answer = InlineGrid.pull_messages

    def fail_in_round_2(grid, ids):
        rounds = {m.content.config_records["round"].get("round") for m in grid.waiting.values()}
        if 2 in rounds:
            raise error
        return answer(grid, ids)

    monkeypatch.setattr(InlineGrid, "pull_messages", fail_in_round_2)
    with pytest.raises(type(error)):
        run(quick)
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert summary_of(folder)["status"].startswith(status)
    assert len(history_of(folder)) == 1
    assert (folder / "run.log").read_text().splitlines()[-1].endswith(summary_of(folder)["status"])


def test_a_summary_is_there_even_if_the_model_cannot_be_written(run, tmp_path, monkeypatch):
    def full(*what):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server_app.federation.save_arrays", full)
    with pytest.raises(OSError, match="No space"):
        run(quick)
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert summary_of(folder)["rounds"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_from_outside(tmp_path, number):
    """SIGTERM leaves a final status; SIGKILL leaves what the status command makes sense of."""
    words = [f"{k}={json.dumps(v)}" for k, v in (SMALL | quick | {"num-rounds": 10_000}).items()]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "keel", "run", "--engine", "inline", "--clients", "2"),
            *(*words, f"output-dir={json.dumps(str(tmp_path))}"),
        ],
        cwd=root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        histories = partial(tmp_path.glob, "*/history.jsonl")
        wait_until(lambda: any(path.read_text() for path in histories()), process=process)
        [folder] = [path.parent for path in histories()]
        assert SavedRun(folder).state == "running"
        process.send_signal(number)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait(timeout=60)
    rounds = len(history_of(folder))
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert summary_of(folder)["status"] == "stopped"
        assert rounds - summary_of(folder)["rounds"] in (0, 1)  # 1: as the round was recorded
        assert SavedRun(folder).state == "stopped"
    else:
        assert SavedRun(folder).state == "interrupted"


def test_a_process_that_ends_where_no_exception_reaches_the_run_still_says_so(tmp_path):
    """As Flower's simulation, whose ServerApp is a thread: the exit handler is all there is."""
    from server_app.federation import run_federation

    from server_app.inline import simulated_nodes

    handlers, seen = [], []

    class Watched(InlineGrid):
        def pull_messages(self, ids):
            if handlers:
                handlers[0]()
                seen.append(summary_of(next(tmp_path.glob("*")))["status"])
            return super().pull_messages(ids)

    import client_app.app

    grid = Watched(client_app.app.app, simulated_nodes(2))
    folder = run_federation(grid, SMALL | quick | {"output-dir": str(tmp_path)}, handlers.append)
    assert set(seen) == {"stopped"}
    handlers[0]()  # after the end it changes nothing
    assert summary_of(folder.path)["status"] == "finished"


# --- TensorBoard ----------------------------------------------------------------------------------


def test_without_tensorboard_there_is_one_line_that_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(server_app.trackers, "is_installed", lambda name: False)
    with pytest.raises(ValueError) as caught:
        run(quick | {"tracker": "tensorboard"})
    assert str(caught.value).startswith("tracker = 'tensorboard': the package tensorboard is not")
    assert "pip install tensorboard" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_events_are_the_historys_figures_also_after_a_resume(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(quick | {"tracker": "tensorboard"})
    resume(folder, num_rounds=4)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    points = [(e.step, e.value) for e in events.Scalars("accuracy/global.accuracy")]
    expected = [(line["round"], line["global"]["accuracy"]) for line in history_of(folder)]
    assert [n for n, _ in points] == [1, 2, 3, 4]
    assert points == [(n, pytest.approx(value)) for n, value in expected]
    assert {"seconds/training", "left_out", "bytes_up"} <= set(events.Tags()["scalars"])


# --- roster.json ----------------------------------------------------------------------------------


def test_the_roster_is_in_the_folder(tmp_path):
    folder = run_inline(SMALL | quick | {"output-dir": str(tmp_path)}, 3)
    rows = json.loads((folder / "roster.json").read_text())
    assert [row["client"] for row in rows] == [f"client-000{i}" for i in range(3)]
    assert sum(sum(row["label_counts"]) for row in rows) == 287  # a fifth of the training digits
    for row in rows:
        assert row["image_shape"] == [1, 32, 32]
        assert row["model"] == "cnn-fedreco"
        assert row["versions"].startswith("flwr 1.39")
        assert row["keel"] == keel_version()
