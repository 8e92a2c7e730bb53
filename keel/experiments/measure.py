"""How a run's history becomes the one number that a paper reports."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

History = Sequence[Mapping[str, Any]]

# what an accuracy is of: key in history.jsonl, key within it
curves_known = {
    "global.accuracy": "the global model on the source's test set",
    "local_global.mean": "the global model on the clients' test parts, mean over clients",
    "personal.mean": "the personal models on the clients' test parts, mean over clients",
}
takes = "final, best, median N, mean N, ema D, 'seconds to P' (percent), or seconds a round"


@dataclass(frozen=True)
class Take:
    """`how`, with its number where it has one."""

    how: str
    number: float = 0.0

    @property
    def is_time(self) -> bool:
        """The number is of seconds, not percent."""
        return self.how.startswith("seconds")


def parse_take(words: object) -> Take:
    """The Take that a recipe's `take` says; ValueError naming what is allowed."""
    how, _, number = str(words).rpartition(" ")
    if words in ("final", "best", "seconds a round"):
        return Take(str(words))
    limits = {"median": 1e9, "mean": 1e9, "ema": 1.0, "seconds to": 100.0}
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if how in limits and 0 < value < limits[how]:
        return Take(how, value)
    raise ValueError(f"take = {words!r}: it is one of {takes}")


def points_of(history: History, of: str) -> list[tuple[int, float]]:
    """(round, accuracy 0..1) wherever the curve `of` was evaluated."""
    key, name = of.split(".")
    found = [(line["round"], line[key][name]) for line in history if key in line]
    return [(number, value) for number, value in found if value is not None]


def measure(
    history: History, of: str, take: Take, at: int, shrunk: float, clock: str = "client_seconds"
) -> float | None:
    """The reported number, in percent or seconds; None where the history does not hold it.

    at: the last round that counts. shrunk: the run's rounds over the paper's; the window of a
    median or mean, and the memory of an average that moves, shrink with it, so that they stay the
    same part of the run.
    Seconds are the clients' own by `clock`, summed: as if one device trained one client after the
    other; infinite where the run never came to the accuracy asked for.
    """
    history = [line for line in history if line["round"] <= at]
    if not history:
        return None
    if take.how == "seconds a round":
        return statistics.fmean(line[clock] for line in history)
    points = points_of(history, of)
    if take.how == "seconds to":
        first = next((r for r, value in points if 100 * value >= take.number), None)
        if first is None:
            return math.inf
        return math.fsum(line[clock] for line in history if line["round"] <= first)
    if not points or history[-1]["round"] < at:
        return None
    values = [100 * value for _, value in points]
    window = [100 * v for r, v in points if r > at - max(1.0, take.number * shrunk)] or values[-1:]
    match take.how:
        case "final":
            return values[-1]
        case "best":
            return max(values)
        case "median":
            return statistics.median(window)
        case "mean":
            return statistics.fmean(window)
        case "ema":
            return moving_average(points, take.number, shrunk)[-1][1]
    raise AssertionError(take)


def moving_average(
    points: Sequence[tuple[int, float]], decay: float, shrunk: float
) -> list[tuple[int, float]]:
    """(round, exponential moving average in percent), from the first of the points (0..1) on.

    decay: of one of the paper's rounds; between two evaluations there are as many as the run's
    rounds between them over `shrunk`.
    """
    averages: list[tuple[int, float]] = []
    for number, value in points:
        now = 100 * value
        if averages:
            before, average = averages[-1]
            kept = decay ** ((number - before) / shrunk)
            now = kept * average + (1 - kept) * now
        averages.append((number, now))
    return averages
