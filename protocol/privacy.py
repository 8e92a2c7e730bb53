"""The Gaussian mechanism and its accounting: noise per release, budget spent over all rounds.

FedReCo, Sections 4.2 and 6.2: (epsilon, delta)-local differential privacy of each release.
"""

import math
from dataclasses import dataclass

import dp_accounting
from dp_accounting.rdp import RdpAccountant

from protocol.config import PrivacyConfig


def noise_multiplier(epsilon: float, delta: float) -> float:
    """sigma / sensitivity of one (epsilon, delta) release: sqrt(2 ln(1.25 / delta)) / epsilon."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def noise_sigma(privacy: PrivacyConfig) -> float:
    """Standard deviation of the noise on every coordinate of a clipped release.

    The sensitivity C' is 2C in the local model, where any two data sets must look alike (two
    clipped releases are at most 2C apart), and C for `central`.
    """
    sensitivity = privacy.clip_norm * (2 if privacy.sensitivity == "local" else 1)
    return noise_multiplier(privacy.epsilon, privacy.delta) * sensitivity


@dataclass(frozen=True)
class Budget:
    """The (epsilon, delta) that `releases` releases of one client cost together."""

    releases: int
    epsilon: float
    delta: float


def composed_budget(privacy: PrivacyConfig, releases: int) -> Budget:
    """The total over `releases` releases, at the run's delta, by Renyi accounting (dp-accounting).

    Tighter than the sum of the releases' budgets. After hundreds of rounds the total is still far
    from a useful guarantee; a run reports it for that reason.
    """
    if releases == 0:
        return Budget(0, 0.0, 0.0)
    accountant = RdpAccountant()
    event = dp_accounting.GaussianDpEvent(noise_multiplier(privacy.epsilon, privacy.delta))
    accountant.compose(event, releases)
    return Budget(releases, float(accountant.get_epsilon(privacy.delta)), privacy.delta)
