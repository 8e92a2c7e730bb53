"""Flower's simulation with our backend. Imports Ray only in the process of a simulation.

That process loads the ClientApp before it creates its backend, and `client_app.app` calls
`replace_backend` there. It puts `ray_backend.ClusterBackend` in the place of Flower's `RayBackend`,
and threads without a limit in the place of its `ThreadPoolExecutor()`: that one has
min(32, cores + 4), each waits for one worker, and the workers beyond never get a message. The
backend learns how many nodes the simulation has. No public way.
"""

import sys
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

from protocol.flower_compat import replace
from protocol.flower_compat.simulation import (
    WorkerThreads,
    is_replaced,
    started,
    vce_api_name,
)
from protocol.ray_nodes import MAX_WORKERS


def replace_backend() -> None:
    """Do so, once, in a process that runs Flower's simulation; nothing in any other."""
    module = sys.modules.get(vce_api_name)
    if module is None or is_replaced():
        return
    try:
        from flwr.server.superlink.fleet.vce.backend import raybackend

        from protocol.flower_compat.ray_backend import ClusterBackend

        replace(raybackend, "RayBackend", ClusterBackend, ClusterBackend.__base__)
        module.run_api = limit_workers(module.run_api)  # type: ignore[attr-defined]
        replace(module, "ThreadPoolExecutor", WorkerThreads, ThreadPoolExecutor)
    except BaseException as error:  # the ServerApp waits for the backend
        started.set_exception(RuntimeError(f"Flower's simulation: {error}"))
        raise


def limit_workers(run_api: Callable[..., None]) -> Callable[..., None]:
    """Flower's `run_api` with a backend that starts at most one worker for each of its nodes."""

    @wraps(run_api)
    def limited(app_fn: Any, backend_fn: Callable[[], Any], nodes: Sized, *rest: Any) -> None:
        def limited_backend() -> Any:
            backend = backend_fn()
            backend.max_workers = min(len(nodes), MAX_WORKERS)
            return backend

        run_api(app_fn, limited_backend, nodes, *rest)

    return limited
