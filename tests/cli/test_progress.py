"""What `keel run` shows within a round, on a terminal and elsewhere."""

import logging
import time
from pathlib import Path
from random import Random

import pytest

from keel.progress import RECORD, Terminal
from protocol.config import resolve_config
from server_app.observers import RunInfo
from server_app.record import split
from tests.tools.run_directories import line_of


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_many_clients_have_answered(is_terminal, monkeypatch, capsys):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with Terminal(5) as terminal:
        for number in range(3):
            terminal.on_replies("round 2", number, 3)
        terminal.bar.refresh()
    text = capsys.readouterr().out
    assert "round 2: 2 of 3 clients" in text if is_terminal else text == ""


@pytest.mark.parametrize(
    ("device", "keys", "row"),
    [
        ("cpu", {}, None),
        ("mps:0", {}, "device      mps:0"),
        ("cuda:0", {}, f"device      cuda:0; {RECORD}"),
        ("cuda:0", {"cuda-graphs": True}, "device      cuda:0"),
    ],
)
def test_an_inline_run_names_its_gpu_and_the_key_that_speeds_it_up(
    device, keys, row, tmp_path, capsys
):
    config = resolve_config(keys).flat
    sizes = 1, 1, (1, 2, 3), 2, "net", 5, 2, 2
    info = RunInfo(tmp_path, *("m", "o", "s"), *sizes, num_rounds=3, config=config, device=device)
    with Terminal(3) as terminal:
        terminal.on_run_start(info)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("device")] == ([row] if row else [])


def test_why_a_client_of_this_process_failed_is_left_to_the_server_to_say(capsys):
    with Terminal(5) as terminal:
        logging.getLogger("keel.client").error("client-0000: min-samples")
        logging.getLogger("keel.client").warning("few samples")
        terminal.begin(Path("run"), 0)
        logging.getLogger("keel.client").error("client-0001: out of memory")
        withheld = {"is_withheld": True}  # the server is not told the reason
        logging.getLogger("keel.client").error("client-0002: not finite", extra=withheld)
    text = capsys.readouterr().out
    assert "min-samples" not in text
    assert "few samples" in text
    assert "out of memory" not in text
    assert "not finite" in text


def test_the_time_includes_the_start_and_the_time_left_counts_this_attempts_rounds(
    monkeypatch, capsys
):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Terminal(100) as terminal:
        now += 3.0  # data are read
        terminal.begin(Path("run"), 90)
        now += 2.0
        terminal.on_round(split(line_of(91, Random(0)))[0])
    terminal.finished()
    text = capsys.readouterr().out
    assert "18 s left" in text  # 9 rounds of 2 s
    assert "finished in 5 s" in text


@pytest.mark.parametrize(
    ("last_round", "where", "command"),
    [(0, "run", ""), (2, "run", "keel resume run"), (2, "", "keel resume x --y")],
)
def test_a_run_that_failed_after_a_round_says_how_to_continue(last_round, where, command, capsys):
    with Terminal(5) as terminal:
        terminal.directory = Path(where) if where else None
        terminal.resume_command = "keel resume x --y"
        terminal.last_round = last_round
        terminal.failed()
    shown = capsys.readouterr().out
    assert (command in shown) if command else (shown == "")
