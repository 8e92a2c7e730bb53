"""The client half of a method: a local objective, or a local procedure of its own.

A *local objective* (client_app/objective.py) is a loss on one batch, which the one local trainer
minimises. A *local procedure* overrides `Method.train` where the algorithm is not one loss on one
model: it consists of calls of `fit` (client_app/trainer.py), with computations between them. Both
are frozen dataclasses whose fields are the method's options (`protocol.options`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from client_app.round import RoundContext
from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig

# keys of local training that `fit` reads itself
FIT_KEYS = (
    *("batch-size", "batches-per-epoch", "lr-decay", "lr-decay-epoch", "lr-schedule"),
    *("warmup-rounds", "optimizer", "momentum", "weight-decay", "clip-norm", "precision"),
    "cuda-graphs",
)


@dataclass(frozen=True)
class ModelParts:
    """What a method adds to the plain model; server and clients build the same."""

    projection: str = "none"  # before the classifier: none, mlp, mlp-normalised, gaussian
    projection_heads: int = 0  # outputs of each projection head, a side branch; 0: no heads
    head_stages: tuple[int | None, int | None] = (None, None)  # slice of the stages that have one


@dataclass
class Update:
    """The result of a client's local training.

    arrays: what the server averages. extra: what else the method's server half reads. state: the
    client state until the next participation, by group name; it replaces all of the old state.
    terms: mean of each loss term over the samples of this round.
    """

    arrays: Arrays
    num_steps: int
    terms: dict[str, float]
    extra: Arrays = field(default_factory=dict)
    state: dict[str, Arrays] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """The client half of a method.

    The attributes are capability flags. A subclass sets them, or lets them follow a boolean option
    with `when_option` and `unless_option` of `protocol.options`.
    """

    is_stateful: ClassVar[bool] = False
    """`Update.state` is client state, without which a client cannot take part again."""

    is_personal: ClassVar[bool] = False
    """Each client is evaluated with a model of its own (`personal_model`)."""

    is_adapted_from_global: ClassVar[bool] = False
    """The personal model is made from the newest global arrays, so evaluated after aggregation."""

    has_global_model: ClassVar[bool] = True
    """The server has a whole model (FedReCo's has only a shared extractor)."""

    sends_weights: ClassVar[bool] = True
    """`Update.arrays` are weights (FedReCo's are gradients, those of `local` are empty)."""

    is_local_objective: ClassVar[bool] = False
    """`Update.arrays` is the output of one loss on one model: `LocalObjective` sets it."""

    supports_mixed_architectures: ClassVar[bool] = False
    """Clients may train different networks (`client-models`)."""

    supports_privacy: ClassVar[bool] = False
    """`Update.arrays` is clipped and noised if `privacy.epsilon` > 0."""

    supports_server_optimizer: ClassVar[bool] = True
    """Works with any aggregation and any server optimizer."""

    supports_adam: ClassVar[bool] = True
    """Local training may use any `optimizer`; otherwise only sgd."""

    supports_weighting: ClassVar[bool] = True
    """Both weightings are allowed; otherwise only `default_weighting`."""

    supports_batch_norm: ClassVar[bool] = True
    """Running statistics of BatchNorm are trained and averaged."""

    has_own_server_half: ClassVar[bool] = False
    """The server half is in strategies/<name>.py; otherwise it is `strategies.Average`."""

    server_half: ClassVar[type[Any] | None] = None
    """The class of the server half of a method outside of Keel; sets `has_own_server_half`."""

    default_weighting: ClassVar[str] = "examples"
    """What `weighting = "auto"` means: the paper's weighting, "examples" or "uniform"."""

    shared_part: ClassVar[str] = "model"
    """What is sent and averaged: "model", "extractor" (all but the classifier) or "nothing".

    Clients refuse a message that lacks it: "nothing" allows a method's own server half any arrays.
    """

    duration_keys: ClassVar[Sequence[str]] = ("local-epochs",)
    """Keys that say how long a client trains in each round: epochs, or a `duration()`."""

    rate_keys: ClassVar[Sequence[str]] = ("lr",)
    """Keys of the learning rates of local training."""

    training_keys: ClassVar[Sequence[str]] = ()
    """Keys of local training that `train` reads; another that is set is refused. A `train` that
    does not say uses those that its code names, and `FIT_KEYS` if it calls `fit`."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {}
    """Option values with which the trained model is FedAvg's, bit for bit; a test checks this. A
    local objective's penalty is not computed then."""

    paper: ClassVar[str] = ""
    """The source, as the table of methods shows it, such as "Acar et al. 2021"."""

    regularises: ClassVar[str] = "nothing"
    """For the table of methods: what is regularised. Nothing depends on it."""

    client_state: ClassVar[str] = "nothing"
    """For the table of methods: what a client stores. Nothing depends on it."""

    extra_forwards: ClassVar[str] = "0"
    """For the table of methods: forward passes per step in addition to the local model's, without
    caching. Nothing depends on it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("server_half"):
            cls.has_own_server_half = True

    def warning(self, config: RunConfig, num_samples: Mapping[str, int]) -> str:
        """A known problem with this run's config, one line, logged before round 1; "" for none.

        num_samples: training samples of each client, by name.
        """
        return ""

    def depends_on_num_rounds(self) -> bool:
        """Whether a round's result depends on how many rounds the run has."""
        return False

    def is_tuned_for_evaluation(self) -> bool:
        """Whether `personal_model` trains the model further; the result is not stored."""
        return False

    def model_parts(self) -> ModelParts:
        """What this method adds to the plain model."""
        return ModelParts()

    def split_stage(self, model: StagedModel) -> str:
        """The last stage of the feature extractor; what follows is the head."""
        return model.stage_names[-1]

    def check_model(self, model: StagedModel) -> None:
        """ValueError, one line, if this method cannot train this network."""

    def train(self, ctx: RoundContext) -> Update:
        """Local training of one round, from what was received and the client state in `ctx`.

        `ctx.model` is this client's own: between two calls of `fit` it keeps its weights.
        """
        raise NotImplementedError(
            f"{type(self).__name__} overrides nothing: override `train`, or derive from "
            "LocalObjective and override `supervised` or `penalty`"
        )

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> nn.Module | None:
        """The model that this client would use on its own data, or None: the global model."""
        return None
