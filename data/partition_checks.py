"""Refusals of partitions that the data cannot have, also before the data is read."""

import math

from protocol.options import ConfigError
from protocol.text import num_of


def check_num_clients(num_samples: int, num_clients: int) -> None:
    """ValueError unless each client can have a sample."""
    if not 1 <= num_clients <= num_samples:
        raise ConfigError(
            "num-clients",
            f"num-clients = {num_clients}: expected 1 to {num_samples}, the number of samples "
            "to split",
        )


def check_dirichlet(num_samples: int, num_clients: int, min_size: int) -> None:
    """ValueError if there are too few samples for `min_size` each."""
    if min_size * num_clients > num_samples:
        raise ConfigError(
            "min-samples",
            f"min-samples = {min_size} for {num_of('client', num_clients)} needs "
            f"{min_size * num_clients} samples, but there are {num_samples}; lower one of them",
        )


def check_classes(num_classes: int, num_clients: int, classes_per_client: int) -> None:
    """ValueError if clients cannot hold that many classes, or no client would hold some class."""
    if not 1 <= classes_per_client <= num_classes:
        raise ConfigError(
            "classes-per-client",
            f"classes-per-client = {classes_per_client}: expected 1 to {num_classes}, the "
            "number of classes in the data",
        )
    if num_clients * classes_per_client < num_classes:
        raise ConfigError(
            "classes-per-client",
            f"classes-per-client = {classes_per_client} for {num_of('client', num_clients)} leaves "
            f"some of the {num_classes} classes without a client; expected at least "
            f"{math.ceil(num_classes / num_clients)}",
        )


def check_shards(num_samples: int, num_clients: int, shards_per_client: int) -> None:
    """ValueError if a shard would be empty."""
    check_num_clients(num_samples, num_clients)
    if not 1 <= shards_per_client <= num_samples // num_clients:
        raise ConfigError(
            "shards-per-client",
            f"shards-per-client = {shards_per_client} for {num_of('client', num_clients)}: "
            f"expected 1 to {num_samples // num_clients}, so that no shard of {num_samples} "
            "samples is empty",
        )
