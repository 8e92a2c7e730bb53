"""A real deployment on loopback: TLS, keys, processes that are killed or hang, and the same bits.

One deployment for all tests, as its processes take a third of a core while they wait. One run goes
through everything that has to cost nothing, because a ServerApp takes seconds to start.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from deployment_fixtures import (
    LOOPBACK_CLIENTS,
    LOOPBACK_KEYS,
    QuietLoopback,
    limit_s,
    lines_of,
    refusing_proxy,
    runs,
    state_inline,
    state_of_clients,
    wait_for_round,
)
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import (
    RuntimeVersionClientInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from run_fixtures import Overrides, final_model, history_of, same_bits, summary_of, wait_until
from source_fixtures import write_newer_app
from tools.processes import descendants

import keel.deployment.loopback
import keel.remote
from flower_adapter.registration import registered_nodes
from keel.cli.main import main
from keel.deployment import proxy_exceptions
from keel.deployment.__main__ import report_superlink
from keel.deployment.credentials import make_credentials
from keel.deployment.doctor import check_key, check_port, check_registered
from keel.deployment.doctor_runtime import check_worker
from keel.deployment.keys import load_client_key
from keel.deployment.loopback import (
    LocalProcess,
    Loopback,
    free_ports,
    partitions,
    running,
)
from keel.deployment.register import register
from protocol.code import code_digest
from server_app.inline import run_inline

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A deployment on loopback, in an environment whose proxy would refuse it."""
    folder, sites = tmp_path_factory.mktemp("deployed"), partitions(LOOPBACK_CLIENTS)
    with refusing_proxy() as (proxy, asked), pytest.MonkeyPatch.context() as patch:
        patch.setattr(keel.deployment.loopback, "pause_s", 0.2)
        for name, value in (proxy | proxy_exceptions(proxy)).items():
            patch.setenv(name, value)
        with running(folder, sites, QuietLoopback) as local:
            yield local
        names = (local.host, "127.0.0.1", "localhost")
        assert [each for each in asked if any(name.encode() in each for name in names)] == []


def words(local: Loopback, keys: Overrides) -> list[str]:
    """The words of `keel run` or `resume` on this deployment."""
    ca = local.credentials / "server" / "ca.pem"
    given = [f"{key}={value}" for key, value in keys.items()]
    return [*given, "--engine", "deployment", "--federation", superlink_of(local),
            "--root-certificates", str(ca)]  # fmt: skip


def superlink_of(local: Loopback) -> str:
    return f"127.0.0.1:{local.http_port}"


def registered(local: Loopback, name: str, folder: Path) -> str:
    """The node of a client, once registered from its request in `folder`."""
    server, request = local.credentials / "server", folder / f"{name}.pub"
    lines = register(server, superlink_of(local), 0.0, [str(request)])
    [node] = [line.split()[3] for line in lines if line.split()[:2] == ["registered", name]]
    return node


def unregister(local: Loopback, node: str) -> None:
    local.superlink.flwr("supernode", "unregister", node, local.superlink.connection)


def server_app_pid(local: Loopback) -> int:
    [pid] = [
        pid
        for pid, command in descendants(local.pid("serverapp-executor")).items()
        if "keel.deployment serverapp" in command
    ]
    return pid


@contextlib.contextmanager
def endless(local: Loopback):
    """`keel run` of a thousand rounds in a process of its own, and the run directory."""
    output = str(local.root / "server" / "keel" / "runs")
    keys = LOOPBACK_KEYS | {"num-rounds": 1000, "output-dir": output}
    before = set(runs(local))
    with subprocess.Popen(
        [sys.executable, "-m", "keel", "run", *words(local, keys)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: set(runs(local)) - before, limit_s, process)
            [run] = set(runs(local)) - before
            yield process, run
        finally:
            process.kill()


@contextlib.contextmanager
def impostor(local: Loopback, name: str, credentials: Path):
    """In place of a site's SuperNode one with another key; then the site's own again."""
    real = local.processes.pop(f"supernode-{name}")  # it is not restarted
    real.stop()
    key = str(credentials / "client.key")
    own = str(local.credentials / name / "client.key")
    command = [key if word == own else word for word in real.command]
    false = LocalProcess(command, real.env, local.log_file("impostor"))
    try:
        yield
    finally:
        false.stop()
        local.processes[f"supernode-{name}"] = real  # which is started again, as it has ended


def test_what_dies_or_lies_costs_no_bit_of_a_run(deployed, tmp_path, capfd):
    """Killed: a worker and the SuperLink, then the ServerApp.

    Ctrl-C ends `keel run`. While the run is resumed, a site is away, and another one, whose key is
    registered as its own, uses its name.
    """
    with endless(deployed) as (command, run):
        wait_for_round(run, 1)
        for name in ("worker-client-0000", "superlink"):
            os.kill(deployed.pid(name), signal.SIGKILL)
        wait_for_round(run, 2)
        os.kill(server_app_pid(deployed), signal.SIGKILL)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=limit_s)
    assert (command.returncode, err) == (130, "")
    assert "Traceback" not in out
    assert f"keel resume {run} --engine deployment" in "".join(out.splitlines())

    stranger, name = tmp_path / "stranger", "client-0001"
    assert main(["deploy", "key", "stranger", "--credentials", str(tmp_path)]) == 0
    shutil.copy(deployed.credentials / "server" / "ca.pem", stranger)
    node = registered(deployed, "stranger", stranger)

    num_rounds, log = len(lines_of(run)) + 1, deployed.log_file("serverapp-executor")
    with contextlib.ExitStack() as away, ThreadPoolExecutor() as pool:
        away.enter_context(impostor(deployed, name, stranger))

        def return_once_it_is_refused(away: contextlib.ExitStack) -> None:
            with away:
                wait_until(lambda: f"node {node} is new and does not" in log.read_text(), limit_s)

        returning = pool.submit(return_once_it_is_refused, away.pop_all())
        resumed = words(deployed, {"num-rounds": num_rounds})
        assert main(["resume", str(run), *resumed]) == 0
        returning.result()
    assert f"round {num_rounds}/{num_rounds}" in capfd.readouterr().out
    unregister(deployed, node)

    output = {"num-rounds": num_rounds, "output-dir": str(tmp_path)}
    inline = run_inline(LOOPBACK_KEYS | output, LOOPBACK_CLIENTS)
    assert summary_of(run)["status"] == "finished"
    assert [line["round"] for line in history_of(run)] == [*range(1, num_rounds + 1)]
    assert all(line["left_out"] == {} for line in history_of(run))
    assert same_bits(final_model(run), final_model(inline))
    assert state_of_clients(deployed, run) == state_inline(inline)
    nodes = {row["client"]: row["node"] for row in json.loads((run / "roster.json").read_text())}
    assert nodes.keys() == set(deployed.clients)
    assert nodes[name] != int(node)
    written = [deployed.root / "server" / "superlink.db"]
    written += (deployed.root / owner / "keel" for owner in ("server", *deployed.clients))
    for path in [*written, *(below for each in written for below in each.rglob("*"))]:
        assert path.stat().st_mode & 0o077 == 0, path  # nobody else reads updates or models


@pytest.mark.slow  # a request waits for 30 seconds
def test_a_superlink_that_hangs_costs_time_alone(deployed):
    with endless(deployed) as (command, run):
        wait_for_round(run, 1)
        superlink, log = deployed.pid("superlink"), deployed.log_file("serverapp-executor")
        os.kill(superlink, signal.SIGSTOP)
        size = log.stat().st_size
        wait_until(lambda: log.stat().st_size > size, limit_s)  # who gets no answer says so
        os.kill(superlink, signal.SIGCONT)
        wait_for_round(run, len(lines_of(run)) + 2)
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=limit_s)
    assert all(line["left_out"] == {} for line in history_of(run))


def test_a_refusal_by_a_site_of_another_checkout_is_one_line_and_code_1(
    deployed, tmp_path, monkeypatch, capfd
):
    app = write_newer_app(tmp_path / "app")
    monkeypatch.setattr(keel.remote, "app_directory", lambda: contextlib.nullcontext(app))
    before = set(runs(deployed))
    output = str(deployed.root / "server" / "keel" / "runs")
    assert main(["run", *words(deployed, LOOPBACK_KEYS | {"output-dir": output})]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert code_digest() in said
    assert re.search("|".join(deployed.clients), said)
    assert str(tmp_path) not in said
    assert set(runs(deployed)) == before


def test_the_doctor_finds_this_server_in_order_and_changes_nothing(deployed):
    address, ca = f"127.0.0.1:{deployed.fleet_port}", deployed.credentials / "server" / "ca.pem"
    before = registered_nodes(superlink_of(deployed), ca.read_bytes())
    findings = [
        *check_port(address, ca),
        *check_key(address, ca, deployed.credentials / "client-0000" / "client.key"),
        *check_registered(ca, superlink_of(deployed)),
        *check_worker(deployed.worker_socket("client-0000")),
    ]
    assert [finding.is_problem for finding in findings] == [False] * 4, findings
    assert f"{LOOPBACK_CLIENTS} SuperNodes" in findings[2].text
    assert registered_nodes(superlink_of(deployed), ca.read_bytes()) == before


# --- strangers -----------------------------------------------------------------------------------


def test_a_key_is_known_from_its_request_until_it_is_unregistered(deployed, tmp_path, capfd):
    """The site keeps the key. Once unregistered, it stays refused and keeps no other client out."""
    for name in ("site-a", "later"):
        assert main(["deploy", "key", name, "--credentials", str(tmp_path)]) == 0
        shutil.copy(deployed.credentials / "server" / "ca.pem", tmp_path / name)
    fingerprint = capfd.readouterr().out.splitlines()[1].split()[-1]
    site, mail = tmp_path / "site-a", tmp_path / "mail"  # what the operator has of the site
    mail.mkdir()
    shutil.copy(site / "site-a.pub", mail)
    address = f"127.0.0.1:{deployed.fleet_port}"

    def answer():
        [found] = check_key(address, site / "ca.pem", site / "client.key")
        return found.is_problem, fingerprint in found.text

    assert answer() == (True, True)
    node = registered(deployed, "site-a", mail)
    assert answer() == (False, True)
    unregister(deployed, node)
    assert answer() == (True, True)
    with pytest.raises(ValueError, match="site-a"):
        registered(deployed, "site-a", mail)
    later = registered(deployed, "later", tmp_path / "later")
    clients = json.loads((deployed.credentials / "server" / "clients.json").read_text())
    assert clients["later"]["node"] == later
    assert "site-a" not in clients
    unregister(deployed, later)
    secret = (site / "client.key").read_bytes().splitlines()[2]
    held = [path for path in deployed.root.rglob("*") if path.is_file()]
    assert not [path for path in held if secret in path.read_bytes()]


def test_who_lacks_a_key_a_certificate_or_a_secret_gets_nothing(deployed, tmp_path, capfd):
    make_credentials(tmp_path, ["127.0.0.1"], ["stranger"])
    ours, theirs = deployed.credentials / "server" / "ca.pem", tmp_path / "stranger"
    fleet = f"127.0.0.1:{deployed.fleet_port}"
    report_superlink(fleet, ours, theirs / "client.key")  # what such a SuperNode logs
    assert "the SuperLink does not know the key" in capfd.readouterr().err
    [other_ca] = check_port(fleet, theirs / "ca.pem")
    assert other_ca.is_problem
    key = load_client_key(deployed.credentials / "client-0000" / "client.key").public_key()
    activation = ActivateNodeRequest(public_key=public_key_to_bytes(key), heartbeat_interval=30.0)
    version = RuntimeVersionClientInterceptor(component_name="SuperNode")
    for insecure, ca in ((True, None), (False, ours.read_bytes())):  # none signs with the key
        channel = create_channel(fleet, insecure, ca, interceptors=[version])
        with pytest.raises(grpc.RpcError):
            FleetStub(channel).ActivateNode(activation, timeout=30)
        channel.close()
    runtimes = {f"127.0.0.1:{deployed.runtime_ports['client-0000']}": None}
    for address, ca in (runtimes | {superlink_of(deployed): ours.read_bytes()}).items():
        client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=ca is None,
            root_certificates=ca,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        )
        with pytest.raises(httpx.HTTPStatusError) as refused:
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
        assert refused.value.response.status_code == 401
        client.close()


def test_a_second_supernode_with_a_connected_client_s_key_says_so(deployed):
    [port] = free_ports(1)
    command = list(deployed.processes["supernode-client-0000"].command)
    command[command.index("--port") + 1] = str(port)
    second = subprocess.run(
        [*command, "--max-retries", "1", "--max-wait-time", "2"],
        env=deployed.environment("stranger"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert second.returncode != 0
    assert "another SuperNode with this key" in second.stdout, second.stdout
