"""The model of docs/how-to/own-model.md, added to a copy of Keel as the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_fixtures import PACKAGES, copy_keel

repository = Path(__file__).parents[3]
page = (repository / "docs/how-to/own-model.md").read_text().partition("## In Keel's own folder")[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy with the page's file, and the lines of its other blocks at their places."""
    copy_keel(tmp_path, (*PACKAGES, "tests/tools"))
    for file in ("tests/test_models.py", "tests/model_fixtures.py"):
        shutil.copy(repository / file, tmp_path / file)
    blocks = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.S))
    (tmp_path / "models/tiny.py").write_text(blocks.pop("models/tiny.py"))
    for path, block in blocks.items():
        text = (tmp_path / path).read_text()
        *imports, table, entry = block.strip("\n").splitlines()
        assert text.count(f"{table}\n") == 1
        text = text.replace(f"{table}\n", f"{table}\n{entry}\n")
        for line in filter(None, imports):
            text = text.replace("from protocol.models", f"{line}\nfrom protocol.models", 1)
        (tmp_path / path).write_text(text)
    return tmp_path


# the page's commands, one a line, in one process: torch is imported once
COMMANDS = """
import sys
import pytest
from keel.cli.main import main

for line in sys.argv[1:]:
    program, *words = line.removeprefix("python -m ").split()
    # the documentation, which has the widths, is not in the copy
    chosen = ["-p", "no:cacheprovider", "-k", "tiny and not documentation"]
    code = pytest.main([*words, *chosen]) if program == "pytest" else main(words)
    assert code == 0, line
"""


def test_the_pages_model_passes_the_tests_and_trains(copy: Path) -> None:
    commands = re.findall(r"^(?:python -m|keel) .*", page, re.M)
    assert len(commands) == 3
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *commands],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "KEEL_HOME": str(copy / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "parameters  5,130" in done.stdout
