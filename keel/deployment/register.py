"""Registers clients' public keys with a SuperLink, and records which node is whose."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from flower_adapter.registration import RegisteredNode, register_key, registered_nodes
from keel.deployment.credentials import certificate_fingerprint
from keel.deployment.keys import check_client_names, fingerprint, read_requests
from keel.deployment.reach import proxy_hint, wait_for_server
from protocol.files import write_atomically

STANDARD_INPUT = "-"
UNREGISTERED = "unregistered"


def register(
    credentials: Path,
    address: str,
    wait_s: float,
    requests: Sequence[str] = (),
    record: Path | None = None,
) -> list[str]:
    """Register the clients of these requests; a line for each client that the SuperLink has then.

    credentials: the server's directory. address: of the SuperLink's HTTP API, which has `wait_s` to
    start. requests: files of `keel deploy key`, or "-" for standard input.

    record: where each client's node id and key are written, which the ServerApp reads as
    $KEEL_CLIENT_REGISTRY: a client is who its key says. Default: `clients.json` in the directory.
    ValueError, before anything is registered, for a name that another key has, or a key that
    another name has or had.
    """
    wanted = [pair for name in requests for pair in read_requests(*content_of(name))]
    ca = credentials / "ca.pem"
    if not ca.exists():
        raise FileNotFoundError(
            f"{ca} is missing: expected the server's directory of `keel deploy credentials`"
        )
    try:
        wait_for_server(address, ca, wait_s)
    except OSError as error:
        raise RuntimeError(
            f"--superlink {address}: no SuperLink answers with a certificate signed by {ca}: "
            f"{error}{proxy_hint(address)}"
        ) from error
    authority = ca.read_bytes()
    known = registered_nodes(address, authority)
    for name, key in new_keys(wanted, known).items():
        register_key(address, authority, name, key)
    clients = {n.name: n for n in registered_nodes(address, authority) if is_client(n)}
    found = {name: {"node": str(n.node_id), "key": n.key} for name, n in clients.items()}
    path = record or credentials / "clients.json"
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
    before = {node.name for node in known if is_client(node)}
    lines = [
        f"{'known' if name in before else 'registered':10s}  {name}  node {node.node_id}  "
        f"{fingerprint(node.key)}"
        for name, node in sorted(clients.items())
    ]
    if clients.keys() - before:
        lines.append("compare each new fingerprint with its site, by telephone")
        lines.append(f"for each site: {ca}, SHA-256 {certificate_fingerprint(ca)}")
    return lines


def content_of(request: str) -> tuple[str, str]:
    """The text of a request, and what errors call it."""
    if request == STANDARD_INPUT:
        return sys.stdin.read(), "standard input"
    return Path(request).read_text(errors="replace"), request


def is_client(node: RegisteredNode) -> bool:
    """Whether a node is registered, as a client with a name."""
    return bool(node.name) and node.status != UNREGISTERED


def new_keys(wanted: Iterable[tuple[str, str]], nodes: Sequence[RegisteredNode]) -> dict[str, str]:
    """Client name to key, of those wanted that are not registered. ValueError if one cannot be."""
    keys = {node.name: node.key for node in nodes if is_client(node)}
    owners = {node.key: node for node in nodes}
    new = {}
    for name, key in wanted:
        if keys.get(name) == key:
            continue
        if name in keys:
            raise ValueError(
                f"client {name} has another key, {fingerprint(keys[name])}; the request's is "
                f"{fingerprint(key)}: choose another name or, if the site has a new key, first "
                "`flwr supernode unregister` the old one"
            )
        if key in owners:
            node = owners[key]
            was = "was unregistered" if node.status == UNREGISTERED else f"is that of {node.name!r}"
            raise ValueError(
                f"client {name}: its key {was}, node {node.node_id}: its site makes a new one"
            )
        owners[key] = RegisteredNode(0, name, key, "")
        keys[name] = new[name] = key
    check_client_names(keys)
    return new
