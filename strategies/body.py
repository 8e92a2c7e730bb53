"""The server half of methods that share the body alone: FedRep, FedBABU."""

from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays
from strategies.average import Average


class SharedBody(Average):
    """Weighted average of everything but the classifier, which never travels."""

    @classmethod
    def initial_arrays(cls, config: RunConfig, model: StagedModel) -> Arrays:
        """All stages."""
        weights = model.state_dict()
        return {k: weights[k].clone() for k in model.extractor_keys(model.stage_names[-1])}


class UniformBody(SharedBody):
    """The plain mean of the bodies: FedBABU's."""

    default_weighting = "uniform"
