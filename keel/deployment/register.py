"""Registers clients' public keys with a SuperLink, once each, and records whose they are."""

import json
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from flower_adapter.registration import register_keys
from keel.deployment.reach import wait_for_server
from protocol.files import write_atomically


def public_keys(credentials: Path) -> dict[str, bytes]:
    """Client name to public key, in OpenSSH's format, from the server's credentials directory.

    ValueError naming the file of a damaged key.
    """
    keys = {
        path.stem: path.read_bytes() for path in sorted((credentials / "clients").glob("*.pub"))
    }
    for name, key in keys.items():
        try:
            load_ssh_public_key(key)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ValueError(
                f"{credentials / 'clients' / name}.pub is damaged or not a public key: {error}: "
                "copy the client's client.pub again"
            ) from error
    return keys


def register(credentials: Path, address: str, wait_s: float) -> list[str]:
    """Register each credentials/clients/NAME.pub that this SuperLink does not know; a line for all.

    Records in $KEEL_CLIENT_REGISTRY, which the ServerApp reads, else in `clients.json` there, for
    every name, its key and the node id that the SuperLink gave this key: a client is who its key
    says. A key that was unregistered is named, and left out. The SuperLink has `wait_s` to start.
    """
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
            f"{error}"
        ) from error
    keys = public_keys(credentials)
    nodes = register_keys(address, ca.read_bytes(), keys)
    clients = {
        name: {"node": str(node), "key": b" ".join(keys[name].split()[:2]).decode()}
        for name, (node, _) in nodes.items()
    }
    path = Path(os.environ.get("KEEL_CLIENT_REGISTRY") or credentials / "clients.json")
    write_atomically(path, (json.dumps(clients, indent=1) + "\n").encode())
    return [
        f"{'registered' if is_new else 'known':10s}  {name}  node {node}"
        for name, (node, is_new) in nodes.items()
    ] + [
        f"{'removed':10s}  {name}  its key was unregistered and cannot be used again: move "
        f"{credentials / 'clients' / name}.pub away; to readmit the client, make a new key"
        for name in keys
        if name not in nodes
    ]
