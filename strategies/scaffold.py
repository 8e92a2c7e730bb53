"""SCAFFOLD, server half: the average of the updates, and the control variate c.

Source: Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1, lines 16 and 17:
    w <- w + eta_g * mean over S of (w_i - w)        c <- c + (1/N) sum over S of (c_i^+ - c_i)
with N all clients, not the sampled. The mean of the models follows `weighting` (by examples, as
public code; uniform in the paper), that of c is uniform. Then c stays the mean of all c_i, also
where a reply is lost: each client is told which of its rounds was counted last.
"""

from dataclasses import dataclass

import torch

from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, TrainReply
from protocol.options import more_than, option
from strategies.average import Average

mark = "counted/"  # no parameter name begins so


@dataclass(frozen=True)
class ScaffoldServerOptions:
    """The key of `scaffold.*` that the server reads: eta_g."""

    lr_global: float = option(more_than(0))


class ScaffoldServer(Average):
    """Keeps c, by parameter name, and each client's last round that counted; sends both."""

    allows_server_steps = False

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        self.options = config.table("scaffold", ScaffoldServerOptions)
        self.c = {name: p.detach().cpu() * 0 for name, p in model.named_parameters()}
        self.counted: dict[str, int] = {}

    def extra(self) -> Arrays:
        """c."""
        return {f"c.{name}": array for name, array in self.c.items()}

    def own_extra(self, client: str) -> Arrays:
        """The last round whose reply of this client is in c; 0: none."""
        return {"counted-round": torch.tensor(self.counted.get(client, 0))}

    def extra_like(self) -> Arrays:
        """c and a round."""
        return self.extra_for("")

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
        self.counted |= {reply.client: reply.round for reply in replies}
        eta_g = self.options.lr_global
        stepped = {n: current[n] + eta_g * (average[n] - current[n]) for n in self.trainable}
        return average | stepped

    def own_state(self) -> Arrays:
        """c, and the rounds counted last."""
        counted = {f"{mark}{client}": torch.tensor(r) for client, r in self.counted.items()}
        return self.c | counted

    def load_own(self, state: Arrays) -> None:
        """Go on with this c."""
        self.c = {name: array for name, array in state.items() if not name.startswith(mark)}
        self.counted = {k[len(mark) :]: int(r) for k, r in state.items() if k.startswith(mark)}
