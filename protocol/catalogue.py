"""The names of all methods, without importing torch, and their classes once these are imported.

A method is one file, client_app/methods/<name>.py. `client_app.methods` imports them all and
registers their classes here, where the server half and the config find the method's options and
capability flags.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

app_folder = Path(__file__).resolve().parent.parent
methods_folder = app_folder / "client_app" / "methods"
classes: dict[str, type[Any]] = {}  # by the method's name


def method_stem(name: str) -> str:
    """The file stem of a method: `fedavg-ft` is `fedavg_ft`."""
    return name.replace("-", "_")


@lru_cache(maxsize=1)
def method_names() -> tuple[str, ...]:
    """All methods, in alphabetical order: one a file of client_app/methods.

    Hidden files are ignored: editors and file systems leave some, such as `.#fedavg.py`.
    """
    stems = (path.stem for path in methods_folder.glob("*.py"))
    names = (stem.replace("_", "-") for stem in stems if not stem.startswith(("_", ".")))
    return tuple(sorted(names))
