"""`keel demo` as a newcomer sees it."""

import re

import pytest

from keel.cli import demo
from keel.cli.main import main


@pytest.mark.parametrize(
    ("num_rounds", "epochs"), [(1, 1), pytest.param(10, 3, marks=pytest.mark.slow)]
)
def test_the_demo_compares_two_methods_over_three_seeds(
    home, monkeypatch, capsys, num_rounds, epochs
):
    """With 10 rounds, as the user runs it."""
    monkeypatch.setitem(demo.SETTING, "num-rounds", num_rounds)
    monkeypatch.setitem(demo.SETTING, "local-epochs", epochs)
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    for method in demo.METHODS:
        assert len(re.findall(rf"^{method}, seed [012]: ", printed, re.MULTILINE)) == 3
        assert re.search(
            rf"^ *{method} +\d+\.\d ± \d+\.\d +\d+\.\d ± \d+\.\d$", printed, re.MULTILINE
        )
    assert f"{home}/demo.png" in printed
    assert (home / "demo.png").stat().st_size > 10_000
    assert len(list((home / "runs").iterdir())) == 6


FINALS = {"fedavg": (50.0, 60.0, 70.0)}


@pytest.mark.parametrize(
    ("second", "cells", "is_decided"),
    [  # 3 seeds: t(0.975, 2) = 4.303; of differences with deviation 1, the mean ± 2.48
        ((54.0, 65.0, 76.0), ["60.0 ± 10.0", "65.0 ± 11.0", "+5.0 ± 1.0"], True),
        ((52.0, 61.0, 73.0), ["60.0 ± 10.0", "62.0 ± 10.5", "+2.0 ± 1.0"], False),
    ],
)
def test_the_demo_says_what_three_seeds_decide(second, cells, is_decided):
    finals = FINALS | {"fedrcl": second}
    assert demo.cells_of(finals) == cells
    assert demo.is_decided(finals) == is_decided
