"""FedPAC, server half: bodies averaged, prototypes averaged, each client's head mixed from all.

Source: Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867. The head of client i is sum_j a_j head_j, with
a the solution of the quadratic programme
    min over the simplex of a' (diag(v) + G_i) a,   G_i[j, k] = <h_i - h_j, h_i - h_k>_F,
over the clients of this round; entries of at most 1e-3 are dropped and the rest scaled to sum to 1.
G_i is a Gram matrix, so the programme is convex; SciPy's SLSQP solves it, and where it fails client
i keeps its own head, as the authors' code does.
"""

import logging

import numpy as np
import torch
from scipy.optimize import minimize

from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import Arrays, TrainReply
from strategies.body import SharedBody
from strategies.prototypes import Prototypes

log = logging.getLogger("keel.server")
smallest_share = 1e-3


def head_mix(i: int, h: np.ndarray, v: np.ndarray) -> np.ndarray:
    """a [m]: how much of each client's head client i takes; >= 0, sums to 1.

    h [m, C * d] and v [m] of the m clients of the round.
    """
    m = len(v)
    difference = h[i] - h  # [m, C * d]
    q = np.diag(v) + difference @ difference.T
    # SLSQP's tolerance is absolute and far heads make q ill-conditioned: own head is 1, and start
    q = q / max(float(v[i]), 1e-30)
    found = minimize(
        lambda a: float(a @ q @ a),
        np.eye(m)[i],
        jac=lambda a: 2 * q @ a,
        bounds=[(0.0, 1.0)] * m,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(m)},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    if not found.success:
        log.warning("FedPAC: the quadratic programme failed (%s): own head kept", found.message)
        own: np.ndarray = np.eye(m)[i]
        return own
    a = np.where(found.x > smallest_share, found.x, 0.0)
    shares: np.ndarray = a / a.sum()
    return shares


class FedPACServer(SharedBody):
    """Keeps prototypes and every client's mixed head; each client is sent its own."""

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        self.prototypes = Prototypes(model.num_classes, model.feature_width)
        weights = model.state_dict()
        keys = model.head_keys(model.stage_names[-1])
        self.head_like = {f"head.{k}": weights[k].detach().cpu() for k in keys}
        self.heads: dict[str, Arrays] = {}

    def extra_for(self, client: str) -> Arrays:
        """Prototypes, once there are some, and this client's head, once it was mixed."""
        known = self.prototypes.arrays() if self.prototypes.is_known.any() else {}
        return known | self.heads.get(client, {})

    def extra_like(self) -> Arrays:
        """Prototypes and a head."""
        return self.prototypes.arrays() | self.head_like

    def expected_extra(self) -> Arrays:
        """Head, h [C, d], v [1], class means [C, d] and counts [C]."""
        like = self.prototypes.values
        return self.head_like | {
            "h": like,
            "v": torch.zeros(1),
            "means": like,
            "counts": torch.zeros(len(like)),
        }

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """The bodies' average; new prototypes; the heads of this round's clients."""
        following = super().next_arrays(current, replies)
        counts = [r.extra["counts"] for r in replies]
        sums = [r.extra["means"] * n[:, None] for r, n in zip(replies, counts, strict=True)]
        self.prototypes.update(sums, counts)
        h = np.stack([r.extra["h"].double().flatten().numpy() for r in replies])
        v = np.array([r.extra["v"].item() for r in replies])
        for i, reply in enumerate(replies):
            shares = head_mix(i, h, v)
            self.heads[reply.client] = {
                name: sum(
                    (float(a) * r.extra[name] for a, r in zip(shares, replies, strict=True)),
                    torch.zeros_like(like),
                )
                for name, like in self.head_like.items()
            }
        return following

    def own_state(self) -> Arrays:
        """Prototypes and heads."""
        heads = {f"{c}/{k}": a for c, head in self.heads.items() for k, a in head.items()}
        return self.prototypes.arrays() | heads

    def load_own(self, state: Arrays) -> None:
        """Go on with these prototypes and heads."""
        self.prototypes.load(state)
        self.heads = {}
        for name, array in state.items():
            client, slash, key = name.rpartition("/")
            if slash:
                self.heads.setdefault(client, {})[key] = array
