"""The doctor on a machine of a deployment: what is wrong is named. `docker` is a shell script."""

import datetime
import os
import re
import subprocess

import pytest
from deployment_fixtures import doctor, problem, program, result

import flower_adapter.registration
from client_app import site_privacy
from flower_adapter.registration import RegisteredNode, Registration
from keel.deployment import doctor as checks
from keel.deployment import doctor_runtime, reach
from keel.deployment.credentials import make_credentials
from protocol.code import code_digest


def test_files_that_are_missing_open_to_others_or_unreadable(made, tmp_path, monkeypatch):
    key = tmp_path / "client.key"
    assert list(checks.check_files(made / "site-a", ["client.key"])) == []
    assert str(key) in problem(checks.check_files(tmp_path, ["client.key"]))
    for mode in (0o644, 0o640, 0o604):
        key.touch()
        key.chmod(mode)
        assert f"chmod 600 {key}" in problem(checks.check_files(tmp_path, ["client.key"]))
    key.chmod(0o600)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert str(key) in problem(checks.check_files(tmp_path, ["client.key"]))


def test_a_certificate_that_is_missing_damaged_or_has_ended(made, tmp_path):
    assert not result(checks.check_certificate(made / "server/server.pem"))[0]
    path = tmp_path / "ca.pem"
    assert str(path) in problem(checks.check_certificate(path))
    path.write_text("no certificate")
    assert str(path) in problem(checks.check_certificate(path))
    make_credentials(tmp_path / "old", ["a.org"], [], days=0)
    assert "old/ca/ca.pem" in problem(checks.check_certificate(tmp_path / "old/ca/ca.pem"))


def test_a_server_key_that_is_damaged_or_of_another_certificate(made, tmp_path):
    certificate, key = made / "server/server.pem", made / "server/server.key"
    assert list(checks.check_server_key(certificate, key)) == []
    for content in (b"", key.read_bytes()[:100], (made / "ca/ca.key").read_bytes()):
        (tmp_path / "server.key").write_bytes(content)
        text = problem(checks.check_server_key(certificate, tmp_path / "server.key"))
        assert str(tmp_path / "server.key") in text


def test_a_program_that_hangs_is_a_problem_of_one_line(tmp_path, monkeypatch):
    program(tmp_path / "docker", "exec sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(checks, "TIMEOUT_S", 0.2)
    assert "docker" in problem(checks.check_containers("client", [], lambda: iter([])))


# --- the port ------------------------------------------------------------------------------------


def test_a_port_in_order_and_one_of_another_ca(made, tmp_path, tls_server):
    make_credentials(tmp_path, ["other.org"], [])
    address = f"127.0.0.1:{tls_server(made / 'server')}"
    assert not result(checks.check_port(address, made / "ca/ca.pem"))[0]
    other = tmp_path / "ca/ca.pem"
    assert str(other) in problem(checks.check_port(address, other))


def test_a_certificate_for_other_names_and_one_that_has_expired(tmp_path, tls_server):
    make_credentials(tmp_path, ["a.org"], [], days=20)
    ca = tmp_path / "ca/ca.pem"
    port = tls_server(tmp_path / "server", "127.0.0.2")
    text = problem(checks.check_port(f"127.0.0.2:{port}", ca))
    assert "127.0.0.2" in text
    assert "--renew" in text
    (tmp_path / "server/server.pem").unlink()
    make_credentials(tmp_path, ["a.org"], [], days=0)  # of the same authority
    text = problem(checks.check_port(f"127.0.0.1:{tls_server(tmp_path / 'server')}", ca))
    assert "expired" in text
    assert "--renew" in text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:9092"])
def test_nobody_listens_or_no_such_name_and_a_proxy_that_may_stand_in_the_way(
    made, monkeypatch, address
):
    monkeypatch.setenv("https_proxy", "http://user:password@proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "localhost,inner.example.org")
    text = problem(checks.check_port(address, made / "ca/ca.pem"))
    assert address in text
    assert "http://proxy.example.org:3128" in text
    assert "password" not in text
    assert reach.proxy_for("inner.example.org:9092") == ""


# --- the key -------------------------------------------------------------------------------------


@pytest.fixture
def answered(monkeypatch):
    """A function that sets the SuperLink's answer about a key."""

    def answer(registration, details=""):
        monkeypatch.setattr(
            flower_adapter.registration, "registration_of", lambda *_: (registration, details)
        )

    return answer


def check_key(folder, made):
    return result(checks.check_key("localhost:1", made / "ca/ca.pem", folder / "client.key"))


def test_a_key_that_is_known_or_unknown_and_a_clock_that_is_refused(made, answered):
    from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor as flowers

    answered(Registration.KNOWN)
    assert not check_key(made / "site-a", made)[0]
    answered(Registration.UNKNOWN)
    is_problem, text = check_key(made / "site-a", made)
    assert is_problem
    assert str(made / "site-a/site-a.pub") in text
    answered(Registration.CLOCKS_DIFFER, "Invalid timestamp")
    is_problem, text = check_key(made / "site-a", made)
    assert is_problem
    assert f"more than {-flowers.MIN_TIMESTAMP_DIFF} seconds ahead" in text
    assert f"more than {flowers.MAX_TIMESTAMP_DIFF // 60} minutes behind" in text
    assert f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}" in text


def test_a_key_of_another_client_a_locked_one_and_none(made, tmp_path, answered):
    answered(Registration.KNOWN)
    make_credentials(tmp_path, ["localhost"], ["site-a", "site-b"])
    key, request = tmp_path / "site-a/client.key", tmp_path / "site-a/site-a.pub"
    key.write_bytes((tmp_path / "site-b/client.key").read_bytes())
    is_problem, text = check_key(tmp_path / "site-a", made)
    assert is_problem
    assert str(request) in text
    request.unlink()  # not needed to connect
    assert not check_key(tmp_path / "site-a", made)[0]
    key.unlink()
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", str(key)]
    subprocess.run(make, check=True)
    for is_problem, text in (check_key(tmp_path / "site-a", made), check_key(tmp_path, made)):
        assert is_problem
        assert "client.key" in text


def test_a_tls_port_without_grpc_is_not_the_port_for_clients(made, tls_server):
    address = f"localhost:{tls_server(made / 'server')}"
    text = problem(checks.check_key(address, made / "ca/ca.pem", made / "site-a/client.key"))
    assert address in text
    assert "--fleet" in text


def test_every_registered_client_that_is_not_connected_is_named(made, monkeypatch):
    nodes = [(2, "", "unregistered"), (3, "site-a", "offline"), (4, "site-b", "online"),
             (5, "site-c", "registered"), (6, "", "online"), (7, "", "registered")]  # fmt: skip
    found = [RegisteredNode(node, name, "", status) for node, name, status in nodes]
    monkeypatch.setattr(checks, "check_port", lambda *_: [])
    monkeypatch.setattr(flower_adapter.registration, "registered_nodes", lambda *_: found)
    findings = list(checks.check_registered(made / "ca/ca.pem", "localhost:8000"))
    named = [f.text.split()[1] for f in findings if f.is_problem]
    assert named == ["6", "7", "3", "5"]
    [connected] = [f.text for f in findings if not f.is_problem]
    assert re.findall(r"\d+", connected) == ["1"]  # site-b


# --- containers and the command line -------------------------------------------------------------


@pytest.fixture
def at_a_client(made, home, monkeypatch):
    """The lines of the doctor on a client's machine, beside a `docker` that is this script."""

    def look(script, *more):
        program(home / "docker", script)
        monkeypatch.setenv("PATH", str(home), prepend=os.pathsep)
        monkeypatch.setattr(doctor_runtime, "WORKER_TIMEOUT_S", 0.5)  # for one that is not there
        words = ["--credentials", str(made / "site-a"), "--fleet", "127.0.0.1:1"]
        return doctor("client", *words, "--device", "cpu", *more)[1]

    return look


def rows(**containers):
    """A script that lists these, and else prints how it was called. project: services."""
    lines = [
        f"printf '{project}-{service}\\tkeel-{project}\\t{service}\\tUp 2 hours\\n'"
        for project, services in containers.items()
        for service in services.split()
    ]
    return "\n".join(['[ $1 = ps ] || { echo "ok       called with $*"; exit 0; }', *lines])


def test_checks_run_inside_the_containers(at_a_client):
    lines = at_a_client(rows(a="supernode executor worker", server="serverapp"))
    options = f"--inside --code {code_digest()} --device cpu"
    called = f"ok       a-worker: called with exec a-worker python -m keel doctor client {options}"
    assert called in lines
    assert not any("device: cpu" in line for line in lines)
    missing = at_a_client(rows(a="supernode worker", b="executor"))
    [first, second] = [line for line in missing if line.startswith("PROBLEM  containers: ")]
    assert "keel-a runs here without its executor:" in first
    assert "keel-b runs here without its supernode, worker:" in second


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("printf 'k\\tkeel-a\\tworker\\tRestarting (1) 5 seconds ago\\n'", "k: exits when started"),
        (
            "[ $1 = ps ] && printf 'k\\tkeel-a\\tworker\\tUp\\n' || { echo gone >&2; exit 1; }",
            "k: ",
        ),
        (
            "[ $1 = ps ] && printf 'k\\tkeel-a\\tworker\\tUp\\n' || { echo ok disk; exit 137; }",
            "137",
        ),
    ],
)
def test_a_container_that_fails_is_a_problem(at_a_client, script, named):
    assert any(x.startswith("PROBLEM") and named in x for x in at_a_client(script))


def test_without_containers_the_machine_itself_is_checked(at_a_client, tmp_path):
    script = "echo 'Is the docker daemon running?' >&2; exit 1"
    options = ["--source", f"folder:{tmp_path / 'none'}", "--worker", str(tmp_path / "none.sock")]
    lines = at_a_client(script, *options)
    assert any(line.startswith("skipped  containers: ") for line in lines)
    assert "ok       device: cpu" in lines
    problems = {line.split(":")[0] for line in lines if line.startswith("PROBLEM")}
    assert {"PROBLEM  data", "PROBLEM  worker"} <= problems


def test_inside_checks_only_where_the_code_runs(home, monkeypatch):
    for name in ("KEEL_WORKER", "KEEL_SOURCE", *site_privacy.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    status, lines = doctor("client", "--inside", "--device", "cpu")
    assert [line.split(":")[0] for line in lines] == [
        *("ok       versions", "ok       disk", "ok       device", "skipped  data"),
        *("ok       privacy limits", "skipped  worker", "no problems found"),
    ]
    assert status == 0
    monkeypatch.setenv("KEEL_SOURCE", f"folder:{home / 'nothing'}")
    status, lines = doctor("client", "--inside", "--device", "cpu")
    assert (status, lines[-1]) == (1, "1 problem")
    status, lines = doctor("server", "--inside", "--code", "f" * 16)
    assert lines[0].startswith("PROBLEM  versions: ")
    assert "f" * 16 in lines[0]
    assert doctor("server", "--credentials", str(home))[0] == 2


def test_without_a_machine_it_checks_this_one_for_simulation(home):
    status, lines = doctor()
    assert (status, lines[-1]) == (0, "no problems found"), lines
    starts = [line.removeprefix("ok       ").split()[0] for line in lines[:-1]]
    assert starts == ["versions:", "device:", "disk:", "disk:", "Ray"]
