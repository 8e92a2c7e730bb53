"""Runs as Ray tasks: on this machine, or on a cluster that exists.

A run is one task, which is the inline engine in a worker of Ray's: the model is bit-identical to
that of `keel run`. A worker locks the run directory while it executes the run, so several
runners, on several machines, share the runs of one output folder. A CPU worker then executes the
next run, without importing PyTorch again; a GPU worker ends with its run, which frees the memory.
"""

import fcntl
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from keel.deployment.cluster import check_address, cluster_nodes
from keel.experiments.runs import REMEDY, Run
from keel.interrupts import interruptible
from keel.runs import is_locked
from protocol.code import code_version
from protocol.config import RunConfig, app_folder, resolve_config
from protocol.files import private_files
from protocol.options import OptionValue
from protocol.processes import num_cores
from protocol.ray_nodes import CPU_WORKERS, Node, living_nodes
from protocol.ray_start import (
    OWN_PYTHON,
    require_token,
    skip_unused_processes,
    worker_variables,
)
from protocol.text import in_one_line, num_of
from server_app.run_reader import LOCK_FILE

LOG_FILE = "log.txt"
RAY_FOLDER = "keel-ray-"  # how the name of a runner's folder begins
ENDED = "ended; repeat the command to resume from the last finished rounds"
START_ATTEMPTS = 3  # a busy machine may miss a deadline of Ray's own
LOST_S = 20.0  # after which a cluster whose head does not answer has ended
FULL_S = 15.0  # after which a cluster that executes none of the runs may be busy with other work
GRACE_S = 30.0  # for interrupted runs to save what they have
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
        """Each run's share of a GPU on these machines."""
        total = sum(node.num_gpus for node in nodes)
        if self.gpus is not None or not total or os.environ.get(CPU_WORKERS):
            return self.gpus or 0.0
        return 1 / math.ceil(self.workers / total) if self.workers else 1.0

    def slots_on(self, nodes: Sequence[Node]) -> int:
        """How many runs there are at once. ValueError if not one of them fits."""
        gpus = self.gpus_on(nodes)
        slots = sum(node.num_workers(self.cpus, gpus) for node in nodes)
        if not slots:
            raise ValueError(
                f"no machine has the {num_of('CPU', self.cpus)} and {num_of('GPU', gpus)} that a "
                f"run needs (--cpus-per-run, --gpus-per-run): {'; '.join(map(str, nodes))}"
            )
        return min(slots, self.workers or slots)


class KilledError(RuntimeError):
    """The process that executed a run, or its machine, is gone."""


# --- the runner's side ------------------------------------------------------------------------


class RayTasks:
    """Executes runs as tasks of Ray, which is started, or connected to, for the first of them.

    with_data: a config for each data set. On the way out, runs under way are interrupted, and can
    be resumed.
    """

    def __init__(
        self, resources: Resources, output: Path, with_data: Sequence[RunConfig] = ()
    ) -> None:
        self.resources, self.output, self.with_data = resources, output, with_data
        self.pending: dict[Any, Run] = {}
        self.data: Sequence[tuple[RunConfig, str]] = ()  # on a cluster, with this machine's digests
        self.slots = 1  # at least, until Ray is there
        self._remote: Any = None
        self._heard = 0.0  # when the cluster's head last answered
        self._executed = 0.0  # when a run was last seen executed; inf: a wait was named
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:  # ends Ray, or leaves it
            if self.pending:
                import ray

                deadline = time.monotonic() + GRACE_S
                for task in self.pending:
                    ray.cancel(task)
                # a task counts as cancelled before its worker has unwound it
                while any(map(is_executed, self.pending.values())) and time.monotonic() < deadline:
                    time.sleep(0.1)

    def connect(self) -> None:
        """Start or join Ray. ValueError if it cannot be used, RuntimeError if it does not start."""
        if self.resources.address:
            # or why there is none, in one line
            cluster_nodes(self.resources.address, self.resources.named)
        self._stack.enter_context(connected(self.resources))
        self._heard = self._executed = time.monotonic()
        import ray

        nodes = living_nodes()
        self.slots, gpus = self.resources.slots_on(nodes), self.resources.gpus_on(nodes)
        gpus = int(1e4 * gpus) / 1e4  # Ray's resolution
        if self.resources.address:
            self.data = [(config, digest_of_data(config)) for config in self.with_data]
            check_machines(self.output, self.data)
        # not Ray's retries: they are silent, and without end where the memory is too small
        self._remote = ray.remote(num_cpus=self.resources.cpus, num_gpus=gpus, max_retries=0)(
            execute
        )

    def submit(self, run: Run) -> Any:
        """Queue a run; returns its task."""
        if self._remote is None:
            self.connect()
        run.folder.mkdir(parents=True, exist_ok=True)
        task = self._remote.remote(run, code_version(), self.data)
        self.pending[task] = run
        return task

    def wait(self, seconds: float) -> list[Any]:
        """Wait for a task to end, at most so long; returns those that have.

        RuntimeError if the cluster has ended: a minute later, Ray would end this process.
        """
        import ray

        if self.resources.address:
            with suppress(ValueError):
                check_address(ray.get_runtime_context().gcs_address)
                self._heard = time.monotonic()
            if time.monotonic() - self._heard > LOST_S:
                raise RuntimeError(
                    f"the Ray cluster {self.resources.address} has ended: "
                    "repeat the command on this machine or on another cluster to resume the runs"
                )
        return list(ray.wait(list(self.pending), timeout=seconds)[0])

    def is_kept_waiting(self) -> bool:
        """Whether the cluster has executed none of the runs for FULL_S; True only once."""
        if not self.resources.address or self._executed == math.inf:
            return False
        now = time.monotonic()
        if any(map(is_executed, self.pending.values())):
            self._executed = now
        if now - self._executed < FULL_S:
            return False
        self._executed = math.inf
        return True

    def result(self, task: Any) -> str | None:
        """What `execute` has returned for the run. KilledError if its process was killed."""
        import ray
        from ray import exceptions

        del self.pending[task]
        lost = (exceptions.OutOfMemoryError, exceptions.NodeDiedError)
        try:
            found: str | None = ray.get(task)
            return found
        except exceptions.WorkerCrashedError:
            reason = "Ray lost its process: killed, out of memory, or paused for minutes"
            raise KilledError(reason) from None
        except (*lost, exceptions.LocalRayletDiedError) as error:
            raise KilledError(in_one_line(str(error))) from None
        except exceptions.RayError as error:
            return in_one_line(str(error).strip().splitlines()[-1])


@contextmanager
def connected(resources: Resources) -> Iterator[None]:
    """Ray within: the cluster, or one of this process, which leaves nothing behind."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # under `uv run`: no copy of the sources
    if not resources.address:
        require_token()
    import ray

    if not resources.address:
        skip_unused_processes(forwards_output=False)
    # one thread a run, on which the bits depend, unless its config says otherwise
    variables = worker_variables() | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    environment: dict[str, Any] = {"env_vars": variables}
    if not resources.address:
        environment |= OWN_PYTHON
    terminate = signal.getsignal(signal.SIGTERM)

    def end_at_once() -> None:
        kill_leftovers(own)  # without these, workers end
        shutil.rmtree(own, ignore_errors=True)

    # in /tmp, as sockets have short paths
    with ray_folder() as own, interruptible(end_at_once, ends_on_hangup=False, ended=ENDED):
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
        options |= {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            for attempts_left in reversed(range(START_ATTEMPTS)):
                try:
                    with warnings.catch_warnings(action="ignore"):
                        ray.init(runtime_env=environment, **options)
                    break
                except Exception as error:
                    ray.shutdown()
                    kill_leftovers(own)
                    if not attempts_left:
                        raise RuntimeError(f"Ray did not start: {in_one_line(error)}") from None
            signal.signal(signal.SIGTERM, terminate)  # Ray has its own
            yield
        finally:
            ray.shutdown()


@contextmanager
def ray_folder(parent: Path = Path("/tmp")) -> Iterator[str]:
    """A folder for Ray within, in /tmp as sockets have short paths.

    Those of runners that were killed are removed: a runner that lives has its folder locked.
    """
    for lock in parent.glob(f"{RAY_FOLDER}*/{LOCK_FILE}"):
        with suppress(OSError):  # it has just been removed
            if lock.parent.lstat().st_uid == os.getuid() and not is_locked(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(prefix=RAY_FOLDER, dir=parent, ignore_cleanup_errors=True)
    with folder as own, (Path(own) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(file.name, Path(own) / LOCK_FILE)  # never there without being locked
        yield own


def kill_leftovers(folder: str) -> None:
    """Kill Ray's processes in this folder; after a failed start, Ray leaves them running."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if folder.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def check_machines(output: Path, data: Sequence[tuple[RunConfig, str]]) -> None:
    """ValueError naming a machine of the cluster that cannot execute runs. data: as `unfit`."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with tempfile.TemporaryDirectory(prefix=".preflight-", dir=output) as folder:
        asked = {}
        for node in living_nodes():
            place: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
            check: Any = ray.remote(num_cpus=0, scheduling_strategy=place)(unfit)
            asked[node.address] = check.remote(Path(folder), code_version(), data)
        for address, task in asked.items():
            try:
                reason = ray.get(task)
            except RayError as error:
                reason = in_one_line(str(error).strip().splitlines()[-1])
            if reason:
                raise ValueError(f"{address} {reason}")


# --- the worker's side ------------------------------------------------------------------------


def execute(run: Run, code: str, data: Sequence[tuple[RunConfig, str]] = ()) -> str | None:
    """Resume the run's newest attempt, or start one, in this process.

    Returns why it failed, empty if it is done, None if another runner has it. code, data: as
    `unfit`; this machine may have joined since `check_machines`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell had it ignored
    read = resolve_config(run.keys).data
    own = [
        (config, digest)
        for config, digest in data
        if (config.data.source, config.data.data_dir) == (read.source, read.data_dir)
    ]
    if reason := unfit(run.folder, code, own):
        return f"its machine {reason}"
    lock = claimed(run)
    if lock is None:
        return None
    with lock, chdir(app_folder), printing_to(run.folder / LOG_FILE):
        from server_app.app import log_to_stdout

        log_to_stdout()
        if run.is_done():  # since the runner looked at it
            return ""
        run.remove_note()
        return reason_of(run, run_alone(run))


def reason_of(run: Run, outcome: object) -> str:
    """Why the run failed, which is logged, and noted where it left no run directory; else empty."""
    if not isinstance(outcome, BaseException):
        return ""
    reason = logged(outcome)
    if not run.ended():
        run.note_failure(reason)
    return reason


def run_alone(run: Run) -> Path | BaseException:
    """The directory of the run once it has finished, or the error that ended it."""
    from server_app.inline import run_inline
    from server_app.observers import SummaryTable

    try:
        return run_inline(overrides_of(run), run.clients, observers=[SummaryTable()])
    except Exception as error:
        return error


def logged(error: BaseException) -> str:
    """The error in one line; it is printed too."""
    if isinstance(error, ValueError | OSError | RuntimeError):
        print(f"error: {error}")
        return in_one_line(str(error))
    traceback.print_exception(error)
    return in_one_line(f"{type(error).__name__}: {error}")


def is_executed(run: Run) -> bool:
    """Whether a worker, of any runner, executes it."""
    return is_locked(run.folder / LOCK_FILE)


def claimed(run: Run) -> TextIO | None:
    """The run's lock; None while another runner has it. OSError if there are no locks here."""
    file = (run.folder / LOCK_FILE).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return None
        raise
    return file


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


def overrides_of(run: Run) -> dict[str, OptionValue]:
    """The config keys that resume its newest attempt with a checkpoint, or start one.

    ValueError naming a damaged file of that attempt, and what to do.
    """
    for attempt in reversed(run.attempts()):
        has_checkpoint = any((attempt / "checkpoints").glob("round-*.safetensors"))
        try:
            if has_checkpoint and not (run.other_default(attempt) or run.other_code(attempt)):
                return {"resume": str(attempt)}
        except ValueError as error:
            raise ValueError(f"{error}; {REMEDY}") from error
    return {**run.keys, "output-dir": str(run.folder)}


@contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Within, this process's output, also that of its libraries, is appended to the file."""
    before = [(number, os.dup(number)) for number in (1, 2)]
    try:
        with private_files(), path.open("ab") as file:  # it says what run.log says
            for number, _ in before:
                os.dup2(file.fileno(), number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a full disk; the output is restored all the same
                stream.flush()
        for number, copy in before:
            os.dup2(copy, number)
            os.close(copy)
