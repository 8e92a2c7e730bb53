"""What the lines of a history say: accuracy curves, the headline, a run's summary.

Needs no torch. summary.json has all that a list of runs shows, so that no reader has to open the
history.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import reduce
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

# whose scores of `metrics` a line may have: key in a line, description
WHOSE = {
    "global": "global model, test set",
    "local_global": "global model, clients' test parts",
    "personal": "personal models, clients' test parts",
}
LOWER_IS_BETTER = ("loss", "ece")


def value_in(line: Mapping[str, Any], key: str, name: str) -> float | None:
    """An accuracy of one of CURVES, or a score of `score_curves`; None if it was not measured."""
    part = line.get(key, {})
    value: float | None = part.get("scores", {}).get(name, part.get(name))
    return value


def score_curves(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The scores that were measured beside the accuracy, as in CURVES."""
    found = dict.fromkeys(
        (key, name) for key in WHOSE for line in history for name in scores_in(line, key)
    )
    return [(key, name, f"{name}, {WHOSE[key]}") for key, name in found if name != "accuracy"]


def scores_in(line: Mapping[str, Any], key: str) -> Mapping[str, float]:
    """The scores of `metrics` of the models `key` of WHOSE."""
    found: Mapping[str, float] = line.get(key, {}).get("scores", {})
    return found


def curve(history: Sequence[Mapping[str, Any]], key: str, name: str) -> list[tuple[int, float]]:
    """(round, value) of every evaluated round of one of CURVES or of `score_curves`."""
    pairs = ((line["round"], value_in(line, key, name)) for line in history)
    return [(number, value) for number, value in pairs if value is not None]


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
    for key in WHOSE:
        found |= {
            f"score/{key}.{name}": v for name, v in scores_in(line, key).items() if v is not None
        }
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


def summarise(
    history: Sequence[Line], config: Mapping[str, Any], last_rounds: int
) -> dict[str, Any]:
    """The fields of summary.json for these rounds of a run with this flat config.

    accuracy: final and best of the headline curve, None before the first evaluation. results: of
    every curve of CURVES, with mean and median over the last `last_rounds` evaluations. scores: the
    same of `score_curves`, where there are any; the best loss and ece are the lowest.
    """
    results = results_of(history, CURVES, last_rounds)
    scores = results_of(history, score_curves(history), last_rounds)
    keys = ("method", "server-optimizer", "source", "model", "seed", "num-rounds")
    headline = ".".join(headline_of(history))
    seconds = sum(sum(line["seconds"].values()) for line in history)
    return {
        **{key.replace("-", "_"): config[key] for key in keys},
        "rounds": len(history),
        "accuracy_of": headline if headline in results else None,
        "final_accuracy": results.get(headline, {}).get("final"),
        "best_accuracy": results.get(headline, {}).get("best"),
        "seconds": round(seconds, 2),
        "seconds_per_round": round(seconds / max(1, len(history)), 4),
        # of a run restored from an archive, only accuracies and times are there
        "bytes_down": sum(line.get("bytes_down", 0) for line in history),
        "bytes_up": sum(line.get("bytes_up", 0) for line in history),
        "left_out": sum(line["num_left_out"] for line in history),
        "rejected": sum(line.get("rejected", 0) for line in history),
        "results": results,
        **({"scores": scores} if scores else {}),
    }


def results_of(
    history: Sequence[Line], curves: Sequence[tuple[str, str, str]], last_rounds: int
) -> dict[str, Any]:
    """Final, best, mean and median of each of these curves that was measured."""
    results: dict[str, Any] = {}
    for key, name, description in curves:
        values = [value for _, value in curve(history, key, name)]
        if values:
            num_last = min(last_rounds, len(values))
            results[f"{key}.{name}"] = {
                "what": description,
                "final": values[-1],
                "best": min(values) if name in LOWER_IS_BETTER else max(values),
                f"mean of last {num_last}": statistics.fmean(values[-num_last:]),
                f"median of last {num_last}": statistics.median(values[-num_last:]),
                # over all evaluations, as FedRCL reports it
                "EMA 0.9": reduce(lambda ema, value: 0.9 * ema + (1 - 0.9) * value, values),
            }
    return results


def privacy_text(privacy: Mapping[str, Any]) -> str:
    """The privacy statement of a summary in one line."""
    release, composed = privacy["per_release"], privacy["composed"]
    text = (
        f"epsilon {release['epsilon']}, delta {release['delta']} a release; composed over "
        f"{privacy['releases']} releases: epsilon {composed['epsilon']:.2f}, delta "
        f"{composed['delta']}"
    )
    small = privacy["composed_at_small_delta"]
    if small["delta"] < composed["delta"]:
        text += f" (epsilon {small['epsilon']:.2f} at delta {small['delta']})"
    return text
