"""The server half of every method: `Average`, or the method's own if it sets `has_own_server_half`.

That of a method of Keel is in strategies/<name>.py; any other method names its class.
"""

import importlib
import pkgutil
from contextlib import suppress
from typing import Any

from models import StagedModel
from protocol.catalogue import classes, method_stem
from protocol.config import RunConfig
from protocol.own_code import import_errors
from strategies.average import Average


def server_half(method: type[Any]) -> type[Average]:
    """The class of the server half of a method, or of the method that it is derived from.

    ValueError if its own file has an error or none.
    """
    names = {cls: name for name, cls in classes.items() if cls.has_own_server_half}
    for cls in method.__mro__:
        half: type[Average] | None = vars(cls).get("server_half")
        if half:
            return half
        if cls in names:
            return half_in_file(names[cls])
    return Average


def half_in_file(method: str) -> type[Average]:
    """The class that strategies/<name>.py defines."""
    with import_errors(place := f"{__name__}.{method_stem(method)}"):
        module = importlib.import_module(place)
    halves: list[type[Average]] = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Average)
        and value.__module__ == module.__name__
    ]
    if len(halves) != 1:
        raise ValueError(
            f"{module.__file__} defines {len(halves)} subclasses of Average: expected one, the "
            f"server half of {method}"
        )
    return halves[0]


def strategy_for(config: RunConfig, model: StagedModel) -> Average:
    """The server half of the run's method, for this network.

    ValueError if clients would add the noise of `privacy.epsilon` to whole numbers, such as
    indices.
    """
    strategy = server_half(config.method_class)(config, model)
    if epsilon := config.privacy.epsilon:
        for name, array in strategy.expected(strategy.initial_arrays(model)).items():
            if not array.is_floating_point():
                kind = str(array.dtype).removeprefix("torch.")
                raise ValueError(
                    f"privacy.epsilon = {epsilon}: clients would add noise to {name} of "
                    f"{model.name}, which is {kind}: register a constant buffer with "
                    "persistent=False, which is not sent, or set privacy.epsilon to 0"
                )
    return strategy


# All of them now: a process that makes several runs records one digest of the sources for each, so
# none of the code may be read later.
for info in pkgutil.iter_modules(__path__):
    # the error of a broken file is raised again where the method is used
    with suppress(ValueError), import_errors(info.name):
        importlib.import_module(f"{__name__}.{info.name}")

__all__ = ["Average", "server_half", "strategy_for"]
