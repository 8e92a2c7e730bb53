"""The resident worker: keeps torch, the CUDA context, decoded data and models warm.

    KEEL_WORKER=/run/keel/worker.sock python -m client_app.worker_server

Answers the messages that ClientApp processes send (`worker_client.py`), in order of arrival. The
socket appears once the worker is ready, and only this user can open it. One worker may serve
several clients of a machine: one trains at a time, while up to `num_answering - 1` others read and
write their state and messages. `--gpu-share` caps the GPU memory that they take together. If a
message takes longer than the server waits for it, without its wait for other clients, the worker
ends with a traceback; whoever started it restarts it (a container's restart policy, a service
manager).

Every connection has a thread of its own, which receives, checks and decodes its request and sends
the reply, each within `io_limit_s` in all: a slow or malformed peer neither blocks nor ends the
worker. Among more than `max_receiving` connections that have not sent their request, the oldest is
closed; all messages that have arrived and are not answered take at most `max_held_bytes`.
"""

import argparse
import contextlib
import faulthandler
import json
import logging
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import flwr
import torch
from flwr.app import Context, Error, Message, MessageType

from client_app.handlers import answer, turn
from client_app.node_config import client_name, clients_folder
from client_app.old_state import OldState
from client_app.setup import device_for
from client_app.worker_client import max_timeout_s, run_and_round
from client_app.worker_socket import (
    Frames,
    default_socket,
    max_frame_bytes,
    max_header_bytes,
    receive_frame,
    send_frames,
    worker_variable,
)
from flower_adapter import CLIENT_FAILED, GPU_LOST, from_bytes, to_bytes
from protocol.code import code_digest
from protocol.files import naming, remove_parts
from protocol.messages import last_accepted_round_of
from protocol.text import in_one_line, num_of

log = logging.getLogger("keel.client")
max_path_bytes = 100  # of a Unix socket's path; the limit of any system is larger
io_limit_s = 60.0  # for a local process to send its message, or to take the reply
max_reason = 4000  # characters of an error: with escapes, they fit into a header
max_receiving = 64
max_waiting = 64  # complete messages
num_answering = 3  # one client trains, another's state is read, a third one's written
max_held_bytes = 2 * max_frame_bytes  # of messages, from all connections together


@dataclass
class Request:
    """A message to answer; `reply` is set when `is_answered` is."""

    peer: socket.socket
    message: Message
    context: Context
    limit_s: float
    reply: Frames = field(default_factory=list)
    sender: threading.Thread = field(default_factory=threading.current_thread)
    is_answered: threading.Event = field(default_factory=threading.Event)
    is_last: bool = False  # after it, the process cannot answer any more


class TimeLimits:
    """Ends the process, with a traceback, when a thread has worked on its message for too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[int, tuple[float, float]] = {}  # thread: (seconds, when they are over)

    def _set(self, limit_s: float | None) -> float | None:
        """Restart this thread's time, or end it (None); the limit that it had."""
        thread = threading.get_ident()
        with self._lock:
            before, _ = self._limits.pop(thread, (None, 0.0))
            if limit_s is not None:
                self._limits[thread] = limit_s, time.monotonic() + limit_s
            faulthandler.cancel_dump_traceback_later()
            if self._limits:
                first = min(until for _, until in self._limits.values())
                faulthandler.dump_traceback_later(max(first - time.monotonic(), 0.001), exit=True)
        return before

    @contextlib.contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """The block may take `limit_s`, not counting the time that it spends in `waiting`."""
        self._set(limit_s)
        try:
            yield
        finally:
            self._set(None)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for other threads; then this thread's time restarts."""
        limit_s = self._set(None)
        try:
            yield
        finally:
            self._set(limit_s)


class WorkerProcess:
    """Talks to each peer in a thread of its own; answers messages in `num_answering` others."""

    def __init__(self, path: Path) -> None:
        self.code = code_digest()
        self.answering: set[str] = set()  # the clients
        self.trained: dict[str, tuple[str, int]] = {}  # by client: its last update's run and round
        self.is_free = threading.Condition()  # one of these has its answer
        self.is_broken = threading.Event()
        self.limits = TimeLimits()
        self.requests: queue.Queue[Request] = queue.Queue(max_waiting)
        self.receiving: dict[socket.socket, None] = {}  # the oldest first
        self.held: dict[socket.socket, int] = {}  # bytes of its message
        self.listener = listen(path)

    def serve(self) -> None:
        """Answer until the process is to end."""
        turn.waiting = self.limits.waiting
        threading.Thread(target=self._accept, daemon=True).start()
        for _ in range(num_answering):
            threading.Thread(target=self._answer, daemon=True).start()
        self.is_broken.wait()
        log.error("the GPU context of this process is lost: exiting, to be restarted")

    def _answer(self) -> None:
        """Answer one message after the other; two of one client never at once."""
        while not self.is_broken.is_set():
            request = self.requests.get()
            node = request.context.node_config
            client = str(node.get("name", node.get("partition-id")))
            with self.is_free:
                self.is_free.wait_for(lambda: client not in self.answering)  # noqa: B023
                self.answering.add(client)
            if is_closed(request.peer):  # its sender was killed while the message waited
                log.warning("message dropped: the process that sent it has ended")
            else:
                try:
                    request.reply = self.answer_to(request)
                except Exception as error:  # a message's content may raise anything
                    reason = in_one_line(f"{type(error).__name__}: {error}")
                    log.warning("a message that cannot be answered: %s", reason)
                    request.reply = error_frames(reason)
            with self.is_free:
                self.answering.remove(client)
                self.is_free.notify_all()
            request.is_answered.set()
            if request.is_last:
                request.sender.join(io_limit_s)  # of the reply
                self.is_broken.set()

    def answer_to(self, request: Request) -> Frames:
        """The reply to one message."""
        message, context = request.message, request.context
        with self.limits.limited(request.limit_s):
            content = answer(message, context)
        if isinstance(content, Error):
            request.is_last = content.code == GPU_LOST
            return error_frames(str(content.reason), content.code)
        client = client_name(context.node_config)
        self.note_round(message, client)
        if message.metadata.message_type == MessageType.TRAIN:
            metrics = content.metric_records["metrics"]  # without the time where it is withheld
            seconds = f", in {metrics['seconds']:.1f} s" if "seconds" in metrics else ""
            log.info(
                "%s: client %s: trained on %s, %s%s",
                run_and_round(message),
                client,
                num_of("sample", metrics["num-examples"]),
                num_of("step", metrics["num-steps"]),
                seconds,
            )
        return [b"{}", to_bytes(content)]

    def note_round(self, message: Message, client: str) -> None:
        """Log that the client's last update was not aggregated, if this later message shows it."""
        is_training = message.metadata.message_type == MessageType.TRAIN
        if not is_training and message.metadata.message_type != MessageType.EVALUATE:
            return
        record = message.content.config_records["round"]
        run, round_ = str(record["run-dir"]), int(record["round"])  # type: ignore[arg-type]
        before, trained = self.trained.get(client, ("", 0))
        if run == before and round_ >= trained + is_training:  # not of a repeated round
            self.trained.pop(client, None)
            if last_accepted_round_of(message) < trained:
                log.warning(
                    "%s: client %s: the server did not aggregate the update of round %d",
                    run_and_round(message),
                    client,
                    trained,
                )
        if is_training:
            self.trained[client] = run, round_

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
                while len(self.receiving) >= max_receiving:
                    oldest = list(self.receiving)[0]  # noqa: RUF015 (a copy: others remove theirs)
                    self.receiving.pop(oldest, None)
                    with contextlib.suppress(OSError):  # it is closed already
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread ends with an error
                self.receiving[peer] = None
                threading.Thread(target=self._talk, args=[peer], daemon=True).start()
            except (OSError, RuntimeError) as error:  # out of descriptors or threads, for a while
                log.warning("connection dropped: %s", error)
                time.sleep(0.1)

    def _talk(self, peer: socket.socket) -> None:
        """Receive one request, have it answered, send the reply."""
        with peer:
            try:
                try:
                    request = self._receive(peer)
                finally:
                    self.receiving.pop(peer, None)
                if isinstance(request, Request):
                    request.is_answered.wait()
                    request = request.reply
                send_frames(peer, request, time.monotonic() + io_limit_s)
            except Exception as error:  # a bad request ends only its own connection
                reason = in_one_line(f"{type(error).__name__}: {error}")
                log.warning("connection dropped: %s", reason)
            finally:
                self.held.pop(peer, None)

    def _hold(self, peer: socket.socket, num_bytes: int) -> None:
        """Count what has arrived from a peer; ValueError beyond what this worker holds at once."""
        self.held[peer] = self.held.get(peer, 0) + num_bytes
        if sum(list(self.held.values())) > max_held_bytes:
            raise ValueError(
                f"this worker holds {max_held_bytes} bytes of messages at most, of all connections"
            )

    def _receive(self, peer: socket.socket) -> Request | Frames:
        """The peer's request, queued for `serve`; or the frames that answer it at once."""
        deadline = time.monotonic() + io_limit_s
        header = json.loads(receive_frame(peer, deadline, max_header_bytes))
        if header["kind"] == "ready?":
            return [self.about()]
        frames = [receive_frame(peer, deadline, note=partial(self._hold, peer)) for _ in range(2)]
        if header["code"] != self.code:
            reason = (
                f"this client's worker runs code {self.code} of Keel, the run's app is "
                f"{in_one_line(header['code'], 16)}: install the same version on the server and on "
                "every client"
            )
            log.warning("message refused: %s", reason)
            return error_frames(reason)
        limit_s = float(header["limit_s"])
        if not 0 < limit_s <= max_timeout_s:
            raise ValueError(f"limit_s = {limit_s}: expected more than 0, at most {max_timeout_s}")
        message, context = from_bytes(Message, frames[0]), from_bytes(Context, frames[1])
        request = Request(peer, message, context, limit_s)
        try:
            self.requests.put_nowait(request)
        except queue.Full:
            return error_frames(f"this client's worker has {max_waiting} messages waiting")
        return request

    def about(self) -> bytes:
        """What `worker_status` returns."""
        versions = {"flwr": flwr.__version__, "torch": torch.__version__}
        status = {
            "pid": os.getpid(),
            "busy": bool(self.answering),
            "code": self.code,
            "versions": versions,
        }
        return json.dumps(status).encode()


def error_frames(reason: str, code: int = CLIENT_FAILED) -> Frames:
    """The reply that reports an error."""
    return [json.dumps({"error": {"code": code, "reason": reason[:max_reason]}}).encode()]


def is_closed(peer: socket.socket) -> bool:
    """Whether the peer has closed its end."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_listening(path: Path) -> bool:
    """Whether a process listens at this socket, even if it is too busy to accept."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return True
        except ConnectionRefusedError:
            return False
    return True


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, for this user alone. ValueError if a worker listens there."""
    if len(os.fsencode(path)) > max_path_bytes:
        raise ValueError(f"{path}: expected a path of at most {max_path_bytes} bytes for a socket")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_socket():
        if is_listening(path):
            raise ValueError(
                f"{path}: another worker is listening there: stop it, or pass another --socket"
            )
        path.unlink()  # left by a worker that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with naming(path):
            listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def warm_device(gpu_share: float = 1.0) -> str:
    """The device in $KEEL_DEVICE (auto), with its CUDA context created; or why it is missing.

    A missing device is no error yet: the client's node config may name another.
    gpu_share: of this GPU's memory that the process may take. One client trains at a time, so it is
    also what each of this worker's clients may take, less the weights that up to
    `num_answering - 1` others have sent or are about to send.
    """
    if not 0 < gpu_share <= 1:
        raise ValueError(
            f"--gpu-share = {gpu_share}: expected a number in (0, 1], the share of the GPU's "
            "memory that this worker may take; 1 takes all of it"
        )
    name = os.environ.get("KEEL_DEVICE") or "auto"
    try:
        device = device_for(name)
    except ValueError as error:
        return f"missing: {error}"
    if device.type != "cuda":
        return str(device)
    try:
        with torch.cuda.device(device):
            if gpu_share < 1:
                torch.cuda.set_per_process_memory_fraction(gpu_share)
            torch.zeros(1, device=device)  # seconds on some machines
    except RuntimeError as error:
        reason = in_one_line(error).rstrip(".")
        raise ValueError(
            f"KEEL_DEVICE = {name!r}: {reason}: end what else uses this GPU, or name another device"
        ) from error
    return f"{device}, at most {gpu_share:.0%} of its memory" if gpu_share < 1 else str(device)


def days(text: str) -> float:
    """The number of days in an argument of the command line."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(
        f"{text!r}: expected a number of days >= 0, also in $KEEL_KEEP_DAYS; 0: never"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m client_app.worker_server", description=__doc__)
    parser.add_argument("--socket", type=Path, default=default_socket(), help="or $KEEL_WORKER")
    parser.add_argument(
        "--keep-days",
        type=days,
        default=os.environ.get("KEEL_KEEP_DAYS") or "0",
        help="delete state this much older than the newest run's; 0: never; or $KEEL_KEEP_DAYS",
    )
    parser.add_argument(
        "--gpu-share",
        type=float,
        default=os.environ.get("KEEL_GPU_SHARE") or "1",
        help="of the memory of the GPU in $KEEL_DEVICE that the clients may take, in (0, 1]; or "
        "$KEEL_GPU_SHARE",
    )
    arguments = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(format="%(asctime)s worker %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    if arguments.socket is None:
        print(f"error: no socket: pass --socket or set ${worker_variable}", file=sys.stderr)
        return 2
    os.environ[worker_variable] = str(arguments.socket)  # state goes to $KEEL_HOME
    try:
        remove_parts(clients_folder())
        device = warm_device(arguments.gpu_share)
        process = WorkerProcess(arguments.socket)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.info(
        "ready at %s, process id %d, code %s, device %s",
        arguments.socket,
        os.getpid(),
        process.code,
        device,
    )
    old_state = OldState(clients_folder(), arguments.keep_days)
    threading.Thread(target=old_state.watch, daemon=True).start()
    process.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
