"""FedCR: average the extractors, multiply the clients' class Gaussians (server half).

Zhang et al., ICML 2023, PMLR 202. As in their code, with a standard normal as one more factor,
    1/S_k^2 = 1 + sum_i 1/S_ik^2,   M_k = S_k^2 sum_i M_ik / S_ik^2
over the clients that saw class k. A
class that no client saw keeps its Gaussian, initially N(0, I). The average of the extractors is
uniform.
"""

from typing import ClassVar

import torch

from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import TrainReply
from strategies.average import Average
from strategies.validation import MAX_VALUE_RATIO

SMALLEST_DEVIATION = 1e-12  # of a class at a client; keeps its precision finite in float32


def product_of_gaussians(
    m: list[torch.Tensor], s: list[torch.Tensor], seen: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(M, S [C, dz], reported [C]) of the clients' M_ik, S_ik [C, dz] and which they saw [C]."""
    masks = [mask[:, None] for mask in seen]
    precisions = [mask / deviation.square() for mask, deviation in zip(masks, s, strict=True)]
    precision = 1 + torch.stack(precisions).sum(0)
    weighted = torch.stack([p * mean for p, mean in zip(precisions, m, strict=True)]).sum(0)
    return weighted / precision, precision.rsqrt(), torch.stack(seen).sum(0) > 0


class FedCRServer(Average):
    """Stores the global Gaussian of every class."""

    needs_updates: ClassVar[bool] = False

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        shape = (model.num_classes, model.feature_width)
        self.m, self.s = torch.zeros(shape), torch.ones(shape)

    def extra(self) -> Arrays:
        """M and S."""
        return {"M": self.m, "S": self.s}

    def expected_extra(self) -> Arrays:
        """A client's M and S, and the classes that it saw."""
        return {"M": self.m, "S": self.s, "seen": torch.zeros(len(self.m))}

    def checked_extra(self, reply: TrainReply) -> Arrays:
        """M, and the client's share of the product.

        The share, 1 / (S sqrt(samples)), is 0 for classes that the client did not see, and at most
        MAX_VALUE_RATIO. ValueError where the product would be infinite, or of others' classes.
        """
        m, s, seen = (reply.extra[name] for name in ("M", "S", "seen"))
        if (low := float(s.min())) < SMALLEST_DEVIATION:
            raise ValueError(f"array 'S' holds {low:.4g}: expected at least {SMALLEST_DEVIATION:g}")
        if not bool(((seen == 0) | (seen == 1)).all()):
            raise ValueError("array 'seen' has values other than 0 and 1")
        samples = torch.tensor(self.entry_of(reply).label_counts)
        if not bool((seen <= samples).all()):
            raise ValueError("array 'seen' has a class without samples")
        share = seen[:, None] / (s * samples.clamp_min(1)[:, None].sqrt())
        return {"M": m, "share": share.clamp_max(MAX_VALUE_RATIO)}

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """The extractors' average, then the product of the clients' Gaussians."""
        following = super().next_arrays(current, replies)
        means, deviations, seen = ([r.extra[k] for r in replies] for k in ("M", "S", "seen"))
        m, s, reported = product_of_gaussians(means, deviations, seen)
        is_new = reported[:, None]
        self.m = torch.where(is_new, m, self.m)
        self.s = torch.where(is_new, s, self.s)
        return following

    def own_state(self) -> Arrays:
        """M and S."""
        return self.extra()

    def load_own(self, state: Arrays) -> None:
        """Restore these Gaussians."""
        self.m, self.s = state["M"], state["S"]
