"""The server half of every method, by name; most use the weighted average."""

from strategies.average import Average, UniformAverage
from strategies.body import SharedBody, UniformBody
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
    "fedrcl": UniformAverage,
    "fedscl": UniformAverage,
    "fedcl": UniformAverage,
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
    "fedbabu": UniformBody,
    "fedpac": FedPACServer,
    "fedcr": FedCRServer,
}

__all__ = ["STRATEGIES", "Average"]
