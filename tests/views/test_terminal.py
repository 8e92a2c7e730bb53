"""`keel watch`: one run in the terminal."""

import fcntl
import io
import json
import threading
from random import Random

import pytest
from rich.console import Console
from run_fixtures import wait_until
from views_fixtures import HOSTILE, damaged_runs

from keel.cli.main import main
from keel.views import terminal
from keel.views.terminal import clients_at_work, sparkline, watch_run
from tests.tools.run_directories import append_round, line_of, make_run


def shown(directory, out=None, width=140, **options):
    out = out or io.StringIO()
    watch_run(directory, console=Console(file=out, width=width, **options))
    return out.getvalue()


def test_a_sparkline_goes_from_the_lowest_to_the_highest():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0] * 50 + [1] * 50, width=4) == "▁▁██"


def test_a_finished_run_is_shown_once(tmp_path, capsys):
    make_run(tmp_path / "a", {"method": "moon"}, 5)
    assert main(["watch", str(tmp_path / "a")]) in (0, None)
    text = capsys.readouterr().out
    assert "a  finished" in text
    assert "round 5/5" in text
    assert "global model, test set (%)" in text


def test_a_run_below_the_run_is_not_shown_for_it(tmp_path):
    run = make_run(tmp_path / "a", {"method": "moon"}, 5)
    make_run(run / "b", {"method": "moon"}, 3)
    text = shown(run)
    assert "a  finished" in text
    assert "round 5/5" in text


def test_clients_at_work_are_those_of_the_round_that_is_not_done(tmp_path):
    sent = {"event": "sent", "kind": "train", "round": 3, "clients": ["x", "y"]}
    lines = [{**sent, "round": 2}, sent, {"event": "released"}]
    (tmp_path / "audit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    assert clients_at_work(tmp_path, 2) == (3, ["x", "y"])
    assert clients_at_work(tmp_path, 3) == (0, [])
    assert clients_at_work(tmp_path / "none", 0) == (0, [])


def test_the_view_follows_a_run_until_it_ends(tmp_path):
    run = make_run(tmp_path / "a", {"method": "moon"}, 3, num_written=1, status="running")
    lock, out = (run / ".lock").open("w"), io.StringIO()
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish():
        wait_until(lambda: "round 1/3" in out.getvalue())
        for number in (2, 3):
            append_round(run, line_of(number, Random(0)))
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"status": "finished"}))
        lock.close()

    threading.Thread(target=finish).start()
    text = shown(run, out, force_terminal=True)
    assert text.index("round 1/3") < text.index("round 3/3")
    assert "finished" in text


def test_the_last_view_is_of_the_run_as_it_ended(tmp_path, monkeypatch):
    """One that ended while it was looked at was shown without its last rounds."""
    run = make_run(tmp_path / "a", {"method": "moon"}, 3, num_written=1, status="running")
    lock, frame = (run / ".lock").open("w"), terminal.frame
    fcntl.flock(lock, fcntl.LOCK_EX)

    def frame_then_end(*about):
        found = frame(*about)
        if not lock.closed:
            append_round(run, line_of(2, Random(0)))
            append_round(run, line_of(3, Random(0)))
            lock.close()
        return found

    monkeypatch.setattr(terminal, "frame", frame_then_end)
    text = shown(run, force_terminal=True)
    assert text.index("round 1/3") < text.index("round 3/3")


def test_no_damage_and_no_name_upsets_the_terminal(tmp_path):
    for name in damaged_runs(tmp_path / "damaged"):
        shown(tmp_path / "damaged" / name)
    run = make_run(tmp_path / "b", {"method": HOSTILE, "source": "[red]x[/]"}, 2)
    line = line_of(3, Random(0)) | {"left_out": {HOSTILE: "[bold]\x1b[31mno"}}
    append_round(run, line)
    text = shown(run)
    assert "\x1b" not in text
    assert "left out: (bold] no" in text


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_narrow_terminal_shows_a_curve_up_to_its_last_round(tmp_path, width):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 200, num_written=0)
    for number in range(1, 201):
        loss = 9.0 if number == 200 else 1.0
        append_round(run, line_of(number, Random(0)) | {"losses": {"supervised": loss}})
    (curve,) = (line for line in shown(run, width=width).splitlines() if "▁▁" in line)
    assert "…" not in curve
    assert curve.split()[-2].endswith("▁█")


def test_a_run_that_cannot_be_read_has_no_numbers(tmp_path):
    (make_run(tmp_path / "a", {"method": "fedavg"}, 3) / "config.json").write_text("{")
    text = shown(tmp_path / "a", width=1000)
    assert text.count("config.json") == 1
    assert "round" not in text


def test_percentages_have_two_decimals(tmp_path):
    run = make_run(tmp_path / "a", {"method": "fedavg"}, 2)
    append_round(run, line_of(3, Random(0)) | {"global": {"accuracy": 0.468}})
    assert " 46.80" in shown(run)
