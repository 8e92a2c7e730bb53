"""`make bench`: all parts, into bench.json and bench.md; `python -m benchmarks steps`: one."""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch

from benchmarks.engine import against_bare, scale
from benchmarks.steps import overheads, random_source
from protocol.config import keel_home

parts = ("steps", "engine", "scale")


def main() -> None:
    """Run the parts asked for, and write what they say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    parser.add_argument("--out", type=Path, default=Path("bench"))
    parser.add_argument("--quick", action="store_true", help="no residual networks")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chosen = arguments.parts or list(parts)
    if strange := set(chosen) - set(parts):
        parser.error(f"{sorted(strange)[0]!r}: a part is one of {', '.join(parts)}")
    home = keel_home()
    home.mkdir(parents=True, exist_ok=True)
    rows = []
    if "steps" in chosen:
        rows += overheads(home, arguments.quick)
    if "engine" in chosen:
        rows += against_bare(home, arguments.repetitions, arguments.rounds)
    if "scale" in chosen:
        counts = (10, 100, 500, 2000)
        rows += scale(home, counts, {n: random_source(home, 30 * n) for n in counts})
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }
    arguments.out.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "rows": rows}, indent=2)
    )
    lines = ["| what | ratio | to reach | wall s | cpu s |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = [row.get(k) for k in ("what", "ratio", "to_reach", "wall_seconds", "cpu_seconds")]
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    text = "\n".join([*lines, "", f"{machine}", ""])
    arguments.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
