"""How a run is doing, for people; reads the run's folder and changes nothing in it.

python -m server_app.status [RUN_FOLDER]      the newest run under $KEEL_HOME/runs by default
"""

import argparse
import fcntl
import json
import sys
from pathlib import Path
from typing import Any

from protocol.config import keel_home
from server_app.report import clock, curves
from server_app.run_directory import read_history

lately = 10  # rounds


def newest_run(base: Path) -> Path:
    """The run folder that was written to last; ValueError if there is none."""
    found = [path.parent for path in base.glob("*/config.json")]
    if not found:
        raise ValueError(f"there is no run in {base}; give a run's folder")
    return max(found, key=last_change)


def last_change(folder: Path) -> float:
    """When the run last wrote a round, or began."""
    paths = (folder / "history.jsonl", folder / "config.json")
    return max(path.stat().st_mtime for path in paths if path.exists())


def is_being_written(folder: Path) -> bool:
    """A living process holds the folder."""
    path = folder / ".lock"
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def status_lines(folder: Path) -> list[str]:
    """The status in a few lines; ValueError, one line, if it is no run's folder."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it is not a run's folder")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["config"]
    history = read_history(folder / "history.jsonl")
    path = folder / "summary.json"
    status = json.loads(path.read_text())["status"] if path.exists() else "running"
    if is_being_written(folder):
        status = "running"
    elif status == "running":
        status = f"killed: it goes on with resume={str(folder)!r}"
    seconds = sum(sum(line["seconds"].values()) for line in history)
    lines = [
        f"run       {folder}",
        f"what      {config['method']}, server optimizer {config.get('server-optimizer', config.get('server'))}, {config['source']}, "
        f"{config['model']}",
        f"status    {status}",
        f"round     {history[-1]['round'] if history else 0} of {config['num-rounds']}, "
        f"{clock(seconds)} of rounds",
    ]
    for key, name, words in curves:
        points = [(line["round"], line[key][name]) for line in history if key in line]
        if points:
            shown = ", ".join(f"{100 * value:.2f} % ({number})" for number, value in points[-3:])
            lines.append(f"accuracy  {words}: {shown}")
    for line in history[-lately:]:
        for client, reason in line["left_out"].items():
            lines.append(f"left out  round {line['round']}: {client}: {reason}")
    if history and history[-1].get("resting"):
        lines.append(f"resting   {', '.join(history[-1]['resting'])}")
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m server_app.status", description=__doc__)
    parser.add_argument("folder", nargs="?", metavar="RUN_FOLDER", type=Path)
    given: Path | None = parser.parse_args().folder
    try:
        folder = given.expanduser() if given else newest_run(keel_home() / "runs")
        print("\n".join(status_lines(folder)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
