"""Keel installed from its wheel, used from an empty directory."""

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
    return built


@pytest.fixture(scope="module")
def keel(wheel, tmp_path_factory):
    """keel(*arguments): the wheel's command, run in an empty directory; what it printed.

    The dependencies are those of the tests' own environment.
    """
    site, home = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("home")
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", site]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, wheel], check=True, timeout=120
    )
    env = os.environ | {"PYTHONPATH": str(site), "KEEL_HOME": str(home), "COLUMNS": "120"}

    def run(*arguments):
        empty = tmp_path_factory.mktemp("empty")
        done = subprocess.run(
            [site / "bin" / "keel", *arguments],
            cwd=empty, env=env, text=True, timeout=120, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    run.site, run.home = site, home
    return run


def test_it_holds_every_source_and_data_file(wheel):
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
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


def test_its_command_lists_from_its_data(keel):
    assert "fedreco" in keel("methods")
    code = "import protocol.config as c; print(c.__file__, c.project_file(), c.keel_version())"
    env = os.environ | {"PYTHONPATH": str(keel.site)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd="/", env=env, text=True, capture_output=True, check=True)
    assert done.stdout.split()[:2] == [
        f"{keel.site}/protocol/config.py", f"{keel.site}/protocol/pyproject.toml",
    ]  # fmt: skip


def test_a_run_finishes_and_the_other_listings_have_their_data(keel, tmp_path):
    """In one process, as two of them import torch."""
    shown = {
        "run --clients 2 num-rounds=1 model=cnn-fedreco data-fraction=0.4 run-name=smoke": "smoke",
        "models": "cnn-fedreco",
        "datasets": "digits",
        "presets": "fedreco",
    }
    code = "import sys; from keel.cli.main import main\n"
    code += "for line in sys.argv[1:]: print('END', main(line.split()))"
    env = os.environ | {"PYTHONPATH": str(keel.site), "KEEL_HOME": str(keel.home)}
    command = [sys.executable, "-c", code, *shown]
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
    *printed, rest = done.stdout.split("END 0\n")
    assert (len(printed), rest) == (len(shown), ""), done.stderr
    for text, word in zip(printed, shown.values(), strict=True):
        assert word in text
    assert (keel.home / "runs" / "smoke" / "model.safetensors").exists()
