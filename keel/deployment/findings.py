"""Findings of the doctor's checks: one line each, a problem with its way out."""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

MARKS = ("ok", "skipped", "PROBLEM")  # before the text of a finding
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """The result of one check; mark: one of `MARKS`."""

    mark: str
    text: str

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong."""
        return self.mark == "PROBLEM"

    def __str__(self) -> str:
        """The line printed for it."""
        return f"{self.mark:9}{self.text}"


def fine(text: str) -> Finding:
    """Nothing is wrong."""
    return Finding("ok", text)


def skipped(text: str) -> Finding:
    """It was not checked; the text says why."""
    return Finding("skipped", text)


def problem(text: str) -> Finding:
    """Something is wrong; the text says what, and the way out."""
    return Finding("PROBLEM", text)


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
