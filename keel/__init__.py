"""Keel from Python: `keel.run(...)`, `keel.load_run(...)`, `keel.load_model(...)`.

Importing keel imports neither torch nor Flower; the first run or model does.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.api import Run, __version__, load_model, load_run, run

__all__ = ["Run", "__version__", "load_model", "load_run", "run"]

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
    """The API, imported when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    import keel.api

    return getattr(keel.api, name)


def __dir__() -> list[str]:
    """The public names, also before the API is imported."""
    return sorted(__all__)
