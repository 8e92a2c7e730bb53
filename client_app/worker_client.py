"""Sends a message from the short-lived ClientApp process to the resident worker; imports no torch.

The worker (`worker_server.py`) is a gRPC server on a Unix socket. Whatever happens to it, the
message is answered within the run's `round-timeout`: with the worker's reply, or with an error of
one line. A request is the length of the serialised context (4 bytes, big-endian), the context and
the message; the reply is a `RecordDict`, with a record `error` for an error.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from flower_adapter import CLIENT_FAILED, from_bytes, to_bytes
from protocol.code import code_digest
from protocol.config import config_from_json
from protocol.text import in_one_line

log = logging.getLogger("keel.client")
worker_variable = "KEEL_WORKER"  # holds the path of the worker's socket
SERVICE = "keel.Worker"
CODE_KEY = "keel-code"  # of a request's metadata: the digest of the sender's code
WORKER_START_S = 120.0  # that a restarted worker may take to come back
START_TIMEOUT_S = 600.0  # before round 1: a client may have to decode all its data
REFUSAL_S = 60.0  # for a message that states no time limit
MAX_MESSAGE_BYTES = 2**31 - 1  # the largest that protobuf can serialise
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS = [
    *OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel never shares a dying connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def default_socket() -> Path | None:
    """$KEEL_WORKER."""
    path = os.environ.get(worker_variable)
    return Path(path) if path else None


def address_of(path: str | Path) -> str:
    """The address of a Unix socket, as gRPC spells it."""
    return "unix:" + quote(os.path.abspath(path))


def request_of(message: Message, context: Context) -> bytes:
    """The request that carries a message and its client's context."""
    about = to_bytes(context)
    return len(about).to_bytes(4, "big") + about + to_bytes(message)


def read_request(request: bytes) -> tuple[Message, Context]:
    """Inverse of `request_of`."""
    end = 4 + int.from_bytes(request[:4], "big")
    return from_bytes(Message, request[end:]), from_bytes(Context, request[4:end])


def reply_of(content: RecordDict | Error) -> bytes:
    """The reply that carries an answer."""
    if isinstance(content, Error):
        about = ConfigRecord({"code": content.code, "reason": str(content.reason)})
        content = RecordDict({"error": about})
    return to_bytes(content)


def read_reply(reply: bytes) -> RecordDict | Error:
    """Inverse of `reply_of`."""
    content = from_bytes(RecordDict, reply)
    if "error" not in content:
        return content
    error = content.config_records["error"]
    return Error(int(error["code"]), str(error["reason"]))  # type: ignore[arg-type]


def worker_status(path: str, timeout_s: float) -> dict[str, Any]:
    """The worker's process id, busy flag, code and versions; waits for one that is starting.

    TimeoutError if none answers within `timeout_s`.
    """
    with grpc.insecure_channel(address_of(path), CHANNEL_OPTIONS) as channel:
        return status_through(channel, path, time.monotonic() + timeout_s)


def status_through(channel: grpc.Channel, path: str, deadline: float) -> dict[str, Any]:
    """`worker_status` through a channel."""
    ask = channel.unary_unary(f"/{SERVICE}/status")
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            status: dict[str, Any] = json.loads(ask(b"", timeout=left_s, wait_for_ready=True))
            return status
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or left_s == 0:
                raise TimeoutError(f"no worker answers at {path}") from None
            time.sleep(0.1)  # the worker is about to end


def send_to_worker(path: str, message: Message, context: Context) -> RecordDict | Error:
    """The worker's answer to a message, which is sent once more if the worker dies on it."""
    deadline = time.monotonic() + answer_timeout_s(message)
    request = request_of(message, context)
    reason = f"the worker at {path} died on this message twice"
    try:
        for _ in range(2):
            if answer := exchange(path, request, deadline):
                return answer
            log.warning("the worker at %s died on a message", path)
    except TimeoutError as late:
        reason = str(late)
    except grpc.RpcError as error:  # it is refused, or another program listens there
        is_refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
        reason = in_one_line(error.details() if is_refused else f"the worker at {path}: {error}")
    node = context.node_config
    client = node.get("name", f"of partition {node.get('partition-id')}")
    log.error("%s: client %s: %s", run_and_round(message), client, reason)
    return Error(CLIENT_FAILED, reason)


def exchange(path: str, request: bytes, deadline: float) -> RecordDict | Error | None:
    """The worker's answer; None if the worker died on the request.

    TimeoutError if the worker is not there or not done by the deadline.
    """
    with grpc.insecure_channel(address_of(path), CHANNEL_OPTIONS) as channel:
        status_through(channel, path, min(deadline, time.monotonic() + WORKER_START_S))
        ask = channel.unary_unary(f"/{SERVICE}/answer")
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return read_reply(ask(request, timeout=left_s, metadata=[(CODE_KEY, code_digest())]))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"the worker at {path} gave no answer in time") from None
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    return None


def run_and_round(message: Message) -> str:
    """The run and round that a message belongs to, for the log."""
    record = message.content.config_records.get("round")
    if not record or not record.get("run-dir"):
        return "the roster query"
    run = Path(str(record["run-dir"])).name
    return in_one_line(f"run {run}, round {record.get('round')!r}", 200)


def answer_timeout_s(message: Message) -> float:
    """How long the server waits for the reply: in a round the run's `round-timeout`."""
    if message.metadata.message_type == MessageType.QUERY:
        return START_TIMEOUT_S
    record = message.content.config_records.get("round")
    try:
        return config_from_json(str(record["config"])).rounds.round_timeout  # type: ignore[index]
    except (KeyError, TypeError, ValueError):  # not of Keel's server: the handlers refuse it
        return REFUSAL_S
