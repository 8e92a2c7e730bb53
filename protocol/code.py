"""The code that a run is made with: digests of its sources, and torch's version. Needs no torch."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.catalogue import method_names, method_stem
from protocol.config import app_folder
from protocol.files import digest
from protocol.own_code import Own, is_own_frame

run_by_worker = ("client_app", "data", "flower_adapter", "models", "protocol")  # packages
SERVER_PACKAGES = ("server_app", "strategies")  # beside those of the clients


@lru_cache(maxsize=1)
def code_digest() -> str:
    """The first 16 hex digits of the SHA-256 of the sources that a client or a worker runs.

    The processes of a run have them from its app, the worker from its own machine, those of a
    simulation from wherever their Python found them. Comparing it with the server's ensures that
    all train with the same code.
    """
    return _digest_of(run_by_worker)


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """The same of all sources that a run depends on, in a checkout as in the app made from it."""
    return _digest_of(SERVER_PACKAGES, code_digest())


def _digest_of(packages: Sequence[str], before: str = "") -> str:
    sources = (
        str(path.relative_to(app_folder)).encode() + b"\0" + path.read_bytes()
        for package in packages
        for path in sorted((app_folder / package).rglob("*.py"))
        if not path.name.startswith(".")  # an editor's, perhaps a dangling link
    )
    return digest(before.encode(), *sources)


@lru_cache(maxsize=64)  # a report asks for it thousands of times
def code_version(sources: str = "", torch: str = "") -> str:
    """One line naming sources and torch, by default the installed ones; without torch's build."""
    torch = (torch or version("torch")).partition("+")[0]
    return f"sources {sources or sources_digest()}, torch {torch}"


def code_of(own: Mapping[str, Own]) -> str:
    """`code_version` with the digests of a run's own code, which is other code once edited."""
    texts = [f", {spec} {own[spec].digest}" for spec in sorted(own)]
    return code_version() + "".join(texts)


def is_installed(package: str) -> bool:
    """Whether it can be imported. A folder of that name without an __init__.py does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def place_of(function: Callable[..., Any]) -> str:
    """NAME (FILE:LINE) of a function or method, for an error about it; its name if in no file."""
    if isinstance(function, partial):
        return place_of(function.func)
    # not that of a decorator, such as torch.no_grad()
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # a callable object, or a function in C
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    path = Path(code.co_filename)
    if path.is_relative_to(app_folder):
        path = path.relative_to(app_folder)
    return f"{function.__qualname__} ({path.as_posix()}:{code.co_firstlineno})"


def line_in_method(error: BaseException) -> str:
    """ " (FILE:LINE)" if a method's code, own code, or a library that it called, raised the error.

    "" otherwise: a ValueError raised elsewhere is a user's mistake.
    """
    stems = {method_stem(name) for name in method_names()}
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if is_own_frame(frame):
            found = f" ({path.name}:{line})"
            continue
        if not path.is_relative_to(app_folder):
            continue
        path = path.relative_to(app_folder)
        if path.parts[0] not in (*run_by_worker, *SERVER_PACKAGES):  # as .venv
            continue
        is_half = str(path.parent) == "strategies" and path.stem in stems
        is_method = is_half or path.parts[:2] == ("client_app", "methods")
        found = f" ({path.as_posix()}:{line})" if is_method else ""
    return found
