"""Clients' keys at a SuperLink: registering them, their node ids, and whether one is known.

`registration_of` changes nothing there. Uses: Flower's Fleet API (gRPC stub, interceptors, error
codes). Public way: none without starting a SuperNode. The request is an activation whose heartbeat
interval of 0 the SuperLink has to refuse; it looks for the key first, so the error code tells which
of the two it refused.

`register_keys` and `registered_nodes` use the client of the Control API that is behind `flwr
supernode register` and `list`. Why: those commands do not say which node has which key.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

import grpc
import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import (
    RuntimeVersionClientInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes


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


def register_keys(
    address: str, ca: bytes, public_keys: Mapping[str, bytes]
) -> dict[str, tuple[int, bool]]:
    """By client name, the node id of its key and whether this call registered it.

    address: of the SuperLink's HTTP API. public_keys: by client name, in OpenSSH's format. Keys
    that the SuperLink knows are left alone. A key that was unregistered, which no SuperLink accepts
    again, is left out. ValueError for an invalid key, or one that two names share.
    """
    keys = names_by_key(public_keys)
    with control_client(address, ca) as client:
        listed = client.ListNodes(ListNodesRequest()).nodes_info
        known = {n.public_key: n.node_id for n in listed}
        removed = {n.public_key for n in listed if n.status == NodeStatus.UNREGISTERED}
        nodes = {}
        for key_bytes, name in keys.items():
            if key_bytes in removed:
                continue
            is_new = key_bytes not in known
            if is_new:
                request = RegisterNodeRequest(public_key=key_bytes, name=name)
                known[key_bytes] = client.RegisterNode(request).node_id
            nodes[name] = known[key_bytes], is_new
        return nodes


def registered_nodes(
    address: str, ca: bytes, public_keys: Mapping[str, bytes]
) -> list[tuple[int, str, str]]:
    """(node id, client name, status) of each registered node; "" if its key is of no client.

    status: "online", "offline", or "registered" for one that has never connected. Arguments as for
    `register_keys`. Changes nothing.
    """
    names = names_by_key(public_keys)
    with control_client(address, ca) as client:
        listed = client.ListNodes(ListNodesRequest()).nodes_info
        return [
            (node.node_id, names.get(node.public_key, ""), node.status)
            for node in listed
            if node.status != NodeStatus.UNREGISTERED
        ]


def names_by_key(public_keys: Mapping[str, bytes]) -> dict[bytes, str]:
    """Key, in a SuperLink's form, to client name. ValueError for an invalid or a shared key."""
    keys: dict[bytes, str] = {}
    for name, text in public_keys.items():
        key = load_ssh_public_key(text)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"client {name}: expected an ECDSA key")
        other = keys.setdefault(public_key_to_bytes(key), name)
        if other != name:
            raise ValueError(f"clients {other} and {name} have the same key: make one for each")
    return keys


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
