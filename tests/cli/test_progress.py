"""What `keel run` shows within a round, on a terminal and elsewhere."""

from keel.cli.progress import Terminal


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
