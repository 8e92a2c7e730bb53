"""The backend of Flower's simulation: guards on what it replaces, GPUs, workers that die."""

import ast
import importlib
import inspect
import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.simulation.ray_transport.ray_actor import ClientAppActor, VirtualClientEngineActor
from ray._private.node import Node as RayNode
from ray.exceptions import RayActorError

from flower_adapter import GPU_LOST, ray_backend, simulation_patches
from flower_adapter.ray_backend import ClusterBackend, Worker, gpu_share
from flower_adapter.simulation import WorkerThreads, vce_api_name, worker_variables
from flower_adapter.simulation_patches import deliver_messages, limit_workers
from protocol.messages import (
    array_record,
    contents_to_simulate,
    get_record,
    message_content,
    simulated_content,
    simulated_replies,
    simulated_reply,
)
from protocol.ray_nodes import MAX_WORKERS, Node
from protocol.ray_start import OWN_PYTHON
from server_app.preflight import START_TIMEOUT_S


def node(address, cpus, gpus=0.0, alive=True):
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return {
        "NodeID": address,
        "NodeManagerAddress": address,
        "Alive": alive,
        "Resources": resources,
    }


# --- what is replaced ----------------------------------------------------------------------------


def test_flower_waits_for_each_worker_in_a_thread_of_a_pool_with_a_limit():
    vce_api = importlib.import_module(vce_api_name)
    source = inspect.getsource(vce_api.run_api)
    assert "with ThreadPoolExecutor() as executor:" in source
    assert "for _ in range(backend.num_workers)" in source
    num = 100  # more than min(32, cores + 4)
    barrier = threading.Barrier(num + 1, timeout=30)
    with WorkerThreads() as threads:
        assert threads._max_workers == MAX_WORKERS
        for _ in range(num):
            threads.submit(barrier.wait)
        barrier.wait()  # all of them run at once


def test_flower_loads_the_clientapp_before_it_creates_the_backend():
    source = inspect.getsource(importlib.import_module(vce_api_name).start_vce)
    assert "from .backend.raybackend import RayBackend" in source
    assert source.index("client_app = app_fn()") < source.index("run_api(\n")


def test_ray_still_starts_unused_processes_by_the_methods_that_are_replaced():
    head, node = (
        inspect.getsource(getattr(RayNode, name))
        for name in ("start_head_processes", "start_ray_processes")
    )
    assert "self.start_api_server(" in head
    assert "self.start_monitor()" in head
    assert "self.start_log_monitor()" in node


@pytest.mark.end_to_end
def test_a_process_of_a_simulation_has_the_backend_and_no_other_imports_ray():
    script = (
        "import sys; {first}import client_app.app; "
        "from flower_adapter.simulation import is_replaced; "
        "b = sys.modules.get('flwr.server.superlink.fleet.vce.backend.raybackend'); "
        "print(is_replaced(), 'ray' in sys.modules, b and b.RayBackend.__name__); "
        f"m = sys.modules.get('{vce_api_name}'); "
        "print(m and (m.add_messages_to_queue.__module__, hasattr(m.run_api, '__wrapped__')))"
    )
    for first, expected in (
        ("", "False False None\nNone"),
        (
            f"import {vce_api_name}; ",
            f"True True ClusterBackend\n('{deliver_messages.__module__}', True)",
        ),
    ):
        command = [sys.executable, "-c", script.replace("{first}", first)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        assert done.stdout.strip() == expected


@pytest.mark.end_to_end
def test_the_serverapp_waits_for_a_backend_that_is_not_there_yet():
    """Its thread starts before the ClientApp is loaded; a preflight that is skipped checks nothing.

    One that cannot be put in place is an error there too.
    """
    script = (
        f"import sys, {vce_api_name}; "
        "from flwr.superlink.grid.inmemory_grid import InMemoryGrid; "
        "from flower_adapter.simulation import has_own_backend, is_replaced, started; "
        "print(has_own_backend(object.__new__(InMemoryGrid)), is_replaced()); "
        f"sys.modules['{vce_api_name}'].ThreadPoolExecutor = None\n"
        "try:\n    import client_app.app\n"
        "except SystemExit:\n    print(started.exception(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "True False"
    assert "not as in Flower 1.39" in second


def test_flowers_actor_runs_any_app_that_it_is_given():
    cid, reply, _ = VirtualClientEngineActor().run(
        lambda: lambda message, context: f"reply to {message}", "m", "7", "context"
    )
    assert (cid, reply) == ("7", "reply to m")
    assert hasattr(ClientAppActor, "options")


# --- resources -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "cpus", "gpus", "expected"),
    [
        ((1, 0), 8, 0, 8),
        ((3, 0), 8, 0, 2),
        ((1, 0.25), 8, 1, 4),
        ((1, 0.1), 64, 3, 30),
        ((1, 1), 8, 0, 0),
        ((16, 0), 8, 0, 0),
        ((4, 0.25), 8, 2, 2),
    ],
)
def test_a_node_has_as_many_workers_as_fit(each, cpus, gpus, expected):
    assert Node("a", cpus, gpus).num_workers(*each) == expected


def test_a_worker_that_asks_for_nothing_is_refused_and_a_node_has_no_more_than_threads(backend):
    assert Node("a", 8, 0).num_workers(0, 0) == 0  # it was 1,000,000,000
    assert Node("a", 1e9, 0).num_workers(1, 0) == MAX_WORKERS
    with pytest.raises(RuntimeError, match=r"^no node .* 0 CPUs and 0 GPUs .*-num-cpus"):
        backend(node("a", 8), resources={"num_cpus": 0})


def test_a_worker_starts_for_each_node_of_flowers_at_most_spread_over_the_machines(backend):
    nodes = node("a", 3), node("b", 1), node("c", 3)
    for num, expected in ((1, "a"), (4, "aabc"), (100, "aaabccc")):
        found, _ = backend(*nodes, max_workers=num)
        assert "".join(worker.node.address for worker in found.workers) == expected


def test_flower_is_asked_how_many_nodes_a_simulation_has():
    """The number of its nodes is what the backend is limited to; it learns when the run is over."""
    vce_api = importlib.import_module(vce_api_name)
    source = inspect.getsource(vce_api.start_vce)
    call = source[source.index("run_api(\n") :]
    assert call.split()[1:4] == ["app_fn,", "backend_fn,", "nodes_mapping,"]
    assert call.split()[6] == "f_stop,"
    made, is_over = [], threading.Event()

    def run_api(app_fn, backend_fn, nodes, *rest):
        made.append((backend_fn(), app_fn, nodes, rest))

    limited = limit_workers(run_api)
    rest = ("state", "contexts", is_over, "metrics")
    limited("app", lambda: SimpleNamespace(max_workers=MAX_WORKERS), {7: 0, 8: 1}, *rest)
    limited("app", lambda: SimpleNamespace(max_workers=0), range(MAX_WORKERS + 1), *rest)
    [(found, *others), (of_many, *_)] = made
    assert (found.max_workers, of_many.max_workers) == (2, MAX_WORKERS)
    assert others == ["app", {7: 0, 8: 1}, rest]
    assert found.is_over is is_over


def test_messages_to_workers_are_looked_for_as_flower_does():
    """With its arguments: each message once, in the order of the nodes, until the run is over."""
    vce_api = importlib.import_module(vce_api_name)
    tree = ast.parse(inspect.getsource(vce_api))  # the function itself may be replaced by now
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    names = [each.arg for each in functions["add_messages_to_queue"].args.args]
    assert names == ["state", "queue", "nodes_mapping", "f_stop"]
    assert "target=add_messages_to_queue," in inspect.getsource(vce_api.run_api)
    waiting = {7: ["a", "b"], 8: ["c"]}
    asked = []

    def get_message_ins(node_id, limit):
        asked.append(node_id)
        found = [waiting[node_id].pop(0)] if waiting[node_id] else []
        return found[:limit]

    found, is_over = queue.Queue(), threading.Event()
    state = SimpleNamespace(get_message_ins=get_message_ins)
    arguments = (state, found, {7: 0, 8: 1}, is_over)
    thread = threading.Thread(target=deliver_messages, args=arguments)
    thread.start()
    assert [found.get(timeout=10) for _ in range(3)] == ["a", "c", "b"]
    is_over.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert set(asked) == {7, 8}


@pytest.mark.parametrize(("looking_s", "pause_s"), [(0.00001, 0.01), (0.0005, 0.05), (2.0, 0.1)])
def test_looking_for_messages_takes_a_hundredth_of_a_core_or_flowers_interval(
    monkeypatch, looking_s, pause_s
):
    now, pauses = itertools.count(0.0, looking_s), []
    monkeypatch.setattr(simulation_patches.time, "perf_counter", lambda: next(now))
    is_over = SimpleNamespace(is_set=lambda: bool(pauses), wait=pauses.append)
    deliver_messages(SimpleNamespace(), queue.Queue(), {}, is_over)
    assert pauses == [pytest.approx(pause_s)]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 3), ({"num_cpus": 5}, 5), ({"address": "auto"}, None)]
)
def test_ray_counts_the_cores_that_this_process_may_use(monkeypatch, given, expected):
    """Under taskset or in a job of Slurm it counted those of the machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(".")
    monkeypatch.setattr(ray_backend, "num_cores", lambda: 3)
    monkeypatch.setattr(ray_backend, "get_num_cpus", lambda: 8.5)  # a container's CPU quota
    monkeypatch.setattr(ray_backend, "skip_unused_processes", lambda **_: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    options = {}
    monkeypatch.setattr("ray.init", lambda **found: options.update(found))
    monkeypatch.setattr(ClusterBackend, "__init__", lambda self: None)
    made = ClusterBackend()
    made.init_args_key = "init_args"
    made.init_ray({"init_args": given})
    assert options.get("num_cpus") == expected


def test_where_no_gpus_are_asked_for_each_worker_has_one_if_there_are_any():
    cpu, gpu = Node("a", 8, 0), Node("b", 8, 2)
    assert gpu_share([cpu], {}) == 0
    assert gpu_share([cpu, gpu], {}) == 1
    assert gpu_share([cpu, gpu], {"KEEL_CPU_WORKERS": "1"}) == 0


@pytest.mark.parametrize(
    ("given", "num_gpus", "expected"), [(None, 2, True), (0.5, 2, False), (None, 0, False)]
)
def test_that_workers_have_a_gpu_unasked_is_a_note_of_their_replies(
    backend, task_identity, monkeypatch, given, num_gpus, expected
):
    resources = {"num_cpus": 1} | ({"num_gpus": given} if given else {})
    found, ray = backend(node("a", 1, num_gpus))
    monkeypatch.delenv("KEEL_CPU_WORKERS", raising=False)
    found.client_resources_key = "client_resources"
    found._validate_client_resources({"client_resources": resources})
    ray.get = lambda future: ("", Message(RecordDict(), reply_to=future.message), None)
    [reply] = found.ask_workers(lambda _: RecordDict())
    texts = [text for level, text in reply.log_lines if level == logging.INFO]
    assert len(texts) == expected
    assert all("a GPU of its own" in text and "--gpus-per-client" in text for text in texts)


def test_workers_get_the_variables_of_keel_and_of_the_libraries_that_compute(monkeypatch):
    environment = {
        "KEEL_WORKER": "/socket",
        "KEEL_ENGINE": "1",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "x",
        "CUDA_VISIBLE_DEVICES": "0",  # Ray sets each worker's own
    }
    shared = {"KEEL_HOME": "/a", "OMP_NUM_THREADS": "2"}
    # these change the last bits
    shared |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    shared |= {"NVIDIA_TF32_OVERRIDE": "0"}
    monkeypatch.setattr("os.environ", environment | shared)
    assert worker_variables() == {"PYTHONPATH": os.pathsep.join([*sys.path, ""])} | shared


# --- workers that die ----------------------------------------------------------------------------


@dataclass(eq=False)
class FakeFuture:
    address: str
    starts: bool
    message: Message | None = None


class FakeReply(str):
    """Its text; `code`: of an error."""

    code = 0

    @property
    def error(self):
        return Error(self.code, str(self))

    def has_error(self):
        return bool(self.code)


class FakeRay:
    """Actors that answer, or die while they are asked. `dies`: the addresses that do.

    kills: the logical clients, by number, on whose messages any actor dies.
    loses_gpu: the addresses whose actors are left without their GPU by a message.
    late: the numbers, in the order in which they were asked for, of actors that never start.
    """

    def __init__(self, nodes, late):
        self.all_nodes, self.dies, self.asked, self.killed = nodes, set(), [], []
        self.late, self.num_actors, self.waited_s = late, 0, 0
        self.loses_gpu, self.kills = set(), set()

    def nodes(self):
        return self.all_nodes

    def actor(self, address):
        future = FakeFuture(address, self.num_actors not in self.late)
        self.num_actors += 1

        def remote(app_fn=None, message=None, client=None, context=None):
            return replace(future, message=message)

        method = SimpleNamespace(remote=remote)
        return SimpleNamespace(address=address, run=method, __ray_ready__=method)

    def wait(self, futures, num_returns, timeout):
        late = [future for future in futures if not future.starts]
        self.waited_s += timeout if late else 0
        return [future for future in futures if future.starts], late

    def get(self, future):
        self.asked.append(future.address)
        if future.address in self.dies:
            raise RayActorError(error_msg="the worker died.\nmore about it")
        if future.message and "simulated" in future.message.content:
            return "7", self.reply_of_logical_clients(future.message), "context"
        reply = FakeReply(f"reply of {future.address}")
        if future.address in self.loses_gpu:
            reply = FakeReply("RuntimeError: CUDA error: unspecified launch failure")
            reply.code = GPU_LOST
        return "7", reply, "context"

    def reply_of_logical_clients(self, message):
        replies = []
        for client, _, content in contents_to_simulate(message.content):
            if client in self.kills:
                raise RayActorError(error_msg="the worker died.")
            assert get_record(content, "client", ConfigRecord)["counted-round"] == 10 + client
            replies.append(RecordDict({"metrics": MetricRecord({"client": client})}))
        return Message(simulated_reply(replies), reply_to=message)

    def kill(self, actor):
        self.killed.append(actor.address)


@pytest.fixture
def backend(monkeypatch):
    """backend(nodes...) -> (a backend with as many workers on each as it has CPUs, its Ray)."""

    def made(*nodes, late=(), resources=None, max_workers=MAX_WORKERS):
        fake = FakeRay(list(nodes), late)
        monkeypatch.setattr(ray_backend, "ray", fake)
        monkeypatch.setattr("ray.nodes", fake.nodes)
        monkeypatch.setattr(
            ClusterBackend, "new_worker", lambda self, node: Worker(fake.actor(node.id), node)
        )
        monkeypatch.setattr(ClusterBackend, "__init__", lambda self: None)
        found = ClusterBackend()
        found.changed, found.own = threading.Condition(), {}
        found.is_over, found.log_lines = threading.Event(), []
        found.workers, found.client_resources = [], resources or {"num_cpus": 1}
        found.max_workers = max_workers
        monkeypatch.setattr(ray_backend, "started", Future())
        found.build(lambda: None)
        return found, fake

    return made


@pytest.mark.parametrize(
    ("variable", "given", "address", "python"),
    [
        ("", {}, "local", OWN_PYTHON["py_executable"]),
        ("", {"address": "auto"}, "auto", None),
        ("10.0.0.1:6379", {}, None, None),  # each node has a path of its own
    ],
)
def test_only_a_cluster_that_is_named_is_used(monkeypatch, variable, given, address, python):
    """Without an address, Ray takes that of the last `ray start` here, or waits for one gone."""

    def init(runtime_env, **options):
        started.append((options.get("address"), runtime_env.get("py_executable")))

    started = []
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(".")  # it changes the directory
    monkeypatch.setattr(ray_backend, "skip_unused_processes", lambda **_: None)
    monkeypatch.setattr("ray.is_initialized", lambda: bool(started))
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(ClusterBackend, "__init__", lambda self: None)
    made = ClusterBackend()
    made.init_args_key = "init_args"
    made.init_ray({"init_args": {"log_to_driver": False, **given}})
    assert started == [(address, python)]


@pytest.mark.end_to_end
def test_ray_starts_workers_of_a_python_whose_path_has_a_blank(tmp_path):
    """It tried again for good, and a run waited: `exec: /home/me/My: cannot execute`."""
    python = tmp_path / "it's a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    code = (
        "from ray._private.runtime_env.context import RuntimeEnvContext as Context; "
        "from ray.core.generated.common_pb2 import Language; "
        "from protocol.ray_start import OWN_PYTHON; "
        "Context(**{given}).exec_worker(['-c', 'import sys; print(sys.executable)'], "
        "Language.PYTHON)"
    )
    for given, expected in (("OWN_PYTHON", f"{python}\n"), ("{}", "")):
        done = subprocess.run(
            [python, "-c", code.replace("{given}", given)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.stdout == expected


# --- which worker gets a message -----------------------------------------------------------------


def test_a_node_has_a_worker_of_its_own_and_another_while_that_is_busy(backend):
    found, _ = backend(node("a", 1), node("b", 1))
    a, b = found.next_idle(2), found.next_idle(3)
    for nodes, workers in (((2, 3), (a, b)), ((3, 2), (b, a)), ((2, 2), (a, b)), ((3, 3), (b, a))):
        found.put_back(b)
        found.put_back(a)
        assert [found.next_idle(each) for each in nodes] == list(workers)
    found.put_back(b)
    assert found.next_idle(4) is b  # there are fewer workers than nodes


def test_a_node_takes_no_others_worker_while_one_is_free(backend):
    found, _ = backend(node("a", 1), node("b", 1), node("c", 1))
    a, b = found.next_idle(2), found.next_idle(3)
    found.put_back(a)
    assert found.next_idle(3).node.address == "c"
    found.put_back(b)
    assert found.next_idle(2) is a


@pytest.fixture
def asked(task_identity):
    message = Message(RecordDict(), dst_node_id=2, message_type=MessageType.TRAIN)
    return message, Context(1, 2, {"partition-id": 7}, RecordDict(), {})


def test_workers_larger_than_any_node_are_an_error_of_one_line_for_the_serverapp_too(backend):
    with pytest.raises(RuntimeError) as error:
        backend(node("10.0.0.1", 0), node("10.0.0.2", 0.5))
    assert str(error.value).startswith("no node has the 1 CPU and 0 GPUs of one worker ")
    assert str(error.value).endswith(
        ": 10.0.0.1 has 0 CPUs and 0 GPUs; 10.0.0.2 has 0.5 CPUs and 0 GPUs"
    )
    assert ray_backend.started.exception() is error.value


@pytest.mark.parametrize("gpus", [1.5, 0.00001])
def test_a_share_of_a_gpu_that_ray_cannot_give_is_an_error_that_names_the_setting(backend, gpus):
    with pytest.raises(ValueError, match=r"^client-resources-num-gpus = 1\S+: expected a") as error:
        backend(node("a", 8, 4), resources={"num_cpus": 1, "num_gpus": gpus})
    assert ray_backend.started.exception() is error.value


def test_a_simulation_without_nodes_is_an_error_that_names_the_setting(backend):
    with pytest.raises(RuntimeError, match=r"^num-supernodes = 0: ") as error:
        backend(node("10.0.0.1", 2), max_workers=0)
    assert ray_backend.started.exception() is error.value


def test_workers_whose_cpus_another_job_has_are_left_out_and_named(
    backend, task_identity, monkeypatch
):
    """They waited for the other job's end, and so did the run, without a word."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found, ray = backend(node("10.0.0.1", 1), node("10.0.0.2", 2), late={1})
    assert [worker.node.address for worker in found.workers] == ["10.0.0.1", "10.0.0.2"]
    assert found.idle == found.workers
    assert ray.killed == ["10.0.0.2"]
    assert 0 < ray.waited_s < START_TIMEOUT_S
    assert ray_backend.started.done()
    [(level, line)] = found.log_lines
    assert level == logging.WARNING
    assert line.startswith("1 of 3 workers did not start within 120 s, probably because ")
    assert "on 10.0.0.2" in line
    numbers = []
    ray.get = lambda _: (None, Message(RecordDict(), 1, "query"), None)
    found.ask_workers(lambda number: numbers.append(number) or RecordDict())
    assert numbers == [0, 0]  # one on each machine reads the data


def test_a_slow_worker_is_not_dropped_where_keel_started_ray(backend, monkeypatch):
    """On a loaded machine it was dropped after two minutes, or the run ended."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    _, ray = backend(node("10.0.0.1", 3), late={1})
    assert ray.waited_s >= START_TIMEOUT_S  # the ServerApp has ended by then


def test_a_cluster_without_a_free_cpu_is_an_error_of_one_line(backend, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    message = r"^no worker started within 120 s, probably because other jobs use"
    with pytest.raises(RuntimeError, match=message):
        backend(node("10.0.0.1", 2), late={0, 1})
    assert ray_backend.started.exception() is not None


def test_a_message_is_played_again_on_another_worker_and_the_dead_one_is_replaced(backend, asked):
    found, ray = backend(node("a", 1), node("b", 1))
    ray.dies = {"a"}
    assert found.process_message(*asked) == ("reply of b", "context")
    assert ray.asked == ["a", "b"]
    assert found.num_workers == 2
    assert ray.killed == ["a"]
    ray.dies = set()
    new = found.next_idle(2)
    assert new.node.address == "a"
    found.put_back(new)
    assert found.next_idle(2) is new


def test_a_message_whose_worker_died_goes_to_the_worker_that_has_waited_longest(backend, asked):
    found, ray = backend(node("a", 1), node("b", 1))
    a, b = found.next_idle(2), found.next_idle(3)
    found.put_back(b)
    found.put_back(a)
    ray.dies = {"a"}  # each that is started there
    assert found.process_message(*asked) == ("reply of b", "context")
    assert ray.asked == ["a", "b"]


def test_a_worker_that_still_trains_does_not_hold_up_the_end_of_the_run(backend, asked):
    """A run whose last round exceeded `round-timeout` ended when the training did, or never."""
    found, ray = backend(node("a", 1))
    looks = iter([[], [], ["done"]])
    ray.wait = lambda futures, num_returns, timeout: (next(looks), futures)
    assert found.process_message(*asked) == ("reply of a", "context")  # while the run goes on
    looks = iter([[]])
    found.is_over.set()
    reply, _ = found.process_message(*asked)
    assert reply.error.reason == "the run is over"


def test_a_message_on_which_each_worker_dies_is_an_error_of_one_line(backend, asked):
    found, ray = backend(node("a", 1), node("b", 1))
    ray.dies = {"a", "b"}
    with pytest.raises(RuntimeError, match=r"^3 workers died on its messages: the worker died\.$"):
        found.process_message(*asked)
    assert len(ray.asked) == 3
    ray.dies = set()
    assert found.process_message(*asked)[1] == "context"  # the next one has a worker


@pytest.mark.parametrize("kills", [{2}, {0, 2, 3}])
def test_a_client_that_kills_its_workers_takes_no_other_client_with_it(
    backend, task_identity, kills
):
    found, ray = backend(node("a", 1), node("b", 1))
    ray.kills = kills
    arrays = array_record({"w": torch.zeros(2)})
    clients = [0, 2, 3]
    contents = [message_content(ConfigRecord(), arrays, ArrayRecord(), 10 + c) for c in clients]
    whole = simulated_content(contents, clients, 4)
    message = Message(whole, dst_node_id=2, message_type=MessageType.TRAIN)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    reply, _ = found.process_message(message, context)
    for client, each in zip(clients, simulated_replies(reply.content, 3), strict=True):
        if client in kills:
            assert each.reason == "3 workers died on its messages: the worker died."
        else:
            assert each["metrics"]["client"] == client
    assert len(ray.killed) == 2 + len(kills)
    assert found.num_workers == 2


def test_a_worker_that_can_no_longer_use_its_gpu_is_replaced_as_one_that_died(backend, asked):
    """It failed each message that it was given from then on."""
    found, ray = backend(node("a", 1), node("b", 1))
    ray.loses_gpu = {"a"}
    assert found.process_message(*asked) == ("reply of b", "context")
    assert ray.killed == ["a"]
    assert found.num_workers == 2
    ray.loses_gpu = {"a", "b"}
    with pytest.raises(RuntimeError, match=r"^3 workers died on .*: .*unspecified launch"):
        found.process_message(*asked)


def test_the_workers_of_a_dead_node_are_not_counted_nor_replaced(backend, asked):
    found, ray = backend(node("a", 4), node("b", 1))
    ray.dies, ray.all_nodes = {"a"}, [node("a", 0, alive=False), node("b", 1)]
    assert found.process_message(*asked) == ("reply of b", "context")
    assert ray.asked == ["a"] * 4 + ["b"]
    assert found.num_workers == 1


def test_without_any_worker_left_a_message_is_an_error(backend, asked, monkeypatch):
    monkeypatch.setattr(ray_backend, "LOOK_S", 0.01)
    found, ray = backend(node("a", 2))
    ray.dies, ray.all_nodes = {"a"}, [node("a", 0, alive=False)]
    with pytest.raises(RuntimeError, match="no worker of the simulation is left"):
        found.process_message(*asked)
