"""The compose files against what they start: options that exist, secrets only where they belong."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from client_app import site_privacy
from keel.cli.main import NOT_IN_IMAGE
from protocol.config import app_folder

docker = app_folder / "docker"
files = {name: yaml.safe_load((docker / f"compose.{name}.yml").read_text())
         for name in ("server", "client", "local")}  # fmt: skip


def test_the_image_has_the_project_requirements_without_simulation_and_pages():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["tensorboard"]]
    expected = {(r.name, str(r.specifier)) for r in map(Requirement, lines)}
    expected = {each for each in expected if each[0] not in ("plotly", "pandas")}
    lines = (docker / "requirements.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {(r.name, str(r.specifier)) for r in listed} == expected
    assert not any(r.extras for r in listed)


@pytest.mark.parametrize("name", files)
def test_services_run_unprivileged_restart_and_are_on_networks_that_exist(name):
    for service in files[name]["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        assert service["user"] == "${KEEL_UID:-10001}"
        assert set(service.get("networks", [])) <= files[name]["networks"].keys()
        assert "networks" in service or service["network_mode"] == "none"


@pytest.mark.parametrize("name", files)
def test_executors_reach_nothing_but_their_control(name):
    """Code that comes with a run has no network but its control's, and no service of the host.

    The bridge has no address of this machine, and no resolver answers for other names.
    """
    option = "com.docker.network.bridge."
    closed = {option + "gateway_mode_ipv4": "isolated", option + "inhibit_ipv4": "true"}
    for service, about in files[name]["services"].items():
        if service.startswith(("serverapp", "executor")):
            for network in about["networks"]:
                assert files[name]["networks"][network] == {"internal": True, "driver_opts": closed}
            assert about["dns"] == ["192.0.2.1"]


@pytest.mark.parametrize("name", files)
def test_flowers_app_installations_do_not_outlive_their_container(name):
    """Flower takes an app that is there for whole: one that a full disk cut short would stay."""
    assert "FLWR_HOME=/run/flwr" in (docker / "Dockerfile").read_text()
    for service, about in files[name]["services"].items():
        expected = {"serverapp": ["/run/flwr"], "executor": ["/run/flwr", "/tmp"]}
        assert about.get("tmpfs") == expected.get(service.rstrip("-0123456789"))


@pytest.mark.parametrize("name", ["client", "local"])
def test_the_code_of_a_run_can_write_to_its_own_memory_alone(name):
    """It could fill the disk, or put a directory in the socket's place: the worker's next start
    failed, and every one after that."""
    executors = [about for s, about in files[name]["services"].items() if s.startswith("executor")]
    for about in executors:
        assert about["read_only"]
        assert all(volume.endswith(":ro") for volume in about["volumes"]), about["volumes"]


def mounts(service):
    """Target to source of a service's volumes."""
    return {
        v.split(":/", 1)[1].removesuffix(":ro"): v.split(":/", 1)[0] for v in service["volumes"]
    }


@pytest.mark.parametrize(("name", "suffix"), [("client", ""), ("local", "-0"), ("local", "-2")])
def test_the_worker_is_a_service_without_a_network_that_the_executor_waits_for(name, suffix):
    services = files[name]["services"]
    worker, executor = services[f"worker{suffix}"], services[f"executor{suffix}"]
    socket = "/run/keel/worker.sock"
    assert worker["network_mode"] == "none"
    assert worker["environment"]["KEEL_WORKER"] == executor["environment"]["KEEL_WORKER"] == socket
    assert worker["healthcheck"]["test"][-2:] == ["keel.deployment.reach", socket]
    assert executor["depends_on"] == {
        f"supernode{suffix}": {"condition": "service_started"},
        f"worker{suffix}": {"condition": "service_healthy"},
    }
    assert mounts(worker)["run/keel"] == mounts(executor)["run/keel"] in files[name]["volumes"]
    assert "state" in mounts(worker)
    assert not {"state", "data"} & mounts(executor).keys()  # where the code of a run runs
    assert not any("credentials" in volume for volume in worker["volumes"])


def test_the_directory_of_the_socket_is_writable_for_every_user():
    lines = (docker / "Dockerfile").read_text()
    assert "chmod 1777 /state /registry /run/keel /run/flwr" in lines


def test_the_gpus_go_to_the_worker():
    gpu = yaml.safe_load((docker / "compose.gpu.yml").read_text())
    assert gpu["services"].keys() == {"worker"}


@pytest.mark.parametrize("name", files)
def test_private_keys_stay_out_of_the_containers_that_run_the_code(name):
    allowed = {"serverapp": {"ca.pem", "executor.secret"}, "executor": {"executor.secret"}}
    for service, about in files[name]["services"].items():
        kind = service.rstrip("-0123456789")
        if kind in allowed:
            volumes = [m for m in about["volumes"] if "credentials" in m.lower()]
            inside = [re.fullmatch(r"(.+)/([\w.]+):/credentials/\2:ro", m) for m in volumes]
            assert {found and found[2] for found in inside} == allowed[kind], service


@pytest.mark.parametrize("name", ["server", "local"])
def test_the_superlink_takes_registered_keys_alone_over_tls_and_keeps_its_database(name):
    superlink, serverapp = (files[name]["services"][s] for s in ("superlink", "serverapp"))
    assert {
        "--enable-supernode-auth",
        "--ssl-certfile=/credentials/server.pem",
        "--ssl-keyfile=/credentials/server.key",
        "--superexec-auth-secret-file=/credentials/executor.secret",
        "--database=/state/superlink.db",
    } <= {*superlink["command"]}
    assert "--insecure" not in superlink["command"] + serverapp["command"]
    for service in (superlink, serverapp):  # the database; the runs with their checkpoints
        assert mounts(service)["state"] in files[name]["volumes"]


@pytest.mark.parametrize(("name", "service"), [("client", "supernode"), ("local", "supernode-0")])
def test_a_supernode_talks_to_the_server_of_its_authority_with_its_key(name, service):
    about = files[name]["services"][service]
    options = {"--root-certificates=/credentials/ca.pem", "--auth-supernode-private-key"}
    command = [*about.get("entrypoint", []), *about["command"]]
    assert options <= {each.removesuffix("=/credentials/client.key") for each in command}
    assert "--insecure" not in command


def test_what_the_worker_reads_from_its_environment_reaches_it():
    source = (app_folder / "client_app" / "worker_server.py").read_text()
    read = {*re.findall(r'environ.get\("(KEEL_\w+)"\)', source)}
    assert read >= {"KEEL_DEVICE", "KEEL_GPU_SHARE"}
    environment = files["client"]["services"]["worker"]["environment"]
    for name in read:
        assert environment[name].startswith(f"${{{name}:-")


def test_a_site_s_privacy_limits_reach_the_process_that_enforces_them():
    """Set beside `make deploy-client`, they would otherwise look as if they held."""
    environment = files["client"]["services"]["worker"]["environment"]
    for variable in site_privacy.VARIABLES:
        assert environment[variable] == f"${{{variable}:-}}"


def test_data_is_mounted_read_only():
    for name, service in (("client", "worker"), ("server", "serverapp")):
        volumes = files[name]["services"][service]["volumes"]
        assert [m.endswith(":ro") for m in volumes if ":/data" in m] == [True]


@pytest.mark.parametrize("name", files)
def test_credentials_are_mounted_read_only(name):
    for service in files[name]["services"].values():
        assert all(v.endswith(":ro") for v in service["volumes"] if ":/credentials" in v)


def test_the_http_api_is_published_on_this_machine_alone_unless_asked():
    for name in ("server", "local"):
        ports = files[name]["services"]["superlink"]["ports"]
        assert [p for p in ports if p.endswith(":8000")] == ["${KEEL_CONTROL:-127.0.0.1:8000}:8000"]


def test_the_image_holds_every_package_but_recipes_trials_and_pages():
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    lines = (docker / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if re.fullmatch(r"COPY (\w+) \1", line)}
    assert copied == packages - {"benchmarks", "deployment", "diagnostics", "experiments"}  # of 0.1
    ignored = (app_folder / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)
    assert ignored[0] == "*"  # secrets and runs stay out of the build, whatever they are called
    left_out = {"keel/experiments", "keel/deployment/loopback.py", "keel/views"}
    assert {name.removesuffix(".py").replace("/", ".") for name in left_out} == {*NOT_IN_IMAGE}
    assert left_out <= set(ignored[ignored.index("!keel") :])  # the last match counts
    assert all((app_folder / name).exists() for name in left_out)


@pytest.mark.end_to_end  # it takes seconds to import all
def test_every_module_of_the_image_can_be_imported_in_it():
    only_in_a_checkout = "keel.cli.experiments"
    names = []
    for package in (
        "protocol",
        "flower_adapter",
        "models",
        "data",
        "client_app",
        "strategies",
        "server_app",
        "keel",
    ):
        for path in (app_folder / package).rglob("[!_]*.py"):
            name = ".".join(path.relative_to(app_folder).with_suffix("").parts)
            if not name.startswith((*NOT_IN_IMAGE, only_in_a_checkout)):
                names.append(name)
    assert len(names) > 100
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({NOT_IN_IMAGE}))  # as if these were missing
for name in {sorted(names)}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=app_folder, check=True)


def test_every_environment_variable_is_documented_in_one_place():
    [page] = (app_folder / "docs").rglob("environment.md")
    documented = set(re.findall(r"`(KEEL_\w+)`", page.read_text()))
    used = set()
    for pattern in ("docker/*", "Makefile", "[!.]*/**/*.py"):  # not .venv, which is large
        for path in app_folder.glob(pattern):
            if path.is_file():
                used |= set(re.findall(r"\bKEEL_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    assert used == documented


def test_defaults_of_variables_are_as_documented():
    [page] = (app_folder / "docs").rglob("environment.md")
    rows = re.findall(r"^\| `(KEEL_\w+)` \| (\S.*?) \|", page.read_text(), re.M)
    for variable, documented in rows:
        for name in ("server", "client"):
            text = (docker / f"compose.{name}.yml").read_text()
            for default in set(re.findall(rf"\$\{{{variable}:-([^}}]+)\}}", text)):
                is_set_by_make = variable in ("KEEL_CREDENTIALS", "KEEL_DATA", "KEEL_UID")
                assert is_set_by_make or documented == f"`{default}`", variable


def test_the_documentation_runs_only_commands_that_the_image_has():
    """Keel's packages are copied there, and not installed: there is no command `keel`."""
    assert not re.search(r"pip install .*(\.|/app)$", (docker / "Dockerfile").read_text(), re.M)
    pages = [page.read_text() for page in (app_folder / "docs").rglob("*.md")]
    inside = re.findall(r"docker exec \$\([^)]*\) (\w+)", "".join(pages))
    assert set(inside) == {"python", "rm", "touch"}
    assert not re.search(r"compose\b.* exec ", "".join(pages))  # needs the variables of a start


@pytest.mark.parametrize("name", ["server", "local"])
def test_the_serverapp_reads_whose_key_each_client_s_is_and_cannot_change_it(name):
    superlink, serverapp = (files[name]["services"][s] for s in ("superlink", "serverapp"))
    path = {"KEEL_CLIENT_REGISTRY": "/registry/clients.json"}
    assert superlink["environment"] == path
    assert path.items() <= serverapp["environment"].items()
    assert "registry:/registry" in superlink["volumes"]
    assert "registry:/registry:ro" in serverapp["volumes"]


@pytest.mark.parametrize("name", files)
def test_every_service_has_a_limit_of_memory_and_processes(name):
    for service, about in files[name]["services"].items():
        kind = {"serverapp": "SERVER_", "worker": "WORKER_"}.get(service.rstrip("-0123456789"), "")
        assert re.fullmatch(rf"\$\{{KEEL_{kind}MEMORY:-\d+g\}}", about["mem_limit"]), service
        assert about["pids_limit"] == 4096


@pytest.mark.parametrize("name", files)
def test_no_log_fills_the_disk(name):
    """The SuperLink writes a line for every request."""
    for service in files[name]["services"].values():
        options = {"max-size": "10m", "max-file": "5"}
        assert service["logging"] == {"driver": "json-file", "options": options}


def test_the_image_s_versions_are_pinned_within_the_requirements():
    def listed(name):
        lines = (docker / name).read_text().splitlines()
        return {r.name: r.specifier for r in map(Requirement, lines[1:]) if not r.extras}

    lines = (docker / "requirements.txt").read_text().splitlines()
    allowed = {r.name: r.specifier for r in map(Requirement, (x for x in lines if x[0] != "#"))}
    pinned = listed("constraints.txt")
    assert pinned.keys() == allowed.keys()
    for name, [only] in pinned.items():
        assert only.operator == "=="
        assert only.version in allowed[name], name
    assert re.search(
        r"^ARG BASE=python:\d+\.\d+\.\d+-slim-\w+$", (docker / "Dockerfile").read_text(), re.M
    )
