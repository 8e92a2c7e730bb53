"""Checks of the config, before training, that need packages which `protocol` does not import."""

import math
from collections.abc import Collection, Mapping

from client_app.methods import method_of
from data.partitions import PARTITIONS
from protocol.arrays import Arrays
from protocol.catalogue import method_names
from protocol.config import RunConfig
from protocol.options import OptionValue
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


def keys_without_effect(config: RunConfig, keys: Collection[str]) -> list[str]:
    """A line for each of these keys that this run does not read."""
    rounds = config.rounds
    in_use = {"method": rounds.method, "server-optimizer": rounds.server_optimizer}
    tables = dict.fromkeys(SERVER_OPTIMIZERS, "server-optimizer")
    tables |= dict.fromkeys(method_names(), "method")
    lines = []
    for key in sorted(keys):
        table, dot, _ = key.partition(".")
        if dot and table in tables and table not in in_use.values():
            lines.append(f"{key} has no effect: {tables[table]} is {in_use[tables[table]]}")
    options = config.method_options()
    for key, instead in (("local-epochs", options.duration_keys), ("lr", options.rate_keys)):
        if key in keys and key not in instead:
            lines.append(
                f"{key} has no effect: {rounds.method} uses {' and '.join(instead)} instead"
            )
    if config.train.optimizer != "sgd" and "momentum" in keys:
        lines.append(f"momentum has no effect: optimizer is {config.train.optimizer}")
    if config.train.lr_schedule != "exponential" and "lr-decay" in keys:
        lines.append(f"lr-decay has no effect: lr-schedule is {config.train.lr_schedule}")
    batches = config.train.batches_per_epoch
    if batches and "batch-size" in keys:
        lines.append(f"batch-size has no effect: batches-per-epoch is {batches}")
    used = PARTITIONS.get(config.data.partition, (None, ()))[1]  # an own partition has no keys
    for key, option in PARTITION_KEYS.items():
        if key in keys and option not in used:
            lines.append(f"{key} has no effect: partition is {config.data.partition}")
    return lines


def protection_not_in_use(config: RunConfig, keys: Collection[str]) -> list[str]:
    """A line for each of these keys whose protection is off: a user may believe that it is on.

    Not in `keys_without_effect`: the rows of a recipe may turn a protection on and off.
    """
    rounds, lines = config.rounds, []
    readers = {
        "trim-fraction": ["trimmed-mean"],
        "num-malicious": ["krum", "multi-krum"],
    }
    for key in sorted(keys):
        if key == "norm-bound-value" and rounds.norm_bound == "off":
            lines.append(f"{key} has no effect: norm-bound is off")
        elif rounds.aggregation not in readers.get(key, [rounds.aggregation]):
            lines.append(f"{key} has no effect: aggregation is {rounds.aggregation}")
        elif key.startswith("privacy.") and key != "privacy.epsilon" and not config.privacy.epsilon:
            lines.append(f"{key} has no effect: privacy.epsilon is 0")
    return lines


def config_warnings(config: RunConfig, overrides: Mapping[str, OptionValue]) -> list[str]:
    """A line for each key that was set but has no effect, and for models never evaluated."""
    rounds, method = config.rounds, method_of(config)
    lines = keys_without_effect(config, overrides) + protection_not_in_use(config, overrides)
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
