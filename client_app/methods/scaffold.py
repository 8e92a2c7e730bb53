"""SCAFFOLD, client half: every step corrected by how this client's gradients differ from all.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, arXiv 1910.06378, Algorithm 1, option II. Server half: strategies/scaffold.py, which keeps c.
Kept between rounds: the control variate c_i, the one before, and the round that made it. Symbols: w
the model received, w_i the one it ends with, K the steps taken, eta their rate. Parameters only: c
does not apply to buffers. The server says which round's reply of this client it counted last: where
the newest was lost or refused, the client goes back to the c_i before it, as the server never saw
it move, and c stays the mean of all c_i.

The paper is plain SGD. With momentum rho, `momentum-form = "corrected"` (default) puts the
corrected gradient into the momentum and replaces K by K_rho, the sum of the weights that a momentum
step gives the K gradients; `niid-bench` leaves the momentum its raw gradient, corrects the
parameters after it and keeps K, which inflates c_i by up to 1 / (1 - rho): MOON's family of code.
"""

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from client_app.method import Arrays, LocalObjective, Update
from client_app.round import RoundContext
from client_app.trainer import Duration, copy_of, descend, objective_terms
from protocol.options import more_than, one_of, option

log = logging.getLogger("keel.client")


def momentum_steps(num_steps: int, momentum: float) -> float:
    """K_rho = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho); K without momentum."""
    k, rho = num_steps, momentum
    return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)


def next_control_variate(c_i: Tensor, c: Tensor, w: Tensor, w_i: Tensor, k_eta: float) -> Tensor:
    """c_i^+ = c_i - c + (w - w_i) / (K eta), option II, eq. (4)."""
    return c_i - c + (w - w_i) / k_eta


def counted_control_variate(ctx: RoundContext) -> Arrays:
    """c_i as the server knows it; {} for zeros.

    State: "control" of the round "control-made", and "control-before", what it was made from.
    """
    if not ctx.state:
        return {}
    if int(ctx.state["control-made"]["round"]) <= ctx.last_accepted_round:  # less: state was lost
        return ctx.state["control"]
    log.warning(
        "client %s, round %d: its reply of round %d was not counted; it goes back to its control "
        "variate of before",
        *(ctx.client, ctx.round, int(ctx.state["control-made"]["round"])),
    )
    return ctx.state["control-before"]


@dataclass(frozen=True)
class Scaffold(LocalObjective):
    """Control variates."""

    is_stateful: ClassVar[bool] = True
    supports_server_optimizer: ClassVar[bool] = False
    has_own_server_half: ClassVar[bool] = True
    keeps: ClassVar[str] = "its control variate c_i, and the one before"  # a reply may be lost
    regularises: ClassVar[str] = "every gradient, by control variates"
    paper: ClassVar[str] = "Karimireddy et al. 2020"

    lr_global: float = option(more_than(0), "server learning rate eta_g", source="Algorithm 1")
    momentum_form: str = option(
        one_of("corrected", "niid-bench"),
        "how control variates combine with momentum",
        source="niid-bench: MOON's family of code",
    )

    def train(self, ctx: RoundContext) -> Update:
        """Algorithm 1, lines 6 to 13."""
        train, model = ctx.config.train, ctx.model
        model.load_state_dict(ctx.received)
        model.train().requires_grad_(True)
        parameters = dict(model.named_parameters())
        c = {name: ctx.extra[f"c.{name}"] for name in parameters}
        kept = counted_control_variate(ctx)
        c_i = {
            n: kept[n].to(ctx.device) if kept else torch.zeros_like(p)
            for n, p in parameters.items()
        }
        corrections = [c[name] - c_i[name] for name in parameters]

        def correct_gradients() -> None:  # line 9: g - c_i + c
            pairs = zip(parameters.values(), corrections, strict=True)
            moved = [(p.grad, correction) for p, correction in pairs if p.grad is not None]
            torch._foreach_add_([g for g, _ in moved], [correction for _, correction in moved])

        @torch.no_grad()
        def correct_parameters(rate: float) -> None:
            torch._foreach_sub_(list(parameters.values()), corrections, alpha=rate)

        corrected = self.momentum_form == "corrected"
        descent = descend(
            ctx,
            list(parameters.values()),
            objective_terms(self, ctx, model),
            lr=train.lr,
            duration=Duration(train.local_epochs, "epochs"),
            after_backward=correct_gradients if corrected else None,
            after_step=None if corrected else correct_parameters,
        )
        arrays = copy_of(model)
        steps = float(descent.num_steps)
        if corrected:
            steps = momentum_steps(descent.num_steps, train.momentum)
        k_eta = steps * descent.total_lr / max(1, descent.num_steps)
        following: Arrays = c_i
        if k_eta > 0:  # no step, or a rate of 0, says nothing of the gradients
            following = {
                n: next_control_variate(c_i[n], c[n], ctx.received[n], arrays[n], k_eta)
                for n in parameters
            }
        extra = {f"dc.{name}": following[name] - c_i[name] for name in parameters}
        update = Update(arrays, descent.num_steps, descent.terms)
        made_in = {"round": torch.tensor(ctx.round)}
        state = {"control": following, "control-before": c_i, "control-made": made_in}
        return replace(update, extra=extra, state=state)
