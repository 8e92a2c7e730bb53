"""A site's own privacy limits and ledger, which bind the server whatever it requests.

Limits are set in the client's node config or environment; the stricter one applies. A resident
worker can trust only its environment: its node config passes through the ClientApp process.

privacy-min-noise-multiplier  KEEL_PRIVACY_MIN_NOISE_MULTIPLIER  least sigma / (2 clip-norm)
privacy-max-clip-norm         KEEL_PRIVACY_MAX_CLIP_NORM         greatest clip-norm
privacy-budget-epsilon        KEEL_PRIVACY_BUDGET_EPSILON        of all releases of the site's data
privacy-budget-delta          KEEL_PRIVACY_BUDGET_DELTA          at this delta; 1e-5
privacy-metrics               KEEL_PRIVACY_METRICS               exact: allows privacy.metrics=exact

If any is set, the site takes part only in runs with noise, and only with withheld metrics unless
privacy-metrics is exact, which is not a limit by itself.

A budget in the environment is of everything that its worker releases, whatever data a message
names; one in the node config is of that client's data.
"""

import copy
import fcntl
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from client_app.node_config import NODE_KEYS, NodeConfig, is_deployed
from protocol.chained import Chain, Entry, read_chain
from protocol.config import PrivacyConfig, RunConfig, keel_home, refuse_unknown, validate
from protocol.files import digest, write_atomically
from protocol.privacy import SMALL_DELTA, composed_epsilon, noise_sigma
from protocol.text import in_one_line

log = logging.getLogger("keel.client")
DEFAULTS = {
    "privacy-min-noise-multiplier": 0.0,
    "privacy-max-clip-norm": math.inf,
    "privacy-budget-epsilon": math.inf,
    "privacy-budget-delta": SMALL_DELTA,
}
KEYS = (*DEFAULTS, "privacy-metrics")
METRICS = ("withheld", "exact")


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


@lru_cache
def variable_of(key: str) -> str:
    """The environment variable of a key: privacy-metrics is KEEL_PRIVACY_METRICS."""
    return f"KEEL_{key.upper().replace('-', '_')}"


def check_names(node_config: NodeConfig) -> None:
    """ValueError for an unknown key of the node config, which is probably misspelt.

    PrivacyRefused for a key or variable that begins as a limit: ignoring it would lift the limit.
    """
    for key in node_config:
        if key not in NODE_KEYS and not key.lower().startswith("privacy"):
            refuse_unknown("node config key", key, [*NODE_KEYS, *KEYS])
    for prefix, settings, known in (
        ("privacy", node_config, KEYS),
        ("keel_privacy", os.environ, [variable_of(key) for key in KEYS]),
    ):
        for name in settings:
            is_limit = name[: len(prefix)].lower() == prefix
            if is_limit and name not in known and settings[name] != "":
                raise PrivacyRefused(
                    f"{name}: unknown privacy limit of this site; expected one of "
                    + ", ".join(known)
                )


def site_limits(node_config: NodeConfig) -> SiteLimits:
    """The limits in node config and environment; PrivacyRefused for one that is not > 0.

    An empty variable counts as unset.
    """
    in_environment = tuple(os.environ.get(variable_of(key)) or None for key in KEYS)
    return stricter_limits(in_environment, *(node_config.get(key) for key in KEYS))


@lru_cache(maxsize=16, typed=True)  # each message needs them; 1 is allowed where True is not
def stricter_limits(in_environment: Sequence[str | None], *own: object) -> SiteLimits:
    """`site_limits` from the values of `KEYS` in the environment and in the node config."""
    variables = dict(zip(KEYS, in_environment, strict=True))
    stated = {  # by key, the values that are set
        key: [value for value in (in_config, variables[key]) if value is not None]
        for key, in_config in zip(KEYS, own, strict=True)
    }
    values = []
    for key, default in DEFAULTS.items():
        numbers = [positive(key, value) for value in stated[key]]
        if key == "privacy-budget-delta":
            if any(number >= 1 for number in numbers):
                raise PrivacyRefused(f"{key} = {max(numbers):g} of this site: expected below 1")
            if variables["privacy-budget-epsilon"] and not variables[key]:
                numbers.append(default)  # no node config loosens a budget of the environment
        strictest = max if key == "privacy-min-noise-multiplier" else min
        values.append(strictest(numbers, default=default))
    metrics = stated["privacy-metrics"]
    for value in metrics:
        if value not in METRICS:
            expected = " or ".join(METRICS)
            raise PrivacyRefused(f"privacy-metrics = {value!r} of this site: expected {expected}")
    if any(in_environment) and not variables["privacy-metrics"]:
        metrics.append("withheld")  # the node config cannot allow what the environment does not
    is_set = "withheld" in metrics or any(stated[key] for key in DEFAULTS)
    min_multiplier, clip, epsilon, delta = values
    allows_exact = set(metrics) == {"exact"}
    return SiteLimits(min_multiplier, clip, epsilon, delta, allows_exact, is_set)


def names_limit(node_config: NodeConfig) -> bool:
    """Whether the node config has a key of a limit, even a misspelt one."""
    return any(key.lower().startswith("privacy") for key in node_config)


def is_site(node_config: NodeConfig) -> bool:
    """Whether the client is deployed or has limits: its noise and ledger are not simulated."""
    return is_deployed(node_config) or site_limits(node_config).is_set


def positive(key: str, value: object) -> float:
    """`value` as a number; PrivacyRefused naming the key unless it is a number > 0."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not number > 0:
        raise PrivacyRefused(f"{key} = {value!r} of this site: expected a number > 0")
    return number


def multiplier_of(privacy: PrivacyConfig) -> float:
    """Standard deviation of the noise over 2 clip-norm."""
    return noise_sigma(privacy) / (2 * privacy.clip_norm)


def check_limits(config: RunConfig, node_config: NodeConfig) -> None:
    """PrivacyRefused, one line, if the run is beyond a limit: key, value, what this site allows."""
    check_names(node_config)
    limits, privacy = site_limits(node_config), config.privacy
    if privacy.epsilon:  # what no server of Keel's asks for, and what would leave without noise
        try:
            validate(config)
        except ValueError as error:
            raise PrivacyRefused(in_one_line(error)) from error
        if not math.isfinite(multiplier_of(privacy)):  # no budget covers an infinite cost
            raise PrivacyRefused(
                f"privacy.clip-norm = {privacy.clip_norm:g}, privacy.delta = {privacy.delta:g}: "
                "the noise is not a finite number: lower clip-norm, or raise delta"
            )
    if not limits.is_set:
        return
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
            "(privacy-min-noise-multiplier)"
        )
    if privacy.clip_norm > limits.max_clip_norm:
        raise PrivacyRefused(
            f"privacy.clip-norm = {privacy.clip_norm:.15g}: this site allows "
            f"{limits.max_clip_norm:.15g} or less (privacy-max-clip-norm)"
        )
    if not privacy.withholds_metrics and not limits.allows_exact_metrics:
        raise PrivacyRefused(
            f"privacy.metrics = {privacy.metrics!r}: this site allows 'withheld' only "
            "(privacy-metrics)"
        )
    ledger = Ledger(node_config)
    with ledger.locked(fcntl.LOCK_SH):
        ledger.check(privacy, limits)


class Ledger:
    """Every noised release of one data set, over all runs, servers and restarts.

    One file under $KEEL_HOME/privacy for each `source`, so that renaming the client does not start
    a new one. Runs without noise are not recorded.
    """

    def __init__(self, node_config: NodeConfig) -> None:
        source = str(node_config.get("source", ""))
        kind, colon, path = source.partition(":")
        if colon:
            source = f"{kind}:{Path(os.path.expanduser(path)).resolve()}"
        self.data = source or f"partition {node_config.get('partition-id')}"
        self.path = keel_home() / "privacy" / f"{digest(self.data.encode())}.jsonl"
        self.newest = self.path.with_suffix(".newest")  # the digest of its newest line

    @contextmanager
    def locked(self, how: int) -> Iterator[None]:
        """Hold the lock of all ledgers: two runs may use the same data, or share a budget."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, how)
            yield

    def total_spent(self) -> float:
        """`spent` of this data set; with a budget in the environment, of all of this machine."""
        if not os.environ.get(variable_of("privacy-budget-epsilon")):
            return self.spent()
        found = self.path.parent.glob("[0-9a-f]" * 16 + ".[jn]*")
        paths = {path.with_suffix(".jsonl") for path in found if path.is_file()}
        return sum(ledger.spent() for ledger in map(self.beside, paths | {self.path}))

    def beside(self, path: Path) -> "Ledger":
        """The ledger in another file of the same folder."""
        other = copy.copy(self)
        other.path, other.newest = path, path.with_suffix(".newest")
        return other

    def spent(self) -> float:
        """Sum of 1 / multiplier^2 over the releases so far.

        PrivacyRefused if the file was changed, or if the newest line ever written is missing.
        """
        entries = self.entries()
        if self.is_cut_short(entries):
            problem = (
                "its newest lines are missing: what this site spent is not known; restore the file "
                "from a backup that has them"
            )
            raise PrivacyRefused(f"{self.path}: {problem}", f"this site's ledger: {problem}")
        return float(sum(entry["multiplier"] ** -2 for entry in entries))

    def check(self, privacy: PrivacyConfig, limits: SiteLimits) -> None:
        """PrivacyRefused if one more release is beyond the budget; needs `locked`."""
        if math.isinf(limits.budget_epsilon):
            return
        total = self.total_spent() + multiplier_of(privacy) ** -2
        epsilon = composed_epsilon(total**-0.5, limits.budget_delta)
        if epsilon > limits.budget_epsilon:
            raise PrivacyRefused(
                f"privacy.epsilon = {privacy.epsilon:g}: with this release the site would have "
                f"spent epsilon {epsilon:.4g} at delta {limits.budget_delta:g}, it allows "
                f"{limits.budget_epsilon:g} (privacy-budget-epsilon)"
            )

    def charge(self, config: RunConfig, node_config: NodeConfig, about: Mapping[str, Any]) -> None:
        """Record a release that is about to be made; PrivacyRefused if it no longer fits."""
        with self.locked(fcntl.LOCK_EX):
            privacy = config.privacy
            self.check(privacy, site_limits(node_config))
            entry = {
                "data": self.data,
                **about,
                "time": round(time.time(), 3),
                "epsilon": privacy.epsilon,
                "delta": privacy.delta,
                "clip_norm": privacy.clip_norm,
                "multiplier": multiplier_of(privacy),
            }
            is_cut_short = self.is_cut_short(self.entries())
            chain = Chain(self.path)
            chain.append([entry])
            if not is_cut_short:  # or the next look would find nothing missing
                write_atomically(self.newest, chain.newest.encode())

    def entries(self) -> list[Entry]:
        """The releases so far. PrivacyRefused if the file was changed."""
        try:
            return list(read_chain(self.path)) if self.path.exists() else []
        except ValueError as error:
            nameless = str(error).replace(str(self.path), "this site's ledger")
            raise PrivacyRefused(str(error), nameless) from error

    def is_cut_short(self, entries: Sequence[Entry]) -> bool:
        """Whether the newest line that was ever written is not among the entries any more."""
        if not self.newest.exists():
            return False
        return self.newest.read_text() not in {entry["digest"] for entry in entries}


def spent_epsilon(node_config: NodeConfig, delta: float) -> float:
    """The total epsilon of this site's releases so far; PrivacyRefused where it is not known."""
    total = Ledger(node_config).total_spent()
    return composed_epsilon(total**-0.5, delta) if total else 0.0


def charge_release(
    config: RunConfig, node_config: NodeConfig, client: str, run: str, round_: int
) -> None:
    """Record a noised release, unless it is a simulation's."""
    if config.privacy.epsilon and is_site(node_config):
        about = {"client": client, "run": run, "round": round_}
        Ledger(node_config).charge(config, node_config, about)
