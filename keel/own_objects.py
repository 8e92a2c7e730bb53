"""Objects among the keys of `keel.run`, such as `method=FedPull(mu=0.3)`, as own code."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from protocol.config import SPEC_KEYS
from protocol.options import ConfigError, OptionValue, defaults_of
from protocol.own_code import Own, own_of, table_of


def with_specs(keys: Mapping[str, Any]) -> tuple[dict[str, OptionValue], dict[str, Own]]:
    """(the keys with a spec in the place of each object, what the specs name).

    ConfigError, one line, for an object that no other process could use.
    """
    plain: dict[str, OptionValue] = {}
    own: dict[str, Own] = {}
    for key, value in keys.items():
        if key not in SPEC_KEYS or isinstance(value, bool | int | float | str):
            plain[key] = value
            continue
        is_instance = key == "method" and not isinstance(value, type)
        thing = type(value) if is_instance else value
        if name := name_in_keel(thing):
            plain[key], table = name, name
        else:
            found = own_code_of(key, thing)
            plain[key], own[found.spec] = found.spec, found
            table = table_of(found.spec)
        if is_instance:
            plain |= {k: v for k, v in options_set(key, value, table).items() if k not in keys}
    return plain, own


def name_in_keel(thing: Any) -> str:
    """The name of a method's class that is one of Keel's; else ""."""
    from client_app import methods  # imports torch, as has whoever has a class or a network
    from protocol.catalogue import classes

    assert methods
    return next((name for name, cls in classes.items() if cls is thing), "")


def own_code_of(key: str, thing: Any) -> Own:
    """An object as own code, named as it is in Python."""
    name = getattr(thing, "__name__", type(thing).__name__)
    try:
        return own_of(name if name.isidentifier() else key, thing)
    except ValueError as error:
        raise ConfigError(key, f"{key} = {error}") from error


def options_set(key: str, method: Any, table: str) -> dict[str, OptionValue]:
    """The options of a method's instance that differ from their defaults, as config keys."""
    if not is_dataclass(method):
        raise ConfigError(
            key, f"{key} = {method!r:.80}: expected a name, a method's class, or an instance of one"
        )
    try:
        defaults = defaults_of(type(method))
    except ValueError:  # `method_of` names it
        defaults = {}
    found = defaults_of(method)
    return {f"{table}.{k}": v for k, v in found.items() if k not in defaults or v != defaults[k]}
