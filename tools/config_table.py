"""The tables of options in pyproject.toml, from their declarations: `python -m tools.config_table`.

Flower takes only keys that [tool.flwr.app.config] has. Those of the server optimizers and methods
are written here; a test compares.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from client_app.methods import method_class
from protocol.catalogue import app_folder, method_names
from protocol.options import defaults_of, key_of
from protocol.server_optimizers import SERVER_OPTIMIZERS

BEGIN, END = "# --- server optimizers ", "# ------------"  # of the lines around the tables
WIDTH = 31  # of a key with its value, before the description


def with_tables(pyproject: str) -> str:
    """The text of pyproject.toml with the tables as they are declared."""
    begin = pyproject.index(BEGIN)
    end = pyproject.index(END, begin)
    methods = {name: method_class(name) for name in method_names()}
    parts = [
        heading(BEGIN),
        *tables(SERVER_OPTIMIZERS),
        heading("# --- methods "),
        *tables(methods),
    ]
    return pyproject[:begin] + "\n".join(parts) + pyproject[end:]


def heading(text: str) -> str:
    """A comment above tables."""
    return f"{text:-<97}"


def tables(declared: Any) -> list[str]:
    """One table for each class that has options, by name."""
    return [
        f"[tool.flwr.app.config.{name}]\n" + "".join(map(line, declared_options(cls)))
        for name, cls in declared.items()
        if fields(cls)
    ]


def declared_options(cls: type) -> list[tuple[str, Any, str]]:
    """(key, default, description) of each option of a class."""
    defaults = defaults_of(cls)
    return [(key_of(f), defaults[key_of(f)], f.metadata["description"]) for f in fields(cls)]


def line(option: tuple[str, Any, str]) -> str:
    """An option as a line of TOML, with its description."""
    key, default, description = option
    return f"{f'{key} = {json.dumps(default)}':<{WIDTH - 1}} # {description}\n"


def main() -> int:
    """Write the tables into pyproject.toml."""
    path = Path(app_folder / "pyproject.toml")
    path.write_text(with_tables(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
