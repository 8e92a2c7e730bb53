"""FedLC: cross entropy with a larger margin for classes with fewer samples (client half).

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022,
arXiv 2209.00189.
Aggregation: weighted average. Client state: none.
z_c: logits; n_c: this client's samples of class c.

The default is the loss in all public implementations: cross entropy of the calibrated logits
a_c = z_c - tau n_c^(-1/4). `exclude-true = true` is the paper's loss, whose denominator leaves out
the true class; it is unbounded below. A class without samples on this client has an infinite margin
and drops out of the loss. Evaluation uses the uncalibrated logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objective import Batch, LocalObjective
from client_app.round import RoundContext
from protocol.options import at_least, option, true_or_false
from protocol.text import num_of


def margins(label_counts: Tensor, tau: float) -> Tensor:
    """tau n_c^(-1/4), [C], in float32; infinity for a class without samples.

    label_counts [C]: whole numbers.
    """
    return tau * label_counts.float().pow(-0.25)


def loss_without_true_class(a: Tensor, y: Tensor) -> Tensor:
    """logsumexp_{c != y} a_c - a_y, a scalar: the paper's loss, mean over the batch."""
    of_others = a.scatter(1, y[:, None], -torch.inf)
    return (of_others.logsumexp(1) - a.gather(1, y[:, None]).squeeze(1)).mean()


@dataclass(frozen=True)
class FedLC(LocalObjective):
    """Calibrated cross entropy."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"tau": 0.0, "exclude-true": False}
    regularises: ClassVar[str] = "logits, by the client's own label counts"
    paper: ClassVar[str] = "Zhang et al. 2022"

    tau: float = option(
        at_least(0), "scale of the margin tau * n_c^(-1/4)", source="FedRCL's tables: 1"
    )
    exclude_true: bool = option(
        true_or_false(),
        "leave the true class out of the denominator: unbounded below",
        source="the paper's loss; public code keeps it in",
    )

    def check_roster(self, label_counts: Mapping[str, Sequence[int]]) -> str:
        """ValueError if a client has one class under the paper's loss: an empty denominator."""
        if not self.exclude_true or self.tau <= 0:
            return ""
        alone = sorted(c for c, counts in label_counts.items() if sum(n > 0 for n in counts) == 1)
        if alone:
            raise ValueError(
                f"fedlc.exclude-true = true: {num_of('client has', alone, 'clients have')} samples "
                f"of one class only, the first is {alone[0]}: their loss has an empty denominator; "
                "set it to false"
            )
        return ""

    def begin_round(self, ctx: RoundContext) -> Tensor | None:
        """The client's margins, [C]; None for tau = 0."""
        return margins(ctx.label_counts, self.tau) if self.tau else None

    def supervised(self, batch: Batch) -> Tensor:
        """The calibrated loss, a scalar."""
        margin = batch.prepared
        a = batch.logits if margin is None else batch.logits - margin  # a_c
        if self.exclude_true:
            return loss_without_true_class(a, batch.y)
        return F.cross_entropy(a, batch.y)
