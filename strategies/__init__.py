"""The server half of every method, by name; most use the weighted average."""

from strategies.average import Average
from strategies.body import SharedBody
from strategies.fedcr import FedCRServer
from strategies.fedpac import FedPACServer
from strategies.fedproc import FedProcServer
from strategies.fedreco import FedReCoServer
from strategies.local import NoExchange
from strategies.scaffold import ScaffoldServer

STRATEGIES: dict[str, type[Average]] = {
    "fedavg": Average,
    "fedprox": Average,
    "scaffold": ScaffoldServer,
    "moon": Average,
    "fedintr": Average,
    "fedcka": Average,
    "fedrcl": Average,
    "fedscl": Average,
    "fedcl": Average,
    "fitnet": Average,
    "fedmlb": Average,
    "fedlc": Average,
    "fedntd": Average,
    "fedproc": FedProcServer,
    "feddecorr": Average,
    "fedreco": FedReCoServer,
    "local": NoExchange,
    "fedavg-ft": Average,
    "ditto": Average,
    "fedrep": SharedBody,
    "fedbabu": SharedBody,
    "fedpac": FedPACServer,
    "fedcr": FedCRServer,
}

__all__ = ["STRATEGIES", "Average"]
