"""A checked run: its keys, its config, and what executes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from keel.saved_runs import SavedRun
from protocol.config import RunConfig
from protocol.options import CommandOptionError, OptionValue
from protocol.processes import num_cores
from protocol.ray_nodes import Node, check_gpus

Engine = StrEnum("Engine", ["inline", "flower", "deployment"])  # what executes a run


@dataclass(frozen=True)
class EngineOptions:
    """Which engine executes a run, and its options; None: the default.

    CommandOptionError, with the option's name, for a value that is not allowed or that the engine
    does not use.
    """

    engine: Engine = Engine.inline
    clients: int | None = None
    cpus_per_client: float | None = None
    gpus_per_client: float | None = None  # default: 1 where there are any
    federation: str = ""
    root_certificates: Path | None = None
    ray: str | None = None  # HOST:PORT of a Ray cluster

    def __post_init__(self) -> None:
        other_engine = f"needs the flower engine; this is the {self.engine} engine"
        for name in ("cpus_per_client", "gpus_per_client", "ray"):
            if getattr(self, name) is not None and self.engine is not Engine.flower:
                raise CommandOptionError(name, other_engine)
        cpus = self.cpus
        if cpus < 1 or cpus % 1:
            raise CommandOptionError(
                "cpus_per_client",
                f"{cpus:g}: expected a whole number >= 1, because Flower does not divide a CPU",
            )
        check_gpus("gpus_per_client", self.gpus_per_client or 0)
        if self.ray == "":
            raise CommandOptionError("ray", "is empty: expected HOST:PORT of a Ray cluster")
        if self.clients is not None and self.clients < 1:
            raise CommandOptionError("clients", f"{self.clients}: expected a number >= 1")
        if self.clients is not None and self.is_remote:
            raise CommandOptionError(
                "clients",
                f"{self.clients}: the clients of a deployment are not simulated; "
                f"num-clients={self.clients} waits for {self.clients} connected clients",
            )
        if bool(self.federation) != self.is_remote:
            raise CommandOptionError(
                "federation",
                "goes together with --engine deployment: it is the name of a connection in "
                "Flower's config.toml, or the HOST:PORT of a SuperLink",
            )

    @property
    def is_remote(self) -> bool:
        """Whether the run is on a SuperLink, with sites in place of simulated clients."""
        return self.engine is Engine.deployment

    @property
    def cpus(self) -> float:
        """CPUs of a worker."""
        return 1.0 if self.cpus_per_client is None else self.cpus_per_client


@dataclass(frozen=True)
class Job:
    """A checked run. overrides: with `num-clients`, if clients are simulated; ray: the address."""

    overrides: Mapping[str, OptionValue]
    config: RunConfig
    options: EngineOptions = EngineOptions()
    resumed: SavedRun | None = None
    ray: str = ""
    nodes: Sequence[Node] = ()  # of that cluster

    @property
    def num_clients(self) -> int:
        """How many clients there are; 0: as many as are connected."""
        return self.config.rounds.num_clients

    @property
    def gpus(self) -> float | None:
        """GPUs of a worker; None: 1 where there are any."""
        given = self.options.gpus_per_client
        return 0.0 if given is None and self.config.train.device == "cpu" else given

    @property
    def num_workers(self) -> int:
        """Nodes of a simulation, which play the clients: as many as its machines run at once."""
        cpus, gpus = self.options.cpus, self.gpus
        if self.ray:
            if gpus is None:
                gpus = float(any(node.num_gpus for node in self.nodes))
            at_once = sum(node.num_workers(cpus, gpus) for node in self.nodes)
        else:
            at_once = int(num_cores() / cpus)
        return max(1, min(self.num_clients, at_once))
