"""Keel from Python: `keel.run(...)`, `keel.load_run(...)`, `keel.load_model(...)`.

Importing keel imports neither torch nor Flower; the first run or model does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.api import Run, __version__, load_model, load_run, run

__all__ = ["Run", "__version__", "load_model", "load_run", "run"]


def __getattr__(name: str) -> Any:
    """The API, imported when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    import keel.api

    return getattr(keel.api, name)


def __dir__() -> list[str]:
    """The public names, also before the API is imported."""
    return sorted(__all__)
