"""Who the client behind a node is: the name that its key is registered under."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from protocol.text import in_one_line

REGISTRY_VARIABLE = "KEEL_CLIENT_REGISTRY"  # the file that `keel deploy register` writes


def registered_names() -> dict[int, str] | None:
    """Client name by node id, as `keel deploy register` recorded them for the clients' keys.

    None without $KEEL_CLIENT_REGISTRY. A SuperLink binds a node id to a key, so with the file a
    client is who its key says. ValueError if the file cannot be read.
    """
    path = os.environ.get(REGISTRY_VARIABLE)
    if not path:
        return None
    try:
        clients = json.loads(Path(path).read_text())
        return {int(about["node"]): str(name) for name, about in clients.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{REGISTRY_VARIABLE} = {path!r}: missing or damaged ({in_one_line(error)}): write it "
            "with `keel deploy register` (`make register`)"
        ) from error


def identity_problem(node: int, client: str, names: Mapping[int, str] | None) -> str:
    """Why the key of `node` is not that of `client`; empty if it is, or if there are no keys."""
    if names is None or names.get(node) == client:
        return ""
    claimed = in_one_line(client, 64)
    if node not in names:
        return (
            f"it calls itself {claimed!r}, and its key has no name: add its public key to the "
            "server's credentials/server/clients and run `keel deploy register`"
        )
    return (
        f"it calls itself {claimed!r}, but its key is registered as {names[node]!r}: deploy it "
        f"with the credentials of {claimed!r}, or under the name {names[node]!r}"
    )
