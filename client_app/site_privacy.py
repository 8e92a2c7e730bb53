"""A site's own privacy limits and ledger, which bind the server whatever it requests.

The limits are environment variables of the process that reads the data, such as the resident
worker: the node config passes through the run's code, which could change it.

KEEL_PRIVACY_MIN_NOISE_MULTIPLIER  least sigma / (2 clip-norm)
KEEL_PRIVACY_MAX_CLIP_NORM         greatest clip-norm
KEEL_PRIVACY_BUDGET_EPSILON        of all releases under this $KEEL_HOME, whatever their data
KEEL_PRIVACY_BUDGET_DELTA          at this delta; 1e-5
KEEL_PRIVACY_METRICS               exact: allows privacy.metrics=exact; withheld

If any is set, the site takes part only in runs with noise, and only with withheld metrics unless
KEEL_PRIVACY_METRICS is exact, which is not a limit by itself.
"""

import fcntl
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from client_app.methods import method_of
from client_app.node_config import NODE_KEYS, NodeConfig, is_deployed
from protocol.config import RunConfig, keel_home, refuse_unknown, validate
from protocol.config_keys import PrivacyConfig
from protocol.files import Chain, Entry, read_chain, write_atomically
from protocol.privacy import SMALL_DELTA, composed_epsilon, noise_sigma
from protocol.text import in_one_line

MIN_NOISE = "KEEL_PRIVACY_MIN_NOISE_MULTIPLIER"
MAX_CLIP = "KEEL_PRIVACY_MAX_CLIP_NORM"
BUDGET = "KEEL_PRIVACY_BUDGET_EPSILON"
BUDGET_DELTA = "KEEL_PRIVACY_BUDGET_DELTA"
METRICS = "KEEL_PRIVACY_METRICS"
DEFAULTS = {MIN_NOISE: 0.0, MAX_CLIP: math.inf, BUDGET: math.inf, BUDGET_DELTA: SMALL_DELTA}
VARIABLES = (*DEFAULTS, METRICS)


class PrivacyRefused(ValueError):
    """The server requests more than the site allows.

    nameless: the message without a file's path, if the message has one.
    """

    def __init__(self, message: str, nameless: str = "") -> None:
        super().__init__(message)
        self.nameless = nameless


@dataclass(frozen=True)
class SiteLimits:
    """What a site allows; `is_set` if it names any limit."""

    min_noise_multiplier: float
    max_clip_norm: float
    budget_epsilon: float
    budget_delta: float
    allows_exact_metrics: bool
    is_set: bool


def site_limits() -> SiteLimits:
    """The limits in the environment; an empty variable counts as unset.

    PrivacyRefused for a value that is no number > 0, and for an unknown variable that begins as a
    limit: ignoring it would lift the limit.
    """
    prefix = "keel_privacy"
    stated = {k: v for k, v in os.environ.items() if v and k.lower().startswith(prefix)}
    for name in stated:
        if name not in VARIABLES:
            raise PrivacyRefused(
                f"{name}: unknown privacy limit of this site; expected one of "
                + ", ".join(VARIABLES)
            )
    numbers = {
        name: positive(name, stated[name]) if name in stated else default
        for name, default in DEFAULTS.items()
    }
    if numbers[BUDGET_DELTA] >= 1:
        raise PrivacyRefused(f"{BUDGET_DELTA} = {stated[BUDGET_DELTA]}: expected below 1")
    metrics = stated.get(METRICS, "withheld")
    if metrics not in ("withheld", "exact"):
        raise PrivacyRefused(f"{METRICS} = {metrics!r}: expected withheld or exact")
    return SiteLimits(
        min_noise_multiplier=numbers[MIN_NOISE],
        max_clip_norm=numbers[MAX_CLIP],
        budget_epsilon=numbers[BUDGET],
        budget_delta=numbers[BUDGET_DELTA],
        allows_exact_metrics=metrics == "exact",
        is_set=bool(stated) and stated != {METRICS: "exact"},
    )


def positive(name: str, value: str) -> float:
    """`value` as a number; PrivacyRefused naming the variable unless it is a number > 0."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise PrivacyRefused(f"{name} = {value!r} of this site: expected a number > 0")
    return number


def is_site(node_config: NodeConfig) -> bool:
    """Whether the client is deployed or has limits: its noise and ledger are not simulated."""
    return is_deployed(node_config) or site_limits().is_set


def multiplier_of(privacy: PrivacyConfig) -> float:
    """Standard deviation of the noise over 2 clip-norm."""
    return noise_sigma(privacy) / (2 * privacy.clip_norm)


def check_limits(config: RunConfig, node_config: NodeConfig) -> None:
    """PrivacyRefused, one line, if the run is beyond a limit: key, value, what this site allows.

    ValueError for an unknown key of the node config.
    """
    for key in node_config:
        refuse_unknown("node config key", key, list(NODE_KEYS))
    limits, privacy = site_limits(), config.privacy
    if privacy.epsilon:  # what no server of Keel's asks for, and what would leave without noise
        try:
            validate(config)
            method_of(config)
        except ValueError as error:
            raise PrivacyRefused(in_one_line(error)) from error
        if not math.isfinite(multiplier_of(privacy)):  # no budget covers an infinite cost
            raise PrivacyRefused(
                f"privacy.clip-norm = {privacy.clip_norm:g}, privacy.delta = {privacy.delta:g}: "
                "the noise is not a finite number: lower clip-norm, or raise delta"
            )
    if limits.is_set:
        check_release(privacy, limits, node_config)
        ledger = Ledger()
        with ledger.locked(fcntl.LOCK_SH):
            ledger.check(privacy, limits)


def check_release(privacy: PrivacyConfig, limits: SiteLimits, node_config: NodeConfig) -> None:
    """PrivacyRefused if one release of the run is beyond a limit."""
    if is_deployed(node_config) and "source" not in node_config:  # removed by a run's code, maybe
        raise PrivacyRefused(
            "this site has privacy limits, but its node config has no 'source': add "
            'source="folder:PATH". A site with limits takes no partition, whose size may reveal '
            "labels"
        )
    if privacy.epsilon == 0:
        raise PrivacyRefused(
            "privacy.epsilon = 0: this site has privacy limits and takes part with noise only"
        )
    multiplier = multiplier_of(privacy)
    if multiplier < limits.min_noise_multiplier:
        raise PrivacyRefused(
            f"privacy.epsilon = {privacy.epsilon:g}: its noise is {multiplier:.4g} times the "
            f"sensitivity 2 clip-norm, this site allows {limits.min_noise_multiplier:g} or more "
            f"({MIN_NOISE})"
        )
    if privacy.clip_norm > limits.max_clip_norm:
        raise PrivacyRefused(
            f"privacy.clip-norm = {privacy.clip_norm:.15g}: this site allows "
            f"{limits.max_clip_norm:.15g} or less ({MAX_CLIP})"
        )
    if not privacy.withholds_metrics and not limits.allows_exact_metrics:
        raise PrivacyRefused(
            f"privacy.metrics = {privacy.metrics!r}: this site allows 'withheld' only ({METRICS})"
        )


class Ledger:
    """Every noised release under this $KEEL_HOME, over all data, runs, servers and restarts.

    Runs without noise are not recorded.
    """

    def __init__(self) -> None:
        self.path = keel_home() / "privacy" / "ledger.jsonl"
        self.newest = self.path.with_suffix(".newest")  # the digest of its newest line

    @contextmanager
    def locked(self, how: int) -> Iterator[None]:
        """Hold the ledger's lock: several workers may share it."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, how)
            yield

    def spent(self) -> float:
        """Sum of 1 / multiplier^2 over the releases so far.

        PrivacyRefused if the file was changed, or the newest line that was ever written is missing.
        """
        entries = self.entries()
        digests = {entry["digest"] for entry in entries}
        if self.newest.exists() and self.newest.read_text() not in digests:
            raise self.refusal(
                f"{self.path}: its newest lines are missing: restore the file from a backup"
            )
        return float(sum(entry["multiplier"] ** -2 for entry in entries))

    def entries(self) -> list[Entry]:
        """The releases so far. PrivacyRefused if the file was changed."""
        try:
            return list(read_chain(self.path)) if self.path.exists() else []
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def refusal(self, message: str) -> PrivacyRefused:
        """The error for what is wrong with the ledger."""
        return PrivacyRefused(message, message.replace(str(self.path), "this site's ledger"))

    def check(self, privacy: PrivacyConfig, limits: SiteLimits) -> None:
        """PrivacyRefused if one more release is beyond the budget; needs `locked`."""
        total = self.spent() + multiplier_of(privacy) ** -2
        if math.isinf(limits.budget_epsilon):
            return
        epsilon = composed_epsilon(total**-0.5, limits.budget_delta)
        if epsilon > limits.budget_epsilon:
            raise PrivacyRefused(
                f"privacy.epsilon = {privacy.epsilon:g}: with this release the site would have "
                f"spent epsilon {epsilon:.4g} at delta {limits.budget_delta:g}, it allows "
                f"{limits.budget_epsilon:g} ({BUDGET})"
            )

    def charge(self, privacy: PrivacyConfig, about: Mapping[str, Any]) -> None:
        """Record a release that is about to be made; PrivacyRefused if it no longer fits."""
        with self.locked(fcntl.LOCK_EX):
            self.check(privacy, site_limits())
            entry = {
                **about,
                "time": round(time.time(), 3),
                "epsilon": privacy.epsilon,
                "delta": privacy.delta,
                "clip_norm": privacy.clip_norm,
                "multiplier": multiplier_of(privacy),
            }
            chain = Chain(self.path)
            chain.append(entry)
            write_atomically(self.newest, chain.newest.encode())


def spent_epsilon(delta: float) -> float:
    """The total epsilon of this site's releases so far; PrivacyRefused where it is not known."""
    total = Ledger().spent()
    return composed_epsilon(total**-0.5, delta) if total else 0.0


def charge_release(
    config: RunConfig, node_config: NodeConfig, client: str, run: str, round_: int
) -> None:
    """Record a noised release, unless it is a simulation's."""
    if config.privacy.epsilon and is_site(node_config):
        data = node_config.get("source") or f"partition {node_config.get('partition-id')}"
        about = {"data": data, "client": client, "run": run, "round": round_}
        Ledger().charge(config.privacy, about)
