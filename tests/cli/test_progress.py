"""What `keel run` shows within a round, on a terminal and elsewhere."""

import time
from pathlib import Path
from random import Random

from keel.cli.progress import Terminal
from tests.tools.run_directories import line_of


def shown(monkeypatch, capsys, is_terminal):
    """What is printed while two of three clients answer."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with Terminal(5) as terminal:
        for number in range(3):
            terminal.on_replies("round 2", number, 3)
        terminal.bar.refresh()
        terminal.on_replies("the evaluation of round 2", 0, 3)
        terminal.bar.refresh()
    return capsys.readouterr().out


def test_a_terminal_shows_how_many_clients_have_answered(monkeypatch, capsys):
    text = shown(monkeypatch, capsys, is_terminal=True)
    assert "round 2: 2 of 3 clients" in text
    assert "evaluation of round 2: 0 of 3 clients" in text


def test_a_pipe_gets_nothing_of_it(monkeypatch, capsys):
    assert shown(monkeypatch, capsys, is_terminal=False) == ""


def test_the_time_left_after_a_resume_counts_this_attempts_rounds_alone(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Terminal(100) as terminal:
        terminal.begin(Path("run"), 90)
        now += 2.0
        terminal.on_round(line_of(91, Random(0)))
    assert "18 s left" in capsys.readouterr().out  # 9 rounds of 2 s
