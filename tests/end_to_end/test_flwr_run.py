"""`flwr run` as a user types it, with the SuperLink that `flwr` starts in the background."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import own_fixtures
import pytest
from run_fixtures import SMALL, assert_same_run, inheriting, summary_of, wait_until

from keel.deployment.loopback import free_ports
from keel.deployment.superlink import toml
from protocol.code import sources_digest
from server_app.inline import run_inline

root = Path(__file__).parents[2]
NUM_CLIENTS, NUM_NODES = 5, 2


@pytest.fixture
def packages(tmp_path):
    """A folder whose modules are installed for everything that `flwr` starts."""
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture
def flwr(tmp_path, packages):
    """flwr("list", cwd=folder): what it prints. All that comes of it ends with the test."""
    http, control = free_ports(2)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "KEEL_HOME": str(tmp_path / "keel"),
        "COLUMNS": "200",
    }

    def flwr(*words, cwd):
        done = subprocess.run(
            ["flwr", *words], cwd=cwd, env=environment, text=True, timeout=280, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def are_ended():
        left = inheriting("FLWR_HOME", environment["FLWR_HOME"])
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    with tempfile.TemporaryDirectory(prefix="keel-ray-") as ray:  # short: it holds sockets' paths
        environment["RAY_TMPDIR"] = ray
        yield flwr
        wait_until(are_ended)


@pytest.fixture
def checkout(tmp_path):
    """Another checkout, of other code than the one that the SuperLink is started in."""
    skip = (".*", "*.egg-info", "__pycache__", "build")
    copy = shutil.copytree(root, tmp_path / "app", ignore=shutil.ignore_patterns(*skip))
    shutil.copy(root / ".gitignore", copy)
    trainer = copy / "client_app" / "trainer.py"
    trainer.write_text(trainer.read_text() + "# another version\n")
    return copy


def test_a_run_has_its_own_checkouts_code_an_installed_method_and_the_bits_of_the_inline_engine(
    flwr, checkout, packages, tmp_path, no_pictures
):
    """Ray's workers look for modules in the SuperLink's folder unless they are told otherwise."""
    for _ in range(3):  # `flwr` gives a SuperLink 15 s, too few on a busy machine
        with contextlib.suppress(AssertionError):
            flwr("list", cwd=root)
            break
    keys = SMALL | {"num-clients": NUM_CLIENTS, "output-dir": str(tmp_path / "runs")}
    own_fixtures.file(packages, name="own_package_of_flwr.py")
    keys |= {"method": "own_package_of_flwr:FedPull", "method-options": "mu = 0.3"}
    config = " ".join(f"{key}={toml(value)}" for key, value in keys.items())
    federation = f"num-supernodes={NUM_NODES} client-resources-num-cpus={os.cpu_count()}"
    options = ["--run-config", config, "--federation-config", federation]
    printed = flwr("run", ".", "--stream", *options, cwd=checkout)
    [folder] = (tmp_path / "runs").glob("*")
    assert summary_of(folder)["status"] == "finished", printed
    assert "Traceback" not in printed
    sources = json.loads((folder / "manifest.json").read_text())["versions"]["sources"]
    assert sources != sources_digest()

    mine = own_fixtures.file(tmp_path)
    keys = SMALL | {"method": f"{mine}:FedPull", "fedpull.mu": 0.3}
    inline = run_inline(keys | {"output-dir": str(tmp_path / "inline")}, NUM_CLIENTS)
    assert_same_run(folder, inline)
