"""The worker's socket under malformed, slow, greedy and many peers: it answers the next one."""

import contextlib
import json
import os
import random
import socket
import struct
import threading
import time

import pytest
import torch
from client_fixtures import make_config
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_fixtures import wait_until

import client_app.handlers
import client_app.worker_server
from client_app.worker_server import Request, TimeLimits, WorkerProcess, warm_device
from client_app.worker_socket import (
    connected,
    exchange,
    max_frame_bytes,
    receive_frame,
    worker_status,
)
from flower_adapter import begin_task, to_bytes

begin_task(1)
MESSAGE = to_bytes(Message(RecordDict(), dst_node_id=1, message_type=MessageType.QUERY))
CONTEXT = to_bytes(Context(1, 1, {"partition-id": 0}, RecordDict(), {}))


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A worker in this process that answers every message with an empty record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_app.worker_server, "answer", lambda message, context: RecordDict())
        made = WorkerProcess(tmp_path_factory.mktemp("worker") / "worker.sock")
        made.path = made.listener.getsockname()
        threading.Thread(target=made.serve, daemon=True).start()
        yield made


def connect(worker):
    peer = connected(worker.path, time.monotonic() + 10)  # waits while the backlog is full
    peer.settimeout(10)
    return peer


def assert_closed(peer):
    with contextlib.suppress(ConnectionResetError):  # with bytes that were not read
        assert peer.recv(1) == b""


def framed(*frames):
    return b"".join(struct.pack(">Q", len(frame)) + frame for frame in frames)


def header(worker, **changed):
    about = {"kind": "message", "code": worker.code, "limit_s": 20.0} | changed
    return json.dumps({k: v for k, v in about.items() if v is not None}).encode()


def assert_serves(worker, limit_s=5.0):
    """It says that it is ready, and answers a message."""
    assert worker_status(worker.path, limit_s)["pid"] == os.getpid()
    deadline = time.monotonic() + limit_s
    reply = exchange(worker.path, [header(worker), MESSAGE, CONTEXT], deadline)
    assert json.loads(reply[0]) == {}


def test_the_socket_is_for_this_user_alone(worker):
    assert os.stat(worker.path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "changed",
    [
        {"code": None},
        {"limit_s": None},
        {"limit_s": "soon"},
        {"limit_s": -1},
        {"limit_s": 1e300},
        {"limit_s": float("nan")},
        {"kind": None},
    ],
)
def test_a_message_with_a_malformed_header_ends_nobody_but_itself(worker, changed):
    """Each of the first five ended the worker."""
    with connect(worker) as peer:
        peer.sendall(framed(header(worker, **changed), MESSAGE, CONTEXT))
        assert_closed(peer)
    assert_serves(worker)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"\xff", b"[" * 60_000, b"{}", b"1" * 60_000]
)
def test_a_header_that_is_none_is_dropped(worker, content):
    with connect(worker) as peer:
        peer.sendall(framed(content))
        assert_closed(peer)
    assert_serves(worker)


def test_a_message_that_cannot_be_decoded_is_dropped(worker):
    for frames in ((b"\xff" * 9, CONTEXT), (MESSAGE, b"\xff" * 9), (b"", b"")):
        with connect(worker) as peer:
            peer.sendall(framed(header(worker), *frames))
            peer.recv(1)
        assert_serves(worker)


def test_a_message_of_other_code_is_refused_with_one_line_here_and_there(worker, caplog):
    """The log of the site, which may be the one to upgrade, had nothing."""
    frames = [header(worker, code="0123456789abcdef"), MESSAGE, CONTEXT]
    [reply] = exchange(worker.path, frames, time.monotonic() + 5)
    reason = json.loads(reply)["error"]["reason"]
    assert reason.startswith(f"this client's worker runs code {worker.code} of Keel, the run's app")
    # a connection of an earlier test may end meanwhile, which is logged too
    assert [m for m in caplog.messages if "refused" in m] == [f"message refused: {reason}"]


def test_an_exception_of_the_handlers_is_an_error_of_one_line(worker, monkeypatch):
    def fail(message, context):
        raise KeyError("a\nb")

    monkeypatch.setattr(client_app.worker_server, "answer", fail)
    frames = [header(worker), MESSAGE, CONTEXT]
    [reply] = exchange(worker.path, frames, time.monotonic() + 5)
    assert json.loads(reply)["error"]["reason"] == "KeyError: 'a\\nb'"


def test_a_client_out_of_gpu_memory_is_an_error_of_one_line_and_the_worker_goes_on(
    worker, monkeypatch
):
    """Unlike a CUDA error, after which nothing runs on the GPU in this process."""

    def fail(message, context):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")

    with monkeypatch.context() as patch:
        patch.setattr(client_app.worker_server, "answer", client_app.handlers.answer)
        patch.setitem(client_app.handlers.handlers, MessageType.QUERY, fail)
        frames = [header(worker), MESSAGE, CONTEXT]
        [reply] = exchange(worker.path, frames, time.monotonic() + 5)
    reason = json.loads(reply)["error"]["reason"]
    assert "CUDA out of memory: lower batch-size or cache-mb" in reason
    assert "\n" not in reason
    assert not worker.is_broken.is_set()
    assert_serves(worker)


@pytest.mark.parametrize("withheld", [False, True])
def test_a_worker_ends_after_a_cuda_error(worker, withheld, monkeypatch):
    """Also where its text stays at the client."""

    def fail(message, context):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(client_app.worker_server, "answer", client_app.handlers.answer)
    monkeypatch.setitem(client_app.handlers.handlers, MessageType.TRAIN, fail)
    privacy = {"privacy__epsilon": 0.5, "privacy__clip_norm": 1.0} if withheld else {}
    config = make_config(method="fedavg", **privacy)
    content = RecordDict({"round": ConfigRecord({"config": config.to_json()})})
    message = Message(content, dst_node_id=1, message_type=MessageType.TRAIN)
    request = Request(None, message, Context(1, 1, {"partition-id": 0}, RecordDict(), {}), 10.0)
    [reply] = worker.answer_to(request)
    assert ("illegal" in json.loads(reply)["error"]["reason"]) is not withheld
    assert request.is_last


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of which only the second has free memory; what is done to them."""
    done, current = [], [0]

    @contextlib.contextmanager
    def chosen(device):
        before, current[0] = current[0], device.index or 0
        yield
        current[0] = before

    def zeros(count, device):
        done.append(("warmed", current[0]))
        if (device.index or 0) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2.00 MiB.")

    def cap(share, gpu=None):
        done.append((share, current[0] if gpu is None else gpu))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", cap)
    monkeypatch.setattr(torch, "zeros", zeros)
    return done


@pytest.mark.parametrize(
    ("name", "share", "words", "expected"),
    [
        ("cuda:1", 0.25, "cuda:1, at most 25% of its memory", [(0.25, 1), ("warmed", 1)]),
        ("cuda:1", 1.0, "cuda:1", [("warmed", 1)]),
        ("cpu", 0.25, "cpu", []),
        ("cuda:2", 0.25, "missing: device = 'cuda:2': this machine has 2 GPUs", []),
    ],
)
def test_a_worker_warms_and_caps_its_own_gpu_alone(name, share, words, expected, gpus, monkeypatch):
    """Others would lose the memory of a CUDA context to it."""
    monkeypatch.setenv("KEEL_DEVICE", name)
    assert warm_device(share) == words
    assert gpus == expected


def test_a_worker_whose_gpu_is_full_at_its_start_ends_with_one_line(
    gpus, tmp_path, monkeypatch, capsys
):
    for name, value in {"DEVICE": "cuda", "HOME": tmp_path, "WORKER": tmp_path / "socket"}.items():
        monkeypatch.setenv(f"KEEL_{name}", str(value))
    monkeypatch.setattr("sys.argv", ["worker"])
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    assert client_app.worker_server.main() == 1
    assert capsys.readouterr().err == (
        "error: KEEL_DEVICE = 'cuda': CUDA out of memory. Tried to allocate 2.00 MiB: end what "
        "else uses this GPU, or name another device\n"
    )


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_of_a_gpu_that_is_none_is_refused(share, monkeypatch):
    monkeypatch.setenv("KEEL_DEVICE", "cpu")
    with pytest.raises(ValueError, match=r"--gpu-share = .*: expected a number in \(0, 1\]"):
        warm_device(share)


@pytest.mark.parametrize("text", ["a month", "-1", "nan", "inf"])
def test_what_is_no_number_of_days_is_refused_by_name(text, monkeypatch, capsys):
    """A negative one, and nan, deleted nothing, without a word."""
    monkeypatch.setenv("KEEL_KEEP_DAYS", text)
    monkeypatch.setattr("sys.argv", ["worker_server"])
    with pytest.raises(SystemExit):
        client_app.worker_server.main()
    said = f"--keep-days: {text!r}: expected a number of days >= 0, also in $KEEL_KEEP_DAYS"
    assert said in capsys.readouterr().err


def test_slow_peers_block_nobody(worker):
    """One peer that sent nothing held the worker for a minute; one that dribbled, for ever."""
    silent = [connect(worker) for _ in range(5)]
    with connect(worker) as peer:
        peer.sendall(framed(header(worker))[:8])
        assert_serves(worker, 30)  # half of what slow peers have
    for each in silent:
        each.close()


def test_slow_peers_have_a_deadline_in_all(worker, monkeypatch):
    monkeypatch.setattr(client_app.worker_server, "io_limit_s", 1.0)
    silent = [connect(worker) for _ in range(5)]
    started = time.monotonic()
    with connect(worker) as peer:
        peer.sendall(framed(header(worker))[:8])
        with contextlib.suppress(OSError):  # it was closed
            while time.monotonic() < started + 60:
                peer.sendall(b" ")
                time.sleep(0.1)
    assert time.monotonic() - started < 50
    for each in silent:
        assert_closed(each)
        each.close()


def test_many_idle_connections_do_not_keep_others_out(worker):
    idle = [connect(worker) for _ in range(3 * client_app.worker_server.max_receiving)]
    assert_serves(worker)
    assert_closed(idle[0])  # the oldest gives way: the process has only so many descriptors
    for each in idle:
        each.close()


def test_who_does_not_take_its_reply_holds_up_nobody(worker, monkeypatch):
    monkeypatch.setattr(client_app.worker_server, "to_bytes", lambda content: bytes(2**24))
    with connect(worker) as peer:
        peer.sendall(framed(header(worker), MESSAGE, CONTEXT))
        time.sleep(0.2)
        assert_serves(worker, 30)


def test_who_does_not_take_its_reply_is_let_go_with_its_message(worker, monkeypatch):
    """What it has sent would count towards what the worker holds, for good."""
    replies = []
    monkeypatch.setattr(client_app.worker_server, "io_limit_s", 1.0)
    monkeypatch.setattr(
        client_app.worker_server, "to_bytes", lambda content: replies.append(1) or bytes(2**24)
    )
    with connect(worker) as peer:
        peer.sendall(framed(header(worker), MESSAGE, CONTEXT))
        wait_until(lambda: replies)
        wait_until(lambda: not worker.held, limit_s=30)


def test_a_frame_of_any_announced_length_takes_memory_for_what_has_arrived(worker):
    def own_mb():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    before = own_mb()
    with connect(worker) as peer:
        peer.sendall(framed(header(worker)) + struct.pack(">Q", max_frame_bytes) + bytes(1000))
        time.sleep(0.2)
        assert own_mb() - before < 50
    for length in (max_frame_bytes + 1, 2**64 - 1):
        with connect(worker) as peer:
            peer.sendall(framed(header(worker)) + struct.pack(">Q", length))
            assert_closed(peer)
    assert_serves(worker)


def test_messages_of_one_client_are_answered_one_at_a_time(worker, monkeypatch):
    running, most = [], []

    def slow(message, context):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return RecordDict()

    monkeypatch.setattr(client_app.worker_server, "answer", slow)
    threads = [threading.Thread(target=assert_serves, args=[worker]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 6


def messages_of(worker, clients):
    """Send a message of each client, each in a thread; the threads."""

    def send(client):
        context = to_bytes(Context(1, 1, {"name": client}, RecordDict(), {}))
        exchange(worker.path, [header(worker), MESSAGE, context], time.monotonic() + 20)

    threads = [threading.Thread(target=send, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    return threads


def test_a_client_trains_while_another_writes_its_state(worker, monkeypatch):
    """A site's slow disk holds up no other client of its worker."""
    events, may_write = [], threading.Event()

    def handled(message, context):
        client = context.node_config["name"]
        with client_app.handlers.turn():
            events.append(f"{client} trains")
        if client == "slow":
            assert may_write.wait(10)
        events.append(f"{client} has written")
        return RecordDict()

    monkeypatch.setattr(client_app.worker_server, "answer", handled)
    threads = messages_of(worker, ["slow"])
    wait_until(lambda: events == ["slow trains"])
    threads += messages_of(worker, ["other"])
    wait_until(lambda: events[1:] == ["other trains", "other has written"])
    may_write.set()
    for thread in threads:
        thread.join(20)
    assert events[-1] == "slow has written"


@pytest.mark.parametrize(
    ("kind", "round_", "counted", "is_said"),
    [
        ("train", 4, 2, True),
        ("train", 4, 3, False),
        ("train", 3, 2, False),  # the same round again: its reply was lost, or it is repeated
        ("train", 2, 1, False),  # by a resume
        ("evaluate", 3, 2, True),
        ("evaluate", 3, 3, False),
        ("evaluate", 2, 2, False),
    ],
)
def test_a_site_learns_that_its_update_was_not_aggregated(
    kind, round_, counted, is_said, tmp_path, caplog
):
    """Its log said that it had trained, whatever became of that."""

    def note(kind, round_, counted, run="run"):
        records = {
            "round": ConfigRecord({"run-dir": run, "round": round_}),
            "client": ConfigRecord({"counted-round": counted}),
        }
        message = Message(RecordDict(records), dst_node_id=1, message_type=kind)
        process.note_round(message, "clinic")

    process = WorkerProcess(tmp_path / "worker.sock")
    note("train", 3, 2)
    note(kind, round_, counted)
    expected = f"run run, round {round_}: client clinic: the server did not aggregate the update of"
    assert caplog.messages == [f"{expected} round 3"] * is_said
    note("train", 9, 0, "another run")
    note("train", 9, 9)
    assert len(caplog.messages) == is_said


def test_one_client_trains_at_a_time_and_no_more_than_three_are_answered(worker, monkeypatch):
    training, answering, most = [], [], [0, 0]

    def handled(message, context):
        answering.append(1)
        most[1] = max(most[1], len(answering))
        with client_app.handlers.turn():
            training.append(1)
            most[0] = max(most[0], len(training))
            time.sleep(0.02)
            training.pop()
        answering.pop()
        return RecordDict()

    monkeypatch.setattr(client_app.worker_server, "answer", handled)
    for thread in messages_of(worker, [f"client-{n}" for n in range(8)]):
        thread.join(20)
    assert most == [1, 3]


def test_a_worker_s_clients_wait_for_their_turn_without_their_time_limit(worker):
    assert_serves(worker)
    assert client_app.handlers.turn.waiting == worker.limits.waiting


def test_time_spent_waiting_for_another_client_does_not_count(monkeypatch):
    """Or a client could end the worker by having one that trains for long before it."""
    armed = []
    timer = client_app.worker_server.faulthandler
    monkeypatch.setattr(
        timer, "dump_traceback_later", lambda seconds, exit: armed.append(round(seconds))
    )
    monkeypatch.setattr(timer, "cancel_dump_traceback_later", lambda: armed.append(None))
    limits = TimeLimits()
    with limits.limited(30), limits.waiting():
        others = limits.limited(50)
        other = threading.Thread(target=others.__enter__)
        other.start()
        other.join()
    assert armed == [None, 30, None, None, 50, None, 30, None, 50]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=200), max_size=4), st.binary(max_size=64), st.integers(0, 2**32))
def test_random_frames_end_nothing(worker, frames, tail, seed):
    chance = random.Random(seed)
    whole = framed(header(worker), MESSAGE, CONTEXT)
    damaged = bytearray(whole)
    for _ in range(chance.randrange(1, 4)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    sent = [framed(*frames) + tail, bytes(damaged), whole[: chance.randrange(len(whole))]]
    for content in sent:
        with connect(worker) as peer:
            peer.sendall(content)
            peer.shutdown(socket.SHUT_WR)
    assert worker_status(worker.path, 5.0)["pid"] == os.getpid()


def test_a_frame_has_a_deadline_in_all():
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def dribble():
        while not done.wait(0.05):
            theirs.send(b"\0")

    thread = threading.Thread(target=dribble)
    with ours, theirs:
        theirs.sendall(struct.pack(">Q", 1000))
        thread.start()
        with pytest.raises(TimeoutError):
            receive_frame(ours, time.monotonic() + 0.3)
        done.set()
        thread.join()


def test_a_header_that_is_announced_as_large_is_dropped_before_it_arrives(worker, caplog):
    """Headers are not counted among what the worker holds."""
    with connect(worker) as peer:
        peer.sendall(struct.pack(">Q", 2**16 + 1))
        assert peer.recv(1) == b""
    assert "a frame of 65537 bytes: expected at most 65536" in caplog.text
    assert_serves(worker)


def test_many_large_messages_take_no_more_than_the_worker_holds(worker, monkeypatch):
    """Each is within its own bound; what is dropped no longer counts."""
    monkeypatch.setattr(client_app.worker_server, "max_held_bytes", 2**20)
    half = framed(header(worker)) + struct.pack(">Q", 2**20) + bytes(600_000)
    for _ in range(3):
        with connect(worker) as first, connect(worker) as second:
            first.sendall(half)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                second.sendall(half)
            wait_until(lambda: sum(worker.held.values()) == 600_000)
            assert_serves(worker)
        while worker.held:
            time.sleep(0.01)
