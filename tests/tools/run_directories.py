"""Run directories made up for tests and for the measurements of docs/results/views.md.

python -m tests.tools.run_directories many DIRECTORY --runs 1000 --rounds 100
python -m tests.tools.run_directories large DIRECTORY --clients 10000 --rounds 1000
"""

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.experiments.jobs import save_job, selected
from keel.experiments.recipe import load_recipe
from keel.experiments.results import runs_needed
from keel.experiments.runs import Options, code_folder
from protocol.code import code_version
from protocol.config import default_config
from server_app.record import split
from server_app.run_reader import CLIENTS_FILE, HISTORY_FILE, LAYOUT

METHODS = ("fedavg", "fedprox", "moon", "fedintr", "fedcka")


def line_of(
    number: int,
    rng: random.Random,
    level: float = 0.8,
    clients: Sequence[str] = (),
    period: float = 20.0,
) -> dict[str, Any]:
    """What a plausible round is recorded with; with clients, one that evaluates all of them."""
    accuracy = level * (1 - math.exp(-number / period)) + rng.gauss(0, 0.005)
    accuracy = min(1.0, max(0.0, accuracy))
    line: dict[str, Any] = {
        "round": number,
        "participants": list(clients[:: max(1, len(clients) // 1000)]) or ["client-0000"],
        "left_out": {c: "no reply within 60 s" for c in clients[number % 97 :: 1000]},
        "rejected": 0,
        "reset_needed": [],
        "losses": {"supervised": 2.3 - 1.8 * accuracy, "contrastive": 0.7 - 0.3 * accuracy},
        "bytes_down": 1_000_000,
        "bytes_up": 900_000,
        "client_seconds": 1.5,
        "client_cpu_seconds": 1.2,
        "backed_off": [],
        "global": {"accuracy": accuracy, "loss": 2.3 - 2 * accuracy},
        "seconds": {"training": 1.0 + rng.random() / 10, "aggregation": 0.1, "evaluation": 0.2},
    }
    if clients:
        values = [min(1.0, max(0.0, rng.gauss(accuracy, 0.1))) for _ in clients]
        line["local_global"] = {
            "mean": sum(values) / len(values),
            "worst_decile": sum(sorted(values)[: max(1, len(values) // 10)]) / len(values) * 10,
            "clients": dict(zip(clients, values, strict=True)),
        }
    return line


def append_round(directory: Path, line: Mapping[str, Any]) -> None:
    """Append a round's lines to a run directory."""
    for name, part in zip((HISTORY_FILE, CLIENTS_FILE), split(line), strict=True):
        with (directory / name).open("a") as file:
            file.write(json.dumps(part) + "\n")


def make_run(
    directory: Path,
    overrides: Mapping[str, Any],
    num_rounds: int,
    clients: Sequence[str] = (),
    status: str = "finished",
    num_written: int | None = None,
    level: float | None = None,
    period: float = 20.0,
    curve: str = "global.accuracy",
) -> Path:
    """Write a run directory of `num_written` (default: all) of its rounds."""
    directory.mkdir(parents=True)
    config = {**default_config(), **overrides, "num-rounds": num_rounds}
    (directory / "config.json").write_text(
        json.dumps({"config": config, "overrides": dict(overrides)}, indent=2)
    )
    (directory / "manifest.json").write_text(json.dumps({"layout": LAYOUT, "simulated": True}))
    written: dict[str, list[str]] = {HISTORY_FILE: [], CLIENTS_FILE: []}
    rng = random.Random(f"{directory.name} {config['method']} {config['seed']}")
    if level is None:
        known = config["method"] in METHODS
        level = 0.7 + 0.05 * (METHODS.index(config["method"]) if known else 0)
    count = num_rounds if num_written is None else num_written
    last: dict[str, Any] = {}
    for number in range(1, count + 1):
        last = line_of(number, rng, level, clients, period)
        key, _, name = curve.partition(".")
        accuracy = last["global"]["accuracy"]
        if key != "global":
            last[key] = {name: accuracy, "worst_decile": accuracy - 0.1, "clients": {}}
        for lines, part in zip(written.values(), split(last), strict=True):
            lines.append(json.dumps(part) + "\n")
    for name, lines in written.items():
        (directory / name).write_text("".join(lines))
    accuracy = last["global"]["accuracy"] if last else None
    summary = {
        **{"status": status, "clients": len(clients) or 10, "num_rounds": num_rounds},
        **{"rounds": count, "final_accuracy": accuracy, "best_accuracy": accuracy},
        **{"method": config["method"], "privacy": None, "results": {}},
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=2))
    (directory / "run.log").write_text("".join(f"round {i + 1}\n" for i in range(min(count, 50))))
    names = list(clients) or [f"client-{i:04d}" for i in range(10)]
    roster = [
        {
            **{"node": i + 2, "client": name, "num_partitions": len(names), "keel": "0.2.0"},
            "label_counts": [rng.randrange(60) for _ in range(10)],
        }
        for i, name in enumerate(names)
    ]
    (directory / "roster.json").write_text(json.dumps(roster, indent=1))
    return directory


def make_many(base: Path, num_runs: int, num_rounds: int) -> None:
    """Runs of five methods, three seeds each setting."""
    for i in range(num_runs):
        overrides = {
            "method": METHODS[i // 3 % len(METHODS)],
            "seed": i % 3,
            "lr": round(0.01 * (1 + i // 15), 4),
        }
        make_run(base / f"run-{i:04d}", overrides, num_rounds)


def make_large(base: Path, num_clients: int, num_rounds: int) -> Path:
    """One run that evaluates every client in every round."""
    clients = [f"client-{i:05d}" for i in range(num_clients)]
    overrides = {"method": "fedintr", "num-clients": num_clients, "evaluate-clients": "all"}
    return make_run(base / f"large-{num_clients}-{num_rounds}", overrides, num_rounds, clients)


def make_table(
    output: Path,
    name: str,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    seeds: int = 0,
    diverging: Sequence[str] = (),
) -> Path:
    """An output folder with all runs of a recipe; their curves end near the paper's numbers.

    diverging: rows whose last seed ends so.
    """
    recipe = load_recipe(name)
    cells = selected(recipe, only)
    numbers = list(range(seeds)) or recipe.seeds
    options = Options(dict(changes or {}), numbers)
    output.mkdir(parents=True, exist_ok=True)
    save_job(recipe, options, output, cells)
    here = {
        "layout": LAYOUT,
        "code": [code_version()],
        "machines": ["cpu: made up"],
        "simulated": True,
    }
    packages = {"torch": "2.11.0", "flwr": "1.39.0", "python": "3.12", "cpu": "AVX2", "gpu": "none"}
    here |= {"keel": ["0.2.0"], "versions": packages}
    if recipe.shows == "labels":
        return output
    for cell, run in runs_needed(cells, options, output / "runs" / code_folder()):
        has_diverged = cell.row.name in diverging and run.seed == numbers[-1]
        status = "failed: an update is not finite" if has_diverged else "finished"
        level = (cell.paper or 60.0) / 100 / (1 - math.exp(-4))
        shape = {"level": level, "period": run.rounds / 4, "curve": cell.of}
        make_run(run.directory, run.config.flat, run.rounds, status=status, **shape)
        (run.directory / "manifest.json").write_text(json.dumps(here))
    return output


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("many", "large"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    if given.what == "many":
        make_many(given.directory, given.runs, given.rounds)
    else:
        make_large(given.directory, given.clients, given.rounds)


if __name__ == "__main__":
    main()
