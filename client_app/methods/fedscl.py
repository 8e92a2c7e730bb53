"""FedSCL: FedRCL without its divergence penalty, plain supervised contrast (client half).

Seo et al., arXiv 2401.04928, eq. (2) and Table 3 (the ablation); Khosla et al., "Supervised
Contrastive Learning", NeurIPS 2020, arXiv 2004.11362. Equivalent to FedRCL with beta = 0.
Aggregation: uniform average. Client state: none.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from client_app.level_contrast import LevelContrast
from client_app.methods.fedrcl import MINING
from protocol.options import more_than, one_of, option


@dataclass(frozen=True)
class FedSCL(LevelContrast):
    """Supervised contrast within the batch, at every stage."""

    regularises: ClassVar[str] = "all stages, samples of a batch against each other"
    paper: ClassVar[str] = "Seo et al. 2024 (ablation)"

    tau: float = option(more_than(0), "temperature", default=0.05, source="as FedRCL: 0.05")
    mining: str = option(
        one_of("all", "hard"),
        "all pairs, eq. (2), or hard pairs",
        default="all",
        source="hard: authors' code",
    )

    def level_loss(self, phi: Tensor, y: Tensor) -> Tensor:
        """L_SCL(phi_l)."""
        return MINING[self.mining](phi, y, self.tau, 1.0, 0.0)
