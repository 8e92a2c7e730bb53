"""Terms that a server optimizer adds to the loss of every local objective.

FedACG: Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient",
CVPR 2024, arXiv 2201.03172. The server (`FedACGStep` in strategies/server_optimizers.py) sends the
look-ahead model wh, and the clients' loss gains beta ||theta - wh||^2, without 1/2 as in the
authors' code.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from client_app.drift import drift_from
from client_app.round import RoundContext
from models import StagedModel


def look_ahead_term(options: Any, ctx: RoundContext, model: StagedModel) -> dict[str, Tensor]:
    """beta ||theta - wh||^2, a scalar; {} with beta 0."""
    return {"look-ahead": options.beta * drift_from(model, ctx.received)} if options.beta else {}


CLIENT_TERMS: dict[str, Callable[[Any, RoundContext, StagedModel], dict[str, Tensor]]] = {
    "fedacg": look_ahead_term,
}


def server_optimizer_terms(ctx: RoundContext, model: StagedModel) -> dict[str, Tensor]:
    """The loss terms of the run's server optimizer by name; {} for most."""
    terms = CLIENT_TERMS.get(ctx.config.rounds.server_optimizer)
    return terms(ctx.config.server_optimizer_options(), ctx, model) if terms else {}
