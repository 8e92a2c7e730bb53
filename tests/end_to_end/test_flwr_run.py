"""`flwr run` as a user types it, in one background SuperLink."""

import json
import shutil
from pathlib import Path

import own_fixtures
import pytest
from run_fixtures import SMALL, assert_same_run, summary_of

from protocol.code import sources_digest
from server_app.inline import run_inline

KEYS = SMALL | {"method": "scaffold", "train-fraction": 0.5, "local-test-fraction": 0.2}
NUM_NODES, NUM_CLIENTS = 2, 5


@pytest.fixture(scope="module")
def checkout(superlink, tmp_path_factory) -> Path:
    """Another checkout, of other code than the one that the SuperLink was started in."""
    other = tmp_path_factory.mktemp("checkout") / "app"
    shutil.copytree(superlink.app, other)
    trainer = other / "client_app" / "trainer.py"
    trainer.write_text(trainer.read_text() + "# another version\n")
    return other


def test_a_run_has_the_bits_of_the_inline_engine_and_its_own_checkouts_code(
    superlink, checkout, tmp_path, no_pictures
):
    """Ray's workers look for modules in the SuperLink's folder unless they are told otherwise."""
    output = {"output-dir": str(tmp_path / "runs"), "num-clients": NUM_CLIENTS}
    printed = superlink.run(KEYS | output, NUM_NODES, 1, checkout)
    [folder] = (tmp_path / "runs").glob("*")
    assert summary_of(folder)["status"] == "finished", printed
    assert "Traceback" not in printed
    sources = json.loads((folder / "manifest.json").read_text())["versions"]["sources"]
    assert sources != sources_digest()
    inline = run_inline(KEYS | {"output-dir": str(tmp_path / "inline")}, NUM_CLIENTS)
    assert_same_run(folder, inline)


def test_a_mistake_ends_the_run_with_a_line_that_names_it_and_leaves_no_folder(superlink, tmp_path):
    keys = SMALL | {"output-dir": str(tmp_path / "runs"), "train-fraction": 7.0}
    printed = superlink.run(keys, NUM_NODES, cpus_each=1)
    [line] = [text for text in printed.splitlines() if " error: " in text]
    assert "train-fraction = 7.0" in line
    assert not (tmp_path / "runs").exists()
    assert "finished:failed" in superlink.flwr("list").stdout


def test_a_method_of_an_installed_module_has_the_bits_of_the_inline_engine(
    superlink, tmp_path, no_pictures
):
    own_fixtures.file(superlink.packages, name="own_package_of_flwr.py")
    keys = SMALL | {"method": "own_package_of_flwr:FedPull", "num-clients": NUM_CLIENTS}
    output = {"output-dir": str(tmp_path / "runs"), "method-options": "mu = 0.3"}
    printed = superlink.run(keys | output, NUM_NODES, 1)
    [folder] = (tmp_path / "runs").glob("*")
    assert summary_of(folder)["status"] == "finished", printed
    mine = own_fixtures.file(tmp_path)
    keys |= {"method": f"{mine}:FedPull", "fedpull.mu": 0.3, "output-dir": str(tmp_path / "inline")}
    assert_same_run(folder, run_inline(keys, NUM_CLIENTS))
