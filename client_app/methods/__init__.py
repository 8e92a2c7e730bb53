"""The client half of every method, by name. A new method: its file, and one line here."""

from client_app.method import Method
from client_app.methods.ditto import Ditto
from client_app.methods.fedavg import FedAvg
from client_app.methods.fedavg_ft import FedAvgFT
from client_app.methods.fedbabu import FedBABU
from client_app.methods.fedcka import FedCKA
from client_app.methods.fedcl import FedCL
from client_app.methods.fedcr import FedCR
from client_app.methods.feddecorr import FedDecorr
from client_app.methods.fedintr import FedIntR
from client_app.methods.fedlc import FedLC
from client_app.methods.fedmlb import FedMLB
from client_app.methods.fedntd import FedNTD
from client_app.methods.fedpac import FedPAC
from client_app.methods.fedproc import FedProc
from client_app.methods.fedprox import FedProx
from client_app.methods.fedrcl import FedRCL
from client_app.methods.fedreco import FedReCo
from client_app.methods.fedrep import FedRep
from client_app.methods.fedscl import FedSCL
from client_app.methods.fitnet import FitNet
from client_app.methods.local import LocalOnly
from client_app.methods.moon import MOON
from client_app.methods.scaffold import Scaffold
from protocol.config import RunConfig, refuse_unknown

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "moon": MOON,
    "fedintr": FedIntR,
    "fedcka": FedCKA,
    "fedrcl": FedRCL,
    "fedscl": FedSCL,
    "fedcl": FedCL,
    "fitnet": FitNet,
    "fedmlb": FedMLB,
    "fedlc": FedLC,
    "fedntd": FedNTD,
    "fedproc": FedProc,
    "feddecorr": FedDecorr,
    "fedreco": FedReCo,
    "local": LocalOnly,
    "fedavg-ft": FedAvgFT,
    "ditto": Ditto,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedpac": FedPAC,
    "fedcr": FedCR,
}


def method_of(config: RunConfig) -> Method:
    """The run's method with its options; ValueError naming the key if one is not allowed."""
    name = config.rounds.method
    refuse_unknown("method", name, list(METHODS))
    return config.table(name, METHODS[name])
