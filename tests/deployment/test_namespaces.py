"""A server and two clients in three network namespaces, and a cable pulled for 20 seconds."""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import pytest
from cluster_fixtures import ip, make_network
from deployment_fixtures import (
    LOOPBACK_KEYS,
    new_run,
    state_inline,
    state_of_clients,
    wait_for_round,
)
from run_fixtures import final_model, history_of, same_bits, summary_of

from keel.deployment.loopback import Loopback, partitions, running
from server_app.inline import run_inline

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]
limit_s, pulled_s = 600, 20
KEYS = LOOPBACK_KEYS | {"num-rounds": 6, "round-timeout": 300.0}


@pytest.fixture
def network():
    """Namespace names by machine and of the switch, and each machine's cable there; then gone."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    mark = f"kl{os.getpid() % 10000}"
    switch, machines = f"{mark}-s", ["server", *partitions(2)]
    spaces = {machine: f"{mark}-{i}" for i, machine in enumerate(machines)}
    cables = {machine: f"{mark}v{i}" for i, machine in enumerate(machines)}
    try:
        try:
            make_network(
                switch,
                {spaces[m]: (cables[m], f"10.213.77.{i + 1}") for i, m in enumerate(machines)},
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no namespaces: {error.stderr}")
        yield spaces, switch, cables
    finally:
        for space in (*spaces.values(), switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


def test_a_cable_pulled_for_20_seconds_costs_time_and_nothing_else(network, tmp_path):
    spaces, switch, cables = network

    class InNamespaces(Loopback):
        """Every machine in a namespace of its own."""

        host = "10.213.77.1"

        def __init__(self, *where):
            super().__init__(*where)
            flwr = self.superlink.command
            self.superlink.command = lambda *words: self.command("server", flwr(*words))

        def command(self, owner, words):
            return ["ip", "netns", "exec", spaces[owner], *words]

        def register(self):
            server, superlink = self.credentials / "server", f"127.0.0.1:{self.http_port}"
            words = [sys.executable, "-m", "keel", "deploy", "register", "--wait", "100"]
            words += ["--credentials", str(server), "--superlink", superlink]
            words += [str(self.credentials / name / f"{name}.pub") for name in self.clients]
            env = self.environment("server")
            subprocess.run(self.command("server", words), env=env, check=True, timeout=200)

    with running(tmp_path / "d", partitions(2), InNamespaces) as local:
        run_id, run = new_run(local, KEYS)
        wait_for_round(run, 2)
        ip("-n", switch, "link", "set", cables["client-0001"], "down")
        time.sleep(pulled_s)
        ip("-n", switch, "link", "set", cables["client-0001"], "up")
        assert local.superlink.wait(run_id, limit_s) == "finished:completed"
        inline = run_inline(KEYS | {"output-dir": str(tmp_path / "inline")}, 2)
        assert summary_of(run)["status"] == "finished"
        assert [line["left_out"] for line in history_of(run)] == [{}] * 6
        assert same_bits(final_model(run), final_model(inline))
        assert state_of_clients(local, run) == state_inline(inline)
