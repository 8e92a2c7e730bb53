"""Typed options from flat keys: one dataclass field is one key, checked once, by name.

A group of options is a frozen dataclass whose fields carry what is allowed:

    @dataclass(frozen=True)
    class FedProx:
        mu: float = option(at_least(0))

Defaults live in pyproject.toml alone, so a field has none and every key must be given.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

type_names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}

OptionValue = bool | int | float | str
T = TypeVar("T")


@dataclass(frozen=True)
class Constraint:
    """What a value may be: a test for it, and the words that say it to a user."""

    holds: Callable[[Any], bool]
    words: str


def at_least(low: float) -> Constraint:
    """A finite number >= low."""
    return Constraint(lambda v: math.isfinite(v) and v >= low, f"a finite number >= {low:g}")


def more_than(low: float) -> Constraint:
    """A finite number > low."""
    return Constraint(lambda v: math.isfinite(v) and v > low, f"a finite number > {low:g}")


def between(
    low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> Constraint:
    """A number in an interval, closed unless said otherwise."""
    words = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    return Constraint(
        lambda v: (v > low if open_low else v >= low) and (v < high if open_high else v <= high),
        words,
    )


def one_of(*names: str) -> Constraint:
    """One of these strings."""
    return Constraint(lambda v: v in names, "one of " + ", ".join(names))


def any_text() -> Constraint:
    """Any string."""
    return Constraint(lambda v: True, "a string")


def true_or_false() -> Constraint:
    """Any truth value."""
    return Constraint(lambda v: True, "true or false")


def option(allowed: Constraint, key: str = "") -> Any:
    """A dataclass field read from the key of the same name, with hyphens (or from `key`)."""
    return dataclasses.field(metadata={"allowed": allowed, "key": key})


def key_of(field: "dataclasses.Field[Any]") -> str:
    """The config key of a field: `local_epochs` is `local-epochs`."""
    return field.metadata.get("key") or field.name.replace("_", "-")


def keys_of(cls: type) -> list[str]:
    """The config keys of an options dataclass, in the order of its fields."""
    return [key_of(f) for f in dataclasses.fields(cls)]


def parse_options(cls: type[T], values: Mapping[str, OptionValue], prefix: str = "") -> T:
    """An instance of the options dataclass `cls` from the flat config `values`.

    Reads the keys prefix + key. ValueError, one line, with the key, the value and what is allowed:
    for a key that is missing, of another type, or out of range.
    """
    types = typing.get_type_hints(cls)
    parsed: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # T is always a dataclass
        key, want = prefix + key_of(field), types[field.name]
        allowed: Constraint = field.metadata["allowed"]
        if key not in values:
            raise ValueError(f"{key} is missing from the config: {allowed.words}")
        value = values[key]
        if want is float and type(value) is int:
            value = float(value)
        if type(value) is not want:
            raise ValueError(
                f"{key} = {value!r}: {type_names[want]} is needed ({allowed.words}), "
                f"not {type(value).__name__}"
            )
        if not allowed.holds(value):
            raise ValueError(f"{key} = {value!r}: it has to be {allowed.words}")
        parsed[field.name] = value
    return cls(**parsed)


def dump_options(instance: object, prefix: str = "") -> dict[str, OptionValue]:
    """The flat keys and values that `parse_options` reads back to an equal instance."""
    fields = dataclasses.fields(instance)  # type: ignore[arg-type]  # any options dataclass
    return {prefix + key_of(f): getattr(instance, f.name) for f in fields}
