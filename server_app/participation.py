"""What each client did in a run, from clients.jsonl: rounds, seconds, loss, direction.

Needs no torch. A round's `updates` have the values; record.py writes them.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.text import num_of, shortened

NUM_RECENT = 10  # updates whose mean is shown
SLOW_FACTOR, SLOW_S = 3.0, 5.0  # times the median of the others, and seconds more
MIN_COSINE = 0.2  # of the others, from which on half of it is opposed; skewed data have less


@dataclass
class Participant:
    """One client. rounds: in which its update was accepted. slowest: (round, seconds, others').

    recent: its last updates. reason: why it was last left out.
    """

    rounds: int = 0
    last_round: int = 0
    slowest: tuple[int, float, float] = (0, 0.0, 0.0)
    recent: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    reason: str = ""

    def mean(self, key: str) -> float | None:
        """The mean of a value over its last updates; None if they lack it."""
        found = [update[key] for update in self.recent if update.get(key) is not None]
        return statistics.fmean(found) if found else None


@dataclass
class Participation:
    """All clients of a run that were asked, by name. last: the newest round's line."""

    clients: dict[str, Participant] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)

    def of(self, client: str) -> Participant:
        """The client, from now on one of the run's."""
        return self.clients.setdefault(client, Participant())

    def add(self, line: Mapping[str, Any]) -> None:
        """One round."""
        self.last, updates = line, line.get("updates", {})
        for client in line["participants"]:
            found = self.of(client)
            found.rounds, found.last_round = found.rounds + 1, line["round"]
        for client, reason in line["left_out"].items():
            self.of(client).reason = f"round {line['round']}: {reason}"
        for client in line["backed_off"]:
            found = self.of(client)
            found.reason = found.reason or "away"
        seconds = {c: update["seconds"] for c, update in updates.items() if update.get("seconds")}
        for client, update in updates.items():
            found = self.of(client)
            found.recent.append(update)
            others = [value for other, value in seconds.items() if other != client]
            own, usual = seconds.get(client, 0.0), statistics.median(others) if others else 0.0
            if others and own - usual > found.slowest[1] - found.slowest[2]:
                found.slowest = line["round"], own, usual

    @property
    def missing(self) -> list[str]:
        """The clients that the newest round had to do without, in the order of their names."""
        return sorted({*self.last.get("left_out", ()), *self.last.get("backed_off", ())})

    def missing_text(self, what: str) -> str:
        """`2 of 3 sites, without site-c`; "" if none is missing. what: `site` or `client`."""
        num = len(self.last.get("participants", ()))
        if not self.missing:
            return ""
        total = num_of(what, num + len(self.missing))
        return f"{num} of {total}, without {shortened(self.missing)}"

    def notes(self, client: str) -> list[str]:
        """What is unusual about a client: slow, or opposed to the others; [] for nothing."""
        found, notes = self.clients[client], []
        number, own, usual = found.slowest
        if own > SLOW_FACTOR * usual and own - usual > SLOW_S:
            notes.append(f"slow: {own:.1f} s in round {number}, the others {usual:.1f} s")
        cosine = found.mean("cosine")
        others = [each.mean("cosine") for name, each in self.clients.items() if name != client]
        known = [value for value in others if value is not None]
        if cosine is None or len(known) < 2:
            return notes
        usual_cosine = statistics.median(known)
        if usual_cosine > MIN_COSINE and cosine < usual_cosine / 2:
            notes.append(
                f"opposed: the cosine of its updates with the others' mean is {cosine:.2f}, that "
                f"of the others {usual_cosine:.2f}"
            )
        return notes

    def rows(self) -> list[dict[str, Any]]:
        """A row for each client, in the order of their names: what tables show."""
        return [
            {
                "client": client,
                "rounds": found.rounds,
                "last_round": found.last_round,
                **{key: found.mean(key) for key in ("seconds", "loss", "norm", "cosine")},
                "notes": self.notes(client),
            }
            for client, found in sorted(self.clients.items())
        ]


def participation(lines: Iterable[Mapping[str, Any]]) -> Participation:
    """What the lines of clients.jsonl say."""
    found = Participation()
    for line in lines:
        found.add(line)
    return found
