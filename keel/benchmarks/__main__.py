"""`make bench`: all parts but resnet50, into bench.json and bench.md.

`python -m keel.benchmarks resnet50` runs that one, which takes 12 minutes by itself.
"""

import argparse
from pathlib import Path

from keel.benchmarks.engine import against_bare, scale, splits
from keel.benchmarks.report import Row, collect, write
from keel.benchmarks.steps import overheads, random_source, resnet50_overheads
from protocol.config import keel_home

parts = ("steps", "engine", "scale", "resnet50")


def main() -> None:
    """Run the parts asked for, and write what they say."""
    parser = argparse.ArgumentParser(prog="python -m keel.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    parser.add_argument("--out", type=Path, help="bench, or bench-PART of single ones")
    parser.add_argument("--quick", action="store_true", help="steps without resnet18")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    chosen = arguments.parts or list(parts[:3])
    if strange := set(chosen) - set(parts):
        parser.error(f"{sorted(strange)[0]!r}: a part is one of {', '.join(parts)}")
    for name, least in (("repetitions", 1), ("rounds", 2)):  # the first round does not count
        if (given := getattr(arguments, name)) < least:
            parser.error(f"--{name} {given}: it has to be at least {least}")
    home = keel_home()
    home.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    if "steps" in chosen:
        rows += collect(overheads(home, arguments.quick))
    if "engine" in chosen:
        rows += collect(against_bare(home, arguments.repetitions, arguments.rounds))
    if "scale" in chosen:
        counts = (10, 100, 500, 2000)
        rows += collect(scale(home, {n: random_source(home, 30 * n) for n in counts}))
        rows += collect(splits())
    if "resnet50" in chosen:
        rows += collect(resnet50_overheads(home))
    write(rows, arguments.out or Path("-".join(["bench", *arguments.parts])))


if __name__ == "__main__":
    main()
