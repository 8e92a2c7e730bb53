"""Measures of representations: pure functions of features and outputs on one probe batch.

N samples, d features (phi, what enters the classifier), C classes. Linear CKA is in
client_app/similarity.py, shared with FedCKA.
Papers: FedCKA = Son et al., Appl. Sci. 12(19) 9943; FedRCL = Seo et al., CVPR 2024.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objective import squared_distance
from client_app.similarity import linear_alignment, unit_features

RESOLUTION = 1e-12  # a variance below this share of the largest is float32 rounding
NEGLIGIBLE = 1e-20  # as is any variance below this share of the mean square


def cka_of_views(x: Tensor, y: Tensor) -> float:
    """Linear CKA, FedCKA eq. (3), from 0 to 1, of two `linear_view`s of the same samples."""
    return linear_alignment(x, y).item()


def mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and mean squared distance from it; of CKA values, FedCKA Fig. 6's variance."""
    t = torch.tensor(values, dtype=torch.float64)
    return t.mean().item(), t.var(correction=0).item()


def class_deviations(phi: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(within [N, d], between [C, d]), float64, of features phi [N, d] with labels y [N].

    Row i of `within` is (phi_i - mean of its class) / sqrt N, row k of `between` is
    sqrt(n_k / N) (mean of class k - mean of all): Sigma_W and Sigma_B are within' within and
    between' between, and their sum is the covariance of all, Sigma_T. FedRCL section 4.2, with the
    weights n_k / N that make it so where classes differ in size.
    """
    phi = phi.double()
    n, counts = len(y), torch.bincount(y).double()
    sums = phi.new_zeros(len(counts), phi.shape[1]).index_add_(0, y, phi)
    means = sums / counts.clamp_min(1)[:, None]
    weights = (counts / n).sqrt()[:, None]  # 0 of a class that does not occur
    return (phi - means[y]) / n**0.5, (means - phi.mean(0)) * weights


def within_class_trace(phi: Tensor, y: Tensor) -> float:
    """Tr Sigma_W of features phi [N, d] with labels y [N]; FedRCL Fig. 2b, 3."""
    return class_deviations(phi, y)[0].square().sum().item()


def between_class_trace(phi: Tensor, y: Tensor) -> float:
    """Tr Sigma_B of features phi [N, d] with labels y [N]; FedRCL Fig. 2c, 3."""
    return class_deviations(phi, y)[1].square().sum().item()


def effective_rank(phi: Tensor) -> float:
    """exp of the entropy of the covariance's normalised singular values; FedRCL Definition 2.

    phi [N, d]; from 1 to min(N - 1, d), and 0 where nothing varies.
    """
    phi = phi.double()
    variances = torch.linalg.svdvals(phi - phi.mean(0)).square()  # the covariance's, times N
    total = variances.sum()
    if total <= NEGLIGIBLE * phi.square().sum():
        return 0.0
    return math.exp(torch.special.entr(variances / total).sum().item())


def variability_collapse_index(phi: Tensor, y: Tensor) -> float | None:
    """VCI = 1 - Tr(Sigma_T^+ Sigma_B) / rank Sigma_B, from 0 to 1; FedRCL section 4.2.

    0: no variation within classes along the directions in which class means differ; near 1: class
    means hardly differ. None where it is undefined (equal class means) or 0 for any features (N <=
    d).
    """
    within, between = class_deviations(phi, y)
    n, d = within.shape
    variances, directions = torch.linalg.eigh(within.T @ within + between.T @ between)  # Sigma_T
    smallest = max(RESOLUTION * variances[-1], NEGLIGIBLE * phi.double().square().sum() / n)
    rank = int((torch.linalg.svdvals(between).square() > smallest).sum())
    if n <= d or rank == 0:
        return None
    varies = variances > smallest
    along = (between @ directions[:, varies]).square() / variances[varies]
    return 1 - float(along.sum()) / rank


def deviation_bounds(phi: Tensor, p: Tensor, y: Tensor) -> Tensor:
    """D(x) of every sample, [N], float64; FedRCL Definition 1, eq. (4).

    phi [N, d] features, p [N, C] class probabilities, y [N]. O_j are the samples of class j here;
    S_r(x) counts x itself, as printed, and <.,.> is the cosine. Small: the classifier's update from
    these samples moves x away from its class. NaN for 0 / 0.
    """
    phi, p = phi.double(), p.double()
    members = F.one_hot(y, p.shape[1]).double()  # [N, C]: is sample i in O_j
    counts = members.sum(0)  # |O_j|
    each = counts.clamp_min(1)
    directions = unit_features(phi)
    s = directions @ (members.T @ directions / each[:, None]).T  # S_j(x_i), [N, C]
    norms = members.T @ phi.norm(dim=1) / each  # Phi_j
    scores = members.T @ p / each[:, None]  # P_z^(j), row j, column z
    weighted = norms * counts * s  # Phi_j |O_j| S_j(x_i), [N, C]
    own = weighted.gather(1, y[:, None]).squeeze(1) * (1 - scores.diagonal()[y])
    of_others = weighted * scores.T[y] * (1 - members)  # column j: times P_r^(j), r = y_i
    bounds: Tensor = own / of_others.sum(1)
    return bounds


def weight_drift(w: Mapping[str, Tensor], w_g: Mapping[str, Tensor]) -> tuple[float, float]:
    """(||w - w_g||, ||w - w_g|| / ||w_g||), 2-norms over all entries of the arrays of `w`."""
    names = list(w)
    theirs = [w_g[name].double() for name in names]
    distance = squared_distance([w[name].double() for name in names], theirs).sqrt().item()
    origin = torch.stack([t.square().sum() for t in theirs]).sum().sqrt().item()
    return distance, distance / origin if origin else float("nan")
