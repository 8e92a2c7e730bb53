"""The options of every server optimizer; `strategies.server_optimizers` holds the update rules."""

from dataclasses import dataclass
from typing import ClassVar

from protocol.options import at_least, between, more_than, option


@dataclass(frozen=True)
class ServerOptimizerOptions:
    """Options of one server optimizer: the keys `<its name>.*`."""

    # The option that weighs a term in the clients' own loss; "": clients train as they are.
    client_term: ClassVar[str] = ""


@dataclass(frozen=True)
class FedAvgOptions(ServerOptimizerOptions):
    """The average itself (McMahan et al., AISTATS 2017, arXiv 1602.05629)."""


@dataclass(frozen=True)
class FedAvgMOptions(ServerOptimizerOptions):
    """SGD with momentum on the pseudo-gradient (Hsu, Qi, Brown 2019, arXiv 1909.06335)."""

    lr: float = option(more_than(0), "server learning rate eta_g", default=1.0)
    beta: float = option(
        between(0, 1, open_high=True), "server momentum", default=0.4, source="FedRCL, Table 5: 0.4"
    )


@dataclass(frozen=True)
class FedAdamOptions(ServerOptimizerOptions):
    """Adam on the pseudo-gradient (Reddi et al., ICLR 2021, arXiv 2003.00295)."""

    lr: float = option(more_than(0), "server learning rate eta_g", default=0.01)
    beta1: float = option(
        between(0, 1, open_high=True),
        "decay of the first moment",
        default=0.9,
        source="Algorithm 2",
    )
    beta2: float = option(
        between(0, 1), "decay of the second moment", default=0.99, source="Algorithm 2"
    )
    tau: float = option(
        more_than(0), "degree of adaptivity, added to sqrt(v)", default=0.001, source="Algorithm 2"
    )


@dataclass(frozen=True)
class FedACGOptions(ServerOptimizerOptions):
    """Clients are pulled towards a look-ahead model (Kim et al., CVPR 2024, arXiv 2201.03172)."""

    client_term: ClassVar[str] = "beta"

    lambda_: float = option(
        between(0, 1, open_high=True), "momentum of the look-ahead", default=0.85, key="lambda"
    )
    beta: float = option(
        at_least(0),
        "weight of the clients' term ||theta - wh||^2; 0 removes it",
        default=0.001,
        source="without 1/2, as the authors' code",
    )


SERVER_OPTIMIZERS: dict[str, type[ServerOptimizerOptions]] = {
    "fedavg": FedAvgOptions,
    "fedavgm": FedAvgMOptions,
    "fedadam": FedAdamOptions,
    "fedacg": FedACGOptions,
}
