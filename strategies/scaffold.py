"""SCAFFOLD, server half: the average of the updates, and the control variate c.

Source: Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1, lines 16 and 17:
    w <- w + eta_g * mean over S of (w_i - w)        c <- c + (1/N) sum over S of (c_i^+ - c_i)
with N all clients, not the sampled. The mean of the models follows `weighting` (by examples, as
public code; uniform in the paper), that of c is uniform. Then c stays the mean of all c_i, also
where a reply is lost: the client is told which of its rounds was counted last, as all clients are.
Only a client that lost its c_i and began anew leaves its last share in c.
"""

from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, TrainReply
from strategies.average import Average


class ScaffoldServer(Average):
    """Keeps c, by parameter name, and sends it."""

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
        """Lines 16 and 17; buffers take the average."""
        average = super().next_arrays(current, replies)
        num_clients = len(self.roster)
        for name in self.c:
            for reply in replies:
                self.c[name] = self.c[name] + reply.extra[f"dc.{name}"] / num_clients
        eta_g = self.options.lr_global
        stepped = {n: current[n] + eta_g * (average[n] - current[n]) for n in self.trainable}
        return average | stepped

    def own_state(self) -> Arrays:
        """c."""
        return self.c

    def load_own(self, state: Arrays) -> None:
        """Go on with this c."""
        if strange := state.keys() ^ self.c.keys():
            raise ValueError(f"the checkpoint is not of this version: {sorted(strange)[0]!r} in c")
        self.c = state
