"""Runs whose workers are nodes of Flower's simulation, which are actors of Ray.

For `keel run`, `flwr.simulation.run_simulation` runs in a thread of this process and hands its grid
to the run's loop, which works as with the inline engine. Ray is started here, or a cluster is
joined; it restarts a worker that died, and sends its message again.
"""

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import client_app.app
from client_app.handlers import forget_data
from client_app.setup import split_over_clients
from protocol.options import OptionValue
from protocol.own_code import Own, hold, shipped
from protocol.processes import num_cores
from protocol.ray_nodes import Node, WorkerOptions, check_gpus, living_nodes
from protocol.ray_start import OWN_PYTHON, require_token, skip_unused_processes, worker_variables
from protocol.text import num_of
from server_app.experiment import Experiment
from server_app.inline import with_num_clients
from server_app.observers import RunObserver
from server_app.pool import FlowerWorkers, WorkerPool
from server_app.preflight import checked_machines
from server_app.run import run_federation
from server_app.run_reader import runs_directory

RETRIES = 2  # of a message whose worker died


def pool_of_workers(
    workers: FlowerWorkers, experiment: Experiment, num_clients: int, resumed: Path | None
) -> WorkerPool:
    """The clients that these workers play, once the workers are checked.

    resumed: the directory of the run that is resumed.
    """
    config = experiment.config
    directory = resumed.parent if resumed else runs_directory(config)
    split_over_clients(config, num_clients)  # raises where it is impossible
    machines = checked_machines(workers, experiment, num_clients, directory)
    workers.num = min(workers.num, len(machines))
    return WorkerPool(workers, config, experiment.source, num_clients, machines)


def run_simulated(
    overrides: Mapping[str, OptionValue],
    num_clients: int,
    options: WorkerOptions,
    observers: Sequence[RunObserver] = (),
    own: Mapping[str, Own] | None = None,
) -> Path:
    """A run with workers on Ray, started from this process; returns its directory.

    own, errors: as `run_federation`.
    """
    forget_data()
    with ExitStack() as held:

        def make_pool(experiment: Experiment, resumed: Path | None) -> WorkerPool:
            num = experiment.config.rounds.num_clients
            simulation = flower_simulation(num, options, experiment.config.own.values())
            workers = FlowerWorkers(*held.enter_context(simulation))
            return pool_of_workers(workers, experiment, num, resumed)

        keys = with_num_clients(overrides, num_clients)
        return run_federation(make_pool, keys, observers=observers, own=own).path


@contextmanager
def flower_simulation(
    num_clients: int, options: WorkerOptions, own: Iterable[Own] = ()
) -> Iterator[tuple[Grid, Callable[[], None]]]:
    """(grid, a function that raises what ended the simulation) within.

    own: the own code that every worker is given. ValueError, one line, if no machine has what a
    worker needs.
    """
    cpus, gpus = options.cpus, options.gpus
    with ray_within(options.address, num_clients * cpus, own):
        import ray

        nodes = living_nodes()
        if gpus is None:
            gpus = float(any(node.num_gpus >= 1 for node in nodes))
        num_workers = min(num_clients, num_fitting(nodes, cpus, gpus))
        failed: list[BaseException] = []
        grids: queue.Queue[Grid] = queue.Queue()
        is_over = threading.Event()
        server = ServerApp()

        @server.main()
        def hand_over(grid: Grid, context: Context) -> None:
            grids.put(grid)
            is_over.wait()

        def simulate() -> None:
            from flwr.simulation import run_simulation

            # Flower gives these to Ray as an actor's options; the last two replace a lost worker
            resources = {"num_cpus": cpus, "num_gpus": gpus}
            resources |= {"max_restarts": -1, "max_task_retries": RETRIES}
            try:
                config: Any = {"client_resources": resources}
                run_simulation(server, client_app.app.app, num_workers, backend_config=config)
            except BaseException as error:
                failed.append(error)

        def check() -> None:
            if failed or not thread.is_alive():
                reason = next((f": {error.__cause__ or error}" for error in failed), "")
                raise RuntimeError(f"Flower's simulation has ended{reason}")

        thread = threading.Thread(target=simulate, name="Flower's simulation", daemon=True)
        thread.start()
        try:
            while grids.empty():
                check()
                is_over.wait(0.05)
            yield grids.get(), check
        finally:
            ray.shutdown()  # first: Ray would restart the workers that Flower ends
            is_over.set()
            thread.join()


def num_fitting(nodes: list[Node], cpus: float, gpus: float) -> int:
    """How many workers with these CPUs and GPUs fit on the nodes; ValueError if none does."""
    check_gpus("gpus_per_client", gpus)
    if num := sum(node.num_workers(cpus, gpus) for node in nodes):
        return num
    raise ValueError(
        f"no machine has the {num_of('CPU', cpus)} and {num_of('GPU', gpus)} of one worker "
        "(--cpus-per-client, --gpus-per-client): " + "; ".join(map(str, nodes))
    )


@contextmanager
def ray_within(address: str, max_cpus: float, own: Iterable[Own] = ()) -> Iterator[None]:
    """Ray within: the cluster at this address, or one on this machine, for this user alone.

    max_cpus: that its workers need. own: the own code that they have from their start. ValueError
    if this process uses Ray already.
    """
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # when Flower ends its workers, they have ended
    if not address:
        require_token()
    import ray

    if ray.is_initialized():
        raise ValueError("this process uses Ray already: start the run in a process of its own")
    options: dict[str, Any] = {"address": address}
    environment: dict[str, Any] = {"env_vars": worker_variables()}
    if taken := shipped(own):

        def take_own_code() -> None:
            hold(taken)

        environment["worker_process_setup_hook"] = take_own_code  # of every process of Ray's
    if not address:
        skip_unused_processes(forwards_output=False)
        options = {"address": "local", "num_cpus": int(min(num_cores(), max(1.0, max_cpus)))}
        options["include_dashboard"] = False
        environment |= OWN_PYTHON
    flower, is_main = logging.getLogger("flwr"), threading.current_thread().name == "MainThread"
    level, terminate = flower.level, signal.getsignal(signal.SIGTERM)
    flower.setLevel(logging.CRITICAL)  # of errors, the run's own log tells
    try:
        try:
            ray.init(
                runtime_env=environment,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        except Exception as error:
            where = f"Ray cluster {address}" if address else "Ray did not start"
            raise RuntimeError(f"{where}: {' '.join(str(error).split())}") from None
        if is_main:
            signal.signal(signal.SIGTERM, terminate)  # Ray has its own
        yield
    finally:
        ray.shutdown()
        flower.setLevel(level)
