"""summary.json: the state and results of a run at a glance; needs no torch.

It has all that a list of runs shows, so that no reader has to open the history.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any

from protocol.files import write_atomically
from server_app.history import CURVES, Line, curve, headline_of
from server_app.run_reader import SUMMARY_FILE


def summarise(
    history: Sequence[Line], config: Mapping[str, Any], last_rounds: int
) -> dict[str, Any]:
    """The fields of summary.json for these rounds of a run with this flat config.

    accuracy: final and best of the headline curve, None before the first evaluation. results: of
    every curve of CURVES, with mean and median over the last `last_rounds` evaluations.
    """
    results: dict[str, Any] = {}
    for key, name, description in CURVES:
        values = [value for _, value in curve(history, key, name)]
        if values:
            num_last = min(last_rounds, len(values))
            results[f"{key}.{name}"] = {
                "what": description,
                "final": values[-1],
                "best": max(values),
                f"mean of last {num_last}": statistics.fmean(values[-num_last:]),
                f"median of last {num_last}": statistics.median(values[-num_last:]),
                # over all evaluations, as FedRCL reports it
                "EMA 0.9": reduce(lambda ema, value: 0.9 * ema + (1 - 0.9) * value, values),
            }
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
    }


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


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json whole or not at all."""
    write_atomically(directory / SUMMARY_FILE, json.dumps(summary, indent=2).encode())


def iso_time(seconds: float) -> str:
    """A time of `time.time` in local time, with its offset: 2026-01-31T12:00:00+01:00."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
