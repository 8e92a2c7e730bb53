"""pyproject.toml declares what the sources import, and the packages that there are."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_fixtures import imports_of

root = Path(__file__).parent.parent
project = tomllib.loads((root / "pyproject.toml").read_text())
packages = [
    pattern.removesuffix("*")
    for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]
]
# Packages that are part of a declared one: flwr's extra [simulation], pydantic's compiled half.
BROUGHT_ALONG = {"flwr": {"ray"}, "pydantic": {"pydantic-core"}, "mlflow-skinny": {"mlflow"}}


def declared():
    """Every distribution of [project.dependencies] and of the extras for users."""
    lines = list(project["project"]["dependencies"])
    for extra, requirements in project["project"]["optional-dependencies"].items():
        lines += requirements if extra not in ("dev", "docs", "test") else []
    names = {canonicalize_name(Requirement(line).name) for line in lines}
    return names.union(*(BROUGHT_ALONG[name] for name in names & BROUGHT_ALONG.keys()))


def imported_modules(file):
    """The top-level names of every absolute import in a file, deferred ones included."""
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        else:
            assert node.level == 0, f"{file}: relative import"
            yield node.module.partition(".")[0]


distributions_by_package = cache(packages_distributions)


@pytest.mark.parametrize("package", packages)
def test_every_imported_package_is_declared(package):
    distributions = distributions_by_package()
    missing = {}
    for file in (root / package).rglob("*.py"):
        for module in set(imported_modules(file)) - sys.stdlib_module_names - set(packages):
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            if not names & declared():
                missing[module] = str(file.relative_to(root))
    assert missing == {}


def test_every_package_directory_is_packaged():
    found = {file.parent.name for file in root.glob("*/__init__.py")} - {"tests"}
    assert found == set(packages)
    for package in packages:
        for file in (root / package).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


def test_the_minimum_python_is_the_same_everywhere():
    minimum = project["project"]["requires-python"].removeprefix(">=")
    assert project["tool"]["mypy"]["python_version"] == minimum
    assert project["tool"]["ruff"]["target-version"] == f"py{minimum.replace('.', '')}"
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text()
    assert min(re.findall(r'"(3\.\d+)"', workflow)) == minimum


@pytest.mark.parametrize("file", ["data.py", "models/__init__.py"])
def test_a_users_file_that_hides_a_package_is_named(file, tmp_path):
    """It lies beside a script or notebook, so that `import data` finds it before Keel's."""
    hiding = tmp_path / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.touch()
    path = os.pathsep.join(map(str, (tmp_path, root)))
    done = subprocess.run(
        [sys.executable, "-c", "import keel"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert str(hiding.resolve()) in line
