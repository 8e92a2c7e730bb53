"""The client half of every method, by name: each file here defines one."""

import importlib
import sys
from contextlib import suppress
from functools import lru_cache

from client_app.class_checks import class_problems
from client_app.config_checks import check_method_config, check_tables
from client_app.method import Method
from protocol.catalogue import classes, method_names, method_stem
from protocol.config import RunConfig, refuse_unknown
from protocol.options import ConfigError
from protocol.own_code import import_errors


def method_class(name: str) -> type[Method]:
    """The class that client_app/methods/<name>.py defines.

    ValueError, one line, if the file has an error, or defines no method or two.
    """
    if name not in classes:
        with import_errors(place := f"{__name__}.{method_stem(name)}"):
            module = importlib.import_module(place)
        found = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Method)
            and value.__module__ == module.__name__
            and not value.__name__.startswith("_")
        ]
        if len(found) != 1:
            names = ", ".join(each.__name__ for each in found) or "none"
            raise ValueError(
                f"{module.__file__} defines {len(found)} methods ({names}): expected one subclass "
                "of Method or LocalObjective; begin the name of a base class with _"
            )
        classes[name] = found[0]
    return classes[name]


# All are imported now: a process must run the code that its digest is of, even if a file is edited.
for each in method_names():
    with suppress(ValueError):  # of a broken file, raised again where the method is used
        method_class(each)


def check_own_class(spec: str, cls: type) -> None:
    """ConfigError, one line, unless own code is a method and declares what Keel reads."""
    if not issubclass(cls, Method):
        reason = f"{cls.__name__} is no method: expected a subclass of Method or LocalObjective"
        raise ConfigError("method", f"method = {spec!r}: {reason}")
    for problem in class_problems(cls):
        raise ConfigError("method", f"method = {spec!r}: {problem}")


def documentation(name: str) -> str:
    """The docstring of the method's file."""
    return sys.modules[method_class(name).__module__].__doc__ or ""


@lru_cache(maxsize=64)  # a config is compared by identity
def method_of(config: RunConfig) -> Method:
    """The run's method with its options.

    ConfigError if an option is not allowed, or if the run asks of the method what it cannot do.
    """
    name = config.rounds.method
    if name in config.own:
        check_own_class(name, config.method_class)
    else:
        refuse_unknown("method", name, list(method_names()))
        method_class(name)
    check_tables(config)
    method: Method = config.method_options()
    check_method_config(config, method)
    return method
