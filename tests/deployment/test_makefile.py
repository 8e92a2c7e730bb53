"""The Makefile's deployment targets, with commands that only print their arguments."""

import os
import shutil
import subprocess

import pytest

from protocol.config import app_folder

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")
client = {"KEEL_CLIENT": "Site.A", "KEEL_SERVER": "fl.example.org:9092", "KEEL_DATA": "/srv/images"}


@pytest.fixture
def make(tmp_path):
    """(exit status, lines) of a target, as root sees it."""
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
            env=env, cwd=app_folder, text=True, timeout=60, check=False,
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


@pytest.mark.parametrize("line", ["{}=withheld", "export {} = withheld", "{}: withheld"])
@pytest.mark.parametrize("file", [".env", "docker/.env"])
def test_deploy_client_names_a_misspelt_privacy_limit_of_compose_s_env_file(
    make, tmp_path, file, line
):
    for name in ("Makefile", "docker/compose.client.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(app_folder / name, tmp_path / name)
    (tmp_path / file).write_text(line.format("KEEL_PRIVACY_METRICS"))
    assert make("deploy-client", f"--directory={tmp_path}", **client)[0] == 0
    (tmp_path / file).write_text(line.format("KEEL_PRIVACY_METRICS"[:-1]))
    status, [error] = make("deploy-client", f"--directory={tmp_path}", **client)
    assert status
    assert error.startswith("KEEL_PRIVACY_METRICS"[:-1] + " is not a site limit")


def test_deploy_client_changes_the_owner_of_its_own_secrets_only(make):
    status, lines = make("deploy-client", **client, KEEL_DEVICE="cuda:1")
    assert status == 0
    assert lines == [
        f"chown -R 10001 {app_folder}/here/Site.A",
        "-p keel-site-a -f docker/compose.client.yml -f docker/compose.gpu.yml up -d",
    ]


def test_make_doctor_passes_its_arguments(make):
    _, lines = make("doctor", "READY=", "BIN=echo called with", "ARGS=client --fleet a:1")
    assert lines == ["called with/python -m keel doctor client --fleet a:1"]


def test_make_credentials_repeats_the_options_for_each_name(make):
    _, lines = make(
        "credentials", "READY=", "BIN=echo called with", "NAMES=fl.example.org 10.0.0.1",
        "CLIENTS=site-a site-b",
    )  # fmt: skip
    assert lines == [
        "called with/python -m keel deploy credentials --folder here --name fl.example.org "
        "--name 10.0.0.1 --client site-a --client site-b"
    ]
