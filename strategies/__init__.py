"""The server half of every method: `Average`, or the method's own if it sets `has_own_server_half`.

A server half of its own is in strategies/<name>.py.
"""

import pkgutil
from contextlib import suppress
from importlib.util import find_spec
from inspect import isfunction

from models import StagedModel
from protocol.catalogue import imported, method_spec, method_stem
from protocol.code import check_signatures, place_of
from protocol.config import RunConfig
from protocol.options import did_you_mean
from strategies.average import Average, returned


def server_half(method: str) -> type[Average]:
    """The class of a method's server half.

    ValueError where its own is missing or not announced, or has a public function that no
    base class has, which would never be called, or that Keel cannot call as the base's.
    """
    has_own, stem = method_spec(method).has_own_server_half, method_stem(method)
    halves: list[type[Average]] = []
    is_there = find_spec(f"{__name__}.{stem}") is not None
    if is_there:
        module = imported(f"{__name__}.{stem}")
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        halves = [c for c in classes if issubclass(c, Average) and c.__module__ == module.__name__]
    if len(halves) != has_own:
        found = f"defines {len(halves)} subclasses of Average" if is_there else "does not exist"
        raise ValueError(
            f"method {method} has has_own_server_half = {has_own} (client_app/methods/{stem}.py), "
            f"and strategies/{stem}.py {found}: expected {int(has_own)} subclass of Average in it"
        )
    for half in halves:
        _check_functions(half)
        check_signatures(half)
    return halves[0] if halves else Average


def _check_functions(half: type[Average]) -> None:
    """ValueError if a server half has a public function that no base class has."""
    inherited = {name for base in half.__bases__ for name in dir(base)}
    for name, value in vars(half).items():
        if isfunction(value) and not name.startswith("_") and name not in inherited:
            raise ValueError(
                f"{place_of(value)}: no base class has a function of this name, so Keel never "
                "calls it; begin the name of a helper with _" + did_you_mean(name, inherited)
            )


def strategy_for(config: RunConfig, model: StagedModel) -> Average:
    """The server half of the run's method, for this network.

    ValueError if its `__init__` does not call that of `Average`, or if clients would add the noise
    of `privacy.epsilon` to whole numbers, such as indices.
    """
    half = server_half(config.rounds.method)
    strategy = half(config, model)
    if not hasattr(strategy, "backoff"):  # the last attribute that `Average.__init__` sets
        raise ValueError(
            f"{place_of(half.__init__)} does not call super().__init__(config, model): call it "
            "first"
        )
    if epsilon := config.privacy.epsilon:
        sent = returned(strategy.expected, returned(strategy.initial_arrays, model))
        for name, array in sent.items():
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
