"""`KEY=VALUE` arguments as typed overrides; all mistakes are reported at once."""

import tomllib
from collections.abc import Sequence

from keel.interrupts import uninterrupted
from protocol.config import default_config, names_taken, refuse_unknown
from protocol.options import OptionValue, type_names
from protocol.own_code import find, table_of
from protocol.own_keys import own_options


def parse_overrides(assignments: Sequence[str]) -> dict[str, OptionValue]:
    """Overrides such as `alpha=0.1` with the type of each key's default; strings need no quotes.

    ValueError, one line, with every argument that is not KEY=VALUE, names no key, or has a wrong
    type.
    """
    overrides: dict[str, OptionValue] = {}
    mistakes = []
    method = next((a.partition("=")[2] for a in assignments if a.startswith("method=")), "")
    defaults, table = default_config(), table_of(method)
    if table and any(a.startswith(f"{table}.") for a in assignments):
        with uninterrupted():  # imports torch
            defaults |= own_options(find(method, "method"), names_taken())
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
