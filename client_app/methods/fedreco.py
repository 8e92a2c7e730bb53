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
eqs. (6) and (7). eta_0 does not decay.

The authors' code (github.com/oyhah/FedReCo) is an early state, whose defaults are not the paper's
settings; the presets `fedreco-*` have them. It differs from the paper in four ways, each available
as an option. H_i is a sum over samples (`reduction = "sum"`). g_i is of all of a client's samples
(`g-samples = "all"`). The mean of the g_i is clipped before eq. (8) (`clip-g`). In the last round
the heads are trained for 9 epochs (`final-head-epochs`). All clients begin with u_i = u_0 and with
equal heads, as here; the paper does not say how they begin.
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
from protocol.options import any_text, at_least, duration, one_of, option, parse_duration


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
    reduction: str = option(
        one_of("mean", "sum"),
        "H_i over the samples: their mean or their sum",
        default="mean",
        source="code: sum",
    )
    g_samples: str = option(
        one_of("batch", "all"),
        "the samples of g_i: one batch, or all",
        default="batch",
        source="code: all",
    )
    clip_g: float = option(
        at_least(0),
        "the norm of the mean of the g_i is clipped to this before eq. (8); 0: no clipping",
        default=0.0,
        source="code: 10",
    )
    final_head_epochs: int = option(
        at_least(0),
        "> 0: epochs on v_i in the last round, in place of k-v",
        default=0,
        source="code: 9",
    )

    def depends_on_num_rounds(self) -> bool:
        """The last round may train the heads longer."""
        return self.final_head_epochs > 0

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
        if self.final_head_epochs and ctx.round == ctx.config.rounds.num_rounds:
            k_v = Duration(self.final_head_epochs)
        h_i, h_0 = cached(ctx, u_i, k_v), cached(ctx, u_0, k_u)

        def f_i(h: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"supervised": F.cross_entropy(model.predict(h, split), y)}

        def f_i_and_distance(x: Tensor, y: Tensor, h_0: Tensor) -> dict[str, Tensor]:
            h = u_i(x)
            return f_i(h, y) | {"penalty": self.lambda_ / 2 * self._distance(h, h_0)}

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
        g_i = self._consensus_gradient(ctx, u_i.eval(), u_0.requires_grad_(True))  # line 18
        num_steps = head.num_steps + extractor.num_steps
        state = {"model": copy_of(model)}
        return Update(privatise(g_i, ctx), num_steps, extractor.terms, state=state)

    def _distance(self, h: Tensor, h_0: Tensor) -> Tensor:
        """H_i of one batch, eq. (5), a scalar: squared distance, summed over entries.

        h and h_0 [B, ...]: representations of the same samples under u_i and u_0, equally wide.
        """
        of_samples = (h.flatten(1) - h_0.flatten(1)).square().sum(1)  # [B]
        return of_samples.mean() if self.reduction == "mean" else of_samples.sum()

    def _consensus_gradient(self, ctx: RoundContext, u_i: Extractor, u_0: Extractor) -> Arrays:
        """g_i: the gradient of H_i with respect to u_0, by parameter name; u_i is a constant.

        Of one batch, or of all samples, a batch at a time. Zeros for a parameter that u_0 does not
        use.
        """
        parameters, g_i = dict(u_0.named_parameters()), list[Tensor]()
        plan = ctx.plan("release", 1, "steps" if self.g_samples == "batch" else "epochs")
        for number, index in enumerate(plan.index):
            x = ctx.train_samples.step(plan, number).x
            with torch.no_grad():
                h = u_i(x)
            share = len(index) / len(plan.host_forms) if self.reduction == "mean" else 1.0
            h_i = share * self._distance(h, u_0(x))
            part = torch.autograd.grad(h_i, list(parameters.values()), materialize_grads=True)
            g_i = [total + more for total, more in zip(g_i, part, strict=True)] if g_i else [*part]
        return dict(zip(parameters, g_i, strict=True))
