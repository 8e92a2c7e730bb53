"""The server half of every method: `Average`, or the method's own if it sets `has_own_server_half`.

A server half of its own is in strategies/<name>.py.
"""

import pkgutil
from contextlib import suppress

from models import StagedModel
from protocol.catalogue import classes, method_stem
from protocol.code import imported
from protocol.config import RunConfig
from strategies.average import Average


def server_half(method: str) -> type[Average]:
    """The class of a method's server half; ValueError if its own file has an error or none."""
    if not classes[method].has_own_server_half:
        return Average
    module = imported(f"{__name__}.{method_stem(method)}")
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
    strategy = server_half(config.rounds.method)(config, model)
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
    with suppress(ValueError):  # of a broken file, raised again where the method is used
        imported(f"{__name__}.{info.name}")

__all__ = ["Average", "server_half", "strategy_for"]
