"""`KEY=VALUE` arguments as typed overrides; all mistakes are reported at once."""

import tomllib
from collections.abc import Mapping, Sequence

from keel.cli.interrupts import uninterrupted
from protocol.config import RunConfig, default_config, refuse_unknown, resolve_config
from protocol.config_keys import DataConfig
from protocol.options import ConfigError, OptionValue, type_names

MAX_MISTAKES = 5
DECIDING_KEYS = {"preset", "method", "server-optimizer", "model"}  # which decide on the others


def parse_overrides(assignments: Sequence[str]) -> dict[str, OptionValue]:
    """Overrides such as `alpha=0.1` with the type of each key's default; strings need no quotes.

    ValueError, one line, with every argument that is not KEY=VALUE, names no key, or has a wrong
    type.
    """
    defaults = default_config()
    overrides: dict[str, OptionValue] = {}
    mistakes = []
    method = next((a.partition("=")[2] for a in assignments if a.startswith("method=")), "")
    if any(assignment.startswith("=") for assignment in assignments):
        raise ValueError("write KEY=VALUE without spaces around =")
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        try:
            if not equals:
                raise ValueError(f"{assignment!r}: expected KEY=VALUE, such as method=fedintr")
            refuse_unknown("config key", key, list(defaults), method)
            if key in overrides:
                raise ValueError(f"{key} is set twice")
            default = defaults[key]
            overrides[key] = typed_value(key, text.strip(), type(default))
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError(" | ".join(mistakes))
    return overrides


def typed_value(key: str, text: str, kind: type[OptionValue]) -> OptionValue:
    """The value that `text` stands for; ValueError if it is not of type `kind`.

    Numbers may have underscores, as in TOML: 1_000.
    """
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{key} = {text}: not a TOML string: {error}") from error
        if kind is str:
            return str(value)
        raise ValueError(f"{key} = {text}: expected {type_names[kind]}, found a string")
    if kind is str:
        return text
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{key} = {text!r}: expected {type_names[kind]}") from None


def checked_config(overrides: Mapping[str, OptionValue]) -> RunConfig:
    """The config of these overrides; ValueError, one line, naming several mistakes at once.

    The key that an error names is set aside and the rest is checked again. The method's own options
    and what the run asks of it are checked last, because this imports torch.
    """
    mistakes: list[str] = []
    rest = dict(overrides)
    while True:
        try:
            config = resolve_config(rest)
            if not mistakes:
                with uninterrupted():
                    from client_app.methods import method_of
                method_of(config)
            break
        except ConfigError as error:
            key = error.key
            if key in overrides and key not in rest:  # due to the default that replaced a mistake
                break
            mistakes.append(str(error))
            if key not in rest or key in DECIDING_KEYS or len(mistakes) == MAX_MISTAKES:
                break
            del rest[key]
    if mistakes:
        raise ValueError(" | ".join(mistakes))
    return config


def check_simulated(config: RunConfig, num_clients: int) -> None:
    """ValueError, one line, for what simulated clients would refuse later, with torch imported."""
    rounds, data = config.rounds, config.data
    if config.evaluated_clients != "none" and not data.local_test_fraction:
        raise config.no_test_part("client-0000")
    # imported late: NumPy takes as long as all the rest, and most refusals come before
    from data.partitions import check_classes, check_dirichlet, check_num_clients, check_shards
    from keel.cli.sizes import data_size
    from server_app.trackers import check_trackers

    check_trackers(rounds)
    rounds.check_cohort(max(1, round(rounds.fraction_train * num_clients)))
    size = data_size(config)
    if size:
        if data.data_fraction < 1:
            check_share(data, size.num_train, size.num_classes, num_clients)
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


def check_share(data: DataConfig, num_train: int, num_classes: int, num_clients: int) -> None:
    """ValueError if `data-fraction` leaves fewer images than the partition needs in any case."""
    # at least one image of each class
    max_left = min(num_train, int(data.data_fraction * num_train) + num_classes)
    each = {"dirichlet": data.min_samples, "shards": data.shards_per_client}.get(data.partition, 1)
    if each * num_clients > max_left:
        key = {"dirichlet": "min-samples", "shards": "shards-per-client"}.get(data.partition)
        with_key = f" with {key} = {each}" if key else ""
        raise ValueError(
            f"data-fraction = {data.data_fraction:g} leaves at most {max_left:,} training images, "
            f"and {num_clients} clients{with_key} need {each * num_clients:,}: raise data-fraction"
        )
