"""The way from the ServerApp of a simulation to its workers. Imports no Ray.

The ServerApp is a thread of the process that has the workers; see `simulation_patches`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict

from protocol.ray_nodes import MAX_WORKERS

# variables that workers on other nodes get: Keel's, and those of the libraries that compute
shared_prefixes = (
    *("KEEL_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH_"),
    *("CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE"),
)
own_variables = ("KEEL_ENGINE", "KEEL_WORKER")  # of the process that has them
vce_api_name = "flwr.server.superlink.fleet.vce.vce_api"


LogLine = tuple[int, str]  # a level of `logging`, and a line


@dataclass(frozen=True)
class WorkerReply:
    """What one worker answered; `error`: one line, where it gave no answer."""

    node: str  # address of its machine in the cluster
    content: RecordDict | None
    error: str = ""
    log_lines: Sequence[LogLine] = ()  # on all workers


Ask = Callable[[Callable[[int], RecordDict]], Sequence[WorkerReply]]


class WorkerThreads(ThreadPoolExecutor):
    """As many threads as there are workers: in the place of Flower's `ThreadPoolExecutor()`."""

    def __init__(self) -> None:
        super().__init__(max_workers=MAX_WORKERS)


# `ClusterBackend.ask_workers` of this process's simulation, once it has started; RuntimeError, one
# line, if Ray or the workers could not be started
started: Future[Ask] = Future()


def is_replaced() -> bool:
    """Whether this process runs Flower's simulation, with our backend."""
    return getattr(sys.modules.get(vce_api_name), "ThreadPoolExecutor", None) is WorkerThreads


def has_own_backend(grid: Any) -> bool:
    """Whether the grid's nodes are, or will be, simulated by the workers of our backend.

    The ServerApp may ask before the process has loaded the ClientApp, which replaces the backend.
    """
    return type(grid).__name__ == "InMemoryGrid" and vce_api_name in sys.modules


def is_cluster() -> bool:
    """Whether Ray's workers may be on other machines."""
    return bool(os.environ.get("RAY_ADDRESS"))


def worker_variables() -> dict[str, str]:
    """The environment of workers on other nodes; they import what this process imports."""
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    names = [n for n in os.environ if n.startswith(shared_prefixes) and n not in own_variables]
    return {"PYTHONPATH": path} | {name: os.environ[name] for name in names}
