"""keel new-method writes a file that runs, and nothing where it refuses."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from source_fixtures import copy_keel

from client_app.methods import method_of
from keel.cli.main import main
from keel.cli.new_method import method_text, placeholders
from protocol.config import resolve_config
from protocol.own_code import find


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_source_takes_the_place_of_its_placeholders():
    without = method_text("FedPull")
    assert placeholders()
    assert all(each in without for each in placeholders())
    text = method_text("FedPull", paper="Ada et al. 1843 (FedPull)")
    assert text.count("Ada et al. 1843 (FedPull)") == 2
    assert "<" not in text


@pytest.mark.parametrize("words", [[], ["--server-half"]])
def test_the_file_is_a_method_in_the_form_of_the_linter(here, words, printed):
    lines = printed("new-method", "FedPull", *words).splitlines()
    assert [path.name for path in here.iterdir()] == ["fedpull.py"]
    assert "  keel check-method fedpull.py:FedPull" in lines
    config = resolve_config({"method": "fedpull.py:FedPull", "fedpull.mu": 0.3})
    assert method_of(config).mu == 0.3
    assert method_of(config).has_own_server_half == bool(words)
    assert linted("fedpull.py") == ""


def linted(file):
    """What the linter would change."""
    printed = ""
    for command in (["check", "--quiet"], ["format", "--quiet", "--diff"]):
        words = ["ruff", *command, "--isolated", "--line-length=100", file]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        printed += done.stdout
    return printed


@pytest.mark.parametrize("name", ["FedProx", "FedAvgM", "Privacy", "fedpull", "Fed-Pull", "../X"])
def test_taken_and_bad_names_are_refused_and_nothing_is_written(here, name, capsys):
    assert main(["new-method", name]) == 2
    assert main(["new-method", "FedPull", "--paper", 'say "x"']) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert list(here.iterdir()) == []


def test_a_new_network_takes_images_of_any_size(here, printed, capsys):
    assert "model=small_net.py:small_net" in printed("new-model", "small_net")
    make = find("small_net.py:small_net", "model").value
    for shape in ((1, 8, 8), (3, 64, 48)):
        assert make(7, shape)(torch.zeros(2, *shape)).shape == (2, 7)
    assert linted("small_net.py") == ""
    for name in ("small_net", "Net", "a-b"):
        assert main(["new-model", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_file_is_not_overwritten(here, capsys):
    (here / "fedpull.py").write_text("mine")
    assert main(["new-method", "FedPull"]) == 2
    assert "fedpull.py exists" in capsys.readouterr().err
    assert (here / "fedpull.py").read_text() == "mine"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of Keel to write a method of Keel's in."""
    return copy_keel(tmp_path_factory.mktemp("checkout"))


@pytest.mark.parametrize(
    ("folder", "use"),
    [
        ("client_app/methods", "from client_app.methods import method_class as use"),
        (
            "strategies",
            "from client_app.methods import method_class; from strategies import server_half; "
            "use = lambda name: server_half(method_class(name))",
        ),
    ],
)
def test_a_method_whose_file_is_broken_stops_no_other(checkout, folder, use):
    method = checkout / "client_app" / "methods" / "broken.py"
    shutil.copy(method.with_name("scaffold.py"), method)
    broken = checkout / folder / "broken.py"
    broken.write_text("class Broken(\n")
    try:
        found = subprocess.run(
            [sys.executable, "-c", f"{use}; print(use('scaffold').__name__); use('broken')"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        method.unlink()
        broken.unlink(missing_ok=True)
    assert found.returncode == 1
    assert found.stdout.startswith("Scaffold")
    assert f"{folder}/broken.py:1: " in found.stderr
