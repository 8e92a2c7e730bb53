"""Whether a SuperLink knows a client's key, found out without changing anything there.

Uses: Flower's Fleet API (gRPC stub, interceptors, error codes). Public way: none without starting a
SuperNode. The request is an activation whose heartbeat interval of 0 the SuperLink has to refuse;
it looks for the key first, so the error code tells which of the two it refused.
"""

from enum import Enum

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.grpc import create_channel
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
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
