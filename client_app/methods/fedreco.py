"""FedReCo: personal models whose representations agree with a shared extractor's (client half).

"Consensus Optimization at Representation: Improving Personalized Federated Learning via
Data-Centric Regularization", anonymous preprint, Algorithm 1. Equation numbers refer to it.
Server half: strategies/fedreco.py, which stores u_0.
Aggregation: eq. (8) with the uniform mean of the clients' g_i. Client state: the model (u_i, v_i).
u_i: extractor of this client; v_i: its head; u_0: the shared extractor; h: the representation.

    v_i <- v_i - eta_v grad_v f_i                                    (6)
    u_i <- u_i - eta_u ( grad_u f_i + lambda/2 grad_u H_i )          (7)
    u_0 <- u_0 - eta_0 mean_i g_i,    g_i = grad_{u_0} H_i           (8)

Only arrays shaped like u_0 are sent, so u_i may be any architecture with the same representation
width (`client-models`, or a node's own): docs/concepts/representation-regularisation.md lists the
widths. The run's momentum, weight decay, gradient clipping and learning rate decays apply to the
steps on u_i and v_i, with eta_u and eta_v in place of `lr`; without them the steps are exactly
eqs. (6) and (7). eta_0 does not decay. The preset uses momentum 0.9. The paper's learning rates and
batch size are in an appendix that is not public.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import Method, Update
from client_app.privacy import privatise
from client_app.round import RoundContext, cached
from client_app.samples import Duration
from client_app.trainer import copy_of, fit
from models import Extractor, StagedModel
from protocol.arrays import Arrays
from protocol.options import any_text, at_least, duration, option, parse_duration


def representation_distance(h: Tensor, h_0: Tensor) -> Tensor:
    """H_i of one batch, eq. (5), a scalar: squared distance, sum over entries, mean over samples.

    h and h_0 [B, ...]: representations of the same samples under u_i and u_0, equally wide.
    """
    return (h.flatten(1) - h_0.flatten(1)).square().sum(1).mean()


def consensus_gradient(extract_0: Extractor, x: Tensor, h: Tensor) -> Arrays:
    """g_i: the gradient of H_i with respect to u_0, by parameter name; h is u_i's, a constant.

    Zeros for a parameter that u_0 does not use.
    """
    parameters = dict(extract_0.named_parameters())
    distance = representation_distance(h, extract_0(x))
    gradients = torch.autograd.grad(distance, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


@dataclass(frozen=True)
class FedReCo(Method):
    """A personal model whose representation is pulled towards the shared extractor's."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False
    supports_mixed_architectures: ClassVar[bool] = True
    supports_privacy: ClassVar[bool] = True
    supports_server_optimizer: ClassVar[bool] = False  # its server update is eq. (8)
    supports_weighting: ClassVar[bool] = False
    supports_batch_norm: ClassVar[bool] = False
    has_own_server_half: ClassVar[bool] = True
    default_weighting: ClassVar[str] = "uniform"
    shared_part: ClassVar[str] = "extractor"
    duration_keys: ClassVar[tuple[str, ...]] = ("fedreco.k-u", "fedreco.k-v")
    rate_keys: ClassVar[tuple[str, ...]] = ("fedreco.eta-u", "fedreco.eta-v")
    client_state: ClassVar[str] = "its whole model"
    regularises: ClassVar[str] = "representation at the split, towards the shared extractor's"
    paper: ClassVar[str] = "FedReCo"
    extra_forwards: ClassVar[str] = "1"

    split: str = option(
        any_text(), 'last stage of the shared extractor; "": all but the classifier', default=""
    )
    lambda_: float = option(
        at_least(0),
        "weight of the consensus at the representation",
        default=0.1,
        source="eq. (5)",
        key="lambda",
    )
    eta_u: float = option(
        at_least(0), "learning rate of the extractor u_i", default=0.01, source="eq. (7)"
    )
    eta_v: float = option(
        at_least(0), "learning rate of the head v_i", default=0.01, source="eq. (6)"
    )
    eta_0: float = option(
        at_least(0), "the server's learning rate of u_0", default=0.01, source="eq. (8)"
    )
    k_u: str = option(
        duration(),
        "steps on u_i in each round",
        default="1 epoch",
        source="Algorithm 1; the paper: 1 epoch",
    )
    k_v: str = option(
        duration(),
        "steps on v_i in each round",
        default="1 epoch",
        source="Algorithm 1; the paper: 1 epoch",
    )

    def split_stage(self, model: StagedModel) -> str:
        """The last stage of the extractor: `split`, or all stages."""
        return self.split or model.stage_names[-1]

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """(u_i, v_i); initially u_i = u_0 if of one architecture, and v_i from the run's seed."""
        u_0 = ctx.received if ctx.model.name == ctx.config.model.model else {}
        ctx.model.load_state_dict(state.get("model") or ctx.initial_weights() | u_0)
        return ctx.model

    def train(self, ctx: RoundContext) -> Update:
        """Algorithm 1, lines 6 to 18."""
        model = self.personal_model(ctx, ctx.state).train().requires_grad_(True)
        shared, split = ctx.network("global", ctx.config.model.model), self.split_stage(model)
        u_i, u_0 = model.extractor(split), shared.extractor(self.split_stage(shared))
        v_i = [model.tensors[name] for name in model.head_keys(split)]
        u_0.load_state_dict(ctx.received)
        u_0.eval().requires_grad_(False)
        k_v, k_u = Duration(*parse_duration(self.k_v)), Duration(*parse_duration(self.k_u))
        h_i, h_0 = cached(ctx, u_i, k_v), cached(ctx, u_0, k_u)

        def f_i(h: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"supervised": F.cross_entropy(model.predict(h, split), y)}

        def f_i_and_distance(x: Tensor, y: Tensor, h_0: Tensor) -> dict[str, Tensor]:
            h = u_i(x)
            return f_i(h, y) | {"penalty": self.lambda_ / 2 * representation_distance(h, h_0)}

        u_i.eval()  # eq. (6)
        head = fit(ctx, v_i, lambda b: (h_i(b), b.y), f_i, self.eta_v, k_v, stream="head")
        model.eval()  # eq. (7); v_i is fixed, its norm statistics included
        extractor = fit(
            ctx,
            list(u_i.train().parameters()),
            lambda b: (b.x, b.y, h_0(b)),
            f_i_and_distance,
            self.eta_u,
            k_u,
            stream="extractor",
        )
        x = next(ctx.steps("release", 1, "steps")).x
        with torch.no_grad():
            h = u_i.eval()(x)
        g_i = consensus_gradient(u_0.requires_grad_(True), x, h)  # line 18
        num_steps = head.num_steps + extractor.num_steps
        state = {"model": copy_of(model)}
        return Update(privatise(g_i, ctx), num_steps, extractor.terms, state=state)
