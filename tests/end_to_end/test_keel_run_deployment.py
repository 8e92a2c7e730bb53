"""`keel run --engine deployment`: submit to a running SuperLink, follow its log, stop it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_fixtures import SMALL

from keel.cli.main import main
from keel.deployment.loopback import partitions, running
from keel.runs import SavedRun

pytestmark = pytest.mark.end_to_end
root = Path(__file__).parent.parent.parent
words = [f"{key}={value}" for key, value in SMALL.items() if key != "num-rounds"]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The options that name a deployment of two clients."""
    folder = tmp_path_factory.mktemp("deployed")
    with running(folder, partitions(2)) as local:
        yield [
            *("--engine", "deployment", "--federation", f"127.0.0.1:{local.http_port}"),
            *("--root-certificates", str(folder / "credentials" / "server" / "ca.pem")),
        ]


def test_a_run_is_followed_to_its_end(deployed, tmp_path, capfd):
    assert main(["run", *words, "num-rounds=2", f"output-dir={tmp_path}", *deployed]) == 0
    shown = capfd.readouterr().out
    assert "round 1/2" in shown
    assert "round 2/2" in shown


def test_a_refusal_by_the_run_is_one_line_and_code_1(deployed, tmp_path, capfd):
    assert main(["run", *words, "min-samples=4000", f"output-dir={tmp_path}", *deployed]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert "min-samples" in said
    assert said.count("\n") == 1


def test_ctrl_c_stops_the_run_on_the_superlink(deployed, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "keel", "run", *words, "num-rounds=1000", "run-name=cut",
         f"output-dir={tmp_path}", *deployed],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("cut/checkpoints/round-00001*")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert "Traceback" not in out
    [directory] = tmp_path.glob("cut")
    assert f"keel resume {directory} --engine deployment" in "".join(out.splitlines())
    done = SavedRun(directory).rounds
    assert main(["resume", str(directory), f"num-rounds={done + 1}", *deployed]) == 0
    assert SavedRun(directory).rounds == done + 1


def test_a_run_that_the_server_does_not_have_is_one_line(deployed, capfd):
    assert main(["resume", "elsewhere", *deployed]) == 1
    error = capfd.readouterr().err
    assert "runs/elsewhere has no config.json" in error
    assert error.count("\n") == 1
