"""Diagnostics of a run under way: each due round's local models against the global one before it.

A local model is what the client sent, under the head that it keeps where that is in the run's
folder (in simulation). Methods whose clients send no weights (FedReCo, local) are measured by the
models that the clients keep there.
"""

from collections.abc import Sequence
from pathlib import Path

from client_app.method import Method
from client_app.setup import build_network
from client_app.state import StateFolder
from data.sources import Source
from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, RosterEntry, TrainReply
from server_app.diagnostics.comparison import (
    Comparison,
    Numbers,
    chosen_diagnostics,
    probe_of,
    probe_samples,
)


class Monitor:
    """Measures the rounds of one run. `model` is borrowed: its weights are overwritten."""

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        source: Source,
        model: StagedModel,
        initial_weights: Arrays,
        roster: Sequence[RosterEntry],
    ) -> None:
        self.config, self.method = config, method
        self.names = chosen_diagnostics(config.rounds.diagnostics)
        self.initial_weights = initial_weights
        self.architectures = {entry.client: entry.model for entry in roster}
        device = model.classifier.weight.device
        self.probe = probe_of(config, source, device, probe_samples)
        self.networks = {config.model.model: model}
        if not method.sends_weights and any(not entry.num_partitions for entry in roster):
            raise ValueError(
                f"diagnostics = {config.rounds.diagnostics!r}: clients of {config.rounds.method} "
                "send no weights, so that only a simulation can be measured; it has to be empty"
            )

    def is_due(self, server_round: int) -> bool:
        """Every `diagnostics-every` rounds, and the last."""
        rounds = self.config.rounds
        return server_round % rounds.diagnostics_every == 0 or server_round == rounds.num_rounds

    def measure(
        self, server_round: int, w_g: Arrays, replies: Sequence[TrainReply], folder: Path
    ) -> Numbers:
        """The round's numbers. w_g: the global arrays that it began with; replies: the good ones.

        folder: the run's. One model is in memory at a time, beside the replies.
        """
        fixed = self.initial_weights if self.method.has_global_model else {}
        run, w_g = self.config.model.model, fixed | w_g
        comparison = Comparison(self.names, self.probe, self.network, run, w_g)
        for reply in replies:
            architecture = self.architectures[reply.client]
            # of this round; {} where the client keeps its state elsewhere
            kept = StateFolder(folder / "clients" / reply.client).load(server_round + 1)
            sent = fixed | reply.arrays if self.method.sends_weights else {}
            arrays = sent | kept.get("head", {}) if sent else kept.get("model", {})
            comparison.add(reply.client, architecture, arrays)
        return comparison.numbers()

    def network(self, name: str) -> StagedModel:
        """An instance of the architecture; made once."""
        if name not in self.networks:
            run = next(iter(self.networks.values()))
            network = build_network(self.config, run.input_shape, run.num_classes, name)
            self.networks[name] = network.to(run.classifier.weight.device)
        return self.networks[name]
