"""`keel demo` as a newcomer sees it."""

import os
import subprocess
import sys
from pathlib import Path

root = Path(__file__).parent.parent.parent


def test_the_demo_compares_two_runs_and_leaves_a_plot(tmp_path):
    env = os.environ | {"KEEL_HOME": str(tmp_path), "PYTHONPATH": str(root), "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "keel", "demo"],
        cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    assert "FedAvg, then with FedIntR" in printed
    assert printed.count("round 10/10") == 2
    assert printed.count("training and 359 test images") == 1
    assert printed.count("cnn-fedreco, 44,426 parameters") == 1
    assert "This is one seed" in printed
    assert f"plot: {tmp_path}/demo.png" in printed
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert ["fedavg" in names[0], "fedintr" in names[1]] == [True, True]
