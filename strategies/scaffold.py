"""SCAFFOLD: the average of the updates, and the control variate c (server half).

Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1, lines 16 and 17:
    w <- w + eta_g * mean over S of (w_i - w)        c <- c + sum over S of p_i (c_i^+ - c_i)
with p_i the weight of client i among all clients, not within the cohort. The paper weights
everything uniformly, p_i = 1/N. Here the mean of the models follows `weighting`, by examples as in
public code, and `control-weighting = "auto"` gives c the same weights. With "uniform" (FedCKA's
tables), clients with few samples, whose c_i are the noisiest, dominate c.

c equals sum p_i c_i over all clients even if a reply is lost, because each client is told the last
round in which its update was aggregated. The exception is a client whose lost c_i was reset: its
last contribution stays in c.
"""

from collections.abc import Sequence
from typing import ClassVar

from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import TrainReply
from strategies.aggregation import capped_counts
from strategies.average import Average


class ScaffoldServer(Average):
    """Stores c, by parameter name, and sends it."""

    needs_updates: ClassVar[bool] = False

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        self.c = {name: p.detach().cpu() * 0 for name, p in model.named_parameters()}

    def extra(self) -> Arrays:
        """c."""
        return {f"c.{name}": array for name, array in self.c.items()}

    def expected_extra(self) -> Arrays:
        """c_i^+ - c_i, like c."""
        return {f"dc.{name}": array for name, array in self.c.items()}

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """Lines 16 and 17; buffers are averaged."""
        average = super().next_arrays(current, replies)
        change = self.extra_sum(replies)
        self.c = {name: array + change[f"dc.{name}"] for name, array in self.c.items()}
        eta_g = self.options.lr_global
        stepped = {n: current[n] + eta_g * (average[n] - current[n]) for n in self.trainable}
        return average | stepped

    def extra_shares(self, clients: Sequence[str]) -> dict[str, float]:
        """p_i, the same in every round."""
        chosen = self.options.control_weighting
        if chosen == "uniform" or (chosen == "auto" and not self.is_weighted_by_examples):
            return dict.fromkeys(clients, 1 / len(self.roster))
        if total := getattr(self.roster, "num_train", None):  # a roster of simulated clients has it
            return {client: self.partition_sizes[client] / total for client in clients}
        entries = list(self.roster.values())
        counts = [float(entry.num_examples) for entry in entries]
        checked = [self.partition_sizes.get(e.client) == e.num_examples for e in entries]
        counts = capped_counts(counts, checked, self.config.rounds.max_weight_share)
        weights = {entry.client: n for entry, n in zip(entries, counts, strict=True)}
        total = sum(counts)
        return {client: weights[client] / total for client in clients}

    def own_state(self) -> Arrays:
        """c."""
        return self.c

    def load_own(self, state: Arrays) -> None:
        """Restore this c."""
        self.c = state
