"""FedLC: cross entropy with a larger margin for classes with fewer samples (client half).

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022,
arXiv 2209.00189.
Aggregation: weighted average. Client state: none.
z_c: logits; n_c: this client's samples of class c.

This is the loss in all public implementations: cross entropy of the calibrated logits
a_c = z_c - tau n_c^(-1/4). The paper's denominator leaves out the true class, which makes its loss
unbounded below. A class without samples on this client has an infinite margin and drops out of the
loss. Evaluation uses the uncalibrated logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.objective import Batch, LocalObjective
from client_app.round import RoundContext
from protocol.options import at_least, option


def margins(label_counts: Tensor, tau: float) -> Tensor:
    """tau n_c^(-1/4), [C], in float32; infinity for a class without samples.

    label_counts [C]: whole numbers.
    """
    return tau * label_counts.float().pow(-0.25)


@dataclass(frozen=True)
class FedLC(LocalObjective):
    """Calibrated cross entropy."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"tau": 0.0}
    regularises: ClassVar[str] = "logits, by the client's own label counts"
    paper: ClassVar[str] = "Zhang et al. 2022"

    tau: float = option(
        at_least(0),
        "scale of the margin tau * n_c^(-1/4)",
        default=1.0,
        source="FedRCL's tables: 1",
    )

    def begin_round(self, ctx: RoundContext) -> Tensor | None:
        """The client's margins, [C]; None for tau = 0."""
        return margins(ctx.label_counts, self.tau) if self.tau else None

    def supervised(self, batch: Batch) -> Tensor:
        """The calibrated loss, a scalar."""
        margin = batch.prepared
        a = batch.logits if margin is None else batch.logits - margin  # a_c
        return F.cross_entropy(a, batch.y)
