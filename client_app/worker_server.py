"""The resident worker: keeps torch, the CUDA context, decoded data and models warm.

    KEEL_WORKER=/run/keel/worker.sock python -m client_app.worker_server

A gRPC server on a Unix socket, which only this user can open. It answers the messages that
ClientApp processes send (`worker_client.py`) one at a time, in order of arrival; one worker may
serve several clients of a machine. `--gpu-share` caps the GPU memory that they take. If a message
takes longer than the server waits for it, without its wait for other clients, the worker ends with
a traceback; whoever started it restarts it (a container's restart policy, a service manager).
"""

import argparse
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flwr
import grpc
import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict

from client_app.handlers import answer
from client_app.node_config import client_name, clients_folder
from client_app.setup import device_for
from client_app.worker_client import (
    CODE_KEY,
    OPTIONS,
    SERVICE,
    address_of,
    default_socket,
    read_request,
    reply_of,
    run_and_round,
    worker_variable,
)
from flower_adapter import CLIENT_FAILED, GPU_LOST
from protocol.code import code_digest
from protocol.files import remove_parts
from protocol.text import in_one_line, num_of

log = logging.getLogger("keel.client")
MAX_PATH_BYTES = 100  # of a Unix socket's path; the limit of any system is larger
MAX_WAITING = 64  # messages of this worker's clients, and questions whether it is ready
MAX_LIMIT_S = 30 * 86400.0  # of one message
STOP_S = 60.0  # for a local process to take the last reply


class Worker:
    """Answers one message at a time, in a thread of its own.

    is_gpu_lost: set once the process has lost its GPU and can answer no more.
    """

    def __init__(self) -> None:
        self.code = code_digest()
        self.is_busy = False
        self.is_gpu_lost = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def status(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        """What `worker_status` returns, as JSON."""
        if self.is_gpu_lost.is_set():
            call.abort(grpc.StatusCode.UNAVAILABLE, "this worker is about to end")
        versions = {"flwr": flwr.__version__, "torch": torch.__version__}
        about = {"pid": os.getpid(), "busy": self.is_busy, "code": self.code, "versions": versions}
        return json.dumps(about).encode()

    def answer(self, request: bytes, call: grpc.ServicerContext) -> bytes:
        """The reply to one message, as soon as those before it are answered."""
        code = dict(call.invocation_metadata()).get(CODE_KEY)
        if code != self.code:
            reason = (
                f"this client's worker runs code {self.code} of Keel, the run's app is {code}: "
                "install the same version on the server and on every client"
            )
            log.warning("message refused: %s", reason)
            call.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        try:
            message, context = read_request(request)
        except Exception as error:
            log.warning("message refused: %s", in_one_line(error))
            call.abort(grpc.StatusCode.INVALID_ARGUMENT, "a request that holds no message")
        limit_s = min(call.time_remaining(), MAX_LIMIT_S)
        work = self._thread.submit(self._answer, message, context, limit_s, call)
        content = work.result()
        if content is None:
            raise call.abort(grpc.StatusCode.UNAVAILABLE, "this worker is about to end")
        return reply_of(content)

    def _answer(
        self, message: Message, context: Context, limit_s: float, call: grpc.ServicerContext
    ) -> RecordDict | Error | None:
        """The answer to a message; None where nobody waits for it, or where the GPU is lost."""
        if self.is_gpu_lost.is_set():
            return None
        if not call.is_active():
            log.warning("message dropped: the process that sent it has ended")
            return None
        self.is_busy = True
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            content = answer(message, context)
        except Exception as error:  # a message's content may raise anything
            log.exception("a message that cannot be answered")
            content = Error(CLIENT_FAILED, in_one_line(f"{type(error).__name__}: {error}"))
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.is_busy = False
        if isinstance(content, Error):
            if content.code == GPU_LOST:
                self.is_gpu_lost.set()
        elif message.metadata.message_type == MessageType.TRAIN:
            log_training(message, context, content)
        return content


def log_training(message: Message, context: Context, content: RecordDict) -> None:
    """Log how much a client has trained on."""
    metrics = content.metric_records["metrics"]  # without the time where it is withheld
    seconds = f", in {metrics['seconds']:.1f} s" if "seconds" in metrics else ""
    log.info(
        "%s: client %s: trained on %s, %s%s",
        run_and_round(message),
        client_name(context.node_config),
        num_of("sample", metrics["num-examples"]),
        num_of("step", metrics["num-steps"]),
        seconds,
    )


def serve(worker: Worker, path: Path) -> grpc.Server:
    """A server at this socket, which exists when this returns.

    ValueError if a worker listens there, OSError if there can be no socket.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"{path}: expected a path of at most {MAX_PATH_BYTES} bytes for a socket")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.is_socket() and is_listening(path):
        raise ValueError(
            f"{path}: another worker is listening there: stop it, or pass another --socket"
        )
    server = grpc.server(
        ThreadPoolExecutor(MAX_WAITING), options=OPTIONS, maximum_concurrent_rpcs=MAX_WAITING
    )
    methods = {
        "status": grpc.unary_unary_rpc_method_handler(worker.status),
        "answer": grpc.unary_unary_rpc_method_handler(worker.answer),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    before = os.umask(0o177)
    try:
        server.add_insecure_port(address_of(path))
    except RuntimeError as error:
        raise OSError(f"{path}: {in_one_line(error)}") from error
    finally:
        os.umask(before)
    server.start()
    return server


def is_listening(path: Path) -> bool:
    """Whether a process accepts connections at this socket; one that was killed left it behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def warm_device(gpu_share: float = 1.0) -> str:
    """The device in $KEEL_DEVICE (auto), with its CUDA context created; or why it is missing.

    A missing device is no error yet: the client's node config may name another.
    gpu_share: of this GPU's memory that the process may take. One client trains at a time, so it is
    also what each of this worker's clients may take.
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


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m client_app.worker_server", description=__doc__)
    parser.add_argument("--socket", type=Path, default=default_socket(), help="or $KEEL_WORKER")
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
        worker = Worker()
        server = serve(worker, arguments.socket)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.info(
        "ready at %s, process id %d, code %s, device %s",
        arguments.socket,
        os.getpid(),
        worker.code,
        device,
    )
    worker.is_gpu_lost.wait()
    log.error("the GPU context of this process is lost: exiting, to be restarted")
    server.stop(STOP_S).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
