"""What is refused before a run starts, as soon as it can be known."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keel.interrupts import uninterrupted
from protocol.config import RunConfig, resolve_config
from protocol.models import model_spec
from protocol.options import ConfigError, OptionValue
from protocol.own_code import Own
from protocol.source_spec import parse_source
from server_app.run_reader import new_path

if TYPE_CHECKING:
    from data.readers import PublishedSizes

MAX_MISTAKES = 5
DECIDING_KEYS = {"preset", "method", "server-optimizer", "model"}  # which decide on the others


def checked_config(
    overrides: Mapping[str, OptionValue],
    own: Mapping[str, Own] | None = None,
    is_new: bool = True,
) -> RunConfig:
    """The config of these overrides; ValueError, one line, naming several mistakes at once.

    own: as `resolve_config`. The key that an error names is set aside, and the rest is checked
    again. The method's options, what the run asks of it, and that a new run uses all of the keys
    are checked last: this imports torch.
    """
    mistakes: list[ConfigError] = []
    rest = dict(overrides)
    while True:
        try:
            config = resolve_config(rest, own)
            if not mistakes:
                with uninterrupted():
                    from client_app.methods import method_of
                    from server_app.checks import refuse_unused
                method_of(config)
                if is_new:
                    refuse_unused(config, rest)
            break
        except ConfigError as error:
            if error.key in overrides and error.key not in rest:
                break  # due to the default that replaced a mistake
            mistakes.append(error)
            is_deciding = error.key not in rest or error.key in DECIDING_KEYS
            if is_deciding or len(mistakes) == MAX_MISTAKES:
                break
            del rest[error.key]
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise ValueError(" | ".join(map(str, mistakes)))
    return config


def check_simulated(config: RunConfig, num_clients: int) -> None:
    """ValueError, one line, for what simulated clients would refuse later, with torch imported."""
    rounds, data = config.rounds, config.data
    config.check_is_for_simulation()
    if config.evaluated_clients != "none" and not data.local_test_fraction:
        raise config.no_test_part("client-0000")
    # imported late: NumPy takes as long as all the rest, and most refusals come before
    from data.partition_checks import (
        check_classes,
        check_dirichlet,
        check_num_clients,
        check_shards,
    )
    from server_app.trackers import check_trackers

    check_trackers(rounds)
    rounds.check_cohort(max(1, round(rounds.train_fraction * num_clients)))
    size = data_size(config)
    if not size:
        return
    match data.partition:
        case "iid" | "dirichlet-balanced":
            check_num_clients(size.num_train, num_clients)
        case "classes":
            check_num_clients(size.num_train, num_clients)
            check_classes(size.num_classes, num_clients, data.classes_per_client)
        case "dirichlet":
            check_dirichlet(size.num_train, num_clients, data.min_samples)
        case "shards":
            check_shards(size.num_train, num_clients, data.shards_per_client)


def data_size(config: RunConfig) -> "PublishedSizes | None":
    """The size of the run's data as the model sees it; None for the user's own."""
    from data.sources import published_size  # imports NumPy

    name, data = config.data.source, config.data
    if name in config.own:
        return None
    _, path = parse_source(name)
    if path and not path.exists():
        raise ConfigError("source", f"source = {name!r}: {path} does not exist")
    preferred = model_spec(config.model.model)
    return published_size(
        name,
        config.image_size,
        data.channels or preferred.channels,
        data.pool_test,
    )


def check_new_directory(config: RunConfig) -> None:
    """ValueError if the run directory exists already or cannot be made."""
    path = new_path(config)
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            "output-dir",
            f"output-dir: {path} cannot be made: {parent} is not a directory that you can write "
            "to; set output-dir or KEEL_HOME to another",
        )
