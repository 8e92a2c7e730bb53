"""The one number that a paper reports, computed from a run's history."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.curve_names import CURVES
from server_app.history import LOWER_IS_BETTER, WHOSE, scores_in

TAKES = (
    "final, best, 'median N' or 'mean N' of N whole rounds, 'ema DECAY', 'seconds to PERCENT' or "
    "'seconds a round'"
)
Points = list[tuple[int, float]]  # (round, accuracy in [0, 1] or in percent)


@dataclass(frozen=True)
class Take:
    """How a curve becomes one number: `how`, with its number if it has one."""

    how: str
    number: float = 0.0

    @property
    def is_time(self) -> bool:
        """The result is in seconds, not in percent."""
        return self.how.startswith("seconds")

    def of(self, curve: str) -> str:
        """What is read of a curve, in words."""
        if self.how == "seconds a round":
            return self.how
        text = {
            "seconds to": f"seconds to {self.number:g} % of",
            "ema": f"moving average ({self.number:g}) of",
            "mean": f"mean over the last {self.number:g} rounds of",
            "median": f"median over the last {self.number:g} rounds of",
        }.get(self.how, self.how)
        return f"{text} {curve}" + (", in %" if not self.is_time else "")

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
    is_whole = value.is_integer() or how not in ("mean", "median")
    if how in upper_limits and 0 < value < upper_limits[how] and is_whole:
        return Take(how, value)
    raise ValueError(f"expected {TAKES}")


CLOCKS = ("client_seconds", "client_cpu_seconds")
DIVERGENCE = ("not finite", "bound on values")  # in why an update was left out, or a run failed


def is_divergence(reason: str) -> bool:
    """Whether an update was left out, or a run failed, for values not finite or too large."""
    return any(sign in reason for sign in DIVERGENCE)


class History:
    """What tables and curves read of a run's lines.

    clients: the lines of clients.jsonl. rounds: of the lines. wall_s: their durations.
    clocks: those of CLOCKS that every line has. diagnostics: (round, measures) where taken.
    num_left_out: updates that were not aggregated; rounds_not_finite: how many rounds had one whose
    values were not finite, or too large.
    num_not_evaluated, rounds_partial: likewise of clients that could not be evaluated; in these
    rounds the curves of the clients have no point, which would be of the others alone.
    rounds_diverged: in which the global model's loss was not finite; its curve has no point there.
    """

    def __init__(
        self, lines: Iterable[Mapping[str, Any]], clients: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        not_finite, partial = set[int](), set[int]()
        for line in clients:
            for key, found in (("left_out", not_finite), ("evaluation_left_out", partial)):
                if any(map(is_divergence, line.get(key, {}).values())):
                    found.add(line["round"])
        self.rounds, self.wall_s = list[int](), list[float]()
        self.clocks = {name: list[float]() for name in CLOCKS}
        self.diagnostics: list[tuple[int, Mapping[str, Any]]] = []
        self.rounds_not_finite, self.rounds_partial = len(not_finite), len(partial)
        self.num_left_out = self.num_not_evaluated = self.rounds_diverged = 0
        self._points: dict[str, Points] = {curve: [] for curve in CURVES}
        for line in lines:
            number = line["round"]
            self.rounds.append(number)
            self.wall_s.append(sum(line.get("seconds", {}).values()))
            self.num_left_out += line.get("num_left_out", 0)
            self.num_not_evaluated += line.get("num_evaluation_left_out", 0)
            has_diverged = line.get("global", {}).get("loss", 0.0) is None
            self.rounds_diverged += has_diverged
            for name in CLOCKS:
                if name in line:
                    self.clocks[name].append(line[name])
            for curve, points in self._points.items():
                key, _, name = curve.partition(".")
                is_omitted = has_diverged if key == "global" else number in partial
                if not is_omitted and key in line and line[key][name] is not None:
                    points.append((number, line[key][name]))
            for key in WHOSE:
                is_omitted = has_diverged if key == "global" else number in partial
                for name, value in {} if is_omitted else scores_in(line, key).items():
                    self._points.setdefault(f"{key}.{name}", []).append((number, value))
            if "diagnostics" in line:
                self.diagnostics.append((number, line["diagnostics"]))
        self.clocks = {k: v for k, v in self.clocks.items() if len(v) == len(self.rounds)}

    def points(self, curve: str) -> Points:
        """(round, accuracy in [0, 1]) for each round in which `curve` was evaluated."""
        return self._points.get(curve, [])


def measure(
    history: History, curve: str, take: Take, at: int, clock: str = "client_seconds"
) -> float | None:
    """The reported number in percent or seconds; None if the history does not contain it.

    That is so if no accuracy of round `at` was recorded: an earlier one is another number.

    at: the last round that counts. Seconds are summed over clients (`clock` is the history's key),
    as if one device trained them in turn; infinite if the run never reached the accuracy.
    """
    counted = [i for i, number in enumerate(history.rounds) if number <= at]
    if not counted:
        return None
    if take.how == "seconds a round":
        return statistics.fmean(history.clocks[clock][i] for i in counted)
    points = [point for point in history.points(curve) if point[0] <= at]
    if take.how == "seconds to":
        reached = next((r for r, value in points if 100 * value >= take.number), None)
        if reached is None:
            return math.inf
        return math.fsum(history.clocks[clock][i] for i in counted if history.rounds[i] <= reached)
    if not points or points[-1][0] < at:
        return None
    values = [100 * value for _, value in points]
    window = [100 * v for r, v in points if r > at - take.number]
    match take.how:
        case "final":
            return values[-1]
        case "best":
            return min(values) if curve.partition(".")[2] in LOWER_IS_BETTER else max(values)
        case "median":
            return statistics.median(window)
        case "mean":
            return statistics.fmean(window)
        case "ema":
            return moving_average(points, take.number)[-1][1]
    raise AssertionError(take)


def moving_average(points: Sequence[tuple[int, float]], decay: float) -> Points:
    """(round, exponential moving average in percent), starting at the first point.

    decay: per round, also of those that are not evaluated.
    """
    averages: Points = []
    for number, value in points:
        average = 100 * value
        if averages:
            last_round, last_average = averages[-1]
            weight = decay ** (number - last_round)
            average = weight * last_average + (1 - weight) * average
        averages.append((number, average))
    return averages
