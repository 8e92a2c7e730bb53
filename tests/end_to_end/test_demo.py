"""`keel demo` as a newcomer sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("num_rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_the_demo_compares_two_runs_and_leaves_a_plot(tmp_path, num_rounds):
    """With 10 rounds, as the user runs it."""
    code = (
        "import sys; from keel.cli import demo; from keel.cli.main import main; "
        f"demo.SETTING['num-rounds'] = {num_rounds}; sys.exit(main(['demo']))"
    )
    env = os.environ | {"KEEL_HOME": str(tmp_path), "PYTHONPATH": str(root), "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    assert "FedAvg, then with FedIntR" in printed
    assert printed.count(f"round {num_rounds}/{num_rounds}") == 2
    assert printed.count("training and 359 test images") == 1
    assert printed.count("cnn-fedreco, 44,426 parameters") == 1
    assert "This is one seed" in printed
    assert f"plot: {tmp_path}/demo.png" in printed
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert ["fedavg" in names[0], "fedintr" in names[1]] == [True, True]
