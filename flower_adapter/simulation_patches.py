"""Flower's simulation with our backend. Imports Ray only in the process of a simulation.

That process loads the ClientApp before it creates its backend, and `client_app.app` calls
`replace_backend` there. It puts `ray_backend.ClusterBackend` in the place of Flower's `RayBackend`,
and threads without a limit in the place of its `ThreadPoolExecutor()`: that one has
min(32, cores + 4), each waits for one worker, and further workers never get a message. The
backend learns how many nodes the simulation has, and when the run is over. Flower looks for
messages to the workers every 0.1 s; `deliver_messages`, in the place of its function, does so more
often. No public API for any.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from queue import Queue
from typing import Any

from flwr.app import Message

from flower_adapter import replace
from flower_adapter.simulation import (
    WorkerThreads,
    is_cluster,
    is_replaced,
    started,
    vce_api_name,
)
from protocol.ray_nodes import MAX_WORKERS
from protocol.ray_start import require_token

MIN_LOOK_S, MAX_LOOK_S, LOOK_SHARE = 0.01, 0.1, 0.01


def replace_backend() -> None:
    """Replace it once in a process that runs Flower's simulation; do nothing in any other."""
    module = sys.modules.get(vce_api_name)
    if module is None or is_replaced():
        return
    if not is_cluster():
        require_token()
    try:
        from flwr.server.superlink.fleet.vce.backend import raybackend

        from flower_adapter.ray_backend import ClusterBackend

        replace(raybackend, "RayBackend", ClusterBackend, ClusterBackend.__base__)
        module.run_api = limit_workers(module.run_api)  # type: ignore[attr-defined]
        module.add_messages_to_queue = deliver_messages  # type: ignore[attr-defined]
        replace(module, "ThreadPoolExecutor", WorkerThreads, ThreadPoolExecutor)
    except BaseException as error:  # the ServerApp waits for the backend
        started.set_exception(RuntimeError(f"Flower's simulation: {error}"))
        raise


def limit_workers(run_api: Callable[..., None]) -> Callable[..., None]:
    """Flower's `run_api` with a backend that starts at most one worker for each of its nodes.

    The backend also learns when the run is over.
    """

    @wraps(run_api)
    def limited(
        app_fn: Any,
        backend_fn: Callable[[], Any],
        nodes: Sized,
        state_factory: Any,
        contexts: Any,
        is_over: threading.Event,
        *rest: Any,
    ) -> None:
        def limited_backend() -> Any:
            backend = backend_fn()
            backend.max_workers = min(len(nodes), MAX_WORKERS)
            backend.is_over = is_over
            return backend

        run_api(app_fn, limited_backend, nodes, state_factory, contexts, is_over, *rest)

    return limited


def deliver_messages(
    state: Any, queue: Queue[Message], nodes: Mapping[int, int], is_over: threading.Event
) -> None:
    """Put each message to one of the nodes into the queue of the workers, until the run is over.

    Polls every 10 ms; less often, up to every 0.1 s, if polling takes more than 1 % of a core.
    """
    while not is_over.is_set():
        started = time.perf_counter()
        for node in nodes:
            for message in state.get_message_ins(node_id=node, limit=1):
                queue.put(message)
        took_s = time.perf_counter() - started
        is_over.wait(min(max(MIN_LOOK_S, took_s / LOOK_SHARE), MAX_LOOK_S))
