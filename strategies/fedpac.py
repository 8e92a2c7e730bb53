"""FedPAC: average extractors and prototypes, mix each client's head from all (server half).

Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867. The head of client i is sum_j a_j head_j, with
a the solution of the quadratic programme
    min over the simplex of a' (diag(v) + G_i) a,   G_i[j, k] = <h_i - h_j, h_i - h_k>_F,
over the clients of this round. Entries of at most 1e-3 are dropped, the rest scaled to sum to 1.

It is solved as non-negative least squares. G_i is a Gram matrix, so with B' B = diag(v) + G_i the
objective is q = ||B a||^2. Its minimiser over the simplex is, up to scale, that of
||B x||^2 + (1' x - 1)^2 over x >= 0: along x = t a the minimum over t is q / (1 + q), which
increases with q. SciPy's active set method solves this exactly. If it fails, client i keeps its own
head, as in the authors' code.
"""

import logging
from typing import ClassVar

import numpy as np
import scipy  # loads submodules on first use
import torch

from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import TrainReply
from strategies.average import Average
from strategies.prototypes import Prototypes, capped_scales, check_counts

log = logging.getLogger("keel.server")
smallest_share = 1e-3


def head_mix(i: int, h: np.ndarray, v: np.ndarray) -> np.ndarray:
    """a [m]: the weight of each client's head in that of client i; >= 0, sums to 1.

    h [m, C * d] and v [m] of the m clients of the round.
    """
    m = len(v)
    own: np.ndarray = np.eye(m)[i]
    if v[i] <= 0:  # its own head has cost 0
        return own
    scale = 1 / np.sqrt(v[i])  # then its own head has cost 1, and x is not tiny
    b = np.vstack([np.diag(np.sqrt(np.maximum(v, 0))), (h[i] - h).T]) * scale
    b = np.vstack([np.linalg.qr(b, mode="r"), np.ones(m)])
    try:
        x, _ = scipy.optimize.nnls(b, np.append(np.zeros(len(b) - 1), 1.0))
    except RuntimeError as error:
        log.warning("FedPAC: the quadratic programme failed (%s): own head used", error)
        return own
    shares: np.ndarray = x / x.sum()
    large = np.where(shares > smallest_share, shares, 0.0)
    return large / large.sum() if large.any() else shares


class FedPACServer(Average):
    """Stores the prototypes and every client's mixed head, which is its `own_extra`."""

    needs_updates: ClassVar[bool] = False

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        self.prototypes = Prototypes(model.num_classes, model.feature_width)
        weights = model.state_dict()
        keys = model.head_keys(model.stage_names[-1])
        self.head_like = {f"head.{k}": weights[k].detach().cpu() for k in keys}

    def extra(self) -> Arrays:
        """Prototypes, from round 2 on."""
        return self.prototypes.arrays() if self.prototypes.is_known.any() else {}

    def expected_extra(self) -> Arrays:
        """Head, h [C, d], v [1], class means [C, d] and counts [C]."""
        like = self.prototypes.values
        own = {"h": like, "v": torch.zeros(1), "means": like, "counts": torch.zeros(len(like))}
        return self.head_like | own

    def checked_extra(self, reply: TrainReply) -> Arrays:
        """All but the counts. ValueError if these differ from the roster entry."""
        check_counts(reply, self.entry_of(reply))
        return {name: array for name, array in reply.extra.items() if name != "counts"}

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """The extractors' average, new prototypes, and the heads of this round's clients."""
        following = super().next_arrays(current, replies)
        scales = capped_scales(replies, self.counts(replies))
        counts = [r.extra["counts"] * scale for r, scale in zip(replies, scales, strict=True)]
        sums = [r.extra["means"] * n[:, None] for r, n in zip(replies, counts, strict=True)]
        self.prototypes.update(sums, counts)
        h = np.stack([r.extra["h"].double().flatten().numpy() for r in replies])
        h = np.asarray(np.linalg.qr(h.T, mode="r")).T  # [m, <= m]: the distances stay the same
        v = np.array([r.extra["v"].item() for r in replies])
        for i, reply in enumerate(replies):
            shares = head_mix(i, h, v)
            self.own_extra[reply.client] = {
                name: sum(
                    (float(a) * r.extra[name] for a, r in zip(shares, replies, strict=True)),
                    torch.zeros_like(like),
                )
                for name, like in self.head_like.items()
            }
        return following

    def own_state(self) -> Arrays:
        """Prototypes and heads."""
        heads = {f"{c}/{k}": a for c, head in self.own_extra.items() for k, a in head.items()}
        return self.prototypes.arrays() | heads

    def load_own(self, state: Arrays) -> None:
        """Restore these prototypes and heads."""
        self.prototypes.load(state)
        self.own_extra = {}
        for name, array in state.items():
            client, slash, key = name.rpartition("/")
            if slash:
                self.own_extra.setdefault(client, {})[key] = array
