"""The client half of every method, by name. A new method: its file, and one line here."""

from client_app.method import Method
from client_app.methods.fedavg import FedAvg
from client_app.methods.fedcka import FedCKA
from client_app.methods.fedintr import FedIntR
from client_app.methods.fedprox import FedProx
from client_app.methods.fedrcl import FedRCL
from client_app.methods.fedreco import FedReCo
from client_app.methods.moon import MOON
from protocol.config import RunConfig, refuse_unknown

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "moon": MOON,
    "fedintr": FedIntR,
    "fedcka": FedCKA,
    "fedrcl": FedRCL,
    "fedreco": FedReCo,
}


def method_of(config: RunConfig) -> Method:
    """The run's method with its options; ValueError naming the key if one is not allowed."""
    name = config.rounds.method
    refuse_unknown("method", name, list(METHODS))
    return config.table(name, METHODS[name])
