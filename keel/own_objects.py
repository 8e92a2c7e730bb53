"""Objects among the keys of `keel.run`, such as `method=FedPull(mu=0.3)`, as own code."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

from data.arrays import ARRAYS, stored
from protocol.config import keel_home
from protocol.options import ConfigError, OptionValue, defaults_of
from protocol.own_code import Own, by_value, own_of, table_of
from protocol.own_keys import SPEC_KEYS


def with_specs(keys: Mapping[str, Any]) -> tuple[dict[str, OptionValue], dict[str, Own]]:
    """(the keys with a spec in the place of each object, what the specs name).

    ConfigError, one line, for an object that no other process could use.
    """
    plain: dict[str, OptionValue] = {}
    own: dict[str, Own] = {}
    for key, value in keys.items():
        if key == "data":
            if "source" in keys:
                raise ConfigError("source", "source is set twice, by data too")
            key = "source"
            if not isinstance(value, str) and not isinstance(value, type | FunctionType):
                plain[key] = stored(value, keel_home() / ARRAYS)
                continue
        if key not in SPEC_KEYS or isinstance(value, bool | int | float | str):
            plain[key] = value
            continue
        if key == "metrics":
            scores = scores_of(value)
            plain[key] = ",".join(scores)
            own |= {spec: found for spec, found in scores.items() if found}
            continue
        is_instance = key == "method" and not isinstance(value, type)
        thing = type(value) if is_instance else value
        if name := name_in_keel(thing):
            plain[key], table = name, name
        else:
            found = own_code_of(key, thing, "" if callable(thing) else key)
            plain[key], own[found.spec] = found.spec, found
            table = table_of(found.spec)
        if is_instance:
            plain |= {k: v for k, v in options_set(key, value, table).items() if k not in keys}
    return plain, own


def scores_of(value: Any) -> dict[str, Own | None]:
    """The specs in `metrics`, of a list of names and functions or a dict from names to them.

    With their own code; None of a name, which is a text. ConfigError for anything else.
    """
    named: Iterable[tuple[Any, Any]] = [("", value)]
    if isinstance(value, Mapping):
        named = value.items()
    elif isinstance(value, list | tuple):
        named = [("", each) for each in value]
    found: dict[str, Own | None] = {}
    for name, each in named:
        if isinstance(each, str):
            if name not in ("", each):
                what = f"metrics: {name!r}: {each!r} keeps its name: expected {each!r}: {each!r}"
                raise ConfigError("metrics", what)
            found[each] = None
            continue
        own = own_code_of("metrics", each, str(name))
        if not callable(each) or (name and not str(name).isidentifier()):
            raise ConfigError(
                "metrics",
                f"metrics: {name or each!r}: expected names of letters, digits and _, each with a "
                "function of (probabilities [N, C], labels [N])",
            )
        if own.spec in found:
            what = f"metrics: two functions are called {own.spec.removeprefix('own:')}"
            raise ConfigError("metrics", f"{what}: expected a dict from names to functions")
        found[own.spec] = own
    return found


def name_in_keel(thing: Any) -> str:
    """The name of a method's class that is one of Keel's; else ""."""
    from client_app import methods  # imports torch, as has whoever has a class or a network
    from protocol.catalogue import classes

    assert methods
    return next((name for name, cls in classes.items() if cls is thing), "")


def own_code_of(key: str, thing: Any, name: str = "") -> Own:
    """An object as own code, under this name, or else named as it is in Python."""
    is_renamed = name not in ("", getattr(thing, "__name__", ""))
    name = name or getattr(thing, "__name__", type(thing).__name__)
    try:
        if is_renamed:
            return by_value(name, thing)
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
