"""The checks of `keel doctor`: one line for each finding, a problem with its way out.

A check is a generator of findings. Here are those of a machine of a deployment and its containers;
doctor_runtime.py has those of where Keel's code runs.
"""

import datetime
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from subprocess import SubprocessError
from typing import Literal, ParamSpec

from keel.deployment.reach import handshake, proxy_hint
from protocol.text import num_of

Machine = Literal["client", "server"]
P = ParamSpec("P")
MARKS = ("ok", "skipped", "PROBLEM")  # before the text of a finding
TIMEOUT_S = 10.0
INSIDE_TIMEOUT_S = 1800.0  # the data may be decoded for the first time
CLOCK_LIMITS = "more than 5 seconds ahead of it or more than 5 minutes behind"  # Flower's
# compose services of a machine; the doctor's own checks run in the last one
SERVICES = {"client": ("supernode", "executor", "worker"), "server": ("superlink", "serverapp")}


@dataclass(frozen=True)
class Finding:
    """The result of a check; mark: one of `MARKS`."""

    mark: str
    text: str

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong."""
        return self.mark == "PROBLEM"

    def __str__(self) -> str:
        """The line printed for it."""
        return f"{self.mark:9}{self.text}"


def fine(text: str) -> Finding:
    """Nothing is wrong."""
    return Finding("ok", text)


def skipped(text: str) -> Finding:
    """It was not checked; the text says why."""
    return Finding("skipped", text)


def problem(text: str) -> Finding:
    """Something is wrong; the text says what, and the way out."""
    return Finding("PROBLEM", text)


def check(function: Callable[P, Iterator[Finding]]) -> Callable[P, Iterator[Finding]]:
    """A check of which an exception is one more problem, of one line."""
    what = function.__name__.removeprefix("check_").replace("_", " ")

    @wraps(function)
    def safe(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        try:
            yield from function(*args, **kwargs)
        except PermissionError as error:
            yield problem(
                f"{what}: {error}: user id {os.getuid()} is denied; the deployment runs as KEEL_UID"
            )
        except (OSError, ValueError, RuntimeError, ImportError, SubprocessError) as error:
            yield problem(f"{what}: {' '.join(str(error).split())[:300]}")

    return safe


# --- a machine of a deployment -------------------------------------------------------------------


def check_client(credentials: Path, fleet: str) -> Iterator[Finding]:
    """A client's machine: files, the SuperLink's port `fleet`, its answer to key and clock."""
    ca = credentials / "ca.pem"
    yield from check_files(credentials, ["client.key", "executor.secret"])
    yield from check_certificate(ca)
    reached = list(check_port(fleet, ca))
    yield from reached
    if any(not finding.is_problem for finding in reached):
        yield from check_key(fleet, ca, credentials / "client.key")


def check_server(credentials: Path, fleet: str, superlink: str) -> Iterator[Finding]:
    """A server's machine: files, the ports for clients and, if given, users; the clients."""
    ca = credentials / "ca.pem"
    yield from check_files(credentials, ["server.key", "executor.secret"])
    for name in ("ca.pem", "server.pem"):
        yield from check_certificate(credentials / name)
    yield from check_server_key(credentials / "server.pem", credentials / "server.key")
    yield from check_port(fleet, ca)
    if superlink:
        yield from check_registered(ca, superlink)
    else:
        yield skipped("clients: --superlink does not name the SuperLink's port for users")


@check
def check_files(folder: Path, names: Sequence[str]) -> Iterator[Finding]:
    """Private files are there, and can be read by their owner alone."""
    for path in (folder / name for name in names):
        if not path.exists():
            yield problem(f"{path} is missing: `keel deploy key` or `credentials` makes it")
        elif path.stat().st_mode & 0o077:
            yield problem(f"{path} is readable by others: chmod 600 {path}")
        elif not os.access(path, os.R_OK):
            yield problem(
                f"{path} is of user id {path.stat().st_uid}, and {os.getuid()} may not read it: "
                "run the doctor as root; it has to be of the user id that deploys (KEEL_UID)"
            )


@check
def check_certificate(path: Path) -> Iterator[Finding]:
    """A certificate is valid now; one from the future may also mean a clock that is behind."""
    from keel.deployment.credentials import (
        certificate_fingerprint,
        certificate_problem,
        load_certificate,
    )

    if not path.exists():
        yield problem(f"{path} is missing: copy the server's (docs/how-to/deployment.md)")
    elif found := certificate_problem(path, datetime.datetime.now(datetime.UTC)):
        yield problem(found)
    else:
        last = load_certificate(path).not_valid_after_utc
        yield fine(
            f"{path} is valid until {last:%Y-%m-%d}, SHA-256 {certificate_fingerprint(path)}"
        )


@check
def check_server_key(certificate: Path, key: Path) -> Iterator[Finding]:
    """The key is the certificate's: with another or a damaged one, the SuperLink does not start."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")  # or it would ask for one
    except ssl.SSLError:
        yield problem(
            f"{key} is damaged, or not the key of {certificate.name}: copy both again from where "
            "`keel deploy credentials` made them"
        )


@check
def check_port(address: str, ca: Path) -> Iterator[Finding]:
    """A TLS server listens there, with a certificate of our CA for this name."""
    if not ca.exists():
        return  # a finding of check_certificate
    try:
        handshake(address, ca)
    except ssl.SSLCertVerificationError as error:
        yield problem(
            f"{address}: its certificate is not accepted: {error.verify_message}. If the name is "
            "another or it has expired: `keel deploy credentials --renew`; else copy the server's "
            f"ca.pem to {ca} again, and set this machine's clock"
        )
    except OSError as error:
        yield problem(
            f"{address}: {error}: is the name right, the SuperLink running, the port published and "
            f"open in the firewall?{proxy_hint(address)}"
        )
    else:
        yield fine(f"{address} answers, with a certificate of our CA for this name")


@check
def check_key(address: str, ca: Path, key: Path) -> Iterator[Finding]:
    """The SuperLink knows this client's key. Changes nothing there."""
    from flower_adapter.registration import Registration, registration_of
    from keel.deployment.keys import fingerprint, load_client_key, public_half

    private = load_client_key(key)
    own = public_half(private)
    shown, requests = f"{key}, {fingerprint(own)}", sorted(key.parent.glob("*.pub"))
    for request in requests:
        if request.read_text().split()[:2] != own.split():
            yield problem(
                f"{key} does not belong to {request}: put the client's directory back, or move "
                f"{request.name} away and run `keel deploy key`"
            )
            return
    registration, details = registration_of(private, address, ca.read_bytes(), TIMEOUT_S)
    match registration:
        case Registration.KNOWN:
            yield fine(f"the SuperLink knows the key in {shown}")
        case Registration.CLOCKS_DIFFER:
            yield problem(
                f"this machine's clock says {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}"
                f" UTC, which the SuperLink refuses: it is {CLOCK_LIMITS}. Synchronise both clocks "
                "(timedatectl set-ntp true)"
            )
        case Registration.UNKNOWN:
            yield problem(
                f"the SuperLink does not know the key in {shown}: send "
                f"{requests[0] if requests else 'its request'} to the server's operator, who "
                "registers it (`make register`; without containers, `keel deploy register`)"
            )
        case Registration.REFUSED:
            yield problem(
                f"{address} takes no key of a client: {details[:300]}: --fleet is the SuperLink's "
                f"port for clients (9092 unless changed){proxy_hint(address)}"
            )


@check
def check_registered(ca: Path, superlink: str) -> Iterator[Finding]:
    """Every registered client is connected."""
    from flower_adapter.registration import registered_nodes

    problems = [found for found in check_port(superlink, ca) if found.is_problem]
    yield from problems
    if problems:
        return
    nodes = [n for n in registered_nodes(superlink, ca.read_bytes()) if n.status != "unregistered"]
    for node in sorted(nodes, key=lambda node: (node.name, node.node_id)):
        how = "has never connected" if node.status == "registered" else f"is {node.status}"
        if not node.name:
            yield problem(
                f"SuperNode {node.node_id} {how} and was registered without a client's name: runs "
                f"refuse it: flwr supernode unregister {node.node_id} deployment"
            )
        elif node.status != "online":
            yield problem(
                f"SuperNode {node.node_id} of {node.name} {how}: run `keel doctor client` on its "
                "machine"
            )
    yield fine(
        f"connected: {num_of('SuperNode', [n.status for n in nodes if n.name].count('online'))}"
    )


# --- containers ----------------------------------------------------------------------------------


@check
def check_containers(
    machine: Machine, options: Sequence[str], check_here: Callable[[], Iterator[Finding]]
) -> Iterator[Finding]:
    """All of a machine's containers run, and what the doctor finds in the one that computes.

    options: of `keel doctor MACHINE --inside` there. check_here: the same checks on this machine,
    for one without containers.
    """
    containers, why = [], "there is no `docker` here"
    if shutil.which("docker"):
        labels = (f'{{{{.Label "com.docker.compose.{name}"}}}}' for name in ("project", "service"))
        columns = "\t".join(["{{.Names}}", *labels, "{{.Status}}"])
        done = output_of("docker", "ps", "--format", columns)
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        containers = sorted(
            row for row in rows if row[1].startswith("keel-") and row[2] in SERVICES[machine]
        )
        why = " ".join(done.stderr.split())[:300] or f"none of a {machine} runs here"
    if not containers:
        yield skipped(f"containers: {why}; checking this machine instead")
        yield from check_here()
    for project in dict.fromkeys(row[1] for row in containers):
        running = {row[2] for row in containers if row[1] == project}
        if missing := [name for name in SERVICES[machine] if name not in running]:
            yield problem(
                f"containers: {project} runs here without its {', '.join(missing)}: see how that "
                "ended with `docker ps --all`, and deploy again"
            )
    for name, _, service, status in containers:
        if status.startswith("Restarting"):
            yield problem(f"{name}: exits when started: docker logs --tail 20 {name}")
        elif service == SERVICES[machine][-1]:
            yield from check_container(name, [machine, "--inside", *options])


@check
def check_container(container: str, options: Sequence[str]) -> Iterator[Finding]:
    """What the doctor finds in this container."""
    words = ("docker", "exec", container, "python", "-m", "keel", "doctor", *options)
    done = output_of(*words, timeout_s=INSIDE_TIMEOUT_S)
    findings = [
        Finding(mark, f"{container}: {text.lstrip()}")
        for mark, _, text in (line.partition(" ") for line in done.stdout.splitlines())
        if mark in MARKS
    ]
    yield from findings
    if not findings or done.returncode not in (0, 1):  # 1: it found problems
        last = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
        yield problem(f"{container}: the doctor did not finish there: {last}")


def output_of(*words: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended; subprocess.TimeoutExpired after `timeout_s`, or `TIMEOUT_S`."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s or TIMEOUT_S, check=False
    )
