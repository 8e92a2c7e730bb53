"""Diagnostics during a run: a round's local models against the global model that it began with.

A local model is what the client sent, with the head of its client state where that is in the run
directory (in simulation). Where clients send no weights, it is the model in their client state.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from client_app.method import Method
from client_app.setup import build_network
from client_app.state import newest_state
from data.sources import Source
from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import TrainReply
from server_app.diagnostics.comparison import (
    NUM_PROBE_SAMPLES,
    Comparison,
    Numbers,
    chosen_diagnostics,
    probe_of,
)


class Monitor:
    """Measures rounds of one run. Overwrites the weights of `model`. architectures: by client."""

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        source: Source,
        model: StagedModel,
        initial_weights: Arrays,
        architectures: Mapping[str, str],
        is_simulated: bool,
    ) -> None:
        self.config, self.method = config, method
        self.names = chosen_diagnostics(config.rounds.diagnostics)
        self.initial_weights = initial_weights
        self.architectures = architectures
        self.probe = probe_of(config, source, model.classifier.weight.device, NUM_PROBE_SAMPLES)
        self.networks = {config.model.model: model}
        if not method.sends_weights and not is_simulated:
            raise ValueError(
                f"diagnostics = {config.rounds.diagnostics!r}: clients of {config.rounds.method} "
                "send no weights, so that they can be measured in simulation only; it has to be "
                "empty"
            )

    def is_due(self, server_round: int) -> bool:
        """Whether the round is measured: every `diagnostics-every` rounds, and the last."""
        rounds = self.config.rounds
        return rounds.is_due(server_round, rounds.diagnostics_every)

    def measure(
        self, server_round: int, w_g: Arrays, replies: Sequence[TrainReply], directory: Path
    ) -> Numbers:
        """The round's numbers; beside the replies, one model is in memory at a time.

        w_g: the global arrays that the round began with. replies: the accepted ones. directory: the
        run directory.
        """
        fixed = self.initial_weights if self.method.has_global_model else {}
        run, w_g = self.config.model.model, fixed | w_g
        comparison = Comparison(self.names, self.probe, self.network, run, w_g)
        for reply in replies:
            # {} where the client state is on another machine
            state = newest_state(directory / "clients" / reply.client, server_round + 1)
            sent = fixed | reply.arrays if self.method.sends_weights else {}
            arrays = sent | state.get("head", {}) if sent else state.get("model", {})
            comparison.add(reply.client, self.architectures[reply.client], arrays)
        return comparison.numbers()

    def network(self, name: str) -> StagedModel:
        """An instance of the architecture, created once."""
        if name not in self.networks:
            run = next(iter(self.networks.values()))
            network = build_network(self.config, run.input_shape, run.num_classes, name)
            self.networks[name] = network.to(run.classifier.weight.device)
        return self.networks[name]
