"""The Flower app that is submitted to a SuperLink."""

import io
import shutil
import zipfile

import pytest
from flwr.cli.build import build_fab_from_disk

from keel.deployment import superlink
from keel.deployment.superlink import app_directory, app_packages
from protocol.config import app_folder as root


def names_in(fab):
    """What a Flower app file (FAB) holds; its own list of contents aside."""
    with zipfile.ZipFile(io.BytesIO(fab)) as file:
        return {name for name in file.namelist() if not name.startswith(".info")}


@pytest.mark.end_to_end
def test_an_installed_keel_makes_the_same_app_as_its_checkout(tmp_path, monkeypatch):
    expected = names_in(build_fab_from_disk(root))
    for package in (*app_packages, "keel"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, tmp_path / package, ignore=skip)
    shutil.copy(root / "pyproject.toml", tmp_path / "protocol")
    monkeypatch.setattr("protocol.config.app_folder", tmp_path)
    monkeypatch.setattr(superlink, "app_folder", tmp_path)
    with app_directory() as app:
        assert app != tmp_path
        assert names_in(build_fab_from_disk(app)) == expected
    assert not app.exists()
