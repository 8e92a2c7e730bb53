"""The methods of docs/how-to/own-method.md and of the README, and their tests, as files of a user.

Each titled block of the page is a file. The tests of FedProto and FedPer are in `own_method/`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

repository = Path(__file__).parents[3]
page = (repository / "docs/how-to/own-method.md").read_text()
readme = (repository / "README.md").read_text()
blocks: list[tuple[str, str]] = re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.S)
CONFTEST = """
import server_app.report

for picture in ("plot_accuracy", "plot_label_distribution"):  # take longer than the runs
    setattr(server_app.report, picture, lambda *what: None)
"""
OF_README = """
import runpy


def test_it_trains_and_its_penalty_counts():
    run = runpy.run_path("readme.py", run_name="__main__")["run"]
    assert run.history["loss/penalty"].iloc[-1] > 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and the README's example as a script."""
    folder = tmp_path_factory.mktemp("user")
    example = re.findall(r"```python\n(.*?)```", readme, re.S)[-1]
    files = [("conftest.py", CONFTEST), ("readme.py", example), ("test_readme.py", OF_README)]
    for name, text in [*blocks, *files]:
        (folder / name).write_text(text)
    for path in (Path(__file__).parent / "own_method").glob("*.py"):
        shutil.copy(path, folder / f"test_{path.name}")
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with these words in the folder."""
    environment = os.environ | {"PYTHONPATH": str(repository), "KEEL_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_tests_of_all_these_methods_pass(folder: Path) -> None:
    done = run(folder, "-m", "pytest", "-v", "-p", "no:cacheprovider", ".")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    for name in ("feddyn", "fedproto", "fedper", "readme"):
        assert f"test_{name}.py::" in done.stdout


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("name", ["FedPull", "FedDyn", "FedProto"])
def test_the_documented_methods_pass_keel_check_method(folder: Path, name: str) -> None:
    done = run(folder, "-m", "keel", "check-method", f"{name.lower()}.py:{name}")
    assert done.returncode == 0, done.stdout + done.stderr
