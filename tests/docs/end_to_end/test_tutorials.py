"""The tutorials in docs/how-to/own-method.md: each titled block is a file of a copy, and runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

repository = Path(__file__).parents[3]
page = (repository / "docs/how-to/own-method.md").read_text()
packages = ["client_app", "data", "keel", "models", "protocol", "server_app", "strategies"]


def code_blocks() -> list[tuple[str, str]]:
    """(path, content) of every block with a title, in the order of the page."""
    return re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, re.S)


@pytest.fixture(scope="module")
def copy_with_tutorials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the repository with the page's files in their places."""
    copy = tmp_path_factory.mktemp("tutorial")
    for package in packages:
        shutil.copytree(repository / package, copy / package)
    shutil.copy(repository / "pyproject.toml", copy)
    for path, content in code_blocks():
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        assert path == "pyproject.toml" or not target.exists(), f"{path} is Keel's own"
        with target.open("a") as file:
            file.write(("\n" if path == "pyproject.toml" else "") + content)
    return copy


def test_the_page_has_both_halves_options_and_a_test_of_each_method() -> None:
    titles = [path for path, _ in code_blocks()]
    for name in ("feddyn", "fedproto"):
        assert f"client_app/methods/{name}.py" in titles
        assert f"strategies/{name}.py" in titles
        assert f"tests/methods/test_{name}.py" in titles
    assert titles.count("pyproject.toml") == 2


def test_the_tutorials_tests_pass(copy_with_tutorials: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=copy_with_tutorials,
        env=os.environ | {"PYTHONPATH": str(copy_with_tutorials)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
