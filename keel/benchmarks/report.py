"""Options, data, rows and output files of all benchmarks."""

import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from keel.tables import markdown
from protocol.files import write_atomically
from protocol.options import OptionValue

Row = dict[str, object]
Keys = dict[str, OptionValue]


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
    done: frozenset[str] = frozenset()  # measurements of an earlier call
    max_seconds: float = 480.0  # after which the gpu part begins no further measurement


def random_source(folder: Path, num: int, shape: tuple[int, ...] = (32, 32, 3)) -> str:
    """The `source` key of `num` random images in 10 classes, stored in `folder`.

    shape: of an image: height, width and, in colour, 3.
    """
    size = "" if shape == (32, 32, 3) else f"-{shape[0]}x{shape[1]}"
    path = folder / f"random-{num}{size}.npz"
    if not path.exists():
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (num, *shape), dtype=np.uint8)
        labels = np.arange(num) % 10
        np.savez(path, x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
    return f"npz:{path}"


def workload_source(options: BenchOptions) -> str:
    """The `source` key of W1 and W2: Fashion-MNIST; for --quick a few random images."""
    return random_source(options.home, 600) if options.is_quick else "fashion-mnist"


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


def settings(options: BenchOptions) -> Row:
    """The options that change what is measured under the same name."""
    return {"device": options.device, "quick": options.is_quick, "cifar10": options.cifar10}


def earlier_rows(out: Path, options: BenchOptions) -> list[Row]:
    """The rows of <out>.json if measured so, on this GPU with this torch; else []."""
    path, about = Path(f"{out}.json"), machine()
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    is_other = any(found["machine"].get(key) != about[key] for key in ("gpu", "torch", "processor"))
    if is_other or found.get("settings") != settings(options):
        return []
    rows: list[Row] = found["rows"]
    return rows


def table(rows: list[Row]) -> str:
    """Markdown, with a column for every key that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["" if row.get(c) is None else row[c] for c in columns] for row in rows]
    return markdown([c.replace("_", " ") for c in columns], cells)


def write(rows: list[Row], out: Path, options: BenchOptions) -> None:
    """Write <out>.json and <out>.md."""
    about = machine()
    content = {"machine": about, "settings": settings(options), "rows": rows}
    write_atomically(Path(f"{out}.json"), json.dumps(content, indent=2).encode())
    write_atomically(Path(f"{out}.md"), f"{table(rows)}\n\n{about}\n".encode())
