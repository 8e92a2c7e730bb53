"""Options, rows and output files of all benchmarks."""

import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.tables import markdown

Row = dict[str, object]


@dataclass(frozen=True)
class BenchOptions:
    """What `keel bench` passes to every part; a part reads what concerns it.

    is_quick: the smallest sizes, to check that a part runs; its numbers mean nothing.
    cifar10: directory with train/<class>/ and test/<class>/, for the GPU benchmark.
    """

    home: Path
    is_quick: bool = False
    repetitions: int = 2
    rounds: int = 4
    device: str = "cuda"
    cifar10: str = ""
    method: str = "fedcka"


def machine() -> Row:
    """The machine that the numbers were measured on, and when."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def collect(rows: Iterable[Row]) -> list[Row]:
    """All rows as a list; each is printed as soon as it is measured."""
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(row)
    return found


def table(rows: list[Row]) -> str:
    """Markdown, with a column for every key that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["" if row.get(c) is None else row[c] for c in columns] for row in rows]
    return markdown([c.replace("_", " ") for c in columns], cells)


def write(rows: list[Row], out: Path) -> None:
    """Write <out>.json and <out>.md, and print the table."""
    about = machine()
    out.with_suffix(".json").write_text(json.dumps({"machine": about, "rows": rows}, indent=2))
    text = f"{table(rows)}\n\n{about}\n"
    out.with_suffix(".md").write_text(text)
    print(text)
