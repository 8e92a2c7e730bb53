"""All of `keel check-method` on a sound method, and its resume in another process."""

import os
import subprocess
import sys

from source_fixtures import copy_keel

CLIENT_HALF = """
from dataclasses import dataclass
from typing import ClassVar

from client_app.objective import LocalObjective


@dataclass(frozen=True)
class Summing(LocalObjective):
    has_own_server_half: ClassVar[bool] = True
"""
SERVER_HALF = """
from strategies.average import Average


class SummingServer(Average):
    def next_arrays(self, current, replies):
        mean = super().next_arrays(current, replies)
        total = sum(mean[name].sum() for name in set(mean))
        return {name: array + total / 100 for name, array in mean.items()}
"""
CHECK = """
import sys
from pathlib import Path

from keel.method_checks import resume_is_exact
from keel.method_subject import Subject

resume_is_exact(Subject("summing", Path(sys.argv[1])))
"""


def test_a_sound_method_passes_all(printed):
    lines = printed("check-method", "fedcka").splitlines()
    assert lines[-1] == "fedcka: all checks pass"
    assert all(line.startswith("pass") for line in lines[:-1])


def test_a_sum_in_the_order_of_a_set_differs_after_resuming(tmp_path):
    """Within one process a set of names has one order."""
    copy = copy_keel(tmp_path / "copy")
    (copy / "client_app/methods/summing.py").write_text(CLIENT_HALF)
    (copy / "strategies/summing.py").write_text(SERVER_HALF)
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONHASHSEED": "7"}
    environment["KEEL_HOME"] = str(tmp_path / "home")
    (tmp_path / "runs").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path / "runs")],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "CheckFailed" in done.stderr
    assert "differs after resuming in another process, in which sets of names" in done.stderr
