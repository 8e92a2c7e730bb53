"""FedACG's client term, for any local objective under `server = "fedacg"`.

Source: Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient",
CVPR 2024, arXiv 2201.03172. Server half: `FedACGStep` in strategies/server_optimizers.py, which sends
the look-ahead model wh. The client's loss gains beta ||theta - wh||^2, without 1/2 as the authors'
code.
"""

from dataclasses import dataclass

from torch import Tensor

from client_app.drift import drift_from
from client_app.round import RoundContext
from models import StagedModel
from protocol.options import at_least, option


@dataclass(frozen=True)
class FedACGClient:
    """The key of `fedacg.*` that clients read."""

    beta: float = option(at_least(0))


def look_ahead_term(ctx: RoundContext, model: StagedModel) -> Tensor | None:
    """beta ||theta - wh||^2, a scalar; None under another server step, or with beta 0."""
    if ctx.config.rounds.server_optimizer != "fedacg":
        return None
    beta = ctx.config.table("fedacg", FedACGClient).beta
    return beta * drift_from(model, ctx.received) if beta else None
