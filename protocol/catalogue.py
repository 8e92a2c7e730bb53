"""The names of all methods, without importing torch, and their classes once these are imported.

A method is one file, client_app/methods/<name>.py. `client_app.methods` imports them all and
registers their classes here, where the server half and the config find the method's options and
capability flags.
"""

import importlib
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType
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


def imported(name: str) -> ModuleType:
    """The module of one half of a method. ValueError, with file and line, if it has an error."""
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).stem == name.rpartition(".")[2]]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else name
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
