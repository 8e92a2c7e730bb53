"""FedDecorr: decorrelate the dimensions of the features over the batch (client half).

Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", ICLR 2023, arXiv 2210.00226.
Aggregation: weighted average. Client state: none.
z [n, d]: the classifier's input; n: the batch size.

The default is the authors' code, for which their beta values were tuned. With x the standardised z
it is 1/n times the mean square of the d (d - 1) off-diagonal entries of x'x, which is (n-1)^2/n
times the mean squared correlation. `form = "paper"` is (1/d^2) ||Corr||_F^2, about n times smaller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from client_app.objective import Batch, LocalObjective
from models import StagedModel
from protocol.options import at_least, one_of, option


def standardised(z: Tensor) -> Tensor:
    """Each column of z [n, d] minus its mean, over its standard deviation (n - 1)."""
    return (z - z.mean(0)) / (z.var(0, unbiased=True) + 1e-8).sqrt()


def decorrelation(z: Tensor, form: str) -> Tensor:
    """The penalty of features z [n, d], a scalar; 0 for one sample, with gradient 0."""
    n, d = z.shape
    if n == 1:
        return (z * 0).sum()
    x = standardised(z)
    squares = (x.T @ x).square()  # [d, d]; x'x = (n - 1) Corr
    if form == "paper":
        return squares.sum() / (n - 1) ** 2 / d**2
    off_diagonal = squares.sum() - squares.diagonal().sum()
    return off_diagonal / (d * (d - 1)) / n


@dataclass(frozen=True)
class FedDecorr(LocalObjective):
    """Decorrelation of the classifier's input."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"beta": 0.0}
    regularises: ClassVar[str] = "classifier's input, its dimensions against each other"
    paper: ClassVar[str] = "Shi et al. 2023"

    beta: float = option(
        at_least(0), "weight of the decorrelation term", default=0.1, source="authors' code: 0.1"
    )
    form: str = option(
        one_of("code", "paper"),
        "code: off-diagonal mean; paper: (1/d^2) ||Corr||_F^2, about batch-size times smaller",
        default="code",
    )

    def layers(self, model: StagedModel) -> list[str]:
        """The classifier's input."""
        return ["features"]

    def penalty(self, batch: Batch) -> Tensor:
        """beta times the decorrelation loss."""
        (z,) = batch.reps
        return self.beta * decorrelation(z, self.form)
