"""Checks of containers, beside a `docker` that is a shell script; and the command line."""

import os

import pytest
from deployment_fixtures import doctor, program

from keel.deployment import checks_containers, checks_runtime
from protocol.code import code_digest


@pytest.fixture
def at_a_client(made, home, monkeypatch):
    """The doctor on a client's machine, beside a `docker` that is this shell script."""

    def look(script, *more):
        program(home / "docker", script)
        monkeypatch.setenv("PATH", str(home), prepend=os.pathsep)
        monkeypatch.setattr(checks_runtime, "timeout_s", 0.5)  # for a worker that is not there
        words = ["--credentials", str(made / "site-a"), "--fleet", "127.0.0.1:1"]
        _, lines = doctor("client", *words, "--device", "cpu", *more)
        return lines

    return look


def test_checks_run_inside_the_containers(at_a_client):
    lines = at_a_client(
        'if [ "$1" = ps ]; then\n'
        "  printf 'web\\tshop\\texecutor\\tUp 2 hours\\n'\n"
        "  printf 'k-sn\\tkeel-site-a\\tsupernode\\tRestarting (1) 5 seconds ago\\n'\n"
        "  printf 'k-ex\\tkeel-site-a\\texecutor\\tUp 2 hours\\n'\n"
        "  printf 'k-wo\\tkeel-site-a\\tworker\\tUp 2 hours (unhealthy)\\n'\n"
        "  printf 'k-sa\\tkeel-server\\tserverapp\\tUp 2 hours\\n'\n"
        "else\n"
        '  echo "PROBLEM  disk: asked with $*"; echo "ok       device: cuda:0"; exit 1\n'
        "fi"
    )
    options = f"--inside --code {code_digest()} --device cpu"
    asked = f"exec k-wo python -m keel doctor client {options}"
    assert lines[-4:] == [
        "PROBLEM  k-sn: exits when started: docker logs --tail 20 k-sn",
        f"PROBLEM  k-wo: disk: asked with {asked}",
        "ok       k-wo: device: cuda:0",
        "3 problems",  # and the port
    ]
    assert not any("device: cpu" in line for line in lines)


def test_without_containers_the_machine_is_checked_and_without_permission_it_says_so(at_a_client):
    assert "ok       device: cpu" in at_a_client("exit 0")
    lines = at_a_client("echo 'permission denied: docker.sock' >&2; exit 1")
    [at] = [i for i, line in enumerate(lines) if line.startswith("PROBLEM  containers: ")]
    assert "permission denied: docker.sock: run `keel doctor` as" in lines[at]
    assert "ok       device: cpu" in lines[at:]
    lines = at_a_client(
        "[ $1 = ps ] && printf 'k-wo\\tkeel-a\\tworker\\tUp\\n' || { echo gone >&2; exit 1; }"
    )
    assert lines[-2] == "PROBLEM  k-wo: the doctor did not finish there: gone"
    worker = "printf 'k-wo\\tkeel-a\\tworker\\tUp\\n'"
    lines = at_a_client(f"[ $1 = ps ] && {worker} || {{ echo 'ok  disk: full'; exit 137; }}")
    assert lines[-3:-1] == [
        "ok       k-wo: disk: full",  # is not all
        "PROBLEM  k-wo: the doctor did not finish there: exit status 137",
    ]


@pytest.mark.parametrize(
    "error",
    [  # of Docker 20 to 28, and of 29
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
        "Is the docker daemon running?",
        "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is "
        "correct and if the daemon is running: dial unix: connect: no such file or directory",
    ],
)
def test_a_docker_without_its_daemon_is_a_note_and_the_machine_is_checked(at_a_client, error):
    lines = at_a_client(f"echo '{error}' >&2; exit 1")
    [at] = [i for i, line in enumerate(lines) if " containers: " in line]
    assert lines[at] == (
        "skipped  containers: Docker's daemon does not run here, so there are none; checking "
        "this machine instead. If `make deploy-client` deployed it, start Docker"
    )
    assert "ok       device: cpu" in lines[at:]


def test_a_docker_that_hangs_is_a_problem_and_the_machine_is_checked(at_a_client, monkeypatch):
    monkeypatch.setattr(checks_containers, "timeout_s", 0.3)
    lines = at_a_client("exec sleep 5")
    [at] = [i for i, line in enumerate(lines) if line.startswith("PROBLEM  containers: ")]
    assert "timed out after 0.3 seconds" in lines[at]
    assert "ok       device: cpu" in lines[at:]


def test_a_missing_container_of_a_deployment_is_a_problem(at_a_client):
    rows = {
        "keel-a": ["supernode", "worker"],
        "keel-b": ["executor"],
        "keel-c": ["supernode", "executor", "worker"],
        "keel-local": ["supernode-0", "executor-0", "worker-0", "supernode-1", "serverapp"],
        "shop": ["supernode"],
    }
    printed = [
        f"printf '{project}-{service}\\t{project}\\t{service}\\tUp 2 hours\\n'"
        for project, there in rows.items()
        for service in there
    ]
    script = "\n".join(["[ $1 = ps ] || { echo 'ok       disk'; exit 0; }", *printed])
    found = [line for line in at_a_client(script) if "containers:" in line]
    ended = "see how that ended with `docker ps --all`, and deploy again"
    assert found == [
        f"PROBLEM  containers: {project} runs here without its {missing}: {ended}"
        for project, missing in (
            ("keel-a", "executor"),
            ("keel-b", "supernode, worker"),
            ("keel-local", "executor-1, worker-1"),
        )
    ]


def test_options_that_containers_do_not_use_are_named(at_a_client, tmp_path):
    script = (
        'if [ "$1" = ps ]; then\n'
        '  for s in supernode executor worker; do printf "k-$s\\tkeel-a\\t$s\\tUp\\n"; done\n'
        "else\n"
        '  echo "ok       asked with $*"\n'
        "fi"
    )
    options = ["--source", f"folder:{tmp_path}", "--worker", str(tmp_path / "worker.sock")]
    lines = at_a_client(script, *options)
    assert lines[-3] == (
        "ok       --source and --worker: only used without containers, not checked; "
        "the containers here have their own"
    )
    assert lines[-2].endswith(" --device cpu")
    assert not any("only used without" in line for line in at_a_client(script))
    alone = at_a_client("exit 0", *options)  # where none runs they are looked at
    assert any(line.startswith("PROBLEM  data") for line in alone)
    assert any(line.startswith("PROBLEM  worker") for line in alone)
