"""FedProx: keep the local weights near the global model's (client half).

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127,
eq. (2): h(w; w_g) = F(w) + (mu / 2) ||w - w_g||^2.
Aggregation: weighted average. Client state: none.
Unlike in the paper, every client completes its local steps (no gamma-inexactness).
`half = false` is the code behind FedRCL's tables: mu ||w - w_g||^2. `squared = false` is FedIntR's
code, behind the FedProx rows of its tables: (mu / 2) sum_k ||w^k - w_g^k||, over the model's arrays
w^k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from client_app.objective import Batch, LocalObjective, drift_from, unsquared_drift_from
from protocol.options import at_least, option, true_or_false


@dataclass(frozen=True)
class FedProx(LocalObjective):
    """Proximal term on the parameters, but not on buffers."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"mu": 0.0}
    regularises: ClassVar[str] = "all weights, towards the global model's"
    paper: ClassVar[str] = "Li et al. 2020"

    mu: float = option(at_least(0), "weight of the proximal term", default=0.01, source="eq. (2)")
    half: bool = option(
        true_or_false(),
        "mu/2 as in eq. (2); false: mu",
        default=True,
        source="false: the code of FedRCL's tables",
    )
    squared: bool = option(
        true_or_false(),
        "the squared norm of all weights as in eq. (2); false: the sum of each array's norm",
        default=True,
        source="false: FedIntR's code",
    )

    def penalty(self, batch: Batch) -> Tensor:
        """(mu / 2) ||w - w_g||^2, eq. (2), or the variant set by `half` and `squared`."""
        distance_from = drift_from if self.squared else unsquared_drift_from
        distance = distance_from(batch.ctx.model, batch.ctx.received)
        return (self.mu / 2 if self.half else self.mu) * distance
