"""The inline engine: ServerApp and ClientApp in one process, without Flower's runtime.

For tests, debugging, benchmarks, and machines too small for Ray. On one CPU the model is
bit-identical to that of `flwr run`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from client_app.handlers import forget_data
from protocol.options import OptionValue
from protocol.own_code import Own
from server_app.experiment import Experiment
from server_app.observers import RunObserver
from server_app.pool import InlineWorkers, WorkerPool
from server_app.run import run_federation


def run_inline(
    overrides: Mapping[str, OptionValue],
    num_clients: int,
    observers: Sequence[RunObserver] = (),
    own: Mapping[str, Own] | None = None,
) -> Path:
    """A run in this process; returns its directory. own, errors: as `run_federation`."""
    forget_data()

    def make_pool(experiment: Experiment, resumed: Path | None) -> WorkerPool:
        config = experiment.config
        return WorkerPool(InlineWorkers(), config, experiment.source, config.rounds.num_clients)

    keys = with_num_clients(overrides, num_clients)
    return run_federation(make_pool, keys, observers=observers, own=own).path


def with_num_clients(
    overrides: Mapping[str, OptionValue], num_clients: int
) -> dict[str, OptionValue]:
    """The overrides with `num-clients`; a resumed run has it in its config.

    ValueError if they name another number, or if it is below 1.
    """
    if "resume" in overrides:
        return dict(overrides)
    if num_clients < 1:
        raise ValueError(f"num-clients = {num_clients}: a run needs at least 1 client")
    expected = overrides.get("num-clients", num_clients)
    if expected != num_clients:
        raise ValueError(
            f"num-clients = {expected}, but the run is started for {num_clients} clients: leave "
            "out num-clients, or set both to the same number"
        )
    return {**overrides, "num-clients": num_clients}
