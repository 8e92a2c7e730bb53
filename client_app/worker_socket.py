"""The resident worker's socket: frames over a local stream; imports neither torch nor Flower.

A frame is 8 bytes of length (big-endian) followed by the content. Requests and replies:

    {"kind": "ready?"}                                  {"pid", "busy", "code", "versions"}
    {"kind": "message", "code", "limit_s"}, message,    {}, records  or
        context                                         {"error": {"code", "reason"}}

A header (the first frame) and a message are bounded; memory grows with what has arrived, not with
the length that a peer announces.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

worker_variable = "KEEL_WORKER"  # holds the path of the worker's socket
worker_start_s = 120.0  # time that a restarted worker has to come back
max_frame_bytes = 2**32
max_header_bytes = 2**16
chunk_bytes = 2**20
Frames = list[bytes]


def default_socket() -> Path | None:
    """$KEEL_WORKER."""
    path = os.environ.get(worker_variable)
    return Path(path) if path else None


def worker_status(path: str, timeout_s: float) -> dict[str, Any]:
    """The worker's process id, busy flag and versions. Raises TimeoutError or ConnectionError."""
    reply = exchange(path, [json.dumps({"kind": "ready?"}).encode()], time.monotonic() + timeout_s)
    status: dict[str, Any] = json.loads(reply[0])
    return status


def exchange(path: str, request: Frames, deadline: float) -> Frames:
    """The worker's reply to a request.

    TimeoutError if the worker is not there or not done by the deadline, ConnectionError if it
    goes away.
    """
    with connected(path, deadline) as peer:
        try:
            send_frames(peer, request, deadline)
            reply = [receive_frame(peer, deadline, max_header_bytes)]
            if not json.loads(reply[0]):
                reply.append(receive_frame(peer, deadline))
        except TimeoutError:
            raise TimeoutError(f"the worker at {path} gave no answer in time") from None
    return reply


def connected(path: str, deadline: float) -> socket.socket:
    """A connection to the worker, which may still be starting; TimeoutError if none answers."""
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

    A worker that was just killed may still accept a connection: a message sent on it would count as
    a second death.
    """
    give_up = min(deadline, time.monotonic() + worker_start_s)
    while True:
        try:
            worker_status(path, remaining_s(give_up))
            return
        except ConnectionError:
            if time.monotonic() > give_up:
                raise TimeoutError(f"no worker answers at {path}") from None
            time.sleep(0.1)


def remaining_s(deadline: float) -> float:
    """Seconds to the deadline, more than 0: a timeout of 0 would mean not to wait at all."""
    return max(0.001, deadline - time.monotonic())


def send_frames(peer: socket.socket, frames: Frames, deadline: float) -> None:
    """Send each frame, its length first; TimeoutError if they are not all sent by the deadline."""
    for frame in frames:
        for part in (struct.pack(">Q", len(frame)), frame):
            set_timeout(peer, deadline)
            peer.sendall(part)


def receive_frame(
    peer: socket.socket,
    deadline: float,
    max_bytes: int = max_frame_bytes,
    note: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """The next frame.

    note: called for each part with its size; what it raises ends the frame.
    ConnectionError if the peer closes before its end, TimeoutError if it is not complete by the
    deadline (however often a few bytes arrive), ValueError if it is announced as larger.
    """
    (length,) = struct.unpack(">Q", _receive(peer, 8, deadline))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes: expected at most {max_bytes}")
    return _receive(peer, length, deadline, note)


def _receive(
    peer: socket.socket,
    length: int,
    deadline: float,
    note: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    content = bytearray()
    while len(content) < length:
        set_timeout(peer, deadline)
        part = peer.recv(min(length - len(content), chunk_bytes))
        if not part:
            raise ConnectionError("closed")
        note(len(part))
        content += part
    return bytes(content)


def set_timeout(peer: socket.socket, deadline: float) -> None:
    """Let the peer's next operation last until the deadline; TimeoutError if that has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    peer.settimeout(left_s)
