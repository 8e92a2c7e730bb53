"""User-defined methods in a copy of Keel, and their tests, in one process that imports torch once.

They come from the tutorials in docs/how-to/own-method.md, where each titled block is a file, from
the example in the README, and from two calls of `keel new-method`.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_fixtures import copy_keel

repository = Path(__file__).parents[3]
page = (repository / "docs/how-to/own-method.md").read_text()
readme = (repository / "README.md").read_text()
written = {"gentle-pull": [], "damped-pull": ["--server-half"]}  # words of `keel new-method`

# pictures of runs take longer than the runs
CONFTEST = """
import server_app.report

for picture in ("plot_accuracy", "plot_label_distribution"):
    setattr(server_app.report, picture, lambda *what: None)
"""
README_TEST = """
from server_app.inline import run_inline
from server_app.run_reader import RunReader


def test_the_readmes_method_trains_and_its_penalty_counts(tmp_path):
    keys = {"method": "fedpull", "num-rounds": 2, "fedpull.mu": 0.5, "lr": 0.05}
    keys |= {"data-fraction": 0.4, "output-dir": str(tmp_path)}
    lines = RunReader(run_inline(keys, num_clients=2)).history
    assert [line["round"] for line in lines] == [1, 2]
    assert all(line["losses"]["penalty"] > 0 for line in lines)
"""


def code_blocks() -> list[tuple[str, str]]:
    """(path, content) of every block of the page with a title, in its order."""
    return re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, re.S)


def readme_blocks() -> list[tuple[str, str]]:
    """(path, content) of the README's method, its table and a test of it."""
    code = re.search(r"```python\n(# client_app/methods/fedpull\.py\n.*?)```", readme, re.S)
    table = re.search(r"```toml\n(\[tool\.flwr\.app\.config\.fedpull\]\n.*?)```", readme, re.S)
    assert code
    assert table
    return [
        ("client_app/methods/fedpull.py", code[1]),
        ("pyproject.toml", table[1]),
        ("tests/test_readme.py", README_TEST),
    ]


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python module's command in the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=copy, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def copy_and_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy of the packages with the blocks as files, and what `keel new-method` wrote there."""
    copy, python = copy_keel(tmp_path_factory.mktemp("tutorial")), []
    (copy / "tests").mkdir()
    (copy / "tests" / "conftest.py").write_text(CONFTEST)
    for name, words in written.items():
        made = run(copy, "keel", "new-method", name, *words)
        assert made.returncode == 0, made.stderr
        files = made.stdout.splitlines()
        stem = name.replace("-", "_")
        assert (f"strategies/{stem}.py" in files) == bool(words)
        assert f"tests/methods/test_{stem}.py" in files
        python += [file for file in files if file.endswith(".py")]
    for path, content in code_blocks() + readme_blocks():
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        assert path == "pyproject.toml" or not target.exists(), f"{path} is Keel's own"
        with target.open("a") as file:
            file.write(("\n" if path == "pyproject.toml" else "") + content)
    return copy, python


def test_the_page_has_both_halves_options_and_a_test_of_each_method() -> None:
    titles = [path for path, _ in code_blocks()]
    for name in ("feddyn", "fedproto"):
        assert f"client_app/methods/{name}.py" in titles
        assert f"strategies/{name}.py" in titles
        assert f"tests/methods/test_{name}.py" in titles
    assert titles.count("pyproject.toml") == 2


def test_new_methods_pass_the_linter_and_have_their_options(
    copy_and_files: tuple[Path, list[str]],
) -> None:
    copy, files = copy_and_files
    for command in (["check"], ["format", "--check"]):
        lint = run(copy, "ruff", *command, *files)
        assert lint.returncode == 0, lint.stdout
    project = tomllib.loads((copy / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert [config[name]["mu"] for name in written] == [0.1, 0.1]


def test_the_tests_of_all_these_methods_pass(copy_and_files: tuple[Path, list[str]]) -> None:
    copy, files = copy_and_files
    done = run(copy, "pytest", "-v", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    paths = [*files, *(path for path, _ in code_blocks() + readme_blocks())]
    for path in paths:
        assert not path.startswith("tests/") or path in done.stdout


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("name", ["feddyn", "fedproto"])
def test_the_documented_methods_pass_keel_check_method(
    copy_and_files: tuple[Path, list[str]], name: str
) -> None:
    copy, _ = copy_and_files
    done = run(copy, "keel", "check-method", name)
    assert done.returncode == 0, done.stdout + done.stderr
