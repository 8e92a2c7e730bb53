"""The compose files against what they start: options that exist, secrets only where they belong."""

import re
import subprocess
import sys
import tomllib
from functools import lru_cache

import pytest
import yaml
from packaging.requirements import Requirement

from protocol.config import app_folder

docker = app_folder / "docker"
files = {name: yaml.safe_load((docker / f"compose.{name}.yml").read_text())
         for name in ("server", "client", "local")}  # fmt: skip


def test_the_image_s_requirements_are_the_project_s_less_the_simulation():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["tensorboard"]]
    wanted = {(r.name, str(r.specifier)) for r in map(Requirement, lines)}
    lines = (docker / "requirements.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {(r.name, str(r.specifier)) for r in listed} == wanted
    assert not any(r.extras for r in listed)


@pytest.mark.parametrize("name", files)
def test_services_run_unprivileged_restart_and_are_on_networks_that_exist(name):
    for service in files[name]["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["restart"] == "unless-stopped"
        assert service["user"] == "${KEEL_UID:-10001}"
        assert set(service["networks"]) <= files[name]["networks"].keys()


@pytest.mark.parametrize("name", files)
def test_executors_reach_nothing_but_their_control(name):
    """The code of a run comes from elsewhere: it sees data or runs, not the network.

    Nor this machine: its bridge has no address here, and nobody is asked for other names.
    """
    option = "com.docker.network.bridge."
    closed = {option + "gateway_mode_ipv4": "isolated", option + "inhibit_ipv4": "true"}
    for service, about in files[name]["services"].items():
        if service.startswith(("serverapp", "executor")):
            for network in about["networks"]:
                assert files[name]["networks"][network] == {"internal": True, "driver_opts": closed}
            assert about["dns"] == ["192.0.2.1"]


@pytest.mark.parametrize("name", files)
def test_private_keys_stay_out_of_the_containers_that_run_the_code(name):
    allowed = {"serverapp": {"ca.pem", "executor.secret"}, "executor": {"executor.secret"}}
    for service, about in files[name]["services"].items():
        kind = service.rstrip("-0123456789")
        if kind in allowed:
            mounts = [m for m in about["volumes"] if "credentials" in m.lower()]
            inside = [re.fullmatch(r"(.+)/([\w.]+):/credentials/\2:ro", m) for m in mounts]
            assert {found and found[2] for found in inside} == allowed[kind], service


def test_data_is_mounted_read_only():
    for name, service in (("client", "executor"), ("server", "serverapp")):
        mounts = files[name]["services"][service]["volumes"]
        assert [m.endswith(":ro") for m in mounts if ":/data" in m] == [True]


def test_the_http_api_is_published_on_this_machine_alone_unless_asked():
    for name in ("server", "local"):
        ports = files[name]["services"]["superlink"]["ports"]
        assert [p for p in ports if p.endswith(":8000")] == ["${KEEL_CONTROL:-127.0.0.1:8000}:8000"]


@lru_cache
def options_of(program):
    command = [f"{sys.prefix}/bin/{program}", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    return set(re.findall(r"--[a-z-]+", said))


@pytest.mark.parametrize("name", files)
def test_every_option_is_one_that_its_command_has(name):
    asked: dict[tuple[str, ...], set[str]] = {}
    for service in files[name]["services"].values():
        words = service["command"]
        if "--" in words:  # what the supervisor starts last
            words = words[len(words) - words[::-1].index("--") :]
        start = 3 if words[0] == "python" else 1
        options = {re.split("[= ]", w)[0] for w in words[start:] if w.startswith("--")}
        asked.setdefault(tuple(words[:start]), set()).update(options)
    for command, options in asked.items():
        stands_for = {"deployment.supernode": "flower-supernode"}
        stands_for["deployment.executor"] = "flower-superexec"
        stands_for["deployment.superlink_server"] = "flower-superlink"
        program = stands_for[command[2]] if command[0] == "python" else command[0]
        assert options <= options_of(program), program


def test_the_image_holds_every_package_of_the_project():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    lines = (docker / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if re.fullmatch(r"COPY (\w+) \1", line)}
    assert copied == packages - {"experiments", "benchmarks"}
    ignored = (app_folder / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)
    assert ignored[0] == "*"  # secrets and runs stay out of the build, whatever they are called
