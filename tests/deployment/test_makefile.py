"""The Makefile's deployment targets, with commands that only print their arguments."""

import os
import shutil
import subprocess

import pytest

from protocol.config import app_folder

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")
client_files = "-f docker/compose.client.yml -f docker/compose.gpu.yml"
client = {"KEEL_CLIENT": "Site.A", "KEEL_SERVER": "fl.example.org:9092", "KEEL_DATA": "/usr"}


@pytest.fixture
def make(tmp_path):
    """(exit status, lines) of a target, as root sees it, in a checkout with credentials in `here`.

    The checkout is `tmp_path`.
    """
    shutil.copy(app_folder / "Makefile", tmp_path)
    shutil.copytree(app_folder / "docker", tmp_path / "docker")
    for machine in ("Site.A", "server"):
        (tmp_path / "here" / machine).mkdir(parents=True)
        for name in ("executor.secret", "ca.pem"):
            (tmp_path / "here" / machine / name).touch()
    for name, script in {
        "id": "echo 0",
        "chown": 'echo chown "$@"',
        "compose": 'echo "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    def call(target, *variables, **values):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEL_", "MAKE"))}
        env |= {"PATH": f"{tmp_path}{os.pathsep}{env['PATH']}"} | values
        done = subprocess.run(
            ["make", "--silent", target, "COMPOSE=compose", "CREDENTIALS=here", *variables],
            env=env, cwd=tmp_path, text=True, timeout=60, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stdout.splitlines()

    return call


@pytest.mark.parametrize("name", client)
def test_deploy_client_names_an_unset_variable_before_it_changes_any_file(make, name):
    status, lines = make("deploy-client", **{k: v for k, v in client.items() if k != name})
    assert status
    [line] = lines
    assert line.startswith(f"{name} is not set")


def test_deploy_client_names_a_misspelt_privacy_limit(make):
    """Compose passes the limits on by name: another would not reach the worker that refuses it."""
    limits = {"KEEL_PRIVACY_BUDGET_EPSILON": "1", "KEEL_PRIVACY_METRICS": "withheld"}
    misspelt = "KEEL_PRIVACY_METRICS"[:-1]
    status, [line] = make("deploy-client", **client, **limits, **{misspelt: "withheld"})
    assert status
    assert line.startswith(f"{misspelt} is not a site limit")
    assert make("deploy-client", **client, **limits, **{misspelt: ""})[0] == 0


@pytest.mark.parametrize(
    ("file", "line"),
    [(".env", "{}=withheld"), (".env", "export {} = withheld"), ("docker/.env", "{}: withheld")],
)
def test_deploy_client_names_a_misspelt_privacy_limit_of_compose_s_env_file(
    make, tmp_path, file, line
):
    (tmp_path / file).write_text(line.format("KEEL_PRIVACY_METRICS"))
    assert make("deploy-client", **client)[0] == 0
    (tmp_path / file).write_text(line.format("KEEL_PRIVACY_METRICS"[:-1]))
    status, [error] = make("deploy-client", **client)
    assert status
    assert error.startswith("KEEL_PRIVACY_METRICS"[:-1] + " is not a site limit")


@pytest.mark.parametrize(
    ("target", "own", "project"),
    [
        ("deploy-client", "Site.A", f"keel-site-a {client_files}"),
        ("deploy-server", "server", "keel-server -f docker/compose.server.yml"),
    ],
)
def test_a_machine_owns_its_own_secrets_alone_and_has_new_containers(
    make, tmp_path, target, own, project
):
    """Compose finds nothing changed if only files are, and would leave what has read the old."""
    assert make(target, **client, KEEL_DEVICE="cuda:1") == (
        0,
        [f"chown -R 10001 {tmp_path}/here/{own}", f"-p {project} up -d --force-recreate"],
    )


def test_end_client_needs_only_the_name_of_what_deploy_client_started(make, tmp_path):
    """The compose file refuses to be read without the variables of a start."""
    (tmp_path / "compose").write_text(
        '#!/bin/sh\necho "$@" ${KEEL_SERVER:?} ${KEEL_CLIENT:?} ${KEEL_DATA:?}\n'
    )
    assert make("end-client", KEEL_CLIENT="Site.A") == (
        0,
        ["-p keel-site-a -f docker/compose.client.yml down - Site.A /"],
    )
    status, [line] = make("end-client")
    assert status
    assert line.startswith("KEEL_CLIENT is not set")
    server = ["-p keel-server -f docker/compose.server.yml down"]
    (tmp_path / "compose").write_text('#!/bin/sh\necho "$@"\n')
    assert make("end-server") == (0, server)  # without --volumes


@pytest.mark.parametrize("target", ["deploy-client", "deploy-server"])
def test_what_is_missing_is_named_before_docker_makes_a_directory_of_it(make, tmp_path, target):
    """Root makes one in place of a secret, too; credentials could then not be copied there."""
    for data in ("images", "./docker", "/nowhere/images"):
        status, [line] = make(target, **client | {"KEEL_DATA": data})
        assert status
        assert line.startswith(f"{data}: no such directory, or its path is not absolute")
    folder = tmp_path / "here" / ("Site.A" if "client" in target else "server")
    for name in ("ca.pem", "executor.secret")["server" in target :]:
        (folder / name).unlink()
        (folder / name).mkdir()
        status, [line] = make(target, **client)
        assert status
        assert line.startswith(f"{folder / name}: no such file, or its path is not absolute")
        (folder / name).rmdir()
        (folder / name).touch()


def test_register_passes_requests_on_and_names_one_that_is_missing(make, tmp_path):
    (tmp_path / "compose").write_text('#!/bin/sh\necho "$@"; case "$*" in *" -") cat;; esac\n')
    for name in ("a", "b"):
        (tmp_path / f"{name}.pub").write_text(f"{name}\n")
    command = (
        "-p keel-server -f docker/compose.server.yml exec -T superlink "
        "python -m keel deploy register --credentials /credentials --wait 120"
    )
    assert make("register") == (0, [command])
    assert make("register", "REQUESTS=a.pub b.pub") == (0, [f"{command} -", "a", "b"])
    status, [line] = make("register", "REQUESTS=a.pub c.pub")
    assert status
    assert line.startswith(f"{tmp_path / 'c.pub'}: no such file")
