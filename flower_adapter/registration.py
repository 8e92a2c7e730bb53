"""Clients' keys at a SuperLink: registering them, their node ids, and whether one is known.

`registration_of` changes nothing there. Uses: Flower's Fleet API (gRPC stub, interceptors, error
codes). Public way: none without starting a SuperNode. The request is an activation whose heartbeat
interval of 0 the SuperLink has to refuse; it looks for the key first, so the error code tells which
of the two it refused.

`register_key` and `registered_nodes` use the client of the Control API that is behind `flwr
supernode register` and `list`. Why: those commands do not say which node has which key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import grpc
import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import (
    RuntimeVersionClientInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes


class Registration(Enum):
    """A SuperLink's answer about a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CLOCKS_DIFFER = "clocks differ"
    REFUSED = "refused"


def registration_of(
    key: ec.EllipticCurvePrivateKey, address: str, ca: bytes, timeout_s: float
) -> tuple[Registration, str]:
    """The answer of the SuperLink at `address` (its Fleet API) about this key, and its details."""
    channel = create_channel(
        server_address=address,
        insecure=False,
        root_certificates=ca,
        interceptors=[
            RuntimeVersionClientInterceptor(component_name="SuperNode"),
            NodeAuthClientInterceptor(key, key.public_key()),
        ],
    )
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=0
    )
    try:
        FleetStub(channel).ActivateNode(request, timeout=timeout_s)
        return Registration.REFUSED, "it accepted a heartbeat interval of 0"
    except grpc.RpcError as error:
        details = str(error.details())
    finally:
        channel.close()
    flower_error = FlowerError.from_json(details)
    code = flower_error.code if flower_error else 0
    if code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
        return Registration.KNOWN, details
    if "Invalid timestamp" in details:
        return Registration.CLOCKS_DIFFER, details
    if code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return Registration.UNKNOWN, details
    return Registration.REFUSED, details


@dataclass(frozen=True)
class RegisteredNode:
    """A node of a SuperLink: its client's name, "" if it has none, and key, in OpenSSH's format.

    status: "online", "offline", "registered" for one that has never connected, or "unregistered",
    whose key is never accepted again.
    """

    node_id: int
    name: str
    key: str
    status: str


def registered_nodes(address: str, ca: bytes) -> list[RegisteredNode]:
    """The nodes that the SuperLink at this HTTP API knows, also unregistered ones."""
    with control_client(address, ca) as client:
        return [
            RegisteredNode(node.node_id, node.name, openssh(node.public_key), node.status)
            for node in client.ListNodes(ListNodesRequest()).nodes_info
        ]


def register_key(address: str, ca: bytes, name: str, key: str) -> None:
    """Register a client's public key, in OpenSSH's format, that the SuperLink does not know."""
    public = load_ssh_public_key(key.encode())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    with control_client(address, ca) as client:
        client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public), name=name))


def openssh(key: bytes) -> str:
    """A public key in a SuperLink's form, in OpenSSH's."""
    return bytes_to_public_key(key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@contextmanager
def control_client(address: str, ca: bytes) -> Iterator[ControlHttpClient]:
    """A client of a SuperLink's Control API, closed at the end. RuntimeError if a request fails."""
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=ca,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    except httpx.HTTPError as error:
        raise RuntimeError(
            f"--superlink {address}: {str(error).rstrip('.')}: expected the SuperLink's port for "
            "users (8000 unless changed), not the one for clients"
        ) from error
    finally:
        client.close()
