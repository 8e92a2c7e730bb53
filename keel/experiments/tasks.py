"""Runs as Ray tasks: on this machine, or on a cluster that exists.

A task executes `keel run` or `keel resume` in a process of its own. It holds the run's lock
meanwhile, so several runners, on several machines, share the runs of one output directory.
"""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from keel.deployment.cluster import cluster_nodes
from keel.experiments.runs import FAILED, FINISHED, Run
from keel.interrupts import interruptible
from protocol.code import code_version
from protocol.config import RunConfig
from protocol.files import private_files
from protocol.processes import end_with_parent, num_cores
from protocol.ray_nodes import Node, living_nodes
from protocol.ray_start import require_token, skip_unused_processes, worker_variables
from protocol.text import in_one_line, num_of

ENDED = "ended; repeat the command to resume from the last finished rounds"
BUSY, KILLED = "busy", "killed"  # how a task may end, beside a run's status
GRACE_S = 60.0  # for an interrupted run to save what it has
STORE_BYTES = 80 * 2**20  # of Ray's objects: the least it accepts, as runs exchange none


@dataclass(frozen=True)
class Resources:
    """What runs are executed with: at most `workers` at once, 0: as many as fit.

    cpus, gpus: each run's share; None: a GPU, or a part where there are fewer than workers.
    address: of a Ray cluster; empty: a Ray of our own on this machine. named: the option or the
    variable with the address.
    """

    workers: int = 0
    cpus: float = 1.0
    gpus: float | None = None
    address: str = ""
    named: str = "ray"

    def gpus_on(self, nodes: Sequence[Node]) -> float:
        """Each run's share of a GPU on these machines. ValueError if not one run fits."""
        total = sum(node.num_gpus for node in nodes)
        gpus = self.gpus
        if gpus is None:
            gpus = 1 / math.ceil(self.workers / total) if self.workers and total else 1.0
            gpus = int(1e4 * gpus) / 1e4 if total else 0.0  # Ray's resolution
        if not any(node.num_workers(self.cpus, gpus) for node in nodes):
            raise ValueError(
                f"no machine has the {num_of('CPU', self.cpus)} and {num_of('GPU', gpus)} that a "
                f"run needs (--cpus-per-run, --gpus-per-run): {'; '.join(map(str, nodes))}"
            )
        return gpus


@contextmanager
def ray_tasks(resources: Resources, output: Path, with_data: Sequence[RunConfig]) -> Iterator[Any]:
    """Within, Ray is there; gives a remote function that executes a run, see `execute`.

    with_data: a config for each data set, of which every machine of a cluster has to have the same.
    ValueError, one line, if the cluster or a machine of it cannot be used.
    """
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # under `uv run`: no copy of the sources
    if resources.address:
        cluster_nodes(resources.address, resources.named)  # or why there are none, in one line
    else:
        require_token()  # Ray's ports are open to other users, who could execute code
    import ray

    if not resources.address:
        skip_unused_processes(forwards_output=False)
    # one thread a run, on which the bits depend, unless its config says otherwise
    variables = worker_variables() | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    folder = tempfile.TemporaryDirectory(prefix="keel-ray-", dir="/tmp")  # sockets: short paths
    with folder as own, interruptible(partial(end_at_once, own), False, ENDED):
        options: dict[str, Any] = {
            "address": "local",
            "num_cpus": max(num_cores(), math.ceil(resources.workers * resources.cpus)),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_temp_dir": own,
            "_node_ip_address": "127.0.0.1",  # stays as it is when the network changes
            "_system_config": {"worker_niceness": 0},  # by default 15 more than ours
        }
        if resources.address:
            options = {"address": resources.address}
        terminate = signal.getsignal(signal.SIGTERM)
        try:
            with warnings.catch_warnings(action="ignore"):
                ray.init(
                    runtime_env={"env_vars": variables},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **options,
                )
            signal.signal(signal.SIGTERM, terminate)  # Ray has its own
            nodes = living_nodes()
            gpus = resources.gpus_on(nodes)
            if resources.address:
                check_machines(nodes, output, with_data)
            # not Ray's retries: they are silent, and without end where the memory is too small
            yield ray.remote(num_cpus=resources.cpus, num_gpus=gpus, max_retries=0)(execute)
        finally:
            ray.shutdown()


def end_at_once(folder: str) -> None:
    """Kill the processes of our Ray, which name its folder, and remove it; their runs end too."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if folder.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def check_machines(nodes: Sequence[Node], output: Path, with_data: Sequence[RunConfig]) -> None:
    """ValueError naming a machine of the cluster that cannot execute runs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    data = [(config, digest_of_data(config)) for config in with_data]
    asked = {}
    for node in nodes:
        place: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
        check: Any = ray.remote(num_cpus=0, scheduling_strategy=place)(unfit)
        asked[node.address] = check.remote(output / "jobs", code_version(), data)
    for address, task in asked.items():
        if reason := ray.get(task):
            raise ValueError(f"{address} {reason}")


def unfit(folder: Path, code: str, data: Sequence[tuple[RunConfig, str]] = ()) -> str:
    """Why this machine cannot execute runs in this folder; empty if it can.

    code, data: the runner's; of data, the digest for each config.
    """
    if not folder.is_dir():
        return f"does not see {folder.parent}: set --output to a folder that all machines share"
    if code != code_version():
        return f"runs {code_version()}, this one {code}: install the same on all"
    for config, digest in data:
        if (found := digest_of_data(config)) != digest:
            return (
                f"has other data for source = {config.data.source!r}, with the digest {found}, "
                f"this one {digest}: copy this one's to it"
            )
    return ""


def digest_of_data(config: RunConfig) -> str:
    """The digest of this machine's copy of a run's data."""
    from client_app.machine import data_digest
    from client_app.setup import open_source

    return data_digest(open_source(config))


def execute(run: Run, code: str) -> tuple[str, str]:
    """Resume the run, or start it, in a process of its own.

    Returns its status and the reason if it failed. BUSY: another runner executes it. KILLED: its
    process was killed, and it can be resumed. code: the runner's.
    """
    if reason := unfit(run.directory.parent, code):
        return FAILED, f"its machine {reason}"
    try:
        lock = FileLock(run.beside("lock"), mode=0o600).acquire(blocking=False)
    except Timeout:
        return BUSY, ""
    with lock:
        if run.is_done:
            return run.status, ""
        words = run.prepare()
        with private_files(), run.beside("log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "keel", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches it through Ray alone
                preexec_fn=partial(begin, os.getpid()),
            )
        code_of_exit = wait_for(process)
        if run.status == FINISHED:
            return FINISHED, ""
        if code_of_exit < 0:
            return KILLED, f"its process was ended by signal {-code_of_exit}"
        if not run.status:
            run.note_failure(last_line(run.beside("log")))
        return run.status, run.reason


def begin(parent: int) -> None:
    """Let this process end with its parent, and heed SIGINT, which Ray's processes block."""
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """The exit code of the process. Ray's interrupt is passed on to it, and raised."""
    try:
        while (code := process.poll()) is None:
            time.sleep(0.1)  # Ray's interrupt ends no system call
        return code
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait(GRACE_S)
        raise


def last_line(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return in_one_line(lines[-1]) if lines else "its log is empty"
