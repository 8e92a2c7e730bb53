"""Whether the classes of a method declare what Keel reads and calls: `keel check-method`."""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from client_app.method import Method
from protocol.code import place_of
from protocol.options import Constraint, did_you_mean, type_names, type_of

FLAG_CHOICES = {
    "default_weighting": ("examples", "uniform"),
    "shared_part": ("model", "extractor", "nothing"),
}


def class_problems(cls: type[Method]) -> Iterator[str]:
    """What is wrong with the options, flags and functions of a method's class, a line each."""
    yield from declaration_problems(cls)
    yield from function_problems(cls)
    if cls.train is Method.train:
        yield f"{cls.__name__} has no train: write one, or derive from LocalObjective"
    if cls.server_half:
        yield from function_problems(cls.server_half)


def declaration_problems(cls: type[Method]) -> Iterator[str]:
    """Attributes that are neither options nor flags, and flags with values that mean nothing."""
    name = cls.__name__
    if any(isinstance(value, Field) for value in vars(cls).values()):
        yield f"{name} lacks @dataclass(frozen=True): it would not have its options"
        return
    for field in fields(cls):
        constraint = field.metadata.get("constraint")
        if not isinstance(constraint, Constraint) or type_of(field) not in type_names:
            yield (
                f"{name}.{field.name} is not an option: expected NAME: TYPE = option(...), of "
                "type bool, int, float or str"
            )
        elif field.default is MISSING:
            yield f"{name}.{field.name} has no default: expected option(..., default=...)"
    own = {each for each in vars(cls) if not each.startswith("_")}
    inherited = {each for base in cls.__mro__[1:] for each in vars(base)}
    functions = {each for each, value in vars(cls).items() if callable(value)}
    for each in sorted(own - inherited - functions - {field.name for field in fields(cls)}):
        yield (
            f"{name}.{each} is neither an option nor a flag of client_app/method.py; move a "
            "constant out of the class, or begin its name with _" + did_you_mean(each, inherited)
        )
    for flag in sorted(own & inherited - functions):
        value, base = getattr(cls, flag), getattr(super(cls, cls), flag)
        allowed = FLAG_CHOICES.get(flag, (True, False))
        if (flag in FLAG_CHOICES or isinstance(base, bool)) and value not in allowed:
            yield f"{name}.{flag} = {value!r}: expected one of {', '.join(map(repr, allowed))}"
    if getattr(cls, "uses_previous", False) and not cls.is_stateful:
        yield (
            f"{name}.uses_previous = True: the previous model is client state; set is_stateful: "
            "ClassVar[bool] = True"
        )


def function_problems(cls: type[Any]) -> Iterator[str]:
    """Public functions that no base class has, and those that Keel cannot call as the base's."""
    inherited = {name for base in cls.__bases__ for name in dir(base)}
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("_") and name not in inherited:
            yield (
                f"{place_of(value)}: no base class has a function of this name, so Keel never "
                "calls it; begin the name of a helper with _" + did_you_mean(name, inherited)
            )
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)  # not that of a staticmethod
        base = [vars(each)[name] for each in cls.__mro__ if name in vars(each)][-1:]  # its first
        if name.startswith("_") or not all(map(inspect.isfunction, [function, *base])):
            continue
        found, expected = (inspect.signature(each) for each in (function, *base))
        kinds = {each: expected.parameters[each].kind for each in expected.parameters}
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_name = [each for each in kinds if kinds[each] is inspect.Parameter.KEYWORD_ONLY]
        try:
            found.bind(*(n for n in kinds if kinds[n] in plain), **dict.fromkeys(by_name))
        except TypeError:
            yield (
                f"{place_of(function)} takes ({', '.join(found.parameters)}): "
                f"expected ({', '.join(expected.parameters)})"
            )
