"""`keel list`: the runs of a directory."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from keel.cli.arguments import JsonOption
from keel.saved_runs import COLOURS, SavedRun, all_runs, runs_directory
from keel.tables import print_table
from protocol.text import in_one_line, num_of
from server_app.history import duration
from server_app.run_reader import CONFIG_FILE

MAX_STATE = 60  # characters of a state: `keel status` shows all of it


def list_command(
    base: Annotated[Path | None, typer.Argument(metavar="[DIRECTORY]")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Number of runs; 0: all.")
    ] = 30,
    as_json: JsonOption = False,
) -> None:
    """List the runs of a directory, by default $KEEL_HOME/runs, most recently changed first."""
    base = (base or runs_directory()).expanduser()
    if not base.is_dir() and base != runs_directory():
        raise ValueError(f"{base} is not a directory")
    if (base / CONFIG_FILE).is_file():
        raise ValueError(f"{base} is a run directory: `keel status {base}` shows it")
    found = all_runs(base)
    shown = found[:limit] if limit else found
    rows = [row_of(SavedRun(run.directory)) for run in shown]  # no history stays in memory
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if rows:
        columns: dict[str, list[str | Text]] = {
            "run": [row["run"] for row in rows],
            "method": [row["method"] for row in rows],
            "data": [row["source"] for row in rows],
            "rounds": [f"{row['rounds']}/{row['num_rounds']}" for row in rows],
            "accuracy": [percent(row["accuracy"]) for row in rows],
            "state": [state_text(row["state"]) for row in rows],
            "age": [age_of(run) for run in shown],
        }
        print_table(columns, ["rounds", "accuracy", "age"])
    if not found:
        hint = " yet; `keel run` starts one" if base == runs_directory() else ""
        print(f"no runs in {base}{hint}")
    elif len(shown) < len(found):
        print(f"{num_of('older run', len(found) - len(shown))}: keel list --limit 0")


def row_of(run: SavedRun) -> dict[str, Any]:
    """A run as a row; "?" and None where it cannot be read."""
    is_readable = not run.fault
    config = run.config if is_readable else {}
    return {
        "run": run.name,
        "directory": str(run.directory),
        "method": str(config.get("method", "?")),
        "source": run.source if is_readable else "?",
        "model": str(config.get("model", "?")),
        "rounds": run.last_round if is_readable else 0,
        "num_rounds": config.get("num-rounds", "?"),
        "accuracy": run.accuracy if is_readable else None,
        "state": run.state,
        "changed": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(run.last_change)),
    }


def age_of(run: SavedRun) -> str:
    """The time since its last change, in one unit."""
    return " ".join(duration(time.time() - run.last_change).split()[:2])


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(in_one_line(state, MAX_STATE), COLOURS.get(state, "red"))


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "" if value is None else f"{100 * value:.2f} %"
