"""Measure speed on this machine, as ratios within one run.

    python -m tools.bench [PART ...] [--quick] [--out bench]

bare: W1 and W2 beside two bare processes. steps: FedCKA's training step over FedAvg's. own: a
network of one's own over the same one of Keel's. clients: 100,000 clients over 100. memory: the
server's peak with ResNet-50. deployment: seconds of a deployed round. gpu: recorded steps over
eager ones. Default: all but gpu. Fashion-MNIST is read from Keel's home. Writes OUT.json and
OUT.md after each row.
"""

import argparse
import json
from pathlib import Path

from keel.tables import markdown
from tools.bench.parts import ON_A_CPU, PARTS, Row, Sizes, machine


def table(rows: list[Row]) -> str:
    """Markdown, with a column for every key that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["" if row.get(c) is None else row[c] for c in columns] for row in rows]
    return markdown([c.replace("_", " ") for c in columns], cells)


def main() -> None:
    """Measure the parts in turn."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to try the code")
    parser.add_argument("--repetitions", type=int, default=2, help="of bare and steps")
    parser.add_argument("--rounds", type=int, default=5, help="of bare, with one to warm up")
    parser.add_argument("--device", default="cuda", help="of the part gpu")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="without an ending")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"PART {min(unknown)}: expected some of {', '.join(PARTS)}")
    sizes = Sizes(options.quick, options.repetitions, options.rounds, options.device)
    rows: list[Row] = []
    for part in options.parts or ON_A_CPU:
        for row in PARTS[part](sizes):
            rows.append(row)
            print(" | ".join(str(value) for value in row.values() if value is not None), flush=True)
            content = json.dumps({"machine": machine(), "rows": rows}, indent=2)
            Path(f"{options.out}.json").write_text(content)
            Path(f"{options.out}.md").write_text(f"{table(rows)}\n\n{machine()}\n")


if __name__ == "__main__":
    main()
