"""The Gaussian mechanism and its accounting: noise per release, budget spent over all rounds.

FedReCo, Sections 4.2 and 6.2: (epsilon, delta)-local differential privacy of each release.
"""

import math
from functools import lru_cache
from typing import Any

from protocol.config_keys import PrivacyConfig
from protocol.discrete_gaussian import SAMPLER_DISTANCE

SMALL_DELTA = 1e-5  # the composed budget is stated at this delta too
STEPS_PER_DEVIATION = 2**10  # at least, of the grid
STEPS_PER_ENTRY = 2**8  # at least, in clip-norm / sqrt(entries): what rounding may change


def noise_multiplier(epsilon: float, delta: float) -> float:
    """sigma / sensitivity of one (epsilon, delta) release: sqrt(2 ln(1.25 / delta)) / epsilon."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def noise_sigma(privacy: PrivacyConfig) -> float:
    """Standard deviation of the noise on every coordinate of a clipped release.

    The sensitivity is 2C: any two data sets must look alike, and two clipped releases are at most
    2C apart.
    """
    return noise_multiplier(privacy.epsilon, privacy.delta) * 2 * privacy.clip_norm


def granularity(privacy: PrivacyConfig, num_entries: int) -> float:
    """The power of two that every value of a release of `num_entries` entries is a multiple of.

    At most sigma / 2^10, and at most a 2^8th of an entry of a release of norm C whose entries are
    all alike: rounding towards zero then changes the release by less than C / 2^8.
    """
    by_noise = noise_sigma(privacy) / STEPS_PER_DEVIATION
    by_signal = privacy.clip_norm / STEPS_PER_ENTRY / math.sqrt(max(1, num_entries))
    return 2.0 ** math.floor(math.log2(min(by_noise, by_signal)))


@lru_cache
def composed_epsilon(multiplier: float, delta: float) -> float:
    """Epsilon at delta of one Gaussian release of this noise / sensitivity, by Renyi accounting.

    n releases of multiplier z cost what one of z / sqrt(n) does. Holds for discrete Gaussian noise.
    """
    import dp_accounting.rdp  # half a second, and scipy: runs without privacy do without it

    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
    return float(accountant.get_epsilon(delta))


def composed_budget(privacy: PrivacyConfig, releases: int) -> tuple[float, float]:
    """Epsilon of `releases` releases of one client, at the run's delta and at `SMALL_DELTA`.

    By Renyi accounting (dp-accounting), tighter than the sum of the releases' budgets. Twice at the
    run's delta if that is smaller. At the run's delta at least the epsilon of one release: a large
    delta alone would cover many releases with an epsilon near 0, as it allows that everything is
    disclosed with that probability. The epsilon at a small delta says what they cost.
    """
    if releases == 0:
        return 0.0, 0.0
    multiplier = noise_multiplier(privacy.epsilon, privacy.delta) / math.sqrt(releases)
    return (
        max(privacy.epsilon, composed_epsilon(multiplier, privacy.delta)),
        max(privacy.epsilon, composed_epsilon(multiplier, min(privacy.delta, SMALL_DELTA))),
    )


def privacy_statement(
    privacy: PrivacyConfig, num_entries: int, releases: int, reads_state: bool = False
) -> dict[str, Any]:
    """What a run spent and what the guarantee covers, for summary.json.

    reads_state: the run's diagnostics measure models in client state.
    """
    epsilon, at_small_delta = composed_budget(privacy, releases)
    small_delta = min(privacy.delta, SMALL_DELTA)
    # delta with exact noise becomes delta + (1 + e^epsilon) distance with the sampler's noise
    sampling = (1 + math.exp(min(at_small_delta, 700))) * SAMPLER_DISTANCE * num_entries * releases
    measured = ["losses", "accuracies", "label counts", "times"]
    return {
        "per_release": {"epsilon": privacy.epsilon, "delta": privacy.delta},
        "releases": releases,
        "composed": {"epsilon": epsilon, "delta": privacy.delta},
        "composed_at_small_delta": {"epsilon": at_small_delta, "delta": small_delta},
        "guarantee": {
            "model": "local: also against the server",
            "unit": "one training sample",
            "neighbours": "one sample is replaced by another; the numbers of samples are fixed "
            "(holds for any two data sets of the same size too)",
            "covers": "the clipped and noised arrays of every reply",
            "public": "numbers of training and test samples, names of the classes that occur, "
            "whether all samples can be read, network, versions, device, whether its state is "
            "lost, when it answers",
            "withheld": measured if privacy.withholds_metrics else [],
            "exempt": [
                *([] if privacy.withholds_metrics else measured),
                *(["diagnostics"] if reads_state else []),
            ],
        },
        "noise": {
            "kind": "discrete Gaussian",
            "sigma": noise_sigma(privacy),
            "granularity": granularity(privacy, num_entries),
            "added_to_delta": min(1.0, sampling),  # to the composed delta
        },
    }
