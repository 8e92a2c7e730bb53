"""The server half of local-only training: it asks and keeps count, nothing travels."""

from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, TrainReply
from strategies.average import Average


class NoExchange(Average):
    """No arrays either way."""

    supports_server_optimizer = False

    @classmethod
    def initial_arrays(cls, config: RunConfig, model: StagedModel) -> Arrays:
        """Nothing."""
        return {}

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """Nothing."""
        return {}
