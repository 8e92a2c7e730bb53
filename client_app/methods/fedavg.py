"""FedAvg, client half: cross entropy and nothing else.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv 1602.05629, Algorithm 1 (ClientUpdate).
Server half: the default weighted average. Kept between rounds: nothing.
With `privacy.epsilon` > 0 what is sent is w plus the clipped and noised difference w_i - w, the
baseline of FedReCo's Table 3. Departs from the paper in nothing else.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from client_app.method import LocalObjective, Update
from client_app.privacy import privatise
from client_app.round import RoundContext
from client_app.trainer import train_on_objective


def private_update(update: Update, ctx: RoundContext) -> Update:
    """The update with its difference to the received model made private; as it is with epsilon 0.

    Parameters alone: the run refuses privacy for networks with buffers, which would go out bare.
    """
    if ctx.config.privacy.epsilon == 0:
        return update
    difference = {name: array - ctx.received[name] for name, array in update.arrays.items()}
    private = privatise(difference, ctx)
    return replace(update, arrays={name: ctx.received[name] + d for name, d in private.items()})


@dataclass(frozen=True)
class FedAvg(LocalObjective):
    """Local SGD on the clients' own labels."""

    supports_privacy: ClassVar[bool] = True
    paper: ClassVar[str] = "McMahan et al. 2017"

    def train(self, ctx: RoundContext) -> Update:
        """ClientUpdate, with differential privacy if the run asks for it."""
        return private_update(train_on_objective(self, ctx), ctx)
