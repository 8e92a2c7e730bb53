"""Terms that a server optimizer adds to the loss of every local objective.

FedACG: Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient",
CVPR 2024, arXiv 2201.03172. The server (`FedACGStep` in strategies/server_optimizers.py) sends the
look-ahead model wh, and the clients' loss gains beta ||theta - wh||^2, without 1/2 as in the
authors' code.
"""

from torch import Tensor

from client_app.drift import drift_from
from client_app.round import RoundContext
from models import StagedModel
from protocol.server_optimizers import SERVER_OPTIMIZERS


def server_optimizer_terms(ctx: RoundContext, model: StagedModel) -> dict[str, Tensor]:
    """beta ||theta - wh||^2, a scalar, by name; {} with beta 0 and for other server optimizers."""
    term = SERVER_OPTIMIZERS[ctx.config.rounds.server_optimizer].client_term
    beta = getattr(ctx.config.server_optimizer_options(), term) if term else 0
    return {"look-ahead": beta * drift_from(model, ctx.received)} if beta else {}
