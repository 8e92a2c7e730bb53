"""`keel demo` as a newcomer sees it."""

import pytest

from keel.cli import demo
from keel.cli.main import main


@pytest.mark.parametrize("num_rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_the_demo_compares_two_runs_and_leaves_a_plot(home, monkeypatch, capsys, num_rounds):
    """With 10 rounds, as the user runs it."""
    monkeypatch.setitem(demo.SETTING, "num-rounds", num_rounds)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"round {num_rounds}/{num_rounds}") == 2
    assert printed.count("training and 359 test images") == 1
    assert f"{home}/demo.png" in printed
    assert (home / "demo.png").stat().st_size > 10_000
    names = sorted(path.name for path in (home / "runs").iterdir())
    assert ["fedavg" in names[0], "fedintr" in names[1]] == [True, True]
