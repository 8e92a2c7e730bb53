"""The one number that a paper reports, computed from a run's history."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

History = Sequence[Mapping[str, Any]]

# Accuracy of the global model on the source's test set, of the global model on the clients' test
# parts, of the personal models on those. A curve `a.b` is line["a"]["b"] of history.jsonl.
Curve = Literal["global.accuracy", "local_global.mean", "personal.mean"]
CURVES: tuple[Curve, ...] = get_args(Curve)
TAKES = "final, best, 'median N', 'mean N', 'ema DECAY', 'seconds to PERCENT' or 'seconds a round'"


@dataclass(frozen=True)
class Take:
    """How a curve becomes one number: `how`, with its number if it has one."""

    how: str
    number: float = 0.0

    @property
    def is_time(self) -> bool:
        """The result is in seconds, not in percent."""
        return self.how.startswith("seconds")

    @property
    def reads_earlier(self) -> bool:
        """Accuracies before the last one are read."""
        return self.how not in ("final", "seconds a round")


def parse_take(text: object) -> Take:
    """The Take of a recipe's `take`. ValueError naming the allowed ones."""
    if text in ("final", "best", "seconds a round"):
        return Take(str(text))
    how, _, number = str(text).rpartition(" ")
    upper_limits = {"median": 1e9, "mean": 1e9, "ema": 1.0, "seconds to": 100.0}
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if how in upper_limits and 0 < value < upper_limits[how]:
        return Take(how, value)
    raise ValueError(f"expected {TAKES}")


def points_of(history: History, curve: str) -> list[tuple[int, float]]:
    """(round, accuracy in [0, 1]) for each round in which `curve` was evaluated."""
    key, name = curve.split(".")
    found = [(line["round"], line[key][name]) for line in history if key in line]
    return [(number, value) for number, value in found if value is not None]


def measure(
    history: History, curve: str, take: Take, at: int, shrink: float, clock: str = "client_seconds"
) -> float | None:
    """The reported number in percent or seconds; None if the history does not contain it.

    at: the last round that counts. shrink: rounds of the run / rounds of the paper. The window of a
    median or mean and the memory of a moving average are scaled by it.
    Seconds are summed over clients (`clock` is the history's key), as if one device trained them in
    turn; infinite if the run never reached the accuracy.
    """
    history = [line for line in history if line["round"] <= at]
    if not history:
        return None
    if take.how == "seconds a round":
        return statistics.fmean(line[clock] for line in history)
    points = points_of(history, curve)
    if take.how == "seconds to":
        reached = next((r for r, value in points if 100 * value >= take.number), None)
        if reached is None:
            return math.inf
        return math.fsum(line[clock] for line in history if line["round"] <= reached)
    if not points or history[-1]["round"] < at:
        return None
    values = [100 * value for _, value in points]
    window = [100 * v for r, v in points if r > at - max(1.0, take.number * shrink)] or values[-1:]
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
            return moving_average(points, take.number, shrink)[-1][1]
    raise AssertionError(take)


def moving_average(
    points: Sequence[tuple[int, float]], decay: float, shrink: float
) -> list[tuple[int, float]]:
    """(round, exponential moving average in percent), starting at the first point.

    decay: per round of the paper. Between two evaluations it applies once for each of the paper's
    rounds they span: the run's rounds between them / `shrink`.
    """
    averages: list[tuple[int, float]] = []
    for number, value in points:
        average = 100 * value
        if averages:
            last_round, last_average = averages[-1]
            weight = decay ** ((number - last_round) / shrink)
            average = weight * last_average + (1 - weight) * average
        averages.append((number, average))
    return averages
