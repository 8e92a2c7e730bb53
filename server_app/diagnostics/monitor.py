"""Diagnostics during a run: a round's local models against the global model that it began with.

A local model is what the client sent, with the head of its client state where that is in the run
directory (in simulation). Where clients send no weights, it is the model in their client state.
"""

from collections.abc import Sequence
from pathlib import Path

from client_app.setup import build_network
from client_app.state import newest_state
from models import StagedModel
from protocol.arrays import Arrays
from protocol.messages import TrainReply
from server_app.diagnostics.comparison import (
    NUM_PROBE_SAMPLES,
    Comparison,
    Numbers,
    chosen_diagnostics,
    probe_of,
)
from server_app.experiment import Experiment


class Monitor:
    """Measures rounds of one run. Overwrites the weights of the experiment's network."""

    def __init__(self, experiment: Experiment, is_simulated: bool) -> None:
        self.experiment, config = experiment, experiment.config
        self.names = chosen_diagnostics(config.rounds.diagnostics)
        self.probe = probe_of(config, experiment.source, experiment.device, NUM_PROBE_SAMPLES)
        self.networks = {config.model.model: experiment.model}
        if not experiment.method.sends_weights and not is_simulated:
            raise ValueError(
                f"diagnostics = {config.rounds.diagnostics!r}: clients of {config.rounds.method} "
                "send no weights, so that they can be measured in simulation only; it has to be "
                "empty"
            )

    def is_due(self, server_round: int) -> bool:
        """Whether the round is measured: every `diagnostics-every` rounds, and the last."""
        rounds = self.experiment.config.rounds
        return rounds.is_due(server_round, rounds.diagnostics_every)

    def measure(
        self, server_round: int, w_g: Arrays, replies: Sequence[TrainReply], directory: Path
    ) -> Numbers:
        """The round's numbers; beside the replies, one model is in memory at a time.

        w_g: the global arrays that the round began with. replies: the accepted ones. directory: the
        run directory.
        """
        method, strategy = self.experiment.method, self.experiment.strategy
        fixed = self.experiment.initial_weights if method.has_global_model else {}
        run, w_g = self.experiment.config.model.model, fixed | w_g
        comparison = Comparison(self.names, self.probe, self.network, run, w_g)
        for reply in replies:
            # {} where the client state is on another machine
            state = newest_state(directory / "clients" / reply.client, server_round + 1)
            sent = fixed | reply.arrays if method.sends_weights else {}
            arrays = sent | state.get("head", {}) if sent else state.get("model", {})
            comparison.add(reply.client, strategy.entry_of(reply).model, arrays)
        return comparison.numbers()

    def network(self, name: str) -> StagedModel:
        """An instance of the architecture, created once."""
        if name not in self.networks:
            run = next(iter(self.networks.values()))
            config = self.experiment.config
            network = build_network(config, run.input_shape, run.num_classes, name)
            self.networks[name] = network.to(self.experiment.device)
        return self.networks[name]
