"""keel new-method writes a file that runs, and nothing where it refuses."""

import subprocess
import sys

import pytest
import torch

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
    (here / "fedpull.py").write_text("mine")  # which is not overwritten
    assert main(["new-method", "FedPull"]) == 2
    assert "fedpull.py" in capsys.readouterr().err
    assert (here / "fedpull.py").read_text() == "mine"


def test_a_new_network_takes_images_of_any_size(here, printed, capsys):
    assert "model=small_net.py:small_net" in printed("new-model", "small_net")
    make = find("small_net.py:small_net", "model").value
    for shape in ((1, 8, 8), (3, 64, 48)):
        assert make(7, shape)(torch.zeros(2, *shape)).shape == (2, 7)
    assert linted("small_net.py") == ""
    for name in ("small_net", "Net", "a-b"):
        assert main(["new-model", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
