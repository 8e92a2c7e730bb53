"""The nodes of Ray's cluster and the workers that fit on them. Imports Ray only to list them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.options import CommandOptionError
from protocol.text import num_of

MAX_WORKERS = 4096
MIN_GPUS = 1e-4  # of a worker; Ray's resolution


@dataclass(frozen=True)
class Node:
    """A node that is alive, and what Ray may use of it."""

    address: str
    num_cpus: float
    num_gpus: float
    id: str = ""

    def __str__(self) -> str:
        cpus, gpus = num_of("CPU", self.num_cpus), num_of("GPU", self.num_gpus)
        return f"{self.address} has {cpus} and {gpus}"

    def num_workers(self, cpus: float, gpus: float) -> int:
        """How many workers with these shares run here at once; 0 if they request neither."""
        fits = [int(self.num_cpus / cpus + 1e-9)] if cpus else []
        fits += [num_shares(self.num_gpus, gpus)] if gpus else []
        return min([*fits, MAX_WORKERS]) if fits else 0


@dataclass(frozen=True)
class WorkerOptions:
    """What each worker of a simulation gets, and where.

    gpus: None: 1 where there are any. address: of a Ray cluster; "": Ray is started here.
    """

    cpus: float = 1
    gpus: float | None = None
    address: str = ""


def check_gpus(name: str, gpus: float) -> None:
    """CommandOptionError unless Ray can give a worker this many GPUs, a number >= 0."""
    if not gpus >= 0 or (gpus > 1 and gpus % 1) or 0 < gpus < MIN_GPUS:
        raise CommandOptionError(
            name,
            f"{gpus:g}: expected a whole number or a fraction from {MIN_GPUS:g} to 1: Ray gives a "
            "worker nothing else",
        )


def devices_by_node(workers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The devices of each node's workers, as `1 on cuda:0, 2 on cuda:1`.

    workers: (address of its node, device) of each.
    """
    nodes: dict[str, Counter[str]] = {}
    for node, device in workers:
        nodes.setdefault(node, Counter())[device] += 1
    return {
        node: ", ".join(f"{num} on {device}" for device, num in found.items())
        for node, found in nodes.items()
    }


def living_nodes() -> list[Node]:
    """The nodes of the Ray that this process is connected to."""
    import ray

    return [
        Node(
            n["NodeManagerAddress"],
            n["Resources"].get("CPU", 0),
            n["Resources"].get("GPU", 0),
            n["NodeID"],
        )
        for n in ray.nodes()  # type: ignore[no-untyped-call]
        if n["Alive"]
    ]


def num_shares(available: float, share: float) -> int:
    """How many processes fit on this many GPUs, each with this share of one.

    A share below 1 is always of a single GPU.
    """
    if share < 1:
        return int(available) * int(1 / share + 1e-9)
    return int(available / share + 1e-9)
