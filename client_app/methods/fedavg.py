"""FedAvg, client half: cross entropy and nothing else.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv 1602.05629, Algorithm 1 (ClientUpdate).
Server half: the default weighted average. Kept between rounds: nothing.
Departs from the paper in nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

from client_app.method import LocalObjective


@dataclass(frozen=True)
class FedAvg(LocalObjective):
    """Local SGD on the clients' own labels."""

    paper: ClassVar[str] = "McMahan et al. 2017"
