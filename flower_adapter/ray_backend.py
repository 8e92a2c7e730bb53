"""The backend of Flower's simulation, on one machine or on a Ray cluster that exists.

Replaces `RayBackend` (see `simulation_patches`), whose options it takes:

- On a cluster ($RAY_ADDRESS) Flower gives workers its `sys.path` and nothing else of the
  environment; here also `worker_variables`.
- Workers look for modules in the folder of the process that starts them, which is the one that the
  SuperLink was started in; here it is the app's.
- Without an address, Flower's `ray.init` joins the cluster of the last `ray start` on the machine,
  or waits for one that is gone. Here a cluster has to be named.
- Flower's workers are on any node; here each has a node, so that the preflight can name it.
- Flower waits forever for workers whose CPUs another job uses. Here the run continues without
  them.
- Flower starts a worker for each of the machine's CPUs. Here only those that this process may use
  count, and no more workers start than the simulation has nodes.
- Flower returns a worker that died, or lost its GPU to a CUDA error, to its pool, where it fails
  every message it gets. Here it is replaced, and its message is sent again to another worker.
- Flower gives a message to the worker that has waited longest. Here each of Flower's nodes has one
  of its own where there are enough, so that how fast it trains can be measured.
- Flower waits at the end of a run until no worker trains, forever if one hangs. Here it ends them.
- With `client-resources-num-gpus` unset, Flower's workers either see no GPU or all share the first
  one. Here each has a GPU, if there are any.

No public way for any of these.
"""

import copy
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import PARTITION_ID_KEY, ErrorCode
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.simulation.ray_transport.ray_actor import ClientAppActor
from ray._private.utils import get_num_cpus
from ray.exceptions import ObjectLostError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flower_adapter import GPU_LOST, assign_message_id
from flower_adapter.simulation import (
    LogLine,
    WorkerReply,
    is_cluster,
    started,
    worker_variables,
)
from protocol.config import app_folder
from protocol.processes import num_cores
from protocol.ray_nodes import CPU_WORKERS, MAX_WORKERS, Node, check_gpus, living_nodes
from protocol.ray_start import OWN_PYTHON, skip_unused_processes
from protocol.text import num_of, shortened

log = logging.getLogger("keel.server")
MAX_ATTEMPTS = 3  # of a message whose worker dies, on nodes that are alive
# for workers to start, before and after the log mentions the late ones
SOON_S, LATE_S = 20.0, 100.0
OWN_RAY_S = 600.0  # instead of LATE_S where no other job uses Ray: the ServerApp waits no longer
LOOK_S = 1.0  # between two looks whether any worker is left, and whether the run is over
LOST = (RayActorError, ObjectLostError)  # the worker, or its node, is gone


@dataclass(eq=False)
class Worker:
    """An actor and the node that it is on."""

    actor: Any
    node: Node


def reason_of(error: BaseException) -> str:
    """An error of Ray's without its traceback: the last line that says something."""
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    reason = lines[-1] if lines else type(error).__name__
    if isinstance(error, RayActorError):
        reason = lines[0] if lines else reason
    return reason


def gpu_share(nodes: Sequence[Node], environment: Mapping[str, str]) -> float:
    """GPUs for each worker where nothing was asked for: 1 if there are any."""
    return float(any(node.num_gpus >= 1 for node in nodes) and not environment.get(CPU_WORKERS))


class ClusterBackend(RayBackend):
    """See the module."""

    def __init__(self, backend_config: BackendConfig) -> None:
        self.idle: list[Worker] = []  # who has waited longest first
        self.own: dict[int, Worker] = {}  # by node of Flower's
        self.workers: list[Worker] = []
        self.max_workers = MAX_WORKERS
        self.changed = threading.Condition()  # of these
        self.is_over = threading.Event()  # the ServerApp has ended
        self.log_lines: list[LogLine] = []  # for the run's log, which does not exist yet
        try:
            super().__init__(backend_config)
        except Exception as error:
            address, reason = os.environ.get("RAY_ADDRESS", ""), " ".join(str(error).split())
            what = f"Ray cluster {address}" if address else "Ray did not start"
            failed = RuntimeError(f"{what}: {reason}")
            started.set_exception(failed)
            raise failed from None

    def init_ray(self, backend_config: BackendConfig) -> None:
        """Start Ray, or join the cluster, with the environment of this process.

        From the app's folder: workers look for modules in the folder of this process first, which
        is the one that the SuperLink was started in, another checkout's perhaps.
        """
        os.chdir(app_folder)
        options: dict[str, Any] = dict(backend_config.get(self.init_args_key) or {})
        environment: dict[str, Any] = {"env_vars": worker_variables()}
        if not is_cluster():
            options.setdefault("include_dashboard", False)
            if options.setdefault("address", "local") == "local":
                options.setdefault("num_cpus", min(num_cores(), int(get_num_cpus())))
                environment |= OWN_PYTHON
            skip_unused_processes(forwards_output=options.get("log_to_driver", True))
        if not ray.is_initialized():
            ray.init(runtime_env=environment, **options)

    def _validate_client_resources(self, config: BackendConfig) -> dict[str, int | float]:
        resources = super()._validate_client_resources(config)
        if not resources.get("num_gpus"):
            resources["num_gpus"] = gpu_share(living_nodes(), os.environ)
            if resources["num_gpus"]:
                text = (
                    "each worker has a GPU of its own: client-resources-num-gpus "
                    "(--gpus-per-client) sets another share, "
                    f"${CPU_WORKERS}=1 keeps the workers on the CPU"
                )
                self.log_lines.append((logging.INFO, text))
        return resources

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """Start as many workers as fit, and at most `max_workers`."""
        self.app_fn = app_fn
        try:
            self.start_workers()
        except (RuntimeError, ValueError) as error:
            started.set_exception(error)
            raise
        self.idle = list(self.workers)
        started.set_result(self.ask_workers)

    def start_workers(self) -> None:
        """Start them, spread over the nodes. RuntimeError, one line, if there is none.

        ValueError, one line, for a number of GPUs that Ray cannot give a worker.
        """
        if not self.max_workers:
            raise RuntimeError("num-supernodes = 0: a simulation needs at least 1 worker")
        nodes, resources = living_nodes(), self.client_resources
        cpus, gpus = resources["num_cpus"], resources.get("num_gpus", 0)
        check_gpus("client-resources-num-gpus =", gpus)
        fits = [
            (number, i)
            for i, node in enumerate(nodes)
            for number in range(node.num_workers(cpus, gpus))
        ]
        for i in sorted(i for _, i in sorted(fits)[: self.max_workers]):
            self.workers.append(self.new_worker(nodes[i]))
        if not self.workers:
            raise RuntimeError(
                f"no node has the {num_of('CPU', cpus)} and {num_of('GPU', gpus)} of one worker "
                "(client-resources-num-cpus, -num-gpus; --cpus-per-client, --gpus-per-client; "
                "at least one must be > 0): " + "; ".join(map(str, nodes))
            )
        self.drop_late_workers()

    def drop_late_workers(self) -> None:
        """Wait for the workers, and drop those that do not start: other jobs use their CPUs.

        Where Keel started Ray, no other job uses it: there late workers are only slow.
        """
        late_s = LATE_S if is_cluster() else OWN_RAY_S
        num = len(self.workers)
        starting = {worker.actor.__ray_ready__.remote(): worker for worker in self.workers}
        _, late = ray.wait(list(starting), num_returns=num, timeout=SOON_S)
        if late:
            log.info(
                "%d of %s not started yet: waiting up to %g s more",
                len(late),
                num_of("worker has", num, "workers have"),
                late_s,
            )
            _, late = ray.wait(late, num_returns=len(late), timeout=late_s)
        for future in late:
            ray.kill(starting[future].actor)
            self.workers.remove(starting[future])
        if not self.workers:
            raise RuntimeError(
                f"no worker started within {SOON_S + late_s:g} s, probably because other jobs "
                "use the cluster's CPUs or GPUs; start the run when they have ended "
                "(`ray status` shows what is free)"
            )
        if late:
            addresses = sorted({starting[future].node.address for future in late})
            text = (
                f"{len(late)} of {num} workers did not start within {SOON_S + late_s:g} s, "
                f"probably because other jobs use the CPUs or GPUs on {shortened(addresses)}: the "
                f"run continues with {len(self.workers)}"
            )
            self.log_lines.append((logging.WARNING, text))

    def new_worker(self, node: Node) -> Worker:
        """A worker on this node."""
        place = NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = ClientAppActor.options(  # type: ignore[attr-defined]
            **self.client_resources, scheduling_strategy=place
        ).remote()
        return Worker(actor, node)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.workers)

    def next_idle(self, node: int | None) -> Worker:
        """The worker of Flower's node if it is idle, else another; RuntimeError if there is none.

        None: the worker that has waited longest.
        """
        with self.changed:
            while not self.idle:
                if not self.changed.wait(LOOK_S) and (not self.workers or self.is_over.is_set()):
                    raise RuntimeError("no worker of the simulation is left")
            worker = self.idle[0]
            if node is not None:
                free = [each for each in self.idle if each not in self.own.values()]
                if free:
                    self.own.setdefault(node, free[0])
                own = self.own.get(node)
                worker = own if own in self.idle else (free or self.idle)[0]
            self.idle.remove(worker)
            return worker

    def put_back(self, worker: Worker) -> None:
        """The worker is idle."""
        with self.changed:
            self.idle.append(worker)
            self.changed.notify()

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """The reply of an idle worker, the node's own if it can be; of another one if it dies.

        Once two workers have died on a message for several clients, each of these is asked alone,
        so that a client that kills its worker does not make others fail.
        """
        return self.reply_of_worker(message, context, MAX_ATTEMPTS)

    def reply_of_worker(
        self, message: Message, context: Context, attempts_left: int
    ) -> tuple[Message, Context]:
        """As `process_message`; RuntimeError once `attempts_left` more workers have died on it."""
        client = str(context.node_config[PARTITION_ID_KEY])
        simulated = message.content.get("simulated")
        is_for_many = simulated and len(simulated["clients"]) > 1  # type: ignore[arg-type]
        node: int | None = message.metadata.dst_node_id
        while True:
            worker = self.next_idle(node)
            try:
                future = worker.actor.run.remote(self.app_fn, message, client, context)
                while not ray.wait([future], num_returns=1, timeout=LOOK_S)[0]:
                    if self.is_over.is_set():  # nobody reads the reply
                        ended = Error(ErrorCode.UNKNOWN, "the run is over")
                        return Message(ended, reply_to=message), context
                _, reply, updated = ray.get(future)
            except LOST as error:
                reason = reason_of(error)
            except BaseException:
                self.put_back(worker)
                raise
            else:
                if not reply.has_error() or reply.error.code != GPU_LOST:
                    self.put_back(worker)
                    return reply, updated
                reason = reply.error.reason
            node = None
            attempts_left -= self.replace_lost(worker)
            if not attempts_left:
                raise RuntimeError(f"{MAX_ATTEMPTS} workers died on its messages: {reason}")
            is_last = attempts_left == 1 and is_for_many
            log.warning(
                "a worker on %s is lost (%s): its %s",
                worker.node.address,
                reason,
                "clients are asked again, one by one" if is_last else "message is sent again",
            )
            if is_last:
                return self.one_by_one(message, context), context

    def one_by_one(self, message: Message, context: Context) -> Message:
        """The reply to a message for several clients, each asked alone for a last attempt."""
        from protocol.messages import contents_one_by_one, reply_of_all  # imports torch

        def replied(content: RecordDict) -> RecordDict | Error:
            own = copy.copy(message)
            own.content = content
            try:
                reply, _ = self.reply_of_worker(own, context, 1)
            except Exception as error:
                return Error(ErrorCode.UNKNOWN, reason_of(error))
            return reply.error if reply.has_error() else reply.content

        replies = map(replied, contents_one_by_one(message.content))
        return Message(reply_of_all(replies), reply_to=message)

    def replace_lost(self, worker: Worker) -> bool:
        """Start another worker on the node of one that died; whether the node is alive."""
        is_alive = any(node.id == worker.node.id for node in living_nodes())
        with self.changed:
            self.workers.remove(worker)
            self.own = {node: own for node, own in self.own.items() if own is not worker}
            if is_alive and not self.is_over.is_set():
                ray.kill(worker.actor)
                new = self.new_worker(worker.node)
                self.workers.append(new)
                self.put_back(new)
        return is_alive

    def ask_workers(self, content: Callable[[int], RecordDict]) -> Sequence[WorkerReply]:
        """Every worker's answer to a query with `content(n)`, n its number on its node."""
        asked = []
        counts: Counter[str] = Counter()
        for worker in list(self.workers):
            number = counts[worker.node.address]
            counts[worker.node.address] += 1
            message = Message(content(number), dst_node_id=1, message_type=MessageType.QUERY)
            assign_message_id(message, f"preflight-{worker.node.address}-{number}")
            context = Context(message.metadata.run_id, 1, {}, RecordDict(), {})
            asked.append(worker.actor.run.remote(self.app_fn, message, "", context))
        replies = []
        for worker, future in zip(list(self.workers), asked, strict=True):
            try:
                _, reply, _ = ray.get(future)
                error = reply.error.reason if reply.has_error() else ""
                found = None if error else reply.content
                replies.append(WorkerReply(worker.node.address, found, error, self.log_lines))
            except RayError as error:
                replies.append(WorkerReply(worker.node.address, None, reason_of(error)))
        return replies

    def terminate(self) -> None:
        """End the workers and leave Ray."""
        self.is_over.set()
        for worker in self.workers:
            ray.kill(worker.actor)
        super().terminate()
