"""The resident worker: the same bits as in process, always an answer, no harm from its peers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch
from client_fixtures import Client, assert_same_bits, initial, make_config
from flwr.app import Context, Message, MessageType, RecordDict
from run_fixtures import wait_until

import client_app.errors
import client_app.handlers
import client_app.worker_client
import client_app.worker_server
from client_app.worker_client import (
    CODE_KEY,
    SERVICE,
    address_of,
    read_reply,
    request_of,
    worker_status,
    worker_variable,
)
from client_app.worker_server import Worker, serve, warm_device
from flower_adapter import CLIENT_FAILED, GPU_LOST, begin_task
from keel.deployment.loopback import LocalProcess, restarting
from protocol import messages

repository = Path(__file__).parents[2]
START_S = 250


def config_with(**keys):
    return make_config(
        **{"method": "moon", "local_test_fraction": 0.2, "round_timeout": 250.0} | keys
    )


class Resident:
    """A worker's process, which is restarted when it ends."""

    def __init__(self, folder):
        self.socket, self.home, self.log = folder / "w.sock", folder / "home", folder / "log"
        env = os.environ | {worker_variable: str(self.socket), "KEEL_HOME": str(self.home)}
        command = [sys.executable, "-m", "client_app.worker_server"]
        self.process = LocalProcess(command, env, self.log)

    @property
    def pid(self):
        return worker_status(str(self.socket), START_S)["pid"]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    running = Resident(tmp_path_factory.mktemp("resident"))
    with restarting({"worker": running.process}):
        assert running.pid
        yield running


@pytest.fixture
def resident(process, monkeypatch):
    monkeypatch.setenv(worker_variable, str(process.socket))
    return process


def trained(config, run_dir):
    """A client's update of round 1."""
    return messages.read_reply(Client(config, run_dir).ask("train", 1, initial(config)))


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


def wait_until_busy(resident):
    wait_until(lambda: worker_status(str(resident.socket), 5)["busy"])


def test_the_process_of_the_clientapp_imports_no_torch():
    code = "import sys, client_app.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repository, timeout=60).returncode == 0


def test_the_worker_answers_as_the_handlers_do_bit_for_bit(resident, tmp_path, monkeypatch):
    config = config_with()
    there = trained(config, tmp_path / "run-a")
    state = resident.home / "clients" / "run-a" / "client-0000"
    assert "run run-a, round 1: client client-0000: trained on" in resident.log.read_text()
    assert list(tmp_path.iterdir()) == []  # the server's folder is not this machine's
    monkeypatch.delenv(worker_variable)
    (tmp_path / "run-b").mkdir()
    here = trained(config, tmp_path / "run-b")
    assert_same_bits(there.arrays, here.arrays)
    assert there.metrics["num-steps"] == here.metrics["num-steps"]
    names = {path.name for path in (tmp_path / "run-b/clients/client-0000").glob("round-*")}
    assert names == {path.name for path in state.glob("round-*")}  # they contain a digest


def test_the_worker_says_what_it_runs(resident):
    status = worker_status(str(resident.socket), 5)
    assert status["versions"]["torch"] == torch.__version__
    assert not status["busy"]


def test_an_error_of_the_handlers_comes_back_as_their_line(resident, tmp_path):
    reply = Client(config_with(device="cuda:63"), tmp_path).ask("train", 1, initial(config_with()))
    assert reply.error.code == CLIENT_FAILED
    assert "cuda:63" in reply.error.reason
    assert reply.error.reason in resident.log.read_text()


def test_a_message_of_other_code_is_refused(resident, tmp_path, monkeypatch):
    monkeypatch.setattr(client_app.worker_client, "code_digest", lambda: "0123456789abcdef")
    reply = Client(config_with(), tmp_path).ask("query")
    assert "0123456789abcdef" in reply.error.reason


def test_a_worker_killed_in_its_work_is_asked_again_and_gives_the_same_bits(resident, tmp_path):
    config = config_with(local_epochs=100)  # a second or more
    expected = trained(config, tmp_path / "a")
    killed, replies = resident.pid, []
    asking = in_thread(lambda: replies.append(trained(config, tmp_path / "b")))
    wait_until_busy(resident)
    os.kill(killed, signal.SIGKILL)
    asking.join(START_S)
    assert_same_bits(replies[0].arrays, expected.arrays)
    assert resident.pid != killed


def test_a_worker_that_hangs_is_an_error_after_round_timeout(resident, tmp_path):
    pid, started = resident.pid, time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        config = config_with(round_timeout=1.0)
        reply = Client(config, tmp_path).ask("train", 1, initial(config))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert reply.error.code == CLIENT_FAILED
    assert 1 <= time.monotonic() - started < 10


def test_work_that_nobody_waits_for_ends_the_worker_and_a_new_one_serves(resident, tmp_path):
    before = resident.pid
    config = config_with(local_epochs=100_000, round_timeout=1.5)
    assert Client(config, tmp_path).ask("train", 1, initial(config)).has_error()
    wait_until(lambda: resident.process.process.pid != before, limit_s=START_S)
    assert resident.pid != before
    assert not Client(config_with(), tmp_path).ask("query").has_error()


def test_a_message_whose_sender_gave_up_is_dropped(resident, tmp_path):
    config = config_with(local_epochs=300)
    first = in_thread(trained, config, tmp_path / "first")
    wait_until_busy(resident)
    second = Client(config_with(round_timeout=0.5), tmp_path / "second")
    assert second.ask("train", 1, initial(config)).has_error()  # gave up while it waited
    first.join(START_S)
    assert not Client(config, tmp_path).ask("query").has_error()
    assert not (resident.home / "clients" / "second").exists()


def test_no_worker_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(client_app.worker_client, "WORKER_START_S", 0.3)
    monkeypatch.setenv(worker_variable, str(tmp_path / "nobody.sock"))
    reason = Client(config_with(), tmp_path).ask("query").error.reason
    assert str(tmp_path / "nobody.sock") in reason
    assert "\n" not in reason


# --- a server in this process --------------------------------------------------------------------


def message_of(kind=MessageType.QUERY, client="site-a"):
    begin_task(1)
    message = Message(RecordDict(), dst_node_id=1, message_type=kind)
    return message, Context(1, 1, {"name": client}, RecordDict(), {})


class Server:
    """A worker in this process, whose answers a test chooses."""

    def __init__(self, folder):
        self.path, self.worker = folder / "own" / "w.sock", Worker()
        self.server = serve(self.worker, self.path)

    def ask(self, request=None, code=None, timeout=20.0):
        """The reply to a request, without what the client does about errors."""
        metadata = [(CODE_KEY, code or self.worker.code)]
        request = request_of(*message_of()) if request is None else request
        with grpc.insecure_channel(address_of(self.path)) as channel:
            ask = channel.unary_unary(f"/{SERVICE}/answer")
            return read_reply(ask(request, timeout=timeout, metadata=metadata))


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(client_app.worker_server, "answer", lambda *asked: RecordDict())
    made = Server(tmp_path)
    yield made
    made.server.stop(0).wait()


def test_the_socket_is_for_this_user_alone(server):
    assert server.path.stat().st_mode & 0o777 == 0o600
    assert server.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_second_worker_at_a_socket_is_refused_and_a_socket_left_behind_is_not(server, tmp_path):
    with pytest.raises(ValueError, match=str(server.path)):
        serve(Worker(), server.path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    serve(Worker(), tmp_path / "left.sock").stop(0).wait()


def test_a_malformed_peer_harms_nobody(server):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(server.path))
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(10_000))
    for request in (b"", b"\xff" * 100, bytes(3), b"\0\0\0\5" + b"\xff" * 9):
        with pytest.raises(grpc.RpcError) as refused:
            server.ask(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.ask() == RecordDict()


def test_silent_peers_harm_nobody(server):
    silent = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for peer in silent:
        peer.connect(str(server.path))
    assert server.ask() == RecordDict()
    assert worker_status(str(server.path), 5)["pid"] == os.getpid()
    for peer in silent:
        peer.close()


def test_one_message_is_answered_at_a_time_and_the_status_meanwhile(server, monkeypatch):
    running, most = [], []

    def slow(message, context):
        running.append(1)
        most.append(len(running))
        time.sleep(0.1)
        running.pop()
        return RecordDict()

    monkeypatch.setattr(client_app.worker_server, "answer", slow)
    threads = [in_thread(server.ask, request_of(*message_of(client=f"c{n}"))) for n in range(6)]
    wait_until(lambda: running)
    assert worker_status(str(server.path), 5)["busy"]
    for thread in threads:
        thread.join(20)
    assert most == [1] * 6


def test_a_worker_that_dies_twice_on_a_message_is_an_error(server, monkeypatch):
    monkeypatch.setattr(server.worker, "_answer", lambda *asked: None)  # as if it ended
    reply = client_app.worker_client.send_to_worker(str(server.path), *message_of())
    assert reply.code == CLIENT_FAILED


@pytest.mark.parametrize("withheld", [False, True])
def test_a_worker_ends_after_a_cuda_error_and_not_if_memory_was_full(server, monkeypatch, withheld):
    error = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")]

    def fail(message, context):
        raise error[0]

    monkeypatch.setattr(client_app.worker_server, "answer", client_app.handlers.answer)
    monkeypatch.setattr(client_app.errors, "withholds_metrics", lambda message: withheld)
    monkeypatch.setitem(client_app.handlers.handlers, MessageType.QUERY, fail)
    assert server.ask().code == CLIENT_FAILED
    assert not server.worker.is_gpu_lost.is_set()
    error[0] = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert server.ask().code == GPU_LOST
    assert server.worker.is_gpu_lost.is_set()
    with pytest.raises(TimeoutError):
        worker_status(str(server.path), 0.5)  # it is about to end


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_of_a_gpu_that_is_none_is_refused(share, monkeypatch):
    monkeypatch.setenv("KEEL_DEVICE", "cpu")
    with pytest.raises(ValueError, match="--gpu-share"):
        warm_device(share)


def test_a_worker_starts_without_the_device_that_is_named(monkeypatch):
    monkeypatch.setenv("KEEL_DEVICE", "cuda:63")
    assert "cuda:63" in warm_device()
