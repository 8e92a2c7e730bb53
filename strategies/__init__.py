"""The server half of every method, by name; most use the weighted average."""

from strategies.average import Average
from strategies.fedreco import FedReCoServer

STRATEGIES: dict[str, type[Average]] = {
    "fedavg": Average,
    "fedprox": Average,
    "moon": Average,
    "fedintr": Average,
    "fedcka": Average,
    "fedrcl": Average,
    "fedreco": FedReCoServer,
}

__all__ = ["STRATEGIES", "Average", "FedReCoServer"]
