"""FedMLB: local features must also work inside the frozen global network (client half).

Kim, Kim, Han, "Multi-Level Branched Regularization for Federated Learning", ICML 2022,
arXiv 2207.06936.
Aggregation: weighted average. Client state: none.
p: logits of the local network; q_j: logits of pathway j, local stages 1..j, then the global
network's stages j+1..L and its classifier; M pathways, one for every stage.

The global weights are frozen, but gradient flows through them into the local features. As in the
authors' code, the target q_j of the KL is not detached. The temperature of the KL is 1.

The authors' network has GroupNorm. Without normalisation this loss makes activations grow until
ReLUs die and the model collapses, with the authors' code too. A warning before round 1 says so;
`norm = "group"` adds GroupNorm to the plain CNNs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objective import Batch, LocalObjective
from models import StagedModel
from protocol.config import RunConfig
from protocol.models import MODELS, model_spec
from protocol.options import at_least, option


def hybrid_cross_entropy(q: Sequence[Tensor], y: Tensor) -> Tensor:
    """(1/M) sum_j CE(q_j, y), a scalar; q_j [B, C]."""
    return torch.stack([F.cross_entropy(q_j, y) for q_j in q]).mean()


def pathway_divergence(q: Sequence[Tensor], p: Tensor) -> Tensor:
    """(1/M) sum_j KL(softmax(q_j) || softmax(p)), a scalar.

    Sum over classes, mean over the batch. Gradient flows into both arguments.
    """
    log_p = F.log_softmax(p, dim=1)
    log_q = [F.log_softmax(q_j, dim=1) for q_j in q]
    terms = [F.kl_div(log_p, each, reduction="batchmean", log_target=True) for each in log_q]
    return torch.stack(terms).mean()


@dataclass(frozen=True)
class FedMLB(LocalObjective):
    """Hybrid pathways through the global network."""

    uses_global_model: ClassVar[bool] = True
    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"lambda1": 0.0, "lambda2": 0.0}
    regularises: ClassVar[str] = "all stages, through the rest of the global network"
    paper: ClassVar[str] = "Kim et al. 2022"
    extra_forwards: ClassVar[str] = "from each stage to the output, with backward"

    lambda1: float = option(
        at_least(0), "weight of the pathways' cross entropy", default=1.0, source="the paper: 1"
    )
    lambda2: float = option(
        at_least(0),
        "weight of the divergence from the pathways",
        default=1.0,
        source="the paper: 1",
    )

    def warning(self, config: RunConfig, num_samples: Mapping[str, int]) -> str:
        """A warning if the network has no normalisation."""
        name, norm = config.model.model, config.model.norm
        if name not in MODELS or model_spec(name).norm_layer(norm):
            return ""
        return (
            f"fedmlb on {name}, which has no norm layer: its activations grow and the model "
            "usually collapses within a few rounds; norm=group adds GroupNorm"
        )

    def layers(self, model: StagedModel) -> list[str]:
        """Every stage: M pathways."""
        return list(model.regularised_stages)

    def penalty(self, batch: Batch) -> Tensor:
        """lambda1 times the hybrid cross entropy plus lambda2 times the divergence."""
        network = batch.global_model
        assert network is not None
        stages = self.layers(network)
        q = [network.resume(h, after=s) for s, h in zip(stages, batch.reps, strict=True)]
        divergence = pathway_divergence(q, batch.logits)
        return self.lambda1 * hybrid_cross_entropy(q, batch.y) + self.lambda2 * divergence
