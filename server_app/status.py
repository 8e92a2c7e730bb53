"""The state of a run, read from its directory without changing anything in it; needs no torch."""

import argparse
import fcntl
import sys
from pathlib import Path

from protocol.config import keel_home
from server_app.history import CURVES, curve, duration, read_history
from server_app.summary import read_config_file, read_summary

NUM_RECENT = 10  # rounds whose left out clients are shown


def newest_run(base: Path) -> Path:
    """The run directory that was written to last; ValueError if there is none."""
    found = [path.parent for path in base.glob("*/config.json")]
    if not found:
        raise ValueError(f"there is no run in {base}: name a run directory")
    return max(found, key=last_change)


def last_change(directory: Path) -> float:
    """When the run last wrote a round, or started."""
    paths = (directory / "history.jsonl", directory / "config.json")
    return max(path.stat().st_mtime for path in paths if path.exists())


def is_being_written(directory: Path) -> bool:
    """Whether a living process on this machine writes the run directory."""
    path = directory / ".lock"
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def run_status(directory: Path) -> str:
    """running, finished, stopped, killed, or failed: with the reason."""
    status = str(read_summary(directory)["status"])
    if is_being_written(directory):
        return "running"
    return "killed" if status in ("running", "starting") else status


def status_lines(directory: Path) -> list[str]:
    """The status in a few lines; ValueError, one line, if it is not a run directory."""
    config, _ = read_config_file(directory)
    history, status = read_history(directory), run_status(directory)
    if status == "killed":
        status += f": continue it with resume={str(directory)!r}"
    seconds = sum(sum(line["seconds"].values()) for line in history)
    lines = [
        f"run       {directory}",
        f"what      {config['method']}, server optimizer {config['server-optimizer']}, "
        f"{config['source']}, {config['model']}",
        f"status    {status}",
        f"round     {history[-1]['round'] if history else 0} of {config['num-rounds']}, "
        f"{duration(seconds)} of rounds",
    ]
    for key, name, description in CURVES:
        if points := curve(history, key, name)[-3:]:
            shown = ", ".join(f"{100 * value:.2f} % ({number})" for number, value in points)
            lines.append(f"accuracy  {description}: {shown}")
    for line in history[-NUM_RECENT:]:
        for client, reason in line["left_out"].items():
            lines.append(f"left out  round {line['round']}: {client}: {reason}")
    if history and history[-1].get("backed_off"):
        lines.append(f"not asked {', '.join(history[-1]['backed_off'])}")
    return lines


def main() -> int:
    """The deprecated command line; `keel status [RUN]` replaces it."""
    parser = argparse.ArgumentParser(prog="python -m server_app.status", description=main.__doc__)
    parser.add_argument("directory", nargs="?", metavar="RUN_DIRECTORY", type=Path)
    directory: Path | None = parser.parse_args().directory
    print("python -m server_app.status works until Keel 0.3; use: keel status", file=sys.stderr)
    try:
        directory = directory.expanduser() if directory else newest_run(keel_home() / "runs")
        print("\n".join(status_lines(directory)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
