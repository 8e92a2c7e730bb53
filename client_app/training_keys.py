"""Which keys of local training a method uses.

A method's `training_keys` say so. Where a class has a `train` of its own and does not say, they are
read off its code: what `train`, and the functions of the same file that it calls, name or call.
"""

import inspect
from collections.abc import Iterable

from client_app.method import FIT_KEYS, Method
from protocol.own_source import codes_in

SCHEDULE = ("lr-decay", "lr-schedule", "warmup-rounds")
# what uses keys without naming them
READERS: dict[str, Iterable[str]] = {
    "fit": FIT_KEYS,
    "fit_part": (*FIT_KEYS, "cache-mb"),
    "minimise": (*FIT_KEYS, "local-epochs", "lr"),
    "cached": ("cache-mb",),
    "FrozenFeatureCache": ("cache-mb",),
    "optimizer": ("optimizer", "momentum", "weight-decay"),
    "optimizer_for": ("optimizer", "momentum", "weight-decay"),
    "plan": ("batch-size", "batches-per-epoch"),
    "steps": ("batch-size", "batches-per-epoch"),
    "batch_size_for": ("batch-size", "batches-per-epoch"),
    "lr_factor": SCHEDULE,
    "precision": ("precision",),
}
TRAINING_KEYS = {*FIT_KEYS, "local-epochs", "lr", "cache-mb", "frozen-statistics"}


def used_training_keys(method: Method) -> set[str]:
    """Those of TRAINING_KEYS that this method's training uses."""
    used = declared_or_read(type(method))
    if getattr(method, "uses_global", False) or getattr(method, "uses_previous", False):
        used |= {"cache-mb", "frozen-statistics"}
    for key, instead in (("local-epochs", method.duration_keys), ("lr", method.rate_keys)):
        if key not in instead:
            used.discard(key)
    return used


def declared_or_read(cls: type[Method]) -> set[str]:
    """The keys of the nearest class that declares `training_keys` or has a `train`."""
    for position, each in enumerate(cls.__mro__):
        if "training_keys" in vars(each):
            return set(vars(each)["training_keys"])
        if "train" in vars(each):
            names = names_in(each, vars(each)["train"], set())
            used = {key for name in names for key in READERS.get(name, ())}
            used |= {key for key in TRAINING_KEYS if key.replace("-", "_") in names}
            rest = cls.__mro__[position + 1 :]
            return used | (declared_or_read(rest[0]) if "super" in names else set())
    return set()


def names_in(cls: type, function: object, seen: set[object]) -> set[str]:
    """The names and attributes that a function reads, and the functions of its file it calls."""
    function = inspect.unwrap(function) if callable(function) else function
    if not inspect.isfunction(function) or function in seen:
        return set()
    seen.add(function)
    found = {name for code in codes_in(function.__code__) for name in code.co_names}
    for name in list(found):
        helper = getattr(cls, name, None) or function.__globals__.get(name)
        if inspect.isfunction(helper) and helper.__module__ == function.__module__:
            found |= names_in(cls, helper, seen)
    return found
