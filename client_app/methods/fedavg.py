"""FedAvg: local SGD on cross entropy, and the weighted average (client half).

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, arXiv 1602.05629, Algorithm 1 (ClientUpdate).
Aggregation: weighted average. Client state: none.
With `privacy.epsilon` > 0 a client sends w plus the clipped and noised difference w_i - w, the
baseline of FedReCo's Table 3.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from client_app.method import Update
from client_app.objective import LocalObjective
from client_app.privacy import privatise
from client_app.round import RoundContext


@dataclass(frozen=True)
class FedAvg(LocalObjective):
    """Local SGD on the clients' own labels."""

    supports_privacy: ClassVar[bool] = True
    paper: ClassVar[str] = "McMahan et al. 2017"

    def train(self, ctx: RoundContext) -> Update:
        """Local training; with epsilon > 0 the difference to the received model is clipped, noised.

        Applies to parameters: the config refuses privacy for networks with BatchNorm's buffers.
        """
        update = super().train(ctx)
        if ctx.config.privacy.epsilon == 0:
            return update
        difference = {name: array - ctx.received[name] for name, array in update.arrays.items()}
        private = privatise(difference, ctx)
        return replace(update, arrays={name: ctx.received[name] + d for name, d in private.items()})
