"""FedReCo: gradient steps on the shared extractor u_0, from the clients' g_i (server half).

"Consensus Optimization at Representation", eq. (8):
    u_0 <- u_0 - eta_0 * (1/M) sum_i g_i,   g_i = grad_{u_0} H_i(u_i, u_0),
the uniform mean over the M clients that replied. The server never sees a client's u_i or v_i.
As the authors' code, `clip-g` scales the mean down to a largest norm, over all arrays together.
Client half: client_app/methods/fedreco.py.
"""

from typing import ClassVar

from torch.nn.utils import get_total_norm

from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import TrainReply
from strategies.average import Average


class FedReCoServer(Average):
    """Steps on u_0; the arrays are u_0's parameters and buffers, the replies its gradients."""

    needs_updates: ClassVar[bool] = False

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        split = self.options.split
        if split and split not in model.stage_names:
            raise ValueError(
                f"fedreco.split = {split!r}: {model.name} has the stages "
                f"{', '.join(model.stage_names)}; '' is the last"
            )

    def initial_arrays(self, model: StagedModel) -> Arrays:
        """u_0: the stages up to the split."""
        split = self.options.split or model.stage_names[-1]
        weights = model.state_dict()
        return {name: weights[name].clone() for name in model.extractor_keys(split)}

    def expected(self, current: Arrays) -> Arrays:
        """A gradient for each of u_0's parameters."""
        return {name: array for name, array in current.items() if name in self.trainable}

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """Eq. (8); u_0's buffers do not change."""
        g = self.average(replies)
        if clip := self.options.clip_g:
            norm = get_total_norm(list(g.values()))
            g = {name: array * (clip / norm).clamp(max=1.0) for name, array in g.items()}
        return current | {name: current[name] - self.options.eta_0 * g[name] for name in g}
