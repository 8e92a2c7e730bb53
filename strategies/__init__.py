"""The server half of every method: `Average`, or the method's own if it sets `has_own_server_half`.

A server half of its own is in strategies/<name>.py.
"""

import pkgutil
import sys

from models import StagedModel
from protocol.catalogue import imported, method_spec, method_stem
from protocol.config import RunConfig
from strategies.average import Average


def server_half(method: str) -> type[Average]:
    """The class of a method's server half. ValueError where its own is missing or not announced."""
    has_own, stem = method_spec(method).has_own_server_half, method_stem(method)
    halves: list[type[Average]] = []
    if module := sys.modules.get(f"{__name__}.{stem}"):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        halves = [c for c in classes if issubclass(c, Average) and c.__module__ == module.__name__]
    if len(halves) != has_own:
        raise ValueError(
            f"method {method} has has_own_server_half = {has_own} (client_app/methods/{stem}.py), "
            f"and strategies/{stem}.py defines {len(halves)} subclasses of Average: "
            f"expected {int(has_own)}"
        )
    return halves[0] if halves else Average


def strategy_for(config: RunConfig, model: StagedModel) -> Average:
    """The server half of the run's method, for this network."""
    return server_half(config.rounds.method)(config, model)


# All of them now: a process that makes several runs records one digest of the sources for each, so
# none of the code may be read later.
for info in pkgutil.iter_modules(__path__):
    imported(f"{__name__}.{info.name}")

__all__ = ["Average", "server_half", "strategy_for"]
