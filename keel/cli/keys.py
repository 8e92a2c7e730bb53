"""`keel keys`: the config keys, from the options that are declared."""

import dataclasses
import json
import typing

from keel.cli.arguments import JsonOption, NameArgument
from keel.tables import Row
from protocol.catalogue import method_names
from protocol.config import default_config, refuse_unknown
from protocol.config_keys import ModelConfig, PrivacyConfig, RoundsConfig, TrainConfig
from protocol.data_keys import DataConfig
from protocol.options import key_of, typed
from protocol.server_optimizers import SERVER_OPTIMIZERS

CONFIG_GROUPS: list[tuple[type, str]] = [
    (RoundsConfig, ""),
    (DataConfig, ""),
    (ModelConfig, ""),
    (TrainConfig, ""),
    (PrivacyConfig, "privacy."),
]


def keys(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """List the config keys with type, default, range and meaning; NAME: a key or its beginning.

    The options of a method are listed only if you name it: `keel keys METHOD`.
    """
    groups = [*CONFIG_GROUPS, *((options, f"{n}.") for n, options in SERVER_OPTIMIZERS.items())]
    if name is not None:
        from client_app.methods import method_class

        groups += [(method_class(method), f"{method}.") for method in method_names()]
    rows = [row for options, prefix in groups for row in option_rows(options, prefix)]
    rows = [{"key": row.pop("option"), **row} for row in rows]
    if name is not None:
        found = [row for row in rows if row["key"].startswith(name)]
        if not found:
            refuse_unknown("config key", name, [row["key"] for row in rows])
        rows = found
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:  # a line each, to be searched
        print(f"{row['key']}={typed(row['default'])}  ({row['range']}) {row['description']}")


def option_rows(options: type, prefix: str) -> list[Row]:
    """One row per option: key, type, default, allowed values, description and source."""
    types, defaults = typing.get_type_hints(options), default_config()
    return [
        {
            "option": prefix + key_of(field),
            "type": types[field.name].__name__,
            "default": defaults.get(prefix + key_of(field)),
            "range": field.metadata["constraint"].describe(types[field.name]),
            "description": field.metadata["description"],
            "source": field.metadata["source"],
        }
        for field in dataclasses.fields(options)
    ]
