"""The compose files against what they start: secrets and networks only where they belong."""

import importlib
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest
import yaml
from packaging.requirements import Requirement

from client_app import site_privacy
from keel.cli.main import NOT_IN_IMAGE
from protocol.config import app_folder

docker = app_folder / "docker"


def load(name):
    return yaml.safe_load((docker / name).read_text())


def resolved(name):
    """A compose file in which each service has what it extends."""
    common = load("common.yml")["services"]
    common["executor"] |= common["base"] | common["executor"]
    found = load(f"compose.{name}.yml")
    for service in found["services"].values():
        base = service.pop("extends")
        assert base["file"] == "common.yml"
        for key, value in common[base["service"]].items():
            if key != "extends":
                service.setdefault(key, value)
    return found


files = {name: resolved(name) for name in ("server", "client")}
SERVICES = [(name, service) for name, found in files.items() for service in found["services"]]
RUNS_CODE = [("server", "serverapp"), ("client", "executor")]


def mounts(about):
    """Target to source of a service's volumes."""
    return {
        target: source
        for source, target in (
            re.fullmatch(r"(.+?):(/[\w/.]+)(?::ro)?", volume).groups()
            for volume in about["volumes"]
        )
    }


def is_read_only(about, target):
    return all(v.endswith(":ro") for v in about["volumes"] if f":{target}" in v)


@pytest.mark.parametrize(("name", "service"), SERVICES)
def test_a_service_is_unprivileged_bounded_and_restarts(name, service):
    about = files[name]["services"][service]
    assert about["cap_drop"] == ["ALL"]
    assert about["security_opt"] == ["no-new-privileges:true"]
    assert about["restart"] == "unless-stopped"
    assert about["user"] == "${KEEL_UID:-10001}"
    kind = {"serverapp": "SERVER_", "worker": "WORKER_"}.get(service, "")
    assert re.fullmatch(rf"\$\{{KEEL_{kind}MEMORY:-\d+g\}}", about["mem_limit"])
    assert about["pids_limit"] == 4096
    assert about["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
    assert is_read_only(about, "/credentials")
    assert is_read_only(about, "/data")


@pytest.mark.parametrize(("name", "service"), RUNS_CODE)
def test_the_code_of_a_run_reaches_nothing_but_its_control(name, service):
    """The bridge has no address of this machine, and no resolver answers for other names."""
    about, option = files[name]["services"][service], "com.docker.network.bridge."
    closed = {option + "gateway_mode_ipv4": "isolated", option + "inhibit_ipv4": "true"}
    assert about["networks"] == ["inside"]
    assert files[name]["networks"]["inside"] == {"internal": True, "driver_opts": closed}
    assert about["dns"] == ["192.0.2.1"]


@pytest.mark.parametrize(("name", "service"), RUNS_CODE)
def test_private_keys_stay_out_of_the_containers_that_run_the_code(name, service):
    found = {target for target in mounts(files[name]["services"][service]) if "cred" in target}
    of_server = {"/credentials/ca.pem"} if name == "server" else set()
    assert found == of_server | {"/credentials/executor.secret"}


def test_the_code_of_a_run_can_write_to_its_own_memory_alone():
    executor = files["client"]["services"]["executor"]
    assert executor["read_only"]
    assert all(volume.endswith(":ro") for volume in executor["volumes"])
    assert executor["tmpfs"] == ["/run/flwr", "/tmp"]  # else apps would outlive the container
    assert files["server"]["services"]["serverapp"]["tmpfs"] == ["/run/flwr"]
    lines = (docker / "Dockerfile").read_text()
    assert "FLWR_HOME=/run/flwr" in lines
    assert "chmod 1777 /state /registry /run/keel /run/flwr" in lines


def test_the_worker_has_no_network_and_the_only_data_state_and_limits():
    services = files["client"]["services"]
    worker, executor, socket = services["worker"], services["executor"], "/run/keel/worker.sock"
    assert worker["network_mode"] == "none"
    assert worker["environment"]["KEEL_WORKER"] == executor["environment"]["KEEL_WORKER"] == socket
    assert executor["depends_on"]["worker"] == {"condition": "service_healthy"}
    assert mounts(worker)["/run/keel"] == mounts(executor)["/run/keel"]
    assert {"/state", "/data"} <= mounts(worker).keys()
    assert not {"/state", "/data"} & mounts(executor).keys()
    assert "/credentials" not in mounts(worker)
    for variable in (*site_privacy.VARIABLES, "KEEL_DEVICE", "KEEL_GPU_SHARE"):
        assert worker["environment"][variable].startswith(f"${{{variable}:-")
    assert load("compose.gpu.yml")["services"].keys() == {"worker"}


def test_the_superlink_takes_registered_keys_alone_over_tls():
    services = files["server"]["services"]
    superlink, serverapp = services["superlink"], services["serverapp"]
    assert {
        "--enable-supernode-auth",
        "--ssl-certfile=/credentials/server.pem",
        "--ssl-keyfile=/credentials/server.key",
        "--superexec-auth-secret-file=/credentials/executor.secret",
        "--database=/state/superlink.db",
    } <= {*superlink["command"]}
    assert "--insecure" not in superlink["command"] + serverapp["command"]
    assert "${KEEL_CONTROL:-127.0.0.1:8000}:8000" in superlink["ports"]  # this machine's alone
    command = files["client"]["services"]["supernode"]["command"]
    assert "--root-certificates=/credentials/ca.pem" in command
    assert "--auth-supernode-private-key=/credentials/client.key" in command
    assert "--insecure" not in command


def test_the_serverapp_reads_whose_key_each_client_s_is_and_cannot_change_it():
    services = files["server"]["services"]
    for service in services.values():
        assert service["environment"]["KEEL_CLIENT_REGISTRY"] == "/registry/clients.json"
        assert mounts(service)["/registry"] == "registry"
    assert is_read_only(services["serverapp"], "/registry")
    assert not is_read_only(services["superlink"], "/registry")
    assert {mounts(service)["/state"] for service in services.values()} == {"runs", "superlink"}


PROGRAMS = {
    "supernode": "flwr.supernode.cli.flower_supernode",
    "executor": "flwr.supercore.cli.flower_superexec",
    "superlink": "flwr.superlink.cli.flower_superlink",
}


@pytest.mark.parametrize(("name", "service"), SERVICES)
def test_every_option_is_one_that_its_command_has(name, service, monkeypatch, capsys):
    python, option, module, *words = files[name]["services"][service]["command"]
    assert [python, option] == ["python", "-m"]
    if module == "client_app.worker_server":
        assert find_spec(module)
        return
    assert module == "keel.deployment"
    monkeypatch.setattr("sys.argv", ["program", "--help"])
    program = importlib.import_module(PROGRAMS[words[0]])
    with pytest.raises(SystemExit):
        vars(program)[program.__name__.rpartition(".")[2]]()
    options = {re.split("[= ]", word)[0] for word in words[1:] if word.startswith("--")}
    assert options <= {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}, words


# --- the image -----------------------------------------------------------------------------------


def requirements(name):
    lines = (docker / name).read_text().splitlines()
    return {r.name: r.specifier for r in (Requirement(x) for x in lines if x[0] != "#")}


def test_the_image_has_the_dependencies_alone_pinned_within_them():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())["project"]
    listed = requirements("requirements.txt")
    assert listed == {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    pinned = requirements("constraints.txt")
    assert pinned.keys() == listed.keys()
    for name, [only] in pinned.items():
        assert only.operator == "=="
        assert only.version in listed[name], name
    text = (docker / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-slim-\w+$", text, re.M)


def test_the_image_holds_every_package_but_recipes_trials_and_pages():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    lines = (docker / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if re.fullmatch(r"COPY (\w+) \1", line)}
    assert copied == packages
    ignored = (app_folder / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)
    assert ignored[0] == "*"  # secrets and runs stay out of the build, whatever they are called
    left_out = {"keel/experiments", "keel/deployment/loopback.py", "keel/views"}
    assert {name.removesuffix(".py").replace("/", ".") for name in left_out} == {*NOT_IN_IMAGE}
    assert left_out <= set(ignored[ignored.index("!keel") :])  # the last match counts
    assert all((app_folder / name).exists() for name in left_out)


@pytest.mark.end_to_end  # it takes seconds to import all
def test_every_module_of_the_image_can_be_imported_with_the_image_s_dependencies():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    names = [
        ".".join(path.relative_to(app_folder).with_suffix("").parts)
        for package in packages
        for path in (app_folder / package).rglob("[!_]*.py")
    ]
    names = [name for name in names if not name.startswith((*NOT_IN_IMAGE, "keel.cli.experiments"))]
    extras = ["ray", "plotly", "pandas", "ruamel", "filelock"]
    assert len(names) > 100
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({[*NOT_IN_IMAGE, *extras]}))  # as if these were missing
for name in {sorted(names)}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=app_folder, check=True)


# --- pages ---------------------------------------------------------------------------------------


def test_every_environment_variable_is_documented_in_one_place():
    page = (app_folder / "docs" / "environment.md").read_text()
    used = set()
    for pattern in ("docker/*", "Makefile", "[!.]*/**/*.py"):  # not .venv, which is large
        for path in app_folder.glob(pattern):
            if path.is_file():
                used |= set(re.findall(r"\bKEEL_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    assert used == set(re.findall(r"`(KEEL_\w+)`", page))


def test_defaults_of_variables_are_as_documented():
    page = (app_folder / "docs" / "environment.md").read_text()
    text = "".join(path.read_text() for path in docker.glob("*.yml"))
    for variable, documented in re.findall(r"^\| `(KEEL_\w+)` \| (\S.*?) \|", page, re.M):
        for default in set(re.findall(rf"\$\{{{variable}:-([^}}]+)\}}", text)):
            is_set_by_make = variable in ("KEEL_CREDENTIALS", "KEEL_DATA", "KEEL_UID")
            assert is_set_by_make or documented == f"`{default}`", variable


def test_the_documentation_runs_only_commands_that_the_image_has():
    """Keel's packages are copied there, and not installed: there is no command `keel`."""
    pages = "".join(page.read_text() for page in (app_folder / "docs").rglob("*.md"))
    inside = re.findall(r"docker exec \$\([^)]*\) (\w+)", pages)
    assert set(inside) <= {"python", "rm", "touch"}
    assert not re.search(r"compose\b.* exec ", pages)  # needs the variables of a start
