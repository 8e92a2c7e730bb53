"""The resident worker: one process with torch, CUDA context, decoded data and networks loaded.

    KEEL_WORKER=/run/keel/worker.sock python -m client_app.worker_server

Answers the messages that ClientApp processes send (`worker_client.py`), one at a time, in order of
arrival. The socket exists once it is ready. It may serve several clients of a machine. A message
that takes longer than the server waits for it ends the worker, with a traceback: whoever started it
restarts it (`deployment.supervise`, or a container's restart policy).
"""

import argparse
import faulthandler
import json
import logging
import os
import queue
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import flwr
import torch
from flwr.app import Error, MessageType
from flwr.common.serde import context_from_proto, message_from_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage

from client_app.handlers import answer
from client_app.node_config import client_name, clients_folder
from client_app.setup import device_for
from client_app.worker_client import (
    Frames,
    client_failed,
    code_digest,
    default_socket,
    receive_frame,
    run_and_round,
    send_frames,
    worker_says,
    worker_variable,
)

log = logging.getLogger("keel.client")
longest_path = 100  # bytes of a Unix socket's path that every system takes
io_limit_s = 60.0  # for a local process to send its message, or to take the reply
Request = tuple[socket.socket, Frames]


class WorkerProcess:
    """Accepts requests in a thread of its own, answers messages in the caller's."""

    def __init__(self, path: Path) -> None:
        self.code = code_digest()
        self.busy = False
        self.is_broken = False
        self.requests: queue.Queue[Request] = queue.Queue()
        self.listener = listen(path)

    def serve(self) -> None:
        """Answer until the process ends."""
        threading.Thread(target=self._take_requests, daemon=True).start()
        while True:
            peer, request = self.requests.get()
            with peer:
                if is_gone(peer):  # its sender was killed while the message was queued
                    log.warning("a message is dropped: the process that sent it has ended")
                    continue
                self.busy = True
                reply = self.answer_to(request)
                self.busy = False
                try:
                    peer.settimeout(io_limit_s)
                    send_frames(peer, reply)
                except OSError:
                    log.warning("a reply is dropped: the process that asked has ended")
            if self.is_broken:
                log.error("this process has lost its GPU context: it exits, to be restarted")
                return

    def answer_to(self, request: Frames) -> Frames:
        """The reply to one message."""
        header = json.loads(request[0])
        if header["code"] != self.code:
            return error_frames(
                f"this client's worker runs Keel's code {self.code}, the run's bundle is "
                f"{header['code']}: install the same version on the server and on every client"
            )
        faulthandler.dump_traceback_later(header["limit_s"], exit=True)
        message = message_from_proto(ProtoMessage.FromString(request[1]))
        context = context_from_proto(ProtoContext.FromString(request[2]))
        try:
            content = answer(message, context)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if isinstance(content, Error):
            self.is_broken = "CUDA error" in str(content.reason)  # permanent for this process
            return error_frames(str(content.reason), content.code)
        if message.metadata.message_type == MessageType.TRAIN:
            figures = content.metric_records["metrics"]
            log.info(
                "%s: client %s: trained on %d samples, %d steps, in %.1f s",
                *(run_and_round(message), client_name(context.node_config)),
                *(figures[name] for name in ("num-examples", "num-steps", "seconds")),
            )
        return [b"{}", recorddict_to_proto(content).SerializeToString()]

    def _take_requests(self) -> None:
        while True:
            peer, _ = self.listener.accept()
            try:
                peer.settimeout(io_limit_s)
                header = receive_frame(peer)
                if json.loads(header)["kind"] == "ready?":
                    with peer:
                        send_frames(peer, [self.about()])
                else:
                    frames = [header, receive_frame(peer), receive_frame(peer)]
                    self.requests.put((peer, frames))
            except Exception as error:  # this thread must survive any input
                log.warning("a request is dropped: %s: %s", type(error).__name__, error)
                peer.close()

    def about(self) -> bytes:
        """What `worker_says` returns."""
        versions = {"flwr": flwr.__version__, "torch": torch.__version__}
        status = {"pid": os.getpid(), "busy": self.busy, "code": self.code, "versions": versions}
        return json.dumps(status).encode()


def error_frames(reason: str, code: int = client_failed) -> Frames:
    """The reply that is an error."""
    return [json.dumps({"error": {"code": code, "reason": reason}}).encode()]


def is_gone(peer: socket.socket) -> bool:
    """The peer has closed its end."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, for this user only. ValueError if a worker uses it."""
    if len(os.fsencode(path)) > longest_path:
        raise ValueError(f"{path}: expected a socket path of at most {longest_path} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        try:
            other = worker_says(str(path), within_s=0.5)
        except (ConnectionError, TimeoutError):
            path.unlink()  # of a worker that was killed
        else:
            raise ValueError(f"{path}: in use by the worker with process id {other['pid']}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def delete_old_runs(days: float) -> None:
    """Delete the client state of runs that were not written to for this many days; 0: none."""
    if days <= 0 or not clients_folder().is_dir():
        return
    oldest = time.time() - days * 86400
    for run in clients_folder().iterdir():
        if max(path.stat().st_mtime for path in [run, *run.rglob("*")]) < oldest:
            log.warning("state of run %s deleted: untouched for %g days", run.name, days)
            shutil.rmtree(run)


def warm_device() -> str:
    """The device of $KEEL_DEVICE (auto), its CUDA context created; or why it is not available.

    That is not an error yet: a client's node config may name another device.
    """
    try:
        device = device_for(os.environ.get("KEEL_DEVICE") or "auto")
    except ValueError as error:
        return f"not available: {error}"
    if device.type == "cuda":
        torch.zeros(1, device=device)  # seconds on some machines
    return str(device)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m client_app.worker_server", description=__doc__)
    parser.add_argument("--socket", type=Path, default=default_socket(), help="or $KEEL_WORKER")
    parser.add_argument(
        "--keep-days",
        type=float,
        default=float(os.environ.get("KEEL_KEEP_DAYS") or 0),
        help="delete client state of runs not written to since; 0: never; or $KEEL_KEEP_DAYS",
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s worker %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    if arguments.socket is None:
        print(f"error: give --socket or set ${worker_variable}", file=sys.stderr)
        return 2
    os.environ[worker_variable] = str(arguments.socket)  # client state goes to $KEEL_HOME
    try:
        delete_old_runs(arguments.keep_days)
        device = warm_device()
        process = WorkerProcess(arguments.socket)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.info(
        "ready at %s, process id %d, code %s, device %s",
        *(arguments.socket, os.getpid(), process.code, device),
    )
    process.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
