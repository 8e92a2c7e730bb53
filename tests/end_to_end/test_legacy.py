"""The command lines of Keel 0.1 run, and name the new command on stderr."""

import subprocess
import sys

import pytest

from protocol.config import app_folder
from protocol.legacy import with_commas

OLD_LINES = {
    "experiments": "keel experiments",
    "benchmarks": "keel bench",
    "diagnostics": "keel diagnose",
    "deployment.credentials": "keel deploy credentials",
    "deployment.register": "keel deploy register",
    "deployment.loopback": "keel deploy loopback",
    "deployment.doctor": "keel doctor",
    "server_app.inline": "keel run --engine inline",
    "server_app.status": "keel status",
    "server_app.method_table": "keel methods --markdown",
}


@pytest.mark.parametrize("module", OLD_LINES)
def test_old_line_runs_and_names_the_new_command(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=app_folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: keel" in done.stdout
    [line] = done.stderr.splitlines()
    assert line == (
        f"python -m {module} is now `{OLD_LINES[module]}`; the old line works until Keel 0.3"
    )


def test_lists_of_names_become_one_word():
    old = ["--folder", "f", "--names", "a.org", "10.0.0.1", "--clients", "x", "y", "z"]
    new = ["--folder", "f", "--name", "a.org,10.0.0.1", "--client", "x,y,z"]
    assert with_commas(old) == new
