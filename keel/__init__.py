"""Keel from Python: `keel.run(...)`, `keel.load_run(...)`, and what own methods are written with.

Importing keel imports neither torch nor Flower; the first run, model or method does.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_app.method import Method, Update
    from client_app.objective import Batch, LocalObjective
    from client_app.round import RoundContext
    from client_app.samples import Duration
    from client_app.split_model import fit_part
    from client_app.trainer import fit
    from data.arrays import Arrays
    from keel.api import Run, __version__, load_model, load_run, run
    from keel.results import compare, load_sweep, runs
    from models.cut import staged
    from protocol.options import (
        any_text,
        at_least,
        between,
        duration,
        matching,
        more_than,
        one_of,
        option,
        true_or_false,
    )
    from strategies.average import Average as ServerHalf

# The public names, and the module that has each; `name as alias` where it is called otherwise.
PLACES = {
    "keel.api": ("Run", "__version__", "load_model", "load_run", "run"),
    "client_app.method": ("Method", "Update"),
    "client_app.objective": ("Batch", "LocalObjective"),
    "client_app.round": ("RoundContext",),
    "client_app.samples": ("Duration",),
    "client_app.split_model": ("fit_part",),
    "client_app.trainer": ("fit",),
    "models.cut": ("staged",),
    "protocol.options": (
        *("any_text", "at_least", "between", "duration", "matching", "more_than", "one_of"),
        *("option", "true_or_false"),
    ),
    "keel.results": ("compare", "load_sweep", "runs"),
    "data.arrays": ("Arrays",),
    "strategies.average": ("Average as ServerHalf",),
}
HOME = {
    name.rpartition(" ")[2]: (module, name.partition(" ")[0])
    for module, names in PLACES.items()
    for name in names
}

__all__ = [
    "Arrays",
    "Batch",
    "Duration",
    "LocalObjective",
    "Method",
    "RoundContext",
    "Run",
    "ServerHalf",
    "Update",
    "__version__",
    "any_text",
    "at_least",
    "between",
    "compare",
    "duration",
    "fit",
    "fit_part",
    "load_model",
    "load_run",
    "load_sweep",
    "matching",
    "more_than",
    "one_of",
    "option",
    "run",
    "runs",
    "staged",
    "true_or_false",
]

# A user's data.py or models/ beside a script would be imported instead of Keel's package.
for _package in (
    "client_app",
    "data",
    "flower_adapter",
    "models",
    "protocol",
    "server_app",
    "strategies",
):
    _spec = find_spec(_package)
    if _spec and _spec.origin:
        _file = Path(_spec.origin).resolve()
        if _file.parent.parent != Path(__file__).resolve().parent.parent:
            raise ImportError(
                f"{_file} hides Keel's package {_package!r}: rename it, or run Python in a folder "
                "without it"
            )


def __getattr__(name: str) -> Any:
    """A public name, whose module is imported when it is first used."""
    if name not in HOME:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    module, there = HOME[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    """The public names, also before the API is imported."""
    return sorted(__all__)
