"""Looks at a server's or a client's machine and says in words what is wrong.

    python -m keel.deployment.doctor server --credentials credentials/server \\
        --fleet fl.example.org:9092 --superlink localhost:8000
    python -m keel.deployment.doctor client --credentials credentials/site-a \\
        --fleet fl.example.org:9092 --classes cat,dog --device cuda
    python -m keel.deployment.doctor client --inside --source folder:/data --classes cat,dog

Files, clock, keys and ports are looked at on this machine. Disk, versions, device, data and worker
are looked at where the code runs: in Keel's containers where some run here, else on this machine;
`--inside` does only that second half, where it is called. `--source` and `--worker` are for a
machine without containers: those have their own. One line a finding; exit status 1 if one is a
problem. Changes nothing, but data is decoded into Keel's cache, as a run would do.
"""

import argparse
import datetime
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import ParamSpec

import grpc
import numpy as np
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from packaging.requirements import Requirement

from client_app.worker_client import code_digest, default_socket, worker_says
from keel.deployment.reach import handshake, split_address
from keel.deployment.superlink import SuperLinkClient
from protocol.config import app_folder, keel_home, resolve_config

disk_needed = 2 * 2**30  # bytes: a few models' checkpoints and decoded data
certificate_warning = datetime.timedelta(days=30)
limit_s = 10.0
inside_limit_s = 1800.0  # in a container: the data may be decoded for the first time
services = {"client": ("supernode", "executor"), "server": ("superlink", "serverapp")}
marks = {False: "ok       ", True: "PROBLEM  "}
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """What one check found, in words."""

    is_problem: bool
    text: str


def fine(text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(False, text)


def problem(text: str) -> Finding:
    """Something is wrong; the text says what, and the way out."""
    return Finding(True, text)


def in_words(check: Callable[P, Iterator[Finding]]) -> Callable[P, Iterator[Finding]]:
    """The check, which says in one line what kept it from looking, where something did."""
    what = check.__name__.removeprefix("check_").replace("_", " ")

    @wraps(check)
    def careful(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        try:
            yield from check(*args, **kwargs)
        except subprocess.TimeoutExpired as error:
            yield problem(f"{what}: {error.cmd[0]} gave no answer within {error.timeout:g} seconds")
        except (OSError, ValueError, RuntimeError) as error:
            yield problem(f"{what}: {' '.join(str(error).split())[:300]}")

    return careful


@in_words
def check_versions(code: str = "") -> Iterator[Finding]:
    """Python and every package that pyproject.toml asks for; and that Keel's code is `code`."""
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())["project"]
    wrong = []
    for line in project["dependencies"]:
        wanted = Requirement(line)
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is not installed, {wanted.specifier} is needed")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} is {found}, {wanted.specifier} is needed")
    yield from map(problem, wrong)
    if code and code != code_digest():
        yield problem(
            f"versions: Keel's client code is {code_digest()} here, {code} in the checkout that "
            "the doctor was called from: take the same version, then `make image` and deploy again"
        )
    elif not wrong:
        named = ", ".join(f"{name} {metadata.version(name)}" for name in ("flwr", "torch"))
        yield fine(f"versions: {named}; Keel's client code is {code_digest()}")


@in_words
def check_disk(folder: Path) -> Iterator[Finding]:
    """Room where state, runs and decoded data go, and whether it can be written to."""
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    amount = f"{free / 2**30:.1f} GiB free at {folder}"
    if free < disk_needed:
        yield problem(f"disk: {amount}; {disk_needed / 2**30:.0f} GiB are needed: make room")
    elif not os.access(there, os.W_OK):
        yield problem(f"disk: {there} cannot be written to by user id {os.getuid()}")
    else:
        yield fine(f"disk: {amount}")


@in_words
def check_private_files(folder: Path, names: list[str]) -> Iterator[Finding]:
    """The files are there, readable, and private ones are for their owner alone."""
    for name in names:
        path = folder / name
        if not path.exists():
            yield problem(f"{path} is missing: copy it from where `make credentials` ran")
        elif not os.access(path, os.R_OK):
            yield problem(
                f"{path} belongs to user id {path.stat().st_uid} and cannot be read by "
                f"{os.getuid()}: run the doctor as root. It has to belong to the user id that the "
                "deployment runs as (KEEL_UID; 10001 where root deployed)"
            )
        elif name.endswith((".key", ".secret")) and path.stat().st_mode & 0o077:
            yield problem(f"{path} can be read by others: chmod 600 {path}")


@in_words
def check_certificate(path: Path, now: datetime.datetime) -> Iterator[Finding]:
    """Dates of a certificate; a date in the future may also be a clock that is behind."""
    if not os.access(path, os.R_OK):  # said by check_private_files
        return
    found = x509.load_pem_x509_certificate(path.read_bytes())
    first, last = found.not_valid_before_utc, found.not_valid_after_utc
    if now < first:
        yield problem(
            f"{path} is valid from {first:%Y-%m-%d %H:%M}, this machine's clock says "
            f"{now:%Y-%m-%d %H:%M} UTC: set the clock"
        )
    elif now > last:
        yield problem(f"{path} was valid until {last:%Y-%m-%d}: make a new one")
    elif last - now < certificate_warning:
        yield problem(f"{path} is valid only until {last:%Y-%m-%d}: make a new one soon")
    else:
        yield fine(f"{path} is valid until {last:%Y-%m-%d}")


@in_words
def check_clock() -> Iterator[Finding]:
    """Whether the system says that its clock is synchronised; nothing where it does not say."""
    if not shutil.which("timedatectl"):
        return
    command = ["timedatectl", "show", "--property", "NTPSynchronized", "--value"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if said.stdout.strip() == "no":
        yield problem(
            "clock: not synchronised; the SuperLink refuses SuperNodes whose clock is 5 minutes off"
        )


@in_words
def check_port(address: str, ca: Path) -> Iterator[Finding]:
    """Somebody listens there, with a certificate of our CA for the name that we call it by."""
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except socket.gaierror:
        yield problem(f"{host}: no such name; check the name or the DNS of this machine")
        return
    except TimeoutError:
        yield problem(f"{address}: no answer; a firewall on the way may drop port {port}")
        return
    except OSError as error:
        yield problem(f"{address}: {error.strerror}: is the SuperLink running, the port published?")
        return
    if not os.access(ca, os.R_OK):  # said by check_private_files
        return
    try:
        ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        yield problem(f"{ca} is no CA certificate: {error}")
        return
    try:
        handshake(address, ca)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
        if error.verify_code == 62 or "mismatch" in why.lower():  # X509_V_ERR_HOSTNAME_MISMATCH
            yield problem(f"{address}: its certificate is for other names: {why}")
        elif error.verify_code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            yield problem(f"{address}: its certificate has expired")
        elif error.verify_code == 9:  # X509_V_ERR_CERT_NOT_YET_VALID
            yield problem(f"{address}: its certificate is not yet valid: set this machine's clock")
        else:
            yield problem(f"{address}: its certificate is not of the CA in {ca}: {why}")
    except OSError as error:
        yield problem(f"{address}: no TLS there ({error}): is another service on this port?")
    else:
        yield fine(f"{address} answers, with a certificate of our CA for this name")


@in_words
def check_key(address: str, ca: Path, key: Path) -> Iterator[Finding]:
    """The SuperLink knows this client's key. Asked so that nothing changes there: by an activation
    with a heartbeat that it has to refuse, after it has looked for the key."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        yield problem(f"{key} is no OpenSSH private key: {error}")
        return
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        yield problem(f"{key} is not an elliptic-curve key: `make credentials` makes one")
        return
    channel = create_channel(
        server_address=address,
        insecure=False,
        root_certificates=ca.read_bytes(),
        interceptors=[
            RuntimeVersionClientInterceptor(component_name="SuperNode"),
            NodeAuthClientInterceptor(private, private.public_key()),
        ],
    )
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=0
    )
    try:
        FleetStub(channel).ActivateNode(request, timeout=limit_s)
        said, code = "activated", 0
    except grpc.RpcError as error:
        said = str(error.details())
        flower_error = FlowerError.from_json(said)
        code = flower_error.code if flower_error else 0
    finally:
        channel.close()
    if code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
        yield fine(f"the SuperLink knows the key of {key}")
    elif "Invalid timestamp" in said:
        yield problem("the SuperLink's clock and this machine's differ by minutes: set the clocks")
    elif code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        yield problem(
            f"the SuperLink does not know the key of {key}: register {key.with_suffix('.pub')} "
            "there (`make register` on the server's machine)"
        )
    else:
        yield problem(f"the SuperLink refuses the key of {key}: {said[:300]}")


@in_words
def check_device(name: str) -> Iterator[Finding]:
    """torch can use the device."""
    import torch

    from client_app.setup import device_for

    try:
        device = device_for(name)
    except ValueError as error:
        driver = shutil.which("nvidia-smi") is not None
        built = torch.version.cuda or "no CUDA"
        hint = (
            f"this machine has NVIDIA's driver, torch is built for {built}"
            if driver
            else "no NVIDIA driver is visible here; a container needs compose.gpu.yml"
        )
        yield problem(f"{error}; {hint}")
        return
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        yield fine(f"device: {device}, {name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    elif name == "auto":
        yield fine(f"device: {device}; auto finds no GPU: if there is one, deploy with cuda")
    else:
        yield fine(f"device: {device}")


@in_words
def check_data(source: str, classes: list[str], run_config: dict[str, str]) -> Iterator[Finding]:
    """The data can be read, and its classes are ones that the run knows."""
    from client_app.setup import open_source

    try:
        found = open_source(resolve_config(run_config), source)
    except (ValueError, OSError) as error:
        yield problem(f"data: {error}")
        return
    strange = [name for name in found.class_names if classes and name not in classes]
    if strange:
        yield problem(
            f"data: {source} has the class {strange[0]!r}, the run's are {', '.join(classes)}"
        )
    counts = np.bincount(np.asarray(found.train.labels), minlength=found.num_classes)
    held = ", ".join(f"{n} {c}" for n, c in zip(found.class_names, counts, strict=True) if c)
    if not strange:
        shape = " x ".join(map(str, found.image_shape))
        yield fine(f"data: {counts.sum()} training images of {shape}: {held}")


@in_words
def check_worker(path: Path | None) -> Iterator[Finding]:
    """The resident worker answers, with this machine's code."""
    if path is None:
        return
    try:
        said = worker_says(str(path), within_s=limit_s)
    except (TimeoutError, ConnectionError) as error:
        yield problem(f"worker: {error}: see the executor's log")
        return
    if said["code"] != code_digest():
        yield problem(f"worker: runs code {said['code']}, here is {code_digest()}: restart it")
    else:
        yield fine(f"worker: process id {said['pid']}, {said['versions']}")


@in_words
def check_registered(credentials: Path, superlink: str) -> Iterator[Finding]:
    """As many SuperNodes are registered as there are keys here, and each is connected."""
    with tempfile.TemporaryDirectory() as home:
        client = SuperLinkClient(Path(home), superlink, credentials / "ca.pem")
        try:
            nodes = {str(node["node-id"]): str(node["status"]) for node in client.nodes()}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield problem(f"{superlink}: {' '.join(str(error).split())[:300]}")
            return
    keys = len(list((credentials / "clients").glob("*.pub")))
    if len(nodes) < keys:
        yield problem(f"{keys} clients have keys here, {len(nodes)} are registered: make register")
    for node, status in sorted(nodes.items()):
        if status != "online":
            yield problem(f"SuperNode {node} is {status}: look at its machine with `make doctor`")
    if "online" in nodes.values():
        yield fine(f"{list(nodes.values()).count('online')} SuperNodes are connected")


@in_words
def check_containers(
    kind: str,
    inside: list[str],
    not_looked_at: list[str],
    here: Callable[[], Iterator[Finding]],
) -> Iterator[Finding]:
    """What the doctor says within Keel's containers of this kind of machine; and that all run.

    inside: more of its options there; not_looked_at: those given that say nothing there.
    here: the same checks on this machine, where none runs.
    """
    containers = keel_containers(kind) if shutil.which("docker") else []
    if not containers:
        yield fine(f"containers: none of a {kind} runs here; this machine is looked at instead")
        yield from here()
    elif not_looked_at:
        yield fine(
            f"{' and '.join(not_looked_at)}: for a machine without containers, not looked at; "
            "the containers here have their own"
        )
    there = {(container.project, container.service) for container in containers}
    for project, service in sorted(there):
        for one in services[kind]:
            number = service.removeprefix(one)  # of `executor-1`, which belongs to `supernode-1`
            for other in services[kind]:
                if number != service and (project, other + number) not in there:
                    yield problem(
                        f"containers: {project}'s {service} runs here without its "
                        f"{other + number}: `docker ps --all` says how that ended; deploy again"
                    )
    for container in containers:
        name = container.name
        if container.status.startswith("Restarting"):
            yield problem(f"{name}: ends as soon as it is started: docker logs --tail 20 {name}")
        elif container.service.startswith(services[kind][1]):
            yield from check_container(name, [kind, "--inside", *inside])


@dataclass(frozen=True, order=True)
class Container:
    """One that runs, or is being restarted: its name, compose's project and service, its status."""

    name: str
    project: str
    service: str
    status: str


def keel_containers(kind: str) -> list[Container]:
    """The containers that the Makefile's targets started for this kind of machine, by name."""
    label = '{{.Label "com.docker.compose.%s"}}'
    columns = ["{{.Names}}", label % "project", label % "service", "{{.Status}}"]
    command = ["docker", "ps", "--format", "\t".join(columns)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip()}: run the doctor as somebody who may use Docker")
    found = [Container(*line.split("\t")) for line in done.stdout.splitlines()]
    return sorted(
        c for c in found if c.project.startswith("keel-") and c.service.startswith(services[kind])
    )


@in_words
def check_container(container: str, options: list[str]) -> Iterator[Finding]:
    """What the doctor says in this container."""
    command = ["docker", "exec", container, "python", "-m", "keel.deployment.doctor", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=inside_limit_s, check=False
    )
    found = [
        Finding(is_problem, f"{container}: {line.removeprefix(mark)}")
        for line in done.stdout.splitlines()
        for is_problem, mark in marks.items()
        if line.startswith(mark)
    ]
    yield from found
    if not found or done.returncode not in (0, 1):
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        yield problem(f"{container}: the doctor did not get to its end there: {reason}")


def server_checks(arguments: argparse.Namespace, now: datetime.datetime) -> Iterator[Finding]:
    """Files, clock and ports of a server's machine."""
    folder: Path = arguments.credentials
    names = ["ca.pem", "server.pem", "server.key", "executor.secret"]
    yield from check_private_files(folder, names)
    yield from check_certificate(folder / "ca.pem", now)
    yield from check_certificate(folder / "server.pem", now)
    yield from check_clock()
    yield from check_port(arguments.fleet, folder / "ca.pem")
    if arguments.superlink:
        yield from check_registered(folder, arguments.superlink)


def client_checks(arguments: argparse.Namespace, now: datetime.datetime) -> Iterator[Finding]:
    """Files, clock, port and key of a client's machine."""
    folder: Path = arguments.credentials
    yield from check_private_files(folder, ["ca.pem", "client.key", "executor.secret"])
    yield from check_certificate(folder / "ca.pem", now)
    yield from check_clock()
    reached = list(check_port(arguments.fleet, folder / "ca.pem"))
    yield from reached
    if any(not f.is_problem for f in reached) and os.access(folder / "client.key", os.R_OK):
        yield from check_key(arguments.fleet, folder / "ca.pem", folder / "client.key")


def checks_inside(arguments: argparse.Namespace) -> Iterator[Finding]:
    """What the code of a run finds: versions, room, device, data, worker."""
    yield from check_versions(arguments.code)
    yield from check_disk(keel_home())
    if arguments.machine == "client":
        yield from check_device(arguments.device or os.environ.get("KEEL_DEVICE") or "auto")
        source = arguments.source
        if source is None:
            source = os.environ.get("KEEL_SOURCE", "")
        if source:
            classes = [name for name in arguments.classes.split(",") if name]
            model = {"model": arguments.model} if arguments.model else {}
            yield from check_data(source, classes, model)
        yield from check_worker(arguments.worker or default_socket())


def all_checks(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Of the files and ports of this machine, and of where the code runs."""
    if arguments.inside:
        yield from checks_inside(arguments)
        return
    files = server_checks if arguments.machine == "server" else client_checks
    yield from files(arguments, datetime.datetime.now(datetime.UTC))
    options = ["--code", code_digest()]
    for name in ("classes", "model", "device"):
        if value := getattr(arguments, name):
            options += [f"--{name}", value]
    not_looked_at = [f"--{name}" for name in ("source", "worker") if getattr(arguments, name)]
    yield from check_containers(
        arguments.machine, options, not_looked_at, lambda: checks_inside(arguments)
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keel.deployment.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("machine", choices=["server", "client"])
    parser.add_argument("--inside", action="store_true", help="only what the code of a run finds")
    parser.add_argument("--credentials", type=Path, help="this machine's folder")
    parser.add_argument("--fleet", default="", help="HOST:PORT that clients connect to")
    parser.add_argument("--superlink", default="", help="server: HOST:PORT of its HTTP API")
    parser.add_argument("--source", help="client: folder:PATH or npz:PATH; else $KEEL_SOURCE")
    parser.add_argument("--classes", default="", help="client: the run's classes, with commas")
    parser.add_argument("--model", default="", help="client: the run's model, for the image size")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; else $KEEL_DEVICE, else auto")
    parser.add_argument("--worker", type=Path, help="client: its socket; else $KEEL_WORKER")
    parser.add_argument("--code", default="", help="digest that Keel's client code has to have")
    arguments = parser.parse_args()
    if not arguments.inside and not (arguments.credentials and arguments.fleet):
        parser.error("--credentials and --fleet are needed, or --inside")
    problems = 0
    for finding in all_checks(arguments):
        print(marks[finding.is_problem] + finding.text, flush=True)
        problems += finding.is_problem
    print(f"{problems} problems" if problems else "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
