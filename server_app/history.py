"""What the lines of a history say: accuracy curves, the headline, durations. Needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

Line = dict[str, Any]

# Accuracy curves: key in a line, key within it, description.
CURVES = (
    ("global", "accuracy", "global model, test set"),
    ("local_global", "mean", "global model, clients' test parts"),
    ("local_global", "worst_decile", "global model, worst tenth of clients"),
    ("personal", "mean", "personal models, clients' test parts"),
    ("personal", "worst_decile", "personal models, worst tenth of clients"),
)
# the first of these curves that was measured is the accuracy
HEADLINE = (("personal", "mean"), ("global", "accuracy"), ("local_global", "mean"))


def curve(history: Sequence[Mapping[str, Any]], key: str, name: str) -> list[tuple[int, float]]:
    """(round, accuracy) of every evaluated round of one of CURVES."""
    return [(line["round"], line[key][name]) for line in history if key in line]


def headline_of(history: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The curve of HEADLINE that stands for a run; the first of them before any evaluation."""
    keys = {key for line in history for key in line}
    return next((pair for pair in HEADLINE if pair[0] in keys), HEADLINE[0])


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """A round's figures under flat names, as trackers, tables and exports show them."""
    found = {f"accuracy/{key}.{name}": line[key][name] for key, name, _ in CURVES if key in line}
    found |= {f"loss/{name}": value for name, value in line["losses"].items() if value is not None}
    found |= {f"seconds/{name}": value for name, value in line["seconds"].items()}
    if (loss := line.get("global", {}).get("loss")) is not None:
        found["loss/global.loss"] = loss
    names = ("bytes_down", "bytes_up", "rejected", "evaluation_bytes_down", "evaluation_bytes_up")
    found |= {name: line[name] for name in names if name in line}
    return found | {"left_out": line["num_left_out"]}


def duration(seconds: float) -> str:
    """12 s, 3 min 4 s, 2 h 5 min, 4 d 3 h."""
    s = max(0, round(seconds))
    for size, unit, part, name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if s >= size:
            return f"{s // size} {unit} {s % size // part} {name}"
    return f"{s} s"
