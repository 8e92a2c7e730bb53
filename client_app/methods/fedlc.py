"""FedLC, client half: cross entropy with a larger margin for the classes this client has fewer of.

Source: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022, arXiv 2209.00189. Server half: the default weighted average. Kept between rounds:
nothing. Symbols: z_c logits, n_c this client's samples of class c.

Default as all public code: cross entropy of the calibrated logits a_c = z_c - tau n_c^(-1/4).
`exclude-true = true` is the paper's loss, whose denominator leaves out the true class; it is
unbounded below. A class that the client does not hold has margin infinity: no part in the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import Batch, LocalObjective
from protocol.options import at_least, option, true_or_false


def calibrated(z: Tensor, label_counts: Tensor, tau: float) -> Tensor:
    """a_c = z_c - tau n_c^(-1/4), [B, C], in float32; -inf for a class without samples.

    z [B, C], label_counts [C] whole numbers.
    """
    if tau == 0:
        return z
    return z.float() - tau * label_counts.clamp_min(1).float().pow(-0.25).masked_fill(
        label_counts == 0, torch.inf
    )


def loss_without_true_class(a: Tensor, y: Tensor) -> Tensor:
    """logsumexp_{c != y} a_c - a_y, a scalar: the paper's loss, mean over the batch."""
    of_others = a.scatter(1, y[:, None], -torch.inf)
    return (of_others.logsumexp(1) - a.gather(1, y[:, None]).squeeze(1)).mean()


@dataclass(frozen=True)
class FedLC(LocalObjective):
    """Calibrated cross entropy; evaluation uses the logits as they are."""

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
        """The paper's loss has no other logit to hold against that of a client's only class."""
        alone = sorted(c for c, counts in label_counts.items() if sum(n > 0 for n in counts) == 1)
        if self.exclude_true and self.tau > 0 and alone:
            raise ValueError(
                f"fedlc.exclude-true = true: {len(alone)} clients hold one class only, the first "
                f"is {alone[0]}: the loss has nothing to hold against it; it has to be false"
            )
        return ""

    def supervised(self, batch: Batch) -> Tensor:
        """The calibrated loss, a scalar."""
        a = calibrated(batch.logits, batch.round.label_counts, self.tau)
        if self.exclude_true:
            return loss_without_true_class(a, batch.y)
        return F.cross_entropy(a, batch.y)
