"""What a run leaves however it ends: logs, status, roster."""

import json
import re
from pathlib import Path

import pytest
from run_fixtures import SMALL, history_of, summary_of

from client_app.methods.moon import MOON
from protocol.config import keel_version
from server_app.inline import run_inline
from server_app.pool import InlineWorkers
from strategies.validation import TooFewRepliesError

root = Path(__file__).parents[2]
quick = {"local-epochs": 0, "num-rounds": 2}


def test_every_line_of_run_log_names_the_run_and_those_about_a_client_the_client(run, failing):
    folder = run(quick | {"num-rounds": 3})
    lines = (folder / "run.log").read_text().splitlines()
    form = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ {folder.name} (INFO|WARNING|ERROR) .+"
    assert all(re.fullmatch(form, line) for line in lines)
    assert [line for line in lines if "client-0001: no power" in line]
    assert lines[-1].endswith(" INFO finished")


def test_an_error_in_a_methods_file_has_its_line_and_a_traceback_in_run_log(tmp_path, monkeypatch):
    """Two layers for one: `(z,) = batch.reps` is a ValueError, as the mistake of a user is."""
    monkeypatch.setattr(MOON, "layers", lambda self, model: ["conv1", "conv2"])
    with pytest.raises(TooFewRepliesError, match=r"client_app/methods/moon.py:\d+"):
        run_inline(SMALL | {"method": "moon", "output-dir": str(tmp_path)}, 2)
    (log,) = tmp_path.glob("*/run.log")
    assert 'client_app/methods/moon.py", line ' in log.read_text()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), "stopped"),
        (SystemExit(1), "stopped"),
        (MemoryError(), "failed: MemoryError"),
        (OSError(28, "No space left on device"), "failed: OSError: [Errno 28] No space left on"),
    ],
)
def test_whatever_ends_a_run_is_in_its_summary(run, tmp_path, monkeypatch, error, status):
    answers, asked = InlineWorkers.answers, []

    def fail_in_round_2(workers, contents, kind, seconds):
        if kind == "train":
            asked.append(kind)
        if len(asked) == 2:
            raise error
        return answers(workers, contents, kind, seconds)

    monkeypatch.setattr(InlineWorkers, "answers", fail_in_round_2)
    with pytest.raises(type(error)):
        run(quick)
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert summary_of(folder)["status"].startswith(status)
    assert len(history_of(folder)) == 1
    assert (folder / "run.log").read_text().splitlines()[-1].endswith(summary_of(folder)["status"])


def test_the_roster_is_in_the_folder(tmp_path):
    folder = run_inline(SMALL | quick | {"output-dir": str(tmp_path)}, 3)
    rows = json.loads((folder / "roster.json").read_text())
    assert [row["client"] for row in rows] == [f"client-000{i}" for i in range(3)]
    assert sum(sum(row["label_counts"]) for row in rows) == 143  # a tenth of the training digits
    for row in rows:
        assert row["image_shape"] == [1, 16, 16]
        assert row["model"] == "cnn-fedreco"
        assert row["keel"] == keel_version()
