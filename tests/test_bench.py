"""Every benchmark runs in its smallest form."""

import json
import subprocess
import sys

import pytest

from protocol.config import app_folder

PARTS = {  # rows
    **{"bare": 2, "steps": 1, "own": 2},
    **{"clients": 2, "memory": 1, "deployment": 1, "gpu": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_measures_something_in_its_smallest_form(part, tmp_path):
    command = [sys.executable, "-m", "tools.bench", part, "--quick", "--device", "cpu"]
    subprocess.run([*command, "--out", str(tmp_path / "bench")], check=True, cwd=app_folder)
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["value"] > 0 for row in rows] == [True] * PARTS[part]
    assert all(row["what"] in (tmp_path / "bench.md").read_text() for row in rows)
