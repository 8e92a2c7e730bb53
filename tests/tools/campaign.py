"""Kills, hangs, full disks, damaged files and fuzzing beside each other; one file of outcomes.

    python -m tests.tools.campaign --json campaign.json      # as root

Hangs and full disks are mostly waiting: several deployments share the kills and hangs, another has
the full disks and damaged files, and the fuzzer takes the time that is left. Each tool's output is
in a file beside the outcomes. The last line has the counts; the status is 0 if every part found
nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

parts: dict[str, Sequence[str]] = {
    "faults": (
        *("--kills", "100", "--hangs", "40", "--deployments", "2", "--clients", "4"),
        *("--epochs", "1", "--rounds", "15", "--pause", "2", "6", "--per-run", "35"),
        *("--limit-s", "3600", "--run-limit-s", "1500"),
    ),
    "damage": ("--disk-full", "10", "--corrupt", "10", "--clients", "3"),
    "fuzz": ("--inputs", "1000000"),
}


def counts(found: dict[str, Any]) -> dict[str, int]:
    """The figures of docs/results/trust.md, from the outcomes of the parts that were run."""
    runs = found.get("faults", {}).get("runs", [])
    damage, fuzz = found.get("damage", {}), found.get("fuzz", {})
    rows = damage.get("rows", [])
    return {
        "kills": sum(sum(run["kills"].values()) for run in runs),
        "hangs": sum(sum(run["hangs"].values()) for run in runs),
        "full disks": sum(row[0].startswith("disk of") for row in rows),
        "damaged files": sum(not row[0].startswith("disk of") for row in rows),
        "fuzz inputs": sum(kind["inputs"] for kind in fuzz.values()),
        "runs": len(runs),
        "finished": sum(run["finished"] for run in runs),
        "models compared": sum(run["compared"] for run in runs),
        "clients left out, named": sum(run["left_out"] for run in runs),
        "models lost": sum(len(run["lost"]) for run in runs) + len(damage.get("lost", [])),
        "wrong results": sum(len(run["wrong"]) for run in runs),
        "unnamed failures": sum(run["unnamed"] for run in runs) + damage.get("unnamed", 0),
        "moments without a name or an end": sum("**no**" in " ".join(row) for row in rows),
        "crashes": sum(kind.get("crashes", 0) for kind in fuzz.values()),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.campaign", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="a file for the outcomes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    arguments = parser.parse_args()
    started, running = time.monotonic(), {}
    for name in arguments.parts:
        result = arguments.json.with_suffix(f".{name}.json")
        result.unlink(missing_ok=True)
        nice = ["nice", "-n", "19"] if name == "fuzz" else []
        command = [*nice, sys.executable, "-m", f"tests.tools.{name}", *parts[name]]
        command += ["--seed", str(arguments.seed), "--json", str(result)]
        print(" ".join(command), flush=True)
        with result.with_suffix(".txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        running[name] = process, result
    found: dict[str, Any] = {}
    for name, (process, result) in running.items():
        status = process.wait()
        seconds = time.monotonic() - started
        print(f"{name}: status {status} after {seconds:.0f} s", flush=True)
        found[name] = json.loads(result.read_text()) if result.exists() else {}
    total = {"seconds": round(time.monotonic() - started)} | counts(found)
    arguments.json.write_text(json.dumps({"counts": total} | found, indent=1))
    print(json.dumps(total))
    return int(any(process.returncode for process, _ in running.values()))


if __name__ == "__main__":
    sys.exit(main())
