"""`keel run --engine flower`: workers on Ray, one of which is killed, and a run that is stopped."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from cluster_fixtures import assert_only_who_has_the_token_joins
from deployment_fixtures import refusing_proxy
from run_fixtures import SMALL, assert_same_run, inheriting, keel_run, summary_of, wait_until

from keel.saved_runs import SavedRun
from protocol.ray_nodes import Node
from server_app.inline import run_inline
from server_app.run_reader import RunReader
from server_app.simulation import num_fitting

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]
root = Path(__file__).parent.parent.parent
KEYS = {key: value for key, value in SMALL.items() if key != "lr"} | {  # fedreco has its own
    **{"method": "fedreco", "fedreco.eta-0": 0.5, "local-test-fraction": 0.2},
    "train-fraction": 0.67,  # two of three
}
MARK = "TEST_HOME"  # of the environment of all processes of a test
words = [f"{key}={value}" for key, value in KEYS.items() if key != "num-rounds"]


def started(home, *arguments, **variables):
    """`keel run --engine flower` with a home of its own, killed at the end."""
    own = {"KEEL_HOME": str(home), "PYTHONPATH": str(root), MARK: str(home), **variables}
    return keel_run("--engine", "flower", *arguments, cwd=home, env=os.environ | own)


def test_a_run_outlives_a_worker_is_stopped_by_ctrl_c_and_resumed_to_the_same_bits(
    tmp_path, no_pictures
):
    home = tmp_path / "home"
    home.mkdir()
    directory, out = home / "runs" / "cut", ""
    of_the_run = partial(inheriting, MARK, str(home))
    arguments = [*words, "num-rounds=1000", "run-name=cut", "--clients", "3"]
    with refusing_proxy() as (proxy, asked), started(home, *arguments, **proxy) as process:
        for line in process.stdout:
            out += line
            if line.startswith("round    2/1000   personal"):
                workers = [pid for pid, text in of_the_run() if "ClientAppActor" in text]
                os.kill(workers[0], signal.SIGKILL)
            if line.startswith("round    4/1000   personal"):
                break
        process.send_signal(
            signal.SIGSTOP
        )  # or it trains rounds meanwhile, all of which are repeated
        raylets = [Path(f"/proc/{pid}") for pid, text in of_the_run() if "/raylet " in text]
        assert_only_who_has_the_token_joins(raylets[0])
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert asked == []  # of loopback, which a proxy would refuse
    assert summary_of(directory)["status"] == "stopped"
    assert "keel resume cut" in out + rest
    num = len(RunReader(directory).manifest["workers"])
    assert f": {num} on cpu" in out[: out.index("round    1/1000")]
    wait_until(lambda: not of_the_run())  # a process that was killed is there for a moment

    done = SavedRun(directory).last_round
    run_inline({"resume": str(directory), "num-rounds": done + 1}, 3)
    whole = run_inline(KEYS | {"num-rounds": done + 1, "output-dir": str(tmp_path / "whole")}, 3)
    assert_same_run(directory, whole)


def test_what_no_machine_has_is_refused():
    nodes = [Node("10.0.0.1", 8, 2), Node("10.0.0.2", 4, 0)]
    assert num_fitting(nodes, cpus=3, gpus=0.5) == 2
    with pytest.raises(ValueError, match="1000 CPUs") as error:
        num_fitting(nodes, cpus=1000, gpus=0)
    assert "10.0.0.2" in str(error.value)
