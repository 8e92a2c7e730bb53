"""From the short-lived ClientApp process to the resident worker, over a local socket; no torch.

    request   header {"kind": "ready?"}
              header {"kind": "message", "code", "limit_s"}; message; context  (Flower's protobuf)
    reply     header {"pid", "busy", "code", "versions"}
              header {}; record dict    or    header {"error": {"code", "reason"}}

A frame is 8 bytes of length (big-endian) and the content. Whatever happens to the worker, the
message is answered by a reply or an error of one line, within the run's `round-timeout`.
"""

import hashlib
import json
import logging
import os
import socket
import struct
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.serde import (
    context_to_proto,
    message_to_proto,
    recorddict_from_proto,
)
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from protocol.config import app_folder

log = logging.getLogger("keel.client")
worker_variable = "KEEL_WORKER"  # holds the socket's path
client_failed = 1  # the error code of a reply; Flower's own start at 0 for unknown
worker_start_s = 120.0  # a restarted worker has to be back by then
longest_wait_s = 30 * 86400.0
longest_frame = 2**40  # bytes
run_by_worker = ("client_app", "data", "models", "protocol")  # packages
Frames = list[bytes]


def send_to_worker(path: str, message: Message, context: Context) -> RecordDict | Error:
    """The worker's answer to a message, which is sent once more if the worker dies."""
    limit_s = answer_limit_s(message)
    deadline = time.monotonic() + limit_s
    request = [
        json.dumps({"kind": "message", "code": code_digest(), "limit_s": limit_s}).encode(),
        message_to_proto(message).SerializeToString(),
        context_to_proto(context).SerializeToString(),
    ]
    for attempt in range(2):
        try:
            if attempt:
                wait_until_ready(path, deadline)
            header, *rest = ask(path, request, deadline)
            return read_answer(json.loads(header), rest)
        except TimeoutError as error:
            reason = str(error)
            break
        except ConnectionError as error:
            reason = f"the worker at {path} died on this message twice ({error or 'no answer'})"
            log.warning("the worker at %s died on a message", path)
    node = context.node_config
    client = node.get("name", f"of partition {node.get('partition-id')}")
    log.error("%s: client %s: %s", run_and_round(message), client, reason)
    return Error(client_failed, reason)


def run_and_round(message: Message) -> str:
    """The run and round of a message, for the log."""
    record = message.content.config_records.get("round")
    run = str(record.get("run-dir", "")) if record else ""
    return f"run {Path(run).name}, round {record['round']!r}" if record and run else "the roster"


def read_answer(header: dict[str, Any], rest: Frames) -> RecordDict | Error:
    """The content of the worker's frames."""
    if "error" in header:
        return Error(int(header["error"]["code"]), str(header["error"]["reason"]))
    return recorddict_from_proto(ProtoRecordDict.FromString(rest[0]))


def answer_limit_s(message: Message) -> float:
    """How long the server waits for the reply: the run's `round-timeout`, or `start-timeout`.

    Before round 1 a client may have to decode all its data.
    """
    record = message.content.config_records.get("round")
    if record is None:  # the handlers refuse it at once
        return 60.0
    key = "start-timeout" if message.metadata.message_type == MessageType.QUERY else "round-timeout"
    limit_s = float(json.loads(str(record["config"]))[key])
    return min(limit_s, longest_wait_s)


def ask(path: str, request: Frames, deadline: float) -> Frames:
    """The worker's reply. TimeoutError if it does not start or reply in time, ConnectionError if it
    closes the connection."""
    with connected(path, deadline) as peer:
        try:
            send_frames(peer, request)
            peer.settimeout(remaining_s(deadline))
            reply = [receive_frame(peer)]
            if not json.loads(reply[0]):
                reply.append(receive_frame(peer))
        except TimeoutError:
            raise TimeoutError(f"the worker at {path} did not reply in time") from None
    return reply


def connected(path: str, deadline: float) -> socket.socket:
    """A connection to the worker, which may be starting; TimeoutError if there is none in time."""
    give_up = min(deadline, time.monotonic() + worker_start_s)
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(remaining_s(deadline))
        try:
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            peer.close()
            if time.monotonic() > give_up:
                raise TimeoutError(f"no worker answers at {path}: {error.strerror}") from None
            time.sleep(0.1)
        else:
            return peer


def wait_until_ready(path: str, deadline: float) -> None:
    """Return once a worker answers; TimeoutError if none does.

    One that was just killed may still accept a connection, and would lose the message again.
    """
    give_up = min(deadline, time.monotonic() + worker_start_s)
    while True:
        try:
            worker_says(path, remaining_s(give_up))
            return
        except ConnectionError:
            if time.monotonic() > give_up:
                raise TimeoutError(f"no worker answers at {path}") from None
            time.sleep(0.1)


def remaining_s(deadline: float) -> float:
    """Seconds to the deadline, more than 0, which would mean not to wait at all."""
    return max(0.001, deadline - time.monotonic())


def send_frames(peer: socket.socket, frames: Frames) -> None:
    """Send each frame after its length."""
    for frame in frames:
        peer.sendall(struct.pack(">Q", len(frame)))
        peer.sendall(frame)


def receive_frame(peer: socket.socket) -> bytes:
    """The next frame; ConnectionError if the peer closes before its end."""
    (length,) = struct.unpack(">Q", _receive(peer, 8))
    if length > longest_frame:
        raise ValueError(f"a frame of {length} bytes: the longest has {longest_frame}")
    return _receive(peer, length)


def _receive(peer: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    view, done = memoryview(content), 0
    while done < length:
        if not (count := peer.recv_into(view[done:])):
            raise ConnectionError("closed")
        done += count
    return bytes(content)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """The first 16 hex digits of the SHA-256 of the sources that a worker runs.

    The ClientApp process has them from the run's app bundle, the worker from its machine: a worker
    refuses to train with other code than the server's.
    """
    found = hashlib.sha256()
    for package in run_by_worker:
        for path in sorted((app_folder / package).rglob("*.py")):
            found.update(str(path.relative_to(app_folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def worker_says(path: str, within_s: float) -> dict[str, Any]:
    """A worker's status: pid, busy, code, versions. TimeoutError or ConnectionError if none."""
    reply = ask(path, [json.dumps({"kind": "ready?"}).encode()], time.monotonic() + within_s)
    status: dict[str, Any] = json.loads(reply[0])
    return status


def default_socket() -> Path | None:
    """$KEEL_WORKER."""
    value = os.environ.get(worker_variable)
    return Path(value) if value else None
