"""All of `keel check-method` on sound methods, and its resume in another process."""

import pytest

from keel.cli.main import main
from keel.method_checks import resume_is_exact
from keel.method_subject import CheckFailed, Subject


def test_a_sound_method_passes_all(printed):
    lines = printed("check-method", "fedcka").splitlines()
    assert lines[-1] == "fedcka: all checks pass"
    assert all(line.startswith("pass") for line in lines[:-1])


def test_an_own_method_is_checked_where_it_is(tmp_path, monkeypatch, printed, capsys):
    monkeypatch.chdir(tmp_path)
    printed("new-method", "FedPull", "--server-half", "--paper", "Ada et al. 1843")
    lines = printed("check-method", "fedpull.py:FedPull").splitlines()
    assert lines[-1] == "fedpull.py:FedPull: all checks pass"
    text = (tmp_path / "fedpull.py").read_text()
    (tmp_path / "fedpull.py").write_text(
        text.replace("def next_arrays(self, current, ", "def next_arrays(self, ")
    )
    assert main(["check-method", "fedpull.py:FedPull"]) == 1
    [line, _] = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL  both halves")
    assert "FedPullServer.next_arrays (" in line


SUMMING = """
from dataclasses import dataclass
from typing import ClassVar

import keel


class Server(keel.ServerHalf):
    def next_arrays(self, current, replies):
        mean = super().next_arrays(current, replies)
        total = 0.0
        for name in set(mean):  # a plain sum may have the same bits in two orders
            total = total / 3 + mean[name].sum()
        return {name: array + total / 100_000 for name, array in mean.items()}


@dataclass(frozen=True)
class Summing(keel.LocalObjective):
    server_half: ClassVar[type] = Server
"""


def test_a_sum_in_the_order_of_a_set_differs_after_resuming(tmp_path, monkeypatch):
    """Within one process a set of names has one order."""
    (tmp_path / "summing.py").write_text(SUMMING)
    with pytest.raises(CheckFailed):
        resume_is_exact(Subject(f"{tmp_path / 'summing.py'}:Summing", tmp_path))
