"""The doctor: each thing that can be wrong is said in words; a machine in order is left alone."""

import datetime
import os
import socket
import sys

import numpy as np
import pytest
from test_credentials import tls_server

import keel.deployment.doctor
from keel.deployment.credentials import make_credentials
from keel.deployment.doctor import (
    check_certificate,
    check_clock,
    check_data,
    check_device,
    check_disk,
    check_key,
    check_port,
    check_private_files,
    check_versions,
    check_worker,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_credentials(folder, ["fl.example.org"], ["site-a"])
    return folder


def said(checks):
    """(whether it is a problem, the text) of the one thing that was found."""
    [finding] = list(checks)
    return finding.is_problem, finding.text


def test_versions_in_order_and_one_that_differs(monkeypatch):
    is_problem, text = said(check_versions())
    assert not is_problem
    assert "flwr 1.39" in text
    real = keel.deployment.doctor.metadata.version
    monkeypatch.setattr(
        keel.deployment.doctor.metadata, "version", lambda n: "1.41.0" if n == "flwr" else real(n)
    )
    is_problem, text = said(check_versions())
    assert is_problem
    assert "flwr is 1.41.0" in text


def test_a_full_disk(tmp_path, monkeypatch):
    assert not said(check_disk(tmp_path / "not" / "yet"))[0]
    monkeypatch.setattr(keel.deployment.doctor, "disk_needed", 2**60)
    is_problem, text = said(check_disk(tmp_path))
    assert is_problem
    assert "make room" in text


def test_files_that_are_missing_or_open_to_others(made, tmp_path):
    assert list(check_private_files(made / "site-a", ["ca.pem", "client.key"])) == []
    assert "is missing" in said(check_private_files(tmp_path, ["client.key"]))[1]
    key = tmp_path / "client.key"
    key.touch(0o644)
    assert "chmod 600" in said(check_private_files(tmp_path, ["client.key"]))[1]


@pytest.mark.parametrize(
    ("days", "is_problem", "words"),
    [
        (0, False, "is valid until"),
        (-2, True, "set the clock"),
        (810, True, "make a new one soon"),
        (900, True, "was valid until"),
    ],
)
def test_dates_of_a_certificate(made, days, is_problem, words):
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    found, text = said(check_certificate(made / "server/server.pem", now))
    assert found == is_problem
    assert words in text


def test_a_port_in_order_and_a_certificate_of_another_ca(made, tmp_path):
    make_credentials(tmp_path, ["other.org"], [])
    port, _ = tls_server(made / "server", 4)
    address = f"127.0.0.1:{port}"
    assert not said(check_port(address, made / "ca/ca.pem"))[0]
    is_problem, text = said(check_port(address, tmp_path / "ca/ca.pem"))
    assert is_problem
    assert "is not of the CA" in text


def test_a_certificate_for_other_names(made, monkeypatch):
    port, _ = tls_server(made / "server", 2)
    real = socket.create_connection
    monkeypatch.setattr(  # a name that leads there, and that the certificate does not have
        socket, "create_connection", lambda address, **k: real(("127.0.0.1", address[1]), **k)
    )
    is_problem, text = said(check_port(f"wrong.example.org:{port}", made / "ca/ca.pem"))
    assert is_problem
    assert "is for other names" in text


def test_nobody_listens_no_such_name_and_no_tls(made):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    assert "Connection refused" in said(check_port(closed, made / "ca/ca.pem"))[1]
    nowhere = said(check_port("nowhere.invalid:9092", made / "ca/ca.pem"))[1]
    assert "no such name" in nowhere


def test_a_device_that_is_not_there():
    assert said(check_device("cpu")) == (False, "device: cpu")
    is_problem, text = said(check_device("cuda:63"))
    assert is_problem
    assert "cuda:63" in text


def test_data_in_order_missing_and_with_a_wrong_class(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        x_train=rng.integers(0, 255, (30, 28, 28), dtype=np.uint8),
        y_train=np.arange(30) % 3,
        x_test=rng.integers(0, 255, (6, 28, 28), dtype=np.uint8),
        y_test=np.arange(6) % 3,
    )
    own = f"npz:{tmp_path / 'own.npz'}"
    is_problem, text = said(check_data(own, ["0", "1", "2"], {}))
    assert not is_problem
    assert "30 training images" in text
    is_problem, text = said(check_data(own, ["0", "1"], {}))
    assert is_problem
    assert "has the class '2'" in text
    is_problem, text = said(check_data(f"folder:{tmp_path / 'nothing'}", [], {}))
    assert is_problem
    assert str(tmp_path / "nothing") in text


def test_a_worker_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(keel.deployment.doctor, "limit_s", 0.3)
    is_problem, text = said(check_worker(tmp_path / "nobody.sock"))
    assert is_problem
    assert "no worker answers" in text
    assert list(check_worker(None)) == []


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "client.key").touch(0o600)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert "run the doctor as root" in said(check_private_files(tmp_path, ["client.key"]))[1]


def test_what_keeps_a_check_from_looking_is_one_line(made, tmp_path, monkeypatch):
    is_problem, text = said(
        check_key("localhost:1", tmp_path / "ca.pem", made / "site-a/client.key")
    )
    assert is_problem
    assert text == f"key: [Errno 2] No such file or directory: '{tmp_path / 'ca.pem'}'"
    (tmp_path / "ca.pem").write_text("no certificate")
    assert said(check_certificate(tmp_path / "ca.pem", datetime.datetime.now(datetime.UTC)))[0]
    program(tmp_path / "timedatectl", "sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(keel.deployment.doctor, "limit_s", 0.2)
    assert said(check_clock()) == (True, "clock: timedatectl gave no answer within 0.2 seconds")


def test_a_ca_that_cannot_be_used_is_not_taken_for_another_service(made, tmp_path, monkeypatch):
    port, _ = tls_server(made / "server", 2)
    (tmp_path / "ca.pem").write_text("no certificate")
    _, text = said(check_port(f"127.0.0.1:{port}", tmp_path / "ca.pem"))
    assert text.startswith(f"{tmp_path / 'ca.pem'} is no CA certificate")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert list(check_port(f"127.0.0.1:{port}", made / "ca/ca.pem")) == []


def program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def doctor(monkeypatch, capsys, *words):
    """(exit status, lines) of the doctor's command line."""
    monkeypatch.setattr(sys, "argv", ["doctor", *words])
    status = keel.deployment.doctor.main()
    return status, capsys.readouterr().out.splitlines()


def test_inside_looks_at_what_the_code_of_a_run_finds_and_at_nothing_else(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    monkeypatch.setenv("KEEL_DEVICE", "cpu")
    monkeypatch.setenv("KEEL_SOURCE", f"folder:{tmp_path / 'nothing'}")
    monkeypatch.delenv("KEEL_WORKER", raising=False)
    status, lines = doctor(monkeypatch, capsys, "client", "--inside")
    assert [line.split(":")[0] for line in lines] == [
        *("ok       versions", "ok       disk", "ok       device", "PROBLEM  data", "1 problems"),
    ]
    assert status == 1
    status, lines = doctor(monkeypatch, capsys, "server", "--inside", "--code", "f" * 16)
    assert lines[0].startswith("PROBLEM  versions: Keel's client code is")
    assert "f" * 16 in lines[0]
    with pytest.raises(SystemExit):
        doctor(monkeypatch, capsys, "server", "--credentials", str(tmp_path))


@pytest.fixture
def at_a_client(made, tmp_path, monkeypatch, capsys):
    """The doctor on a client's machine, beside a `docker` that is this shell script."""

    def look(script, *more):
        program(tmp_path / "docker", script)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("KEEL_HOME", str(tmp_path))
        words = ["--credentials", str(made / "site-a"), "--fleet", "127.0.0.1:1"]
        _, lines = doctor(monkeypatch, capsys, "client", *words, "--device", "cpu", *more)
        return lines

    return look


def test_where_containers_run_it_looks_inside_them(at_a_client):
    lines = at_a_client(
        'if [ "$1" = ps ]; then\n'
        "  printf 'web\\tshop\\texecutor\\tUp 2 hours\\n'\n"
        "  printf 'k-sn\\tkeel-site-a\\tsupernode\\tRestarting (1) 5 seconds ago\\n'\n"
        "  printf 'k-ex\\tkeel-site-a\\texecutor\\tUp 2 hours (unhealthy)\\n'\n"
        "  printf 'k-sa\\tkeel-server\\tserverapp\\tUp 2 hours\\n'\n"
        "else\n"
        '  echo "PROBLEM  disk: asked with $*"; echo "ok       device: cuda:0"; exit 1\n'
        "fi"
    )
    code = keel.deployment.doctor.code_digest()
    asked = f"exec k-ex python -m keel.deployment.doctor client --inside --code {code} --device cpu"
    assert lines[-4:] == [
        f"PROBLEM  k-ex: disk: asked with {asked}",
        "ok       k-ex: device: cuda:0",
        "PROBLEM  k-sn: ends as soon as it is started: docker logs --tail 20 k-sn",
        "3 problems",  # and the port
    ]
    assert not any("device: cpu" in line for line in lines)


def test_where_none_runs_it_looks_at_the_machine_and_where_it_may_not_look_it_says_so(at_a_client):
    lines = at_a_client("exit 0")
    assert "ok       device: cpu" in lines
    lines = at_a_client("echo 'permission denied: docker.sock' >&2; exit 1")
    assert "PROBLEM  containers: permission denied: docker.sock: run the doctor as" in lines[-2]
    lines = at_a_client(
        "[ $1 = ps ] && printf 'k-ex\\tkeel-a\\texecutor\\tUp\\n' || { echo gone >&2; exit 1; }"
    )
    assert lines[-2] == "PROBLEM  k-ex: the doctor did not get to its end there: gone"


def test_a_container_whose_other_half_has_ended_is_a_problem(at_a_client):
    rows = {
        "keel-a": ["supernode"],
        "keel-b": ["executor"],
        "keel-local": ["supernode-0", "executor-0", "supernode-1", "serverapp"],
        "shop": ["supernode"],
    }
    printed = [
        f"printf '{project}-{service}\\t{project}\\t{service}\\tUp 2 hours\\n'"
        for project, there in rows.items()
        for service in there
    ]
    script = "\n".join(["[ $1 = ps ] || { echo 'ok       disk'; exit 0; }", *printed])
    ended = "`docker ps --all` says how that ended; deploy again"
    found = [line for line in at_a_client(script) if "containers:" in line]
    assert found == [
        f"PROBLEM  containers: keel-{of}'s {runs} runs here without its {other}: {ended}"
        for of, runs, other in (
            ("a", "supernode", "executor"),
            ("b", "executor", "supernode"),
            ("local", "supernode-1", "executor-1"),
        )
    ]


def test_options_that_say_nothing_to_containers_are_named(at_a_client, tmp_path):
    script = (
        'if [ "$1" = ps ]; then\n'
        "  printf 'k-sn\\tkeel-a\\tsupernode\\tUp\\n'; printf 'k-ex\\tkeel-a\\texecutor\\tUp\\n'\n"
        "else\n"
        '  echo "ok       asked with $*"\n'
        "fi"
    )
    options = ["--source", f"folder:{tmp_path}", "--worker", str(tmp_path / "worker.sock")]
    lines = at_a_client(script, *options)
    assert lines[-3] == (
        "ok       --source and --worker: for a machine without containers, not looked at; "
        "the containers here have their own"
    )
    assert lines[-2].endswith(" --device cpu")
    assert not any("for a machine without" in line for line in at_a_client(script))
    alone = at_a_client("exit 0", *options)  # where none runs they are looked at
    assert any(line.startswith("PROBLEM  data") for line in alone)
    assert any(line.startswith("PROBLEM  worker") for line in alone)
