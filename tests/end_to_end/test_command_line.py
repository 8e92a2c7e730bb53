"""A refused run as a command."""

import re
import subprocess
import sys
from pathlib import Path


def test_the_command_ends_with_one_line_and_exit_code_1(tmp_path, keel_home):
    """Once in a process of its own, with all that the libraries may print on the way."""
    broken = tmp_path / "runs"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keel", "run", "--engine", "inline", "--clients", "3"),
            *(f'output-dir="{broken}"', 'method="fedreco"', "local-test-fraction=0.2"),
            *("fedreco.eta-0=1e38", "num-rounds=5", 'model="cnn-fedreco"', "data-fraction=0.4"),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.match(r"error: round \d: ", line)
    assert "not finite" in line
    assert "Traceback" not in done.stdout
    [folder] = broken.iterdir()
    assert str(folder) in done.stdout
