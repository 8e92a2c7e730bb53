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
page = (repository / "docs/how-to/own-model.md").read_text()


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


def test_the_pages_model_passes_the_tests_and_trains(copy: Path) -> None:
    commands = re.findall(r"^(?:python -m|keel) .*", page, re.M)
    assert len(commands) == 3
    environment = os.environ | {"PYTHONPATH": str(copy), "KEEL_HOME": str(copy / "home")}
    for command in commands:
        words = command.removeprefix("python -m ").split()
        # the documentation, which has the widths, is not in the copy
        words += ["-k", "tiny and not documentation"] * (words[0] == "pytest")
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, command + done.stdout[-3000:] + done.stderr[-2000:]
    assert "parameters  5,130" in done.stdout
