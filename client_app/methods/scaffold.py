"""SCAFFOLD: correct every step by the client's control variate (client half).

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
arXiv 1910.06378, Algorithm 1, option II. Server half: strategies/scaffold.py, which stores c.
Aggregation: weighted average of the models, and of the control variates with the same weights.
Client state: the control variate c_i, the one before it, and the round in which c_i was computed.
w: the model received; w_i: the trained model; K: the number of steps; eta: their learning rate.

Only parameters have control variates; buffers have none. The server tells each client the last
round in which its update was aggregated. If a newer update was lost or rejected, the client reverts
to the previous c_i, so that c remains the weighted mean of all c_i.

The paper uses plain SGD. With momentum rho, `momentum-form = "corrected"` (default) accumulates the
corrected gradients in the momentum and replaces K by K_rho, the total weight that the momentum
steps give the K gradients. `niid-bench`, the benchmark of MOON's authors, accumulates the raw
gradients, corrects the parameters after each step, outside the momentum, and uses K. Its c_i is up
to 1 / (1 - rho) times larger, because momentum does not amplify its correction. In both
forms, a step is weighted by its own learning rate if the rate decays within a round.

It diverges if eta K is too large: c_i is a gradient of the last round, and the further a client
moves, the larger the next c_i. The paper's theorems bound eta by a constant over K. A client with
few steps has a noisy c_i. If the clients' numbers of steps differ by a factor of more than ten, a
warning is logged before round 1; `batches-per-epoch` gives clients with enough samples nearly the
same number.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.method import Update
from client_app.objective import LocalObjective, minimise
from client_app.round import RoundContext
from client_app.samples import batch_size_for
from client_app.trainer import copy_of
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.options import more_than, one_of, option

log = logging.getLogger("keel.client")
MAX_STEP_RATIO = 10  # largest over smallest number of steps of a client, without a warning


def momentum_length(rates: Sequence[float], momentum: float) -> float:
    """K_rho eta: how far momentum SGD with these learning rates moves if the gradient is always 1.

    With one rate eta, K_rho = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho); K without momentum.
    """
    velocity = length = 0.0
    for rate in rates:
        velocity = momentum * velocity + 1
        length += rate * velocity
    return length


def next_control_variate(c_i: Tensor, c: Tensor, w: Tensor, w_i: Tensor, k_eta: float) -> Tensor:
    """c_i^+ = c_i - c + (w - w_i) / (K eta), option II, eq. (4)."""
    return c_i - c + (w - w_i) / k_eta


def accepted_control_variate(ctx: RoundContext) -> Arrays:
    """c_i of the last update that was aggregated; {} for zeros.

    State: "control" was computed in round "control-made" from "control-before".
    """
    if not ctx.state:
        return {}
    made_in = int(ctx.state["control-made"]["round"])
    if made_in <= ctx.last_accepted_round:  # smaller if newer state was lost
        return ctx.state["control"]
    log.warning(
        "client %s, round %d: the update of round %d was not aggregated; reverting to the control "
        "variate before it",
        ctx.client,
        ctx.round,
        made_in,
    )
    return ctx.state["control-before"]


@dataclass(frozen=True)
class Scaffold(LocalObjective):
    """Local SGD whose gradients are corrected by control variates."""

    is_stateful: ClassVar[bool] = True
    supports_server_optimizer: ClassVar[bool] = False
    supports_adam: ClassVar[bool] = False  # c_i is an average of gradients from SGD's path
    has_own_server_half: ClassVar[bool] = True
    # the previous one: an update may be lost
    client_state: ClassVar[str] = "its control variate, and the previous one"
    regularises: ClassVar[str] = "every gradient, by control variates"
    paper: ClassVar[str] = "Karimireddy et al. 2020"

    lr_global: float = option(
        more_than(0), "server learning rate eta_g", default=1.0, source="Algorithm 1"
    )
    momentum_form: str = option(
        one_of("corrected", "niid-bench"),
        "how control variates combine with momentum",
        default="corrected",
        source="niid-bench: the benchmark of MOON's authors",
    )
    control_weighting: str = option(
        one_of("auto", "examples", "uniform"),
        "weights p_i of c = sum p_i c_i over all clients; auto: as `weighting`",
        default="auto",
        source="uniform: Algorithm 1, and public code that weighs the models by examples",
    )

    def warning(self, config: RunConfig, num_samples: Mapping[str, int]) -> str:
        """A warning if the numbers of steps differ by a factor of more than `MAX_STEP_RATIO`."""
        train = config.train
        steps = {
            client: train.local_epochs * -(-n // batch_size_for(n, train))
            for client, n in sorted(num_samples.items())
        }
        few, many = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        if steps[many] <= MAX_STEP_RATIO * steps[few]:
            return ""
        return (
            f"scaffold: the steps of a round range from {steps[few]} ({few}) to {steps[many]} "
            f"({many}): control variates from few steps are noisy, and the accuracy may swing or "
            "collapse; with batches-per-epoch, clients with enough samples take nearly as many"
        )

    def train(self, ctx: RoundContext) -> Update:
        """Algorithm 1, lines 7 to 14."""
        model, momentum = ctx.model, ctx.config.train.momentum
        model.load_state_dict(ctx.received)
        parameters = dict(model.named_parameters())
        c = {name: ctx.extra[f"c.{name}"] for name in parameters}
        accepted = accepted_control_variate(ctx)
        c_i = {
            n: accepted[n].to(ctx.device) if accepted else torch.zeros_like(p)
            for n, p in parameters.items()
        }
        correction = [c[n] - c_i[n] for n in parameters]
        if self.momentum_form == "corrected":  # line 10: g - c_i + c
            descent = minimise(self, ctx, gradient_offsets=correction)
        else:
            descent = minimise(self, ctx, step_offsets=[-each for each in correction])
            momentum = 0.0
        w, w_i, k_eta = ctx.received, copy_of(model), momentum_length(descent.rates, momentum)
        next_c_i = {
            n: next_control_variate(c_i[n], c[n], w[n], w_i[n], k_eta) if k_eta > 0 else c_i[n]
            for n in parameters  # without a step c_i cannot be estimated
        }
        dc = {f"dc.{name}": next_c_i[name] - c_i[name] for name in parameters}
        made_in = {"round": torch.tensor(ctx.round)}
        state = {"control": next_c_i, "control-before": c_i, "control-made": made_in}
        return Update(w_i, descent.num_steps, descent.terms, dc, state)
