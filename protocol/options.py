"""Typed options from flat keys: one dataclass field is one key, parsed and checked once.

A group of options is a frozen dataclass whose fields carry a constraint and a description:

    @dataclass(frozen=True)
    class FedProx:
        mu: float = option(at_least(0), "weight of the proximal term", default=0.01)

Options of methods and server optimizers declare their defaults, from which `tools.config_table`
writes the tables in pyproject.toml. Of the common keys, only pyproject.toml states the defaults.
"""

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

type_names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}

OptionValue = bool | int | float | str
T = TypeVar("T")
MAX_MESSAGE, SHOWN_FIRST, SHOWN_LAST = 2000, 200, 400  # characters of an error
MAX_INTEGER = 2**63 - 1  # of a value: what Flower sends, and more than anything counts to


class ConfigError(ValueError):
    """A value of the config that is refused. key: the config key; message: one line, for users."""

    def __init__(self, key: str, message: str) -> None:
        if len(message) > MAX_MESSAGE:  # the value comes first, and what is allowed last
            message = f"{message[:SHOWN_FIRST]} ... {message[-SHOWN_LAST:]}"
        super().__init__(key, message)
        self.key, self.message = key, message

    def __str__(self) -> str:
        return self.message


class CommandOptionError(ValueError):
    """An option of a command that is refused. fault: what follows its name.

    name: as in Python, or of an environment variable.
    """

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(name, fault)
        self.name, self.fault = name, fault

    def __str__(self) -> str:
        name = self.name if self.name.isupper() else f"--{self.name.replace('_', '-')}"
        return f"{name} {self.fault}"


@dataclass(frozen=True)
class Constraint:
    """Which values an option accepts. choices: their names, where they have any."""

    holds: Callable[[Any], bool]
    description: str
    choices: tuple[str, ...] = ()

    def describe(self, kind: type) -> str:
        """The description, for an option of this type."""
        if kind is not int:
            return self.description
        return re.sub("a (finite )?number", type_names[int], self.description)


def at_least(low: float) -> Constraint:
    """A finite number >= low."""
    return Constraint(lambda v: math.isfinite(v) and v >= low, f"a finite number >= {low:g}")


def more_than(low: float) -> Constraint:
    """A finite number > low."""
    return Constraint(lambda v: math.isfinite(v) and v > low, f"a finite number > {low:g}")


def between(
    low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> Constraint:
    """A number in an interval, which is closed by default."""
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    return Constraint(
        lambda v: (v > low if open_low else v >= low) and (v < high if open_high else v <= high),
        f"a number in {interval}",
    )


def one_of(*names: str) -> Constraint:
    """One of these strings."""
    return Constraint(
        lambda v: v in names, "one of " + ", ".join(name or '""' for name in names), names
    )


def any_text() -> Constraint:
    """Any string."""
    return Constraint(lambda v: True, "a string")


def true_or_false() -> Constraint:
    """Either truth value."""
    return Constraint(lambda v: True, "true or false")


def matching(pattern: str, description: str) -> Constraint:
    """A string that matches the whole regular expression."""
    return Constraint(lambda v: re.fullmatch(pattern, v) is not None, description)


def duration() -> Constraint:
    """A string such as "1 epoch", "2 epochs" or "20 steps"; see `parse_duration`."""
    return matching(
        r"\d{1,9} (epoch|step)s?", "like '1 epoch', '2 epochs' or '20 steps', with at most 9 digits"
    )


def parse_duration(text: str) -> tuple[int, str]:
    """(count, "epochs" or "steps") of a string that `duration` accepts."""
    count, _, unit = text.partition(" ")
    return int(count), unit.rstrip("s") + "s"


def option(
    constraint: Constraint,
    description: str = "",
    *,
    default: Any = dataclasses.MISSING,
    source: str = "",
    key: str = "",
) -> Any:
    """A dataclass field read from the key of the same name, with hyphens (or from `key`).

    source: the equation, paper or code that the option comes from.
    """
    metadata = {"constraint": constraint, "description": description, "source": source, "key": key}
    return dataclasses.field(default=default, kw_only=True, metadata=metadata)


def typed(value: object) -> str:
    """A config value as `keel run` takes it: true, 1000, 0.1, text without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?` with the name that is nearest to `name`; "" if none is near.

    Upper and lower case are the same. A name that begins with `name` is near.
    """
    folded, by_folded = name.casefold(), {each.casefold(): each for each in names}
    near = difflib.get_close_matches(folded, by_folded, n=1)
    if not near and len(name) > 2:
        near = [each for each in by_folded if each.startswith(folded)]
    return f"; did you mean {by_folded[near[0]]}?" if near else ""


class OptionFlag:
    """A capability flag that follows a boolean option; see `when_option`, `unless_option`."""

    def __init__(self, name: str, negate: bool) -> None:
        self.name, self.negate = name, negate

    def __get__(self, options: object, owner: type) -> bool:
        """The flag of parsed options; on the class itself, its value if the option is false."""
        is_on = False if options is None else bool(getattr(options, self.name))
        return is_on != self.negate


def when_option(name: str) -> Any:
    """A class flag that is true where the boolean option `name` is."""
    return OptionFlag(name, negate=False)


def unless_option(name: str) -> Any:
    """A class flag that is true where the boolean option `name` is false."""
    return OptionFlag(name, negate=True)


def key_of(field: "dataclasses.Field[Any]") -> str:
    """The config key of a field: `local_epochs` is `local-epochs`."""
    return field.metadata.get("key") or field.name.replace("_", "-")


def type_of(field: "dataclasses.Field[Any]") -> Any:
    """The type of an option, whose annotation may be text: `from __future__ import annotations`."""
    named = {kind.__name__: kind for kind in type_names}
    return named.get(field.type, field.type) if isinstance(field.type, str) else field.type


def keys_of(cls: type) -> list[str]:
    """The config keys of an options dataclass, in the order of its fields."""
    return [key_of(f) for f in dataclasses.fields(cls)]


def defaults_of(options: Any) -> dict[str, OptionValue]:
    """The default of each key of an options dataclass, or the value in an instance of one.

    ValueError for an option without a default.
    """
    found = {}
    for field in dataclasses.fields(options):
        value = field.default if isinstance(options, type) else getattr(options, field.name)
        if value is dataclasses.MISSING:
            name = f"{options.__name__}.{field.name}"
            raise ValueError(f"{name} has no default: expected option(..., default=...)")
        found[key_of(field)] = value
    return found


@functools.cache
def _columns(cls: type) -> list[tuple[str, str, Any, Constraint]]:
    """(field, key, type, constraint) of each field; recipes parse thousands of configs."""
    columns = dataclasses.fields(cls)
    return [(f.name, key_of(f), type_of(f), f.metadata["constraint"]) for f in columns]


def parse_options(cls: type[T], values: Mapping[str, OptionValue], prefix: str = "") -> T:
    """An instance of the options dataclass `cls` from the flat config `values`.

    Reads the keys prefix + key. ValueError, one line, with the key, the value and what is allowed
    if a key is missing, of another type, or out of range.
    """
    parsed: dict[str, Any] = {}
    for name, own_key, expected, constraint in _columns(cls):  # type: ignore[arg-type]
        key = prefix + own_key
        if key not in values:
            table = f".{prefix[:-1]}" if prefix else ""
            raise ConfigError(
                key,
                f"{key} is missing from the config: expected {constraint.describe(expected)}; give "
                f"its default under [tool.flwr.app.config{table}] in pyproject.toml",
            )
        value = values[key]
        if type(value) is int and abs(value) > MAX_INTEGER:  # it may be too large for a float
            raise ConfigError(
                key, f"{key} = {value!r:.40}: expected a number between -2^63 and 2^63"
            )
        if expected is float and type(value) is int:
            value = float(value)
        if type(value) is expected and constraint.holds(value):
            parsed[name] = value
            continue
        allowed = constraint.describe(expected)
        if type(value) is not expected:
            if type_names[expected] not in allowed and expected is not float:
                allowed = f"{type_names[expected]} ({allowed})"
            raise ConfigError(
                key, f"{key} = {value!r}: expected {allowed}, not {type(value).__name__}"
            )
        hint = did_you_mean(str(value), constraint.choices)
        raise ConfigError(key, f"{key} = {value!r}: expected {allowed}{hint}")
    return cls(**parsed)
