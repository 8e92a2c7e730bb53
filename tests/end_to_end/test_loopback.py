"""A real deployment on loopback: TLS, keys, processes that are killed or hang, and the same bits.

One deployment for all tests, as its processes take a third of a core while they wait.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from deployment_fixtures import (
    LOOPBACK_CLIENTS,
    LOOPBACK_KEYS,
    QuietLoopback,
    limit_s,
    new_run,
    refusing_proxy,
    runs,
    state_inline,
    state_of_clients,
    wait_for_round,
)
from run_fixtures import (
    SMALL,
    Overrides,
    final_model,
    history_of,
    same_bits,
    summary_of,
    wait_until,
)
from source_fixtures import write_newer_app
from tools.processes import descendants

from flower_adapter.registration import registered_nodes
from keel.cli.main import main
from keel.deployment import proxy_exceptions
from keel.deployment.credentials import make_credentials
from keel.deployment.doctor import check_key, check_port, check_registered
from keel.deployment.doctor_runtime import check_worker
from keel.deployment.loopback import (
    PROGRAM,
    LocalProcess,
    Loopback,
    free_ports,
    partitions,
    running,
)
from keel.deployment.register import register
from keel.deployment.superlink import connection, run_config
from keel.saved_runs import SavedRun
from protocol.code import code_digest
from protocol.config import app_folder
from server_app.inline import run_inline

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A deployment on loopback, in an environment whose proxy would refuse it."""
    folder, sites = tmp_path_factory.mktemp("deployed"), partitions(LOOPBACK_CLIENTS)
    with refusing_proxy() as (proxy, asked), pytest.MonkeyPatch.context() as patch:
        for name, value in (proxy | proxy_exceptions(proxy)).items():
            patch.setenv(name, value)
        with running(folder, sites, kind=QuietLoopback) as local:
            yield local
        names = (local.host, "127.0.0.1", "localhost")
        assert [each for each in asked if any(name.encode() in each for name in names)] == []


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    output = {"output-dir": str(tmp_path_factory.mktemp("inline"))}
    return run_inline(LOOPBACK_KEYS | output, LOOPBACK_CLIENTS)


def wait_for_end(local: Loopback, run_id: int, run: Path) -> str:
    """Flower's status of a run that has ended.

    Flower is asked only at the end: each time takes a process of more than a second.
    """
    wait_until(lambda: has_ended(run), 3 * limit_s)
    return local.superlink.wait(run_id, limit_s)


def has_ended(run: Path) -> bool:
    is_there = (run / "summary.json").exists()
    return is_there and summary_of(run)["status"] not in ("starting", "running")


def words(keys: Overrides) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


def on(local: Loopback) -> list[str]:
    """The options of `keel` that name this deployment."""
    ca = local.credentials / "server" / "ca.pem"
    address = f"127.0.0.1:{local.http_port}"
    return ["--engine", "deployment", "--federation", address, "--root-certificates", str(ca)]


def registered(local: Loopback, name: str, folder: Path | None = None) -> str:
    """The node of a client, once registered from its request in `folder`."""
    request = (folder or local.credentials / name) / f"{name}.pub"
    address = f"127.0.0.1:{local.http_port}"
    lines = register(local.credentials / "server", address, 0.0, [str(request)])
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


def test_keel_run_follows_a_run_whose_bits_are_those_of_the_inline_engine(deployed, inline, capfd):
    output, before = deployed.root / "server" / "keel" / "runs", set(runs(deployed))
    assert main(["run", *words(LOOPBACK_KEYS), f"output-dir={output}", *on(deployed)]) == 0
    shown = capfd.readouterr().out
    assert all(f"round {number}/3" in shown for number in (1, 2, 3))
    [run] = set(runs(deployed)) - before
    assert summary_of(run)["status"] == "finished"
    assert same_bits(final_model(run), final_model(inline))
    assert state_of_clients(deployed, run) == state_inline(inline)
    assert all(line["left_out"] == {} for line in history_of(run))
    written = [deployed.root / "server" / "superlink.db"]
    written += (deployed.root / owner / "keel" for owner in ("server", *deployed.clients))
    for path in [*written, *(below for each in written for below in each.rglob("*"))]:
        assert path.stat().st_mode & 0o077 == 0, path  # nobody else reads updates or models


def test_a_refusal_by_the_run_is_one_line_and_code_1(deployed, capfd):
    assert main(["run", *words(SMALL | {"min-samples": 4000}), *on(deployed)]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert "min-samples" in said
    assert said.count("\n") == 1


def test_each_worker_refuses_a_run_from_another_checkout(deployed, tmp_path):
    before = set(runs(deployed))
    app = write_newer_app(tmp_path / "app")
    run_id = deployed.superlink.submit(LOOPBACK_KEYS, app)
    assert "failed" in deployed.superlink.wait(run_id, limit_s)
    refusal = f"cannot take part: this client's worker runs code {code_digest()} of Keel, the run's"
    lines = [line for line in deployed.superlink.log(run_id).splitlines() if refusal in line]
    assert any(re.search(rf"error: client ({'|'.join(deployed.clients)}) cannot", x) for x in lines)
    assert str(tmp_path) not in "".join(lines)
    assert set(runs(deployed)) == before


def test_killed_and_hung_processes_cost_no_bit_of_a_resumed_run(deployed, inline):
    """A worker and the SuperLink are killed; then it hangs, and the ServerApp is killed."""
    run_id, run = new_run(deployed, LOOPBACK_KEYS)
    wait_for_round(run, 1)
    for name in ("worker-client-0000", "superlink"):
        os.kill(deployed.pid(name), signal.SIGKILL)
    wait_for_round(run, 2)
    superlink, log = deployed.pid("superlink"), deployed.log_file("serverapp-executor")
    os.kill(superlink, signal.SIGSTOP)
    size = log.stat().st_size
    wait_until(lambda: log.stat().st_size > size, limit_s)  # who gets no answer says so
    os.kill(superlink, signal.SIGCONT)
    os.kill(server_app_pid(deployed), signal.SIGKILL)
    resumed = deployed.superlink.submit({"resume": str(run)})
    assert wait_for_end(deployed, resumed, run) == "finished:completed"
    history = history_of(run)
    assert [line["round"] for line in history] == [1, 2, 3]
    assert all(line["left_out"] == {} for line in history)
    assert same_bits(final_model(run), final_model(inline))
    assert state_of_clients(deployed, run) == state_inline(inline)
    listed = {row["run-id"] for row in deployed.superlink.flwr_json("list", connection)["runs"]}
    assert {str(run_id), str(resumed)} <= listed  # the restarted SuperLink knows its runs


def test_the_doctor_finds_this_server_in_order_and_a_key_that_is_not_registered(deployed, tmp_path):
    make_credentials(tmp_path, ["127.0.0.1"], ["stranger"])
    address, ca = f"127.0.0.1:{deployed.fleet_port}", deployed.credentials / "server" / "ca.pem"
    superlink = f"127.0.0.1:{deployed.http_port}"
    before = {node.node_id: node.status for node in registered_nodes(superlink, ca.read_bytes())}
    [reached] = check_port(address, ca)
    assert not reached.is_problem, reached.text
    [known] = check_key(address, ca, deployed.credentials / "client-0000" / "client.key")
    assert not known.is_problem, known.text
    [unknown] = check_key(address, ca, tmp_path / "stranger" / "client.key")
    assert unknown.is_problem
    registered = [f.text for f in check_registered(ca, superlink) if not f.is_problem]
    assert registered == ["2 SuperNodes are connected"]
    lines = register(deployed.credentials / "server", superlink, 0.0)
    known = {line.split()[1]: line.split()[3] for line in lines}
    assert {int(known[name]) for name in deployed.clients} <= before.keys()
    [worker] = check_worker(deployed.worker_socket("client-0000"))
    assert not worker.is_problem, worker.text
    after = {node.node_id: node.status for node in registered_nodes(superlink, ca.read_bytes())}
    assert after == before


@pytest.fixture
def endless(deployed):
    """`keel run` of a thousand rounds, after the first, and the run directory."""
    before = set(runs(deployed))
    keys = words(LOOPBACK_KEYS | {"num-rounds": 1000, "min-replies": 1})
    output = f"output-dir={deployed.root / 'server' / 'keel' / 'runs'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "keel", "run", *keys, output, *on(deployed)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: set(runs(deployed)) - before, limit_s, process)
        [run] = set(runs(deployed)) - before
        wait_for_round(run, 1)
        yield process, run
    finally:
        process.kill()
        process.wait(timeout=60)


def test_a_site_that_is_away_misses_rounds_and_returns_and_ctrl_c_stops_the_run(deployed, endless):
    """Its SuperNode is killed; a SuperNode with another site's key uses its name meanwhile."""
    command, run = endless
    impostor, name = "client-0009", "client-0001"
    make_credentials(deployed.credentials, [deployed.host], [impostor])
    node = registered(deployed, impostor)
    real = deployed.processes.pop(f"supernode-{name}")  # not restarted
    real.stop()
    deployed.runtime_ports[impostor] = free_ports(1)[0]
    try:
        deployed.start_client(impostor, partitions(LOOPBACK_CLIENTS)[name] | {"name": name})
        wait_until(lambda: f"node {node} " in (run / "run.log").read_text(), limit_s)
        wait_until(lambda: name not in history_of(run)[-1]["participants"], limit_s)
    finally:
        for process in ("worker", "supernode", "executor"):
            deployed.processes.pop(f"{process}-{impostor}").stop()
        real.start()
        deployed.processes[f"supernode-{name}"] = real
        unregister(deployed, node)
    wait_until(lambda: name in history_of(run)[-1]["participants"], limit_s)
    nodes = {row["client"]: row["node"] for row in json.loads((run / "roster.json").read_text())}
    assert nodes.keys() == set(partitions(LOOPBACK_CLIENTS))
    assert nodes[name] != int(node)
    events = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    assert [e["node"] for e in events if e["event"] == "refused"][:1] == [int(node)]
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 130, err
    assert err == ""
    assert "Traceback" not in out
    assert f"keel resume {run} --engine deployment" in "".join(out.splitlines())
    done = SavedRun(run).last_round
    assert main(["resume", str(run), f"num-rounds={done + 1}", *on(deployed)]) == 0
    assert SavedRun(run).last_round == done + 1


# --- strangers -----------------------------------------------------------------------------------


def rejected(deployed, words: list[str]) -> subprocess.CompletedProcess:
    """A SuperNode started with these words, which has to give up."""
    [port] = free_ports(1)
    return subprocess.run(
        [
            *(*PROGRAM, "supernode", "--isolation", "process", "--host", "127.0.0.1"),
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


def test_a_site_s_own_key_connects_once_its_request_is_registered_and_stays_there(
    deployed, tmp_path, capfd
):
    """From the request alone; an unregistered key is refused, here by the doctor's question."""
    name, site = "site-a", tmp_path / "site-a"
    assert main(["deploy", "key", name, "--credentials", str(tmp_path)]) == 0
    fingerprint = capfd.readouterr().out.split()[-1]
    shutil.copy(deployed.credentials / "server" / "ca.pem", site)
    server = tmp_path / "mail"  # what the operator has of the site
    server.mkdir()
    shutil.copy(site / f"{name}.pub", server)
    address = f"127.0.0.1:{deployed.fleet_port}"

    def answer():
        [found] = check_key(address, site / "ca.pem", site / "client.key")
        return found.is_problem, fingerprint in found.text

    assert answer() == (True, True)
    node = registered(deployed, name, server)
    assert answer() == (False, True)
    log = tmp_path / "supernode.log"
    command = [
        *(*PROGRAM, "supernode", "--isolation", "process", "--host", "127.0.0.1"),
        *("--port", str(free_ports(1)[0]), "--superlink", address),
        *("--root-certificates", str(site / "ca.pem")),
        *("--auth-supernode-private-key", str(site / "client.key")),
        *("--node-config", run_config({"name": name})),
    ]
    supernode = LocalProcess(command, deployed.environment("stranger"), log)
    superlink, ca = f"127.0.0.1:{deployed.http_port}", (site / "ca.pem").read_bytes()
    try:
        wait_until(
            lambda: (
                (name, "online") in [(n.name, n.status) for n in registered_nodes(superlink, ca)]
            ),
            limit_s,
            supernode.process,
        )
    finally:
        supernode.stop()
        unregister(deployed, node)
    secret = (site / "client.key").read_bytes().splitlines()[2]
    held = [path for path in deployed.root.rglob("*") if path.is_file()]
    assert not [path for path in held if secret in path.read_bytes()]


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
    assert "the SuperLink does not know the key" in unknown.stdout, unknown.stdout
    assert re.search("(?i)certificate|ssl|handshake", wrong_ca.stdout), wrong_ca.stdout
    for each in (unknown, no_key, wrong_ca, plain):
        assert each.returncode != 0
        assert "SuperNode ID" not in each.stdout


def test_a_second_supernode_with_a_connected_client_s_key_says_so(deployed):
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
    assert "another SuperNode with this key" in second.stdout, second.stdout


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
    server, address = deployed.credentials / "server", f"127.0.0.1:{deployed.http_port}"
    make_credentials(deployed.credentials, [deployed.host], ["removed", "later"])
    node = registered(deployed, "removed")
    unregister(deployed, node)
    with pytest.raises(ValueError, match="removed"):
        registered(deployed, "removed")
    later = registered(deployed, "later")
    clients = json.loads((server / "clients.json").read_text())
    assert clients["later"]["node"] == later
    assert "removed" not in clients
    ca = server / "ca.pem"
    assert not any(node in finding.text.split() for finding in check_registered(ca, address))
    unregister(deployed, later)
