"""What the client half of a method is: a local objective, or a local procedure of its own.

A *local objective* is a loss on one batch, run by the one local trainer (`client_app.trainer`).
A *local procedure* overrides `Method.train` where the algorithm is not one loss on one model.
Both are frozen dataclasses whose fields are the method's options (`protocol.options`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from models import StagedModel

if TYPE_CHECKING:
    from client_app.round import RoundContext

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class ModelParts:
    """What a method adds to the plain model; server and clients build the same."""

    projection: str = "none"  # before the classifier: none, mlp, mlp-normalised
    projection_heads: bool = False  # a projection head for every regularised tap


@dataclass(frozen=True)
class Batch:
    """One step of local training, as a local objective sees it. B is the batch size.

    x [B, C, H, W] augmented, y [B]. logits [B, num_classes] and `taps` (in the order of
    `LocalObjective.taps`) come from the local model and carry gradient. `reps_global` and `reps_previous` are
    what `represent` made of the same batch with the frozen global and previous local model;
    empty where the objective does not use that model. global_model is the frozen network itself.
    """

    x: Tensor
    y: Tensor
    logits: Tensor
    taps: list[Tensor]
    reps_global: list[Tensor]
    reps_previous: list[Tensor]
    round: "RoundContext"
    global_model: StagedModel | None = None


@dataclass
class Update:
    """What a client sends back, and what it keeps.

    arrays: what the server averages. extra: whatever else its strategy reads. state: everything
    that this client keeps until its next participation, by group name; it replaces what was kept.
    terms: mean of each loss term over the samples of this round.
    """

    arrays: Arrays
    num_steps: int
    terms: dict[str, float]
    extra: Arrays = field(default_factory=dict)
    state: dict[str, Arrays] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """Client half of a method."""

    # Capability flags: all that the rest of Keel knows of a method. They are read without importing
    # this package (protocol/catalogue.py), so a subclass sets them to literals, or lets them follow
    # a boolean option with `when_option` and `unless_option` of protocol.options.
    #
    # `Update.state` holds client state, without which a client cannot take part again.
    is_stateful: ClassVar[bool] = False
    # Each client is evaluated with a model of its own (`personal_model`).
    is_personal: ClassVar[bool] = False
    # The personal model is made from the newest global arrays: evaluated once these are known.
    adapts_global: ClassVar[bool] = False
    # The server holds a whole model (FedReCo's holds only a shared extractor).
    has_global_model: ClassVar[bool] = True
    # `Update.arrays` are weights (FedReCo's are gradients, those of `local` are empty).
    sends_weights: ClassVar[bool] = True
    # `Update.arrays` is the output of one loss on one model: see client_app/objective.py.
    is_local_objective: ClassVar[bool] = False
    # Clients may train different networks (`client-models`).
    supports_mixed_architectures: ClassVar[bool] = False
    # `Update.arrays` is clipped and noised if `privacy.epsilon` > 0.
    supports_privacy: ClassVar[bool] = False
    # The server may take any aggregation and any server optimizer.
    supports_server_optimizer: ClassVar[bool] = True
    # The average may be weighted by examples and uniformly; else by `default_weighting` alone.
    supports_weighting: ClassVar[bool] = True
    # Running statistics of BatchNorm are trained and averaged.
    supports_batch_norm: ClassVar[bool] = True
    # strategies/<name>.py holds the server half; else it is `strategies.Average`.
    has_own_server_half: ClassVar[bool] = False
    # `weighting = "auto"`, "examples" or "uniform": the paper's.
    default_weighting: ClassVar[str] = "examples"
    # What is sent and averaged: "model", "extractor" (all but the classifier) or "nothing".
    shared_part: ClassVar[str] = "model"

    # Documentation only: nothing depends on these.
    paper: ClassVar[str] = ""
    regularises: ClassVar[str] = "nothing"
    keeps: ClassVar[str] = "nothing"
    # forward passes beside the local model's, for each step, before caching
    extra_forwards: ClassVar[str] = "0"

    def check_roster(self, label_counts: Mapping[str, Sequence[int]]) -> str:
        """What to warn of before round 1, one line; "" if nothing.

        label_counts: training samples of each class of each client, by name. ValueError, one line,
        naming the clients, where this method cannot train on what they hold.
        """
        return ""

    def depends_on_num_rounds(self) -> bool:
        """A run resumed with another number of rounds would not be the same run."""
        return False

    def model_parts(self) -> ModelParts:
        """What this method adds to the plain model."""
        return ModelParts()

    def train(self, ctx: "RoundContext") -> Update:
        """Train for one round, from what was received and the client state in `ctx`."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides nothing: override `train`, or derive from "
            "LocalObjective and override `supervised` or `penalty`"
        )

    def personal_model(self, ctx: "RoundContext", state: Mapping[str, Arrays]) -> nn.Module | None:
        """The model that this client would use on its own data, or None: the global model."""
        return None


@dataclass(frozen=True)
class LocalObjective(Method):
    """A loss on one batch: `supervised` plus `penalty`; plain cross entropy unless overridden.

    The trainer sees to data, frozen models, optimiser, and what is kept. Subclasses say which taps
    they read, what of them they compare (`represent`), and the penalty, already weighted.
    """

    is_local_objective: ClassVar[bool] = True
    uses_global: ClassVar[bool] = False  # `Batch.reps_global` is wanted
    uses_global_model: ClassVar[bool] = False  # `Batch.global_model` is wanted
    uses_previous: ClassVar[bool] = (
        False  # `Batch.reps_previous` is wanted; the local model is kept
    )

    def taps(self, model: StagedModel) -> list[str]:
        """Names of the taps that are read; none by default."""
        return []

    def represent(self, model: StagedModel, taps: list[Tensor]) -> list[Tensor]:
        """What is compared between models: by default the taps themselves, [B, ...] each.

        Of a frozen model this is a constant of the sample: it is what the trainer caches.
        """
        return taps

    def first_previous(self, ctx: "RoundContext") -> Arrays | None:
        """What stands for the previous model at a client's first participation; None: no term."""
        return None

    def supervised(self, batch: Batch) -> Tensor:
        """The loss on the labels, a scalar: cross entropy, mean over the batch."""
        return F.cross_entropy(batch.logits, batch.y)

    def penalty(self, batch: Batch) -> Tensor | None:
        """The regulariser times its weight, a scalar; None where there is none.

        Not called at a client's first participation if `uses_previous` (unless `first_previous`
        says otherwise): the previous model is then the global one, the term is a constant and its
        gradient zero.
        """
        return None

    def train(self, ctx: "RoundContext") -> Update:
        """Local training as in FedAvg, on this objective."""
        from client_app.trainer import train_on_objective

        return train_on_objective(self, ctx)
