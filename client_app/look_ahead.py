"""FedACG's client term, for any local objective under `server = "fedacg"`.

Source: Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient",
CVPR 2024, arXiv 2201.03172. Server half: `FedACGStep` in strategies/server_optimizers.py, which sends
the look-ahead model wh. The client's loss gains beta ||theta - wh||^2, without 1/2 as the authors'
code.
"""

from torch import Tensor

from client_app.drift import drift_from
from client_app.round import RoundContext
from models import StagedModel


def look_ahead_term(ctx: RoundContext, model: StagedModel) -> Tensor | None:
    """beta ||theta - wh||^2, a scalar; None under another server optimizer, or with beta 0."""
    options = ctx.config.server_optimizer_options()
    if not options.client_term:
        return None
    beta: float = getattr(options, options.client_term)
    return beta * drift_from(model, ctx.received) if beta else None
