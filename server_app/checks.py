"""Checks of the config, before training, that need packages which `protocol` does not import."""

import math
from collections.abc import Collection, Mapping

from client_app.methods import method_of
from client_app.training_keys import TRAINING_KEYS, used_training_keys
from data.partitions import PARTITIONS
from protocol.arrays import Arrays
from protocol.catalogue import method_names
from protocol.config import RunConfig
from protocol.options import ConfigError
from protocol.privacy import noise_sigma
from protocol.server_optimizers import SERVER_OPTIMIZERS
from protocol.text import num_of

PARTITION_KEYS = {  # config key: the name of the option in `PARTITIONS`
    "alpha": "alpha",
    "balanced-order": "order",
    "classes-per-client": "classes_per_client",
    "min-samples": "min_size",
    "shards-per-client": "shards_per_client",
}

# keys that no simulation uses, and those that the inline engine does not use either
IN_SIMULATION = {"max-weight-share": "the partition says how many samples a client has"}
INLINE = IN_SIMULATION | dict.fromkeys(
    ("round-timeout", "backoff-after"), "the inline engine waits for every client"
)


def unused_keys(config: RunConfig) -> dict[str, str]:
    """Every key that this run does not use, on any engine, with the reason.

    `IN_SIMULATION` and `Sites.unused_keys` have what depends on the engine.
    """
    rounds, data, train = config.rounds, config.data, config.train
    method, found = config.method_options(), dict[str, str]()
    in_use = {config.method_table, rounds.method, rounds.server_optimizer}
    for key in config.flat:
        table, dot, _ = key.partition(".")
        if dot and table in SERVER_OPTIMIZERS and table not in in_use:
            found[key] = f"server-optimizer is {rounds.server_optimizer}"
        elif dot and table in method_names() and table not in in_use:
            found[key] = f"method is {rounds.method}"
    for key in TRAINING_KEYS - used_training_keys(method):
        found[key] = f"the local training of {rounds.method} does not read it"
    for key, keys in (("local-epochs", method.duration_keys), ("lr", method.rate_keys)):
        if key not in keys:
            found[key] = f"{rounds.method} uses {' and '.join(keys)} instead"
    if train.batches_per_epoch:
        found["batch-size"] = f"batches-per-epoch is {train.batches_per_epoch}"
    if train.optimizer != "sgd":
        found["momentum"] = f"optimizer is {train.optimizer}"
    if train.lr_schedule != "exponential":
        found["lr-decay"] = f"lr-schedule is {train.lr_schedule}"
    options = PARTITIONS.get(data.partition, (None, ()))[1]  # an own partition has no keys
    for key, option in PARTITION_KEYS.items():
        if option not in options:
            found[key] = f"partition is {data.partition}"
    readers = {"trim-fraction": ["trimmed-mean"], "num-malicious": ["krum", "multi-krum"]}
    for key, aggregations in (*readers.items(), ("weighting", ["mean", "multi-krum"])):
        if rounds.aggregation not in aggregations:
            found[key] = f"aggregation is {rounds.aggregation}"
    if rounds.norm_bound == "off":
        found["norm-bound-value"] = "norm-bound is off"
    if method.shared_part == "nothing":
        for key in ("weighting", "max-weight-share", "norm-bound", "norm-bound-value"):
            found[key] = f"{rounds.method} sends nothing"
    if not rounds.diagnostics:
        found["diagnostics-every"] = "diagnostics is empty"
    if not config.privacy.epsilon:
        for key in ("privacy.delta", "privacy.clip-norm", "privacy.metrics"):
            found[key] = "privacy.epsilon is 0"
    elif config.privacy.withholds_metrics:
        found["evaluate-clients"] = "privacy.metrics is withheld"
    return found


def keys_without_effect(config: RunConfig, keys: Collection[str]) -> list[str]:
    """A line for each of these keys that this run does not use."""
    unused = unused_keys(config)
    return [unused_text(config, key, unused[key]) for key in sorted(unused.keys() & set(keys))]


def unused_text(config: RunConfig, key: str, reason: str) -> str:
    """What is said of a key that is set and not used."""
    return f"{key} = {config.flat[key]!r} would have no effect: {reason}; leave it out"


def refuse_unused(
    config: RunConfig, keys: Collection[str], unused: Mapping[str, str] | None = None
) -> None:
    """ConfigError if one of these keys, which the user set, is not used. unused: with reasons."""
    found = unused_keys(config) if unused is None else unused
    lines = {key: unused_text(config, key, found[key]) for key in sorted(found.keys() & set(keys))}
    if lines:
        raise ConfigError(next(iter(lines)), " | ".join(lines.values()))


def config_warnings(config: RunConfig) -> list[str]:
    """A line for what is revealed beside `privacy`, and for models never evaluated."""
    rounds, method, lines = config.rounds, method_of(config), list[str]()
    on_clients = config.evaluated_clients != "none"
    if config.privacy.withholds_metrics:
        what = "no losses and no accuracies of clients"
        if not method.has_global_model:
            what = f"no accuracy at all: {rounds.method} is evaluated on clients only"
        lines.append(
            f"privacy.metrics = 'withheld': this run reports {what}; 'exact' reports them without "
            "noise, outside the guarantee"
        )
    elif config.privacy.epsilon:
        lines.append(
            "privacy.metrics = 'exact': losses, accuracies, label counts and times leave the "
            "clients without noise, outside the guarantee of privacy.epsilon"
        )
    if config.privacy.epsilon and rounds.diagnostics and method.is_stateful:
        lines.append(
            "diagnostics are measured on the clients' own models, without noise, outside the "
            "guarantee of privacy.epsilon"
        )
    if not config.privacy.withholds_metrics and method.is_personal and not on_clients:
        lines.append("evaluate-clients = 'none': the clients' personal models are never evaluated")
    elif not on_clients and not config.evaluates_global:
        lines.append("evaluate-global = false: nothing is evaluated in this run")
    return lines


def noise_warnings(config: RunConfig, num_clients: int, released: Arrays) -> list[str]:
    """A line if the noise of `privacy.epsilon` drowns what the clients send.

    In the mean of n clients the noise on d values has the norm sigma sqrt(d / n), and the clipped
    updates at most C. Over T rounds the first adds up to sqrt(T) times as much, the second to T
    times. released: what a client sends; num_clients: in a round.
    """
    privacy, num_rounds = config.privacy, config.rounds.num_rounds
    if not privacy.epsilon:
        return []
    num_values = sum(array.numel() for array in released.values())
    noise = noise_sigma(privacy) * math.sqrt(num_values / num_clients)
    if noise <= math.sqrt(num_rounds) * privacy.clip_norm:
        return []
    return [
        f"privacy.epsilon = {privacy.epsilon}: in the mean of {num_of('client', num_clients)} the "
        f"noise on {num_values:,} values is {noise / privacy.clip_norm:.3g} times as long as the "
        f"clipped updates can be: nothing can be learnt in {num_of('round', num_rounds)}; more "
        "clients, fewer values or a larger epsilon would help"
    ]
