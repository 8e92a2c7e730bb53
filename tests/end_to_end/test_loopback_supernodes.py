"""A real deployment on loopback: SuperNodes and executors that die, and strangers that are refused.

Apart from test_loopback.py, as both take minutes: mostly waiting, so they run side by side.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from deployment_fixtures import (
    LOOPBACK_CLIENTS,
    LOOPBACK_KEYS,
    QuietLoopback,
    limit_s,
    lines_of,
    new_run,
    state_of_clients,
    wait_for_round,
)

from keel.deployment.checks_host import check_registered
from keel.deployment.credentials import make_credentials
from keel.deployment.loopback import free_ports, partitions, running
from keel.deployment.register import register
from keel.deployment.superlink import run_config
from protocol.config import app_folder

pytestmark = pytest.mark.timeout(900)
WITH_HEARTBEATS = """
import runpy, sys
import flwr.common.constant
for module in list(sys.modules.values()):
    if hasattr(module, "HEARTBEAT_DEFAULT_INTERVAL"):
        module.HEARTBEAT_DEFAULT_INTERVAL = 10
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class QuickHeartbeats(QuietLoopback):
    """Clients have a heartbeat every 10 s, not 30: Flower misses it after 20 s, not a minute."""

    def start(self, name, owner, command, env):
        if owner in self.clients:
            python, option, *words = command
            assert option == "-m"
            command = [python, "-c", WITH_HEARTBEATS, *words]
        super().start(name, owner, command, env)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A deployment on loopback."""
    folder = tmp_path_factory.mktemp("deployed")
    with running(folder, partitions(LOOPBACK_CLIENTS), kind=QuickHeartbeats) as local:
        yield local


def test_a_supernode_and_an_executor_killed_come_back_and_rounds_without_them_say_so(deployed):
    run_id, run = new_run(deployed, LOOPBACK_KEYS | {"num-rounds": 60, "evaluate-every": 60})
    wait_for_round(run, 1)
    executor, supernode = "executor-client-0001", "supernode-client-0000"
    starts = {name: deployed.processes[name].starts for name in (executor, supernode)}
    os.kill(deployed.pid(executor), signal.SIGKILL)
    os.kill(deployed.pid(supernode), signal.SIGKILL)
    disturbed, back, deadline = len(lines_of(run)) + 1, False, time.monotonic() + limit_s
    while not back:  # the SuperLink takes the killed SuperNode for connected for 20 s
        assert time.monotonic() < deadline
        time.sleep(0.5)
        rows = [json.loads(line) for line in lines_of(run)]
        for row in rows:
            missing = {"client-0000", "client-0001"} - set(row["participants"])
            assert missing <= row["left_out"].keys() | set(row["backed_off"])
            disturbed = max(disturbed, row["round"] if missing else 0)
        again = all(deployed.processes[name].starts > starts[name] for name in starts)
        back = again and rows[-1]["round"] > disturbed + 1
    deployed.superlink.stop(run_id)
    states = state_of_clients(deployed, run)
    assert states.keys() == {"client-0000", "client-0001"}
    for name in states:  # trained on from its own state: every version intact
        folder = deployed.root / name / "keel" / "clients" / run.name / name
        assert not list(folder.glob("*.damaged"))
        assert max(int(path.name.split("-")[1]) for path in folder.glob("round-*")) > disturbed


def rejected(deployed, words: list[str]) -> subprocess.CompletedProcess:
    """A SuperNode started with these words, which has to give up."""
    [port] = free_ports(1)
    return subprocess.run(
        [
            *(sys.executable, "-m", "keel.deployment.supernode"),
            *("--isolation", "process", "--host", "127.0.0.1"),
            *("--port", str(port), "--max-retries", "1", "--max-wait-time", "5"),
            *("--superlink", f"127.0.0.1:{deployed.fleet_port}", *words),
        ],
        env=deployed.environment("stranger"),
        cwd=app_folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_unknown_key_wrong_ca_and_plain_text_are_refused(deployed, tmp_path):
    make_credentials(tmp_path, ["127.0.0.1"], ["stranger"])
    ours, theirs = deployed.credentials / "server" / "ca.pem", tmp_path / "stranger"
    key = ["--auth-supernode-private-key", str(theirs / "client.key")]
    config = ["--node-config", run_config({"name": "stranger"})]
    words = [
        ["--root-certificates", str(ours), *key, *config],
        ["--root-certificates", str(ours), *config],
        ["--root-certificates", str(theirs / "ca.pem"), *key, *config],
        ["--insecure", *config],
    ]
    with ThreadPoolExecutor() as pool:  # each waits for five seconds
        unknown, no_key, wrong_ca, plain = pool.map(partial(rejected, deployed), words)
    assert "Failed to activate SuperNode" in unknown.stdout, unknown.stdout
    assert "warning: the SuperLink does not know the key in" in unknown.stdout
    assert re.search("(?i)certificate|ssl|handshake", wrong_ca.stdout), wrong_ca.stdout
    for each in (unknown, no_key, wrong_ca, plain):
        assert each.returncode != 0
        assert "SuperNode ID" not in each.stdout
    assert len(deployed.superlink.nodes()) == LOOPBACK_CLIENTS


def test_a_second_supernode_with_a_connected_client_s_key_says_so(deployed):
    """Its log said only that it could not be activated, and the doctor found nothing wrong."""
    own = deployed.credentials / "client-0000"
    second = rejected(
        deployed,
        [
            *("--root-certificates", str(own / "ca.pem")),
            *("--auth-supernode-private-key", str(own / "client.key")),
            *("--node-config", run_config({"name": "client-0000"})),
        ],
    )
    assert second.returncode != 0
    assert "another SuperNode with this key is connected" in second.stdout, second.stdout


@pytest.mark.parametrize(
    ("owner", "executor"),
    [("client-0000", "executor-client-0000"), ("server", "serverapp-executor")],
)
def test_an_executor_without_the_secret_gets_no_work(deployed, owner, executor):
    """Neither the SuperNode nor the SuperLink has tasks for it."""
    port, tls = (deployed.runtime_ports | {"server": deployed.http_port})[owner], ["--insecure"]
    if owner == "server":
        tls = ["--root-certificates", str(deployed.credentials / "server" / "ca.pem")]
    strange = subprocess.run(
        ["flower-superexec", *tls, "--runtime-api-address", f"127.0.0.1:{port}"],
        env=deployed.environment("stranger"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert "terminated" in strange.stdout  # refused, it ends by itself
    assert "Start `flwr-clientapp`" not in strange.stdout
    with_secret = deployed.processes[executor].process
    assert with_secret.poll() is None


def test_a_key_that_was_unregistered_keeps_no_other_client_out(deployed):
    """No SuperLink takes such a key again: while its file was there, registering ended with it."""
    server, address = deployed.credentials / "server", f"127.0.0.1:{deployed.http_port}"
    make_credentials(deployed.credentials, [deployed.host], ["removed"])
    [line] = [x for x in register(server, address, 0.0) if x.startswith("registered")]
    node = line.split()[3]
    deployed.superlink.flwr("supernode", "unregister", node, deployed.superlink.connection)
    make_credentials(deployed.credentials, [deployed.host], ["later"])
    lines = {line.split()[1]: line for line in register(server, address, 0.0)}
    assert lines["later"].startswith("registered")
    assert f"its key was unregistered and cannot be used again: move {server}" in lines["removed"]
    assert json.loads((server / "clients.json").read_text()).keys() == lines.keys() - {"removed"}
    findings = list(check_registered(server, address))
    assert not any(node in finding.text for finding in findings), findings
    [later] = [finding.text for finding in findings if "of later" in finding.text]
    assert later.startswith(f"SuperNode {lines['later'].split()[3]} of later has never connected:")
    assert any(f.text == "not registered: the key of removed: make register" for f in findings)
