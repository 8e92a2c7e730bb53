"""Keel from its wheel, used from an empty directory."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

root = Path(__file__).parent.parent.parent
NOT_PACKAGED = ("tests", "docs", "docker", "build")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built from a copy: setuptools leaves a build directory behind."""
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", *NOT_PACKAGED)
    shutil.copytree(root, folder / "checkout", ignore=skip)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", folder, folder / "checkout"]
    subprocess.run(command, check=True, timeout=120)
    [built] = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_it_holds_every_source_and_data_file(wheel):
    in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ignored = (*NOT_PACKAGED, "setup.py")
    suffixes = {".py", ".yaml", ".json", ".j2", ".html", ".css", ".js", ".txt"}
    in_checkout = {
        file.relative_to(root).as_posix()
        for package in root.glob("*/__init__.py")
        for file in package.parent.rglob("*")
        if file.suffix in suffixes and "__pycache__" not in file.parts
    }
    in_checkout = {name for name in in_checkout if name.split("/")[0] not in ignored}
    assert in_wheel - {"protocol/pyproject.toml"} == in_checkout


def test_its_command_lists_from_its_data_and_a_run_finishes(wheel, tmp_path):
    """Unpacked, in one process, with the dependencies of the tests' own environment."""
    [entry] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert "keel = keel.__main__:main" in wheel.read(entry).decode()
    site, home, empty = (tmp_path / name for name in ("site", "home", "empty"))
    wheel.extractall(site)
    empty.mkdir()
    shown = {
        "run --clients 2 num-rounds=1 model=cnn-fedreco data-fraction=0.4 run-name=smoke": "smoke",
        "keys": "num-rounds",
        "datasets": "digits",
        "presets": "fedreco",
    }
    code = """
import sys
import protocol.config
from keel.cli.main import main
print(protocol.config.project_file(), "END 0")
for line in sys.argv[1:]:
    print("END", main(line.split()))
"""
    env = os.environ | {"PYTHONPATH": str(site), "KEEL_HOME": str(home), "COLUMNS": "120"}
    command = [sys.executable, "-c", code, *shown]
    done = subprocess.run(command, cwd=empty, env=env, text=True, capture_output=True)
    project, *printed, rest = done.stdout.split("END 0\n")
    assert project.strip() == str(site / "protocol" / "pyproject.toml")
    assert (len(printed), rest) == (len(shown), ""), done.stderr
    for text, word in zip(printed, shown.values(), strict=True):
        assert word in text
    assert (home / "runs" / "smoke" / "model.safetensors").exists()
    assert list(empty.iterdir()) == []
