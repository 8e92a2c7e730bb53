"""Messages handed to the resident worker: same bits, no torch here, and always an answer."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from client_fixtures import Client, assert_same_bits, initial, make_config
from flwr.app import ConfigRecord, Context, Message, RecordDict
from run_fixtures import wait_until

import client_app.worker_client
import client_app.worker_socket
from client_app.worker_server import listen, warm_device
from client_app.worker_socket import receive_frame, send_frames, worker_status, worker_variable
from flower_adapter import CLIENT_FAILED, begin_task
from keel.deployment.loopback import LocalProcess, restarting
from protocol.messages import read_reply

repository = Path(__file__).parents[2]
start_limit_s = 250


def config_with(**keys):
    defaults = {"method": "moon", "local_test_fraction": 0.2, "round_timeout": 250.0}
    return make_config(**defaults | keys)


class Resident:
    """A worker that is restarted when it ends; this process is its ClientApp side."""

    def __init__(self, folder):
        self.socket, self.home = folder / "worker.sock", folder / "home"
        self.log = folder / "worker.log"
        env = os.environ | {worker_variable: str(self.socket), "KEEL_HOME": str(self.home)}
        command = [sys.executable, "-m", "client_app.worker_server"]
        self.process = LocalProcess(command, env, self.log)

    @property
    def pid(self):
        return worker_status(str(self.socket), start_limit_s)["pid"]

    def printed(self):
        return self.log.read_text()


@pytest.mark.parametrize(
    "config",
    [
        '{"round-timeout": NaN}',
        '{"round-timeout": -1}',
        '{"round-timeout": "x"}',
        f'{{"round-timeout": {10**400}}}',
        "{}",
        "[]",
        "[" * 10**5,
    ],
    ids=["NaN", "negative", "text", "beyond floats", "none", "no object", "deep"],
)
def test_a_server_that_states_no_time_limit_is_answered(config, monkeypatch, tmp_path):
    """NaN was waited for endlessly where no worker was there; the others raised."""
    monkeypatch.setattr(client_app.worker_client, "refusal_s", 0.2)
    begin_task(1)
    content = RecordDict({"round": ConfigRecord({"config": config})})
    message = Message(content, dst_node_id=1, message_type="train")
    context = Context(1, 1, {"name": "site-a"}, RecordDict(), {})
    path = str(tmp_path / "worker.sock")
    errors = []

    def send():
        errors.append(client_app.worker_client.send_to_worker(path, message, context))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(10)
    assert "no worker answers" in errors[0].reason


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    running = Resident(tmp_path_factory.mktemp("resident"))
    with restarting({"worker": running.process}):
        assert running.pid
        yield running


@pytest.fixture
def handed_over(resident, monkeypatch):
    monkeypatch.setenv(worker_variable, str(resident.socket))
    return resident


def two_rounds(config, run_dir):
    """A client's first two rounds: its replies, and its names of what it kept."""
    client = Client(config, run_dir)
    return [
        read_reply(client.ask("train", n, initial(config, seed=n), evaluate=True)) for n in (1, 2)
    ]


def test_a_private_reply_without_metrics_comes_back_from_the_worker(handed_over, tmp_path):
    config = config_with(method="fedavg", privacy__epsilon=0.5)
    for reply in two_rounds(config, tmp_path / "run"):
        assert "num-steps" in reply.metrics
        assert "seconds" not in reply.metrics


def test_the_process_of_the_clientapp_imports_no_torch():
    code = "import sys, client_app.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repository, timeout=60).returncode == 0


def test_the_worker_answers_as_the_handlers_in_process_to_the_bit(
    handed_over, tmp_path, monkeypatch
):
    config = config_with()
    there = two_rounds(config, tmp_path / "run-a")
    kept = handed_over.home / "clients" / "run-a" / "client-0000"
    assert len(list(kept.glob("round-*.safetensors"))) == 2
    assert list(tmp_path.iterdir()) == []  # the server's folder is not this machine's
    line = (
        r"run run-a, round 2: client client-0000: trained on \d+ samples, \d+ steps, in [\d.]+ s\n"
    )
    assert re.search(line, handed_over.printed())
    monkeypatch.delenv(worker_variable)
    (tmp_path / "run-b").mkdir()
    here = two_rounds(config, tmp_path / "run-b")
    for a, b in zip(there, here, strict=True):
        assert_same_bits(a.arrays, b.arrays)
        assert a.metrics["personal-accuracy" if "personal-accuracy" in a.metrics else "num-steps"]
    names = {path.name for path in (tmp_path / "run-b/clients/client-0000").iterdir()}
    assert names == {path.name for path in kept.iterdir()}  # a name holds the content's digest


def test_an_error_of_the_handlers_comes_back_as_their_line(handed_over, tmp_path):
    config = config_with(device="cuda:63")
    reply = Client(config, tmp_path).ask("train", 1, initial(config_with()))
    assert reply.error.code == CLIENT_FAILED
    assert reply.error.reason.startswith("device = 'cuda:63'")
    line = f"run {tmp_path.name}, round 1: client client-0000: {reply.error.reason}\n"
    assert line in handed_over.printed()


def test_other_code_than_the_run_s_is_refused(handed_over, tmp_path, monkeypatch):
    monkeypatch.setattr(client_app.worker_client, "code_digest", lambda: "0123456789abcdef")
    reply = Client(config_with(), tmp_path).ask("query")
    assert "the run's app is 0123456789abcdef" in reply.error.reason


def wait_until_busy(resident):
    wait_until(lambda: worker_status(str(resident.socket), 5)["busy"])


def test_a_worker_killed_in_its_work_is_asked_again_and_gives_the_same_bits(handed_over, tmp_path):
    config = config_with(local_epochs=300)  # some seconds
    expected = read_reply(Client(config, tmp_path / "a").ask("train", 1, initial(config)))
    killed = handed_over.pid
    replies = []
    client = Client(config, tmp_path / "b")
    asking = threading.Thread(
        target=lambda: replies.append(client.ask("train", 1, initial(config)))
    )
    asking.start()
    wait_until_busy(handed_over)
    os.kill(killed, signal.SIGKILL)
    asking.join(start_limit_s)
    assert_same_bits(read_reply(replies[0]).arrays, expected.arrays)
    assert handed_over.pid != killed


def test_a_worker_that_dies_twice_on_a_message_is_an_error_of_one_line(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "worker.sock"
    with listen(path) as listener:

        def die_on_messages():
            listener.accept()[0].close()
            listener.accept()[
                0
            ].close()  # the one that has just died, not yet gone: no second death
            for _ in range(2):  # the next one is ready, and dies too
                peer, _ = listener.accept()
                with peer:
                    deadline = time.monotonic() + 10
                    if json.loads(receive_frame(peer, deadline))["kind"] == "ready?":
                        send_frames(peer, [b'{"pid": 1}'], deadline)

        thread = threading.Thread(target=die_on_messages)
        thread.start()
        monkeypatch.setenv(worker_variable, str(path))
        reply = Client(config_with(), tmp_path).ask("train", 1)
        thread.join(10)
    said = caplog.messages[-1]
    assert said == f"run {tmp_path.name}, round 1: client of partition 0: {reply.error.reason}"
    assert "died on this message twice" in reply.error.reason
    assert "\n" not in reply.error.reason


def test_no_worker_is_an_error_of_one_line_after_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(client_app.worker_socket, "worker_start_s", 0.3)
    monkeypatch.setenv(worker_variable, str(tmp_path / "nobody.sock"))
    started = time.monotonic()
    reply = Client(config_with(), tmp_path).ask("query")
    assert "no worker answers at" in reply.error.reason
    assert time.monotonic() - started < 5


def test_a_socket_that_may_not_be_opened_is_an_error_of_one_line(tmp_path, monkeypatch):
    """It was a traceback, as were the next test's."""

    def refuse(*_):
        raise PermissionError(13, "Permission denied")  # root may open every socket

    monkeypatch.setenv(worker_variable, str(tmp_path / "worker.sock"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    reply = Client(config_with(), tmp_path).ask("query")
    assert reply.error.code == CLIENT_FAILED
    assert reply.error.reason == (
        f"the worker at {tmp_path / 'worker.sock'}: PermissionError: [Errno 13] Permission denied"
    )


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 7 + b"\3[1]"])
def test_another_program_at_the_socket_is_an_error_of_one_line(tmp_path, monkeypatch, answer):
    path = tmp_path / "docker.sock"
    monkeypatch.setenv(worker_variable, str(path))
    with listen(path) as listener:

        def serve():
            peer, _ = listener.accept()
            with peer:
                for _ in range(3):
                    receive_frame(peer, time.monotonic() + 60)
                peer.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        reply = Client(config_with(), tmp_path).ask("query")
    assert reply.error.code == CLIENT_FAILED
    assert reply.error.reason.startswith(f"the worker at {path}: ")


def test_a_worker_that_hangs_is_an_error_after_round_timeout(handed_over, tmp_path):
    pid = handed_over.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        config = config_with(round_timeout=1.0)
        reply = Client(config, tmp_path).ask("train", 1, initial(config))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "no answer in time" in reply.error.reason
    assert 1 <= time.monotonic() - started < 5


def test_work_that_nobody_waits_for_any_more_ends_the_worker_and_a_new_one_serves(
    handed_over, tmp_path
):
    before = handed_over.pid
    config = config_with(local_epochs=100_000, round_timeout=1.5)
    reply = Client(config, tmp_path).ask("train", 1, initial(config))
    assert reply.has_error()
    deadline = time.monotonic() + start_limit_s
    pid = before
    while pid == before:
        assert time.monotonic() < deadline
        with contextlib.suppress(ConnectionError):  # it is just going
            pid = handed_over.pid
        time.sleep(0.1)
    assert "Timeout" in handed_over.printed()  # the traceback of where it was
    assert not Client(config_with(), tmp_path).ask("query").has_error()


def test_a_message_whose_sender_has_ended_is_not_worked_on(handed_over, tmp_path):
    config = config_with(local_epochs=300)
    first = threading.Thread(
        target=lambda: Client(config, tmp_path / "first").ask("train", 1, initial(config))
    )
    first.start()
    wait_until_busy(handed_over)
    second = Client(config_with(round_timeout=1.0), tmp_path / "second")
    assert second.ask("train", 1, initial(config)).has_error()  # gave up while it waited
    first.join(250)
    assert not Client(config, tmp_path).ask("query").has_error()
    assert not (handed_over.home / "clients" / "second").exists()
    assert "message dropped: the process that sent it has ended" in handed_over.printed()


def test_a_second_worker_at_a_socket_is_refused_and_a_stale_socket_is_not(resident, tmp_path):
    with pytest.raises(ValueError, match="another worker is listening there"):
        listen(resident.socket)
    with (
        contextlib.closing(listen(tmp_path / "busy.sock")),  # and never answers
        pytest.raises(ValueError, match="another worker is listening there"),
    ):
        listen(tmp_path / "busy.sock")
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))  # and never listens, as after a kill
    with contextlib.closing(listen(stale)):
        assert stale.stat().st_mode & 0o777 == 0o600


def test_a_socket_that_cannot_be_created_is_named(tmp_path):
    """The worker ended with `error: [Errno 13] Permission denied`, or 98, and no path."""
    (path := tmp_path / "worker.sock").mkdir()
    with pytest.raises(OSError, match=r"already in use: '.*worker\.sock'"):
        listen(path)


def test_the_worker_status_which_device_it_has_and_starts_without_it_too(resident, monkeypatch):
    assert re.search(r"ready at .*, device (cpu|cuda)", resident.printed())
    monkeypatch.setenv("KEEL_DEVICE", "cpu")
    assert warm_device() == "cpu"
    monkeypatch.setenv("KEEL_DEVICE", "cuda:63")
    assert warm_device().startswith("missing: device = 'cuda:63'")


def test_the_worker_s_torch_is_this_torch(resident):
    assert worker_status(str(resident.socket), 5)["versions"]["torch"] == torch.__version__
