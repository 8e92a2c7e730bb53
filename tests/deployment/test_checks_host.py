"""Checks of a machine: each thing that can be wrong is named, with the way out."""

import datetime
import os
import re
import socket
import subprocess

import pytest
from deployment_fixtures import problem, program, result
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    MAX_TIMESTAMP_DIFF,
    MIN_TIMESTAMP_DIFF,
)
from test_credentials import tls_server

import keel.deployment.checks_host
from flower_adapter.registration import Registration
from keel.deployment.checks_host import (
    check_certificate,
    check_clock,
    check_key,
    check_port,
    check_private_files,
    check_registered,
    check_server_key,
)
from keel.deployment.credentials import make_credentials


def test_files_that_are_missing_or_open_to_others(made, tmp_path):
    assert list(check_private_files(made / "site-a", ["ca.pem", "client.key"])) == []
    assert "is missing" in result(check_private_files(tmp_path, ["client.key"]))[1]
    key = tmp_path / "client.key"
    for mode in (0o644, 0o640, 0o604):
        key.touch()
        key.chmod(mode)
        assert "chmod 600" in result(check_private_files(tmp_path, ["client.key"]))[1]
    key.chmod(0o600)
    assert list(check_private_files(tmp_path, ["client.key"])) == []


@pytest.mark.parametrize(
    ("days", "is_problem", "words"),
    [
        (0, False, "is valid until"),
        (-2, True, "set the clock"),
        (810, True, "expires soon"),
        (900, True, "expired on"),
    ],
)
def test_dates_of_a_certificate(made, days, is_problem, words):
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    found, text = result(check_certificate(made / "server/server.pem", now))
    assert found == is_problem
    assert words in text


def test_a_server_key_that_is_damaged_or_of_another_certificate(made, tmp_path):
    """The doctor only asked whether the SuperLink was running."""
    certificate, key = made / "server" / "server.pem", made / "server" / "server.key"
    assert list(check_server_key(certificate, key)) == []
    assert list(check_server_key(certificate, tmp_path / "none")) == []
    for content in (b"", key.read_bytes()[:100], (made / "ca" / "ca.key").read_bytes()):
        (tmp_path / "server.key").write_bytes(content)
        is_problem, text = result(check_server_key(certificate, tmp_path / "server.key"))
        assert is_problem
        assert "server.key is damaged, or not the key of server.pem: copy both again" in text


def test_a_supernode_whose_key_has_no_name_is_to_be_named_or_removed(made, monkeypatch):
    """After new credentials, the doctor sent the operator to the machine of each old key.

    One that was still connected was not named at all.
    """
    nodes = [(1, "", "online"), (2, "", "offline"), (3, "site-a", "offline"), (4, "b", "online")]
    monkeypatch.setattr(keel.deployment.checks_host, "check_port", lambda *_: [])
    monkeypatch.setattr(keel.deployment.checks_host, "registered_nodes", lambda *_: nodes)
    found = {f.text for f in check_registered(made / "server", "localhost:8000") if f.is_problem}
    hint = "Put the client.pub of its client there and register it, or remove it: flwr supernode"
    where = f"and its key is not in {made / 'server' / 'clients'}: runs refuse it. {hint}"
    assert {
        f"SuperNode 1 is online, {where} unregister 1 deployment",
        f"SuperNode 2 is offline, {where} unregister 2 deployment",
        "SuperNode 3 of site-a is offline: run `keel doctor client` on its machine",
    } <= found
    assert not any("SuperNode 4" in text for text in found)


def test_a_port_in_order_and_a_certificate_of_another_ca(made, tmp_path):
    make_credentials(tmp_path, ["other.org"], [])
    port, _ = tls_server(made / "server", 4)
    address = f"127.0.0.1:{port}"
    assert not result(check_port(address, made / "ca/ca.pem"))[0]
    assert "is not from the CA" in problem(check_port(address, tmp_path / "ca/ca.pem"))


def test_a_certificate_for_other_names(made, monkeypatch):
    port, _ = tls_server(made / "server", 2)
    real = socket.create_connection
    monkeypatch.setattr(  # a name that leads there, and that the certificate does not have
        socket, "create_connection", lambda address, **k: real(("127.0.0.1", address[1]), **k)
    )
    text = problem(check_port(f"wrong.example.org:{port}", made / "ca/ca.pem"))
    assert "is for other names" in text
    assert "keel deploy credentials --renew --name" in text


def test_nobody_listens_no_such_name_and_no_tls(made):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    assert "Connection refused" in result(check_port(closed, made / "ca/ca.pem"))[1]
    nowhere = result(check_port("nowhere.invalid:9092", made / "ca/ca.pem"))[1]
    assert "no such name" in nowhere


def test_a_tls_port_without_grpc_is_not_the_port_for_clients(made):
    port, _ = tls_server(made / "server", 5)
    found = check_key(f"localhost:{port}", made / "ca/ca.pem", made / "site-a/client.key")
    assert "--fleet takes its port for clients (9092 unless changed)" in problem(found)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "client.key").touch(0o600)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert "run the doctor as root" in result(check_private_files(tmp_path, ["client.key"]))[1]


def test_an_exception_in_a_check_is_a_problem_of_one_line(made, tmp_path, monkeypatch):
    text = problem(check_key("localhost:1", tmp_path / "ca.pem", made / "site-a/client.key"))
    assert text == f"key: [Errno 2] No such file or directory: '{tmp_path / 'ca.pem'}'"
    (tmp_path / "ca.pem").write_text("no certificate")
    assert result(check_certificate(tmp_path / "ca.pem", datetime.datetime.now(datetime.UTC)))[0]
    program(tmp_path / "timedatectl", "sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(keel.deployment.checks_host, "timeout_s", 0.2)
    assert result(check_clock()) == (True, "clock: timedatectl gave no answer within 0.2 seconds")


@pytest.mark.parametrize(("answer", "is_problem"), [("no", True), ("yes", False), ("", False)])
def test_a_clock_that_is_known_not_to_be_synchronised(tmp_path, monkeypatch, answer, is_problem):
    program(tmp_path / "timedatectl", f"echo {answer}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert ["turn on NTP" in finding.text for finding in check_clock()] == [True] * is_problem


def test_a_clock_that_the_superlink_refuses_is_named_with_the_limits_of_flower(made, monkeypatch):
    """A client 10 seconds ahead is refused: the line named 5 minutes, or no number."""
    limits = (
        f"more than {-MIN_TIMESTAMP_DIFF} seconds ahead of it or more than "
        f"{MAX_TIMESTAMP_DIFF // 60} minutes behind"
    )
    answer = Registration.CLOCKS_DIFFER, "Invalid timestamp"
    monkeypatch.setattr(keel.deployment.checks_host, "registration_of", lambda *_: answer)
    text = problem(check_key("localhost:1", made / "ca/ca.pem", made / "site-a/client.key"))
    assert limits in text
    assert re.search(r"this machine's clock says \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", text)


def test_a_key_of_another_client_is_named(made, tmp_path, monkeypatch):
    """With the keys of two sites swapped, runs refused both, and their doctors found nothing."""
    answer = Registration.KNOWN, ""
    monkeypatch.setattr(keel.deployment.checks_host, "registration_of", lambda *_: answer)
    make_credentials(tmp_path, ["localhost"], ["site-a", "site-b"])
    key, public = tmp_path / "site-a/client.key", tmp_path / "site-a/client.pub"
    knows = f"the SuperLink knows the key in {key}"
    assert result(check_key("localhost:1", made / "ca/ca.pem", key)) == (
        False,
        f"{knows}, which was made for client site-a",
    )
    key.write_bytes((tmp_path / "site-b/client.key").read_bytes())
    text = problem(check_key("localhost:1", made / "ca/ca.pem", key))
    assert text.startswith(f"{key} does not belong to {public}")
    public.unlink()  # not needed to connect
    assert result(check_key("localhost:1", made / "ca/ca.pem", key)) == (False, knows)


def test_a_key_with_a_password_is_named(tmp_path):
    """It was a TypeError, with a traceback."""
    key = tmp_path / "client.key"
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", str(key)]
    subprocess.run(make, check=True)
    assert "password-protected" in problem(check_key("localhost:1", tmp_path / "ca.pem", key))


def test_a_ca_that_cannot_be_used_is_not_taken_for_another_service(made, tmp_path, monkeypatch):
    port, _ = tls_server(made / "server", 2)
    (tmp_path / "ca.pem").write_text("no certificate")
    _, text = result(check_port(f"127.0.0.1:{port}", tmp_path / "ca.pem"))
    assert text.startswith(f"{tmp_path / 'ca.pem'} is not a CA certificate")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert list(check_port(f"127.0.0.1:{port}", made / "ca/ca.pem")) == []
