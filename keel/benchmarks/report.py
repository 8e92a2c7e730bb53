"""What the benchmarks say: rows, on the screen as they come, then as JSON and as a table."""

import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import torch

Row = dict[str, object]


def machine() -> Row:
    """What the figures were taken on, and when."""
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
    """All rows, each printed when it is there."""
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(row)
    return found


def table(rows: list[Row]) -> str:
    """Markdown, with a column for every key that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(c.replace("_", " ") for c in columns) + " |"]
    lines.append("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        cells = ["" if row.get(c) is None else str(row[c]) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows: list[Row], out: Path) -> None:
    """<out>.json and <out>.md."""
    about = machine()
    out.with_suffix(".json").write_text(json.dumps({"machine": about, "rows": rows}, indent=2))
    text = "\n".join([table(rows), "", f"{about}", ""])
    out.with_suffix(".md").write_text(text)
    print(text)
