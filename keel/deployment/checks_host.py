"""Checks of a server's or a client's machine: credentials, clock, port, registration."""

import datetime
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from flower_adapter.registration import Registration, registered_nodes, registration_of
from keel.deployment.credentials import certificate_problem
from keel.deployment.findings import Finding, check, fine, problem
from keel.deployment.reach import handshake, split_address
from keel.deployment.register import public_keys
from protocol.text import num_of, shortened

timeout_s = 10.0
clock_limits = "more than 5 seconds ahead of it or more than 5 minutes behind"  # Flower's
hostname_mismatch, expired, not_yet_valid = 62, 10, 9  # X509_V_ERR_... of OpenSSL


@check
def check_private_files(folder: Path, names: Sequence[str]) -> Iterator[Finding]:
    """The files exist and are readable, and private ones are readable by their owner only."""
    for name in names:
        path = folder / name
        if not path.exists():
            yield problem(f"{path} is missing: copy it from where `keel deploy credentials` ran")
        elif not os.access(path, os.R_OK):
            yield problem(
                f"{path} belongs to user id {path.stat().st_uid} and is not readable by "
                f"{os.getuid()}: run the doctor as root. It has to belong to the user id that the "
                "deployment runs as (KEEL_UID; 10001 if root deployed)"
            )
        elif name.endswith((".key", ".secret")) and path.stat().st_mode & 0o077:
            yield problem(f"{path} is readable by others: chmod 600 {path}")


@check
def check_certificate(path: Path, now: datetime.datetime) -> Iterator[Finding]:
    """A certificate is valid now; one from the future may also mean a clock that is behind."""
    if not os.access(path, os.R_OK):  # reported by check_private_files
        return
    if found := certificate_problem(path, now):
        yield problem(found)
    else:
        last = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        yield fine(f"{path} is valid until {last:%Y-%m-%d}")


@check
def check_server_key(certificate: Path, key: Path) -> Iterator[Finding]:
    """The key is the certificate's: with another or a damaged one, the SuperLink does not start."""
    if not all(os.access(path, os.R_OK) for path in (certificate, key)):
        return  # reported by check_private_files
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")  # or it would ask for one
    except ssl.SSLError:
        yield problem(
            f"{key} is damaged, or not the key of {certificate.name}: copy both again from where "
            "`keel deploy credentials` made them, or move both away there and run it again"
        )


@check
def check_clock() -> Iterator[Finding]:
    """The system's clock is synchronised, if the system knows."""
    if not shutil.which("timedatectl"):
        return
    command = ["timedatectl", "show", "--property", "NTPSynchronized", "--value"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.stdout.strip() == "no":
        yield problem(
            "clock: not synchronised; the SuperLink refuses SuperNodes whose clock is "
            f"{clock_limits}: turn on NTP (timedatectl set-ntp true)"
        )


@check
def check_port(address: str, ca: Path) -> Iterator[Finding]:
    """A TLS server listens there, with a certificate of our CA for this name."""
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except socket.gaierror:
        yield problem(f"{host}: no such name; check the name and this machine's DNS")
        return
    except TimeoutError:
        yield problem(f"{address}: no answer; a firewall may drop port {port}")
        return
    except OSError as error:
        yield problem(f"{address}: {error.strerror}: is the SuperLink running, the port published?")
        return
    if not os.access(ca, os.R_OK):  # reported by check_private_files
        return
    try:
        ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        yield problem(f"{ca} is not a CA certificate: {error}")
        return
    try:
        handshake(address, ca)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
        if error.verify_code == hostname_mismatch or "mismatch" in why.lower():
            yield problem(
                f"{address}: its certificate is for other names: {why}: use a name of it, or add "
                f"this one: keel deploy credentials --renew --name {host}"
            )
        elif error.verify_code == expired:
            yield problem(
                f"{address}: its certificate has expired: keel deploy credentials --renew makes "
                "a new one for the server"
            )
        elif error.verify_code == not_yet_valid:
            yield problem(f"{address}: its certificate is not yet valid: set this machine's clock")
        else:
            yield problem(f"{address}: its certificate is not from the CA in {ca}: {why}")
    except OSError as error:
        yield problem(f"{address}: no TLS there ({error}): is it another service's port?")
    else:
        yield fine(f"{address} answers, with a certificate of our CA for this name")


@check
def check_key(address: str, ca: Path, key: Path) -> Iterator[Finding]:
    """The SuperLink knows this client's key. Changes nothing there."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # it has a password
        yield problem(f"{key} is not an OpenSSH private key: {error}")
        return
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        yield problem(f"{key} is not an ECDSA key: `keel deploy credentials` makes one")
        return
    public = key.with_suffix(".pub")
    words = public.read_text(errors="replace").split() if public.exists() else []
    own = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    if words and words[:2] != own.split():
        yield problem(
            f"{key} does not belong to {public}: copy this client's directory again from where "
            "`keel deploy credentials` ran"
        )
        return
    registration, details = registration_of(private, address, ca.read_bytes(), timeout_s)
    match registration:
        case Registration.KNOWN:
            owner = f", which was made for client {words[2]}" if len(words) == 3 else ""
            yield fine(f"the SuperLink knows the key in {key}{owner}")
        case Registration.CLOCKS_DIFFER:
            yield problem(
                f"this machine's clock says {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}"
                f" UTC, which the SuperLink refuses: it is {clock_limits}. Synchronise both clocks "
                "(timedatectl set-ntp true)"
            )
        case Registration.UNKNOWN:
            yield problem(
                f"the SuperLink does not know the key in {key}: register "
                f"{public} there (`make register` on the server's machine; "
                "without containers, `keel deploy register`)"
            )
        case Registration.REFUSED if "ALPN" in details:  # TLS without gRPC
            yield problem(
                f"{address} is the SuperLink's port for users, or another service's: --fleet takes "
                "its port for clients (9092 unless changed)"
            )
        case Registration.REFUSED:
            yield problem(f"the SuperLink refuses the key in {key}: {details[:300]}")


@check
def check_registered(credentials: Path, superlink: str) -> Iterator[Finding]:
    """Every key in credentials/clients is registered, and every SuperNode is connected."""
    problems = [
        found for found in check_port(superlink, credentials / "ca.pem") if found.is_problem
    ]
    yield from problems
    if problems:
        return
    keys = public_keys(credentials)
    nodes = registered_nodes(superlink, (credentials / "ca.pem").read_bytes(), keys)
    if missing := sorted(keys.keys() - {name for _, name, _ in nodes}):
        yield problem(f"not registered: the key of {shortened(missing)}: make register")
    for node, name, status in sorted(nodes, key=lambda each: (each[1], each[0])):
        how = "has never connected" if status == "registered" else f"is {status}"
        if not name:
            yield problem(
                f"SuperNode {node} {how}, and its key is not in {credentials / 'clients'}: runs "
                "refuse it. Put the client.pub of its client there and register it, or remove it: "
                f"flwr supernode unregister {node} deployment"
            )
        elif status != "online":
            yield problem(
                f"SuperNode {node} of {name} {how}: run `keel doctor client` on its machine"
            )
    if num_online := [status for _, _, status in nodes].count("online"):
        yield fine(
            f"{num_of('SuperNode', num_online)} {'is' if num_online == 1 else 'are'} connected"
        )


def check_server(credentials: Path, fleet: str, superlink: str) -> Iterator[Finding]:
    """Everything on a server's machine. fleet, superlink: HOST:PORT; superlink may be empty."""
    now = datetime.datetime.now(datetime.UTC)
    names = ["ca.pem", "server.pem", "server.key", "executor.secret"]
    yield from check_private_files(credentials, names)
    yield from check_certificate(credentials / "ca.pem", now)
    yield from check_certificate(credentials / "server.pem", now)
    yield from check_server_key(credentials / "server.pem", credentials / "server.key")
    yield from check_clock()
    yield from check_port(fleet, credentials / "ca.pem")
    if superlink:
        yield from check_registered(credentials, superlink)


def check_client(credentials: Path, fleet: str) -> Iterator[Finding]:
    """Everything on a client's machine. fleet: HOST:PORT of the SuperLink."""
    ca, key = credentials / "ca.pem", credentials / "client.key"
    yield from check_private_files(credentials, ["ca.pem", "client.key", "executor.secret"])
    yield from check_certificate(ca, datetime.datetime.now(datetime.UTC))
    yield from check_clock()
    port = list(check_port(fleet, ca))
    yield from port
    if any(not finding.is_problem for finding in port) and os.access(key, os.R_OK):
        yield from check_key(fleet, ca, key)
