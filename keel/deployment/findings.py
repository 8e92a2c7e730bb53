"""Findings of the doctor's checks: one line each, a problem with its way out."""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

marks = {False: "ok       ", True: "PROBLEM  "}
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    is_problem: bool
    text: str

    def __str__(self) -> str:
        """The line printed for it."""
        return marks[self.is_problem] + self.text


def fine(text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(False, text)


def problem(text: str) -> Finding:
    """Something is wrong; the text says what, and the way out."""
    return Finding(True, text)


def check(function: Callable[P, Iterator[Finding]]) -> Callable[P, Iterator[Finding]]:
    """A check of which an exception is one more problem, of one line."""
    what = function.__name__.removeprefix("check_").replace("_", " ")

    @wraps(function)
    def safe(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        try:
            yield from function(*args, **kwargs)
        except subprocess.TimeoutExpired as error:
            yield problem(f"{what}: {error.cmd[0]} gave no answer within {error.timeout:g} seconds")
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            yield problem(f"{what}: {' '.join(str(error).split())[:300]}")

    return safe
