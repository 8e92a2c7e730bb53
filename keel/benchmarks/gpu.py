"""`make bench-gpu`: what one GPU makes of local training, of whole rounds, and of FedReco's way up.

    python -m keel.benchmarks.gpu --cifar10 /data/cifar10-jpg
    python -m keel.benchmarks.gpu --device cpu --quick

Samples a second of each method in each way of computing, and their share of the arithmetic bound:
the operations of products and convolutions that torch counts in the same run, at the rate that this
device gives one large matrix product of the same kind. Wall seconds, the device waited for; the
least of the repetitions. `--device cpu --quick` tries the commands where there is no GPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from client_app.precision import products
from keel.benchmarks.engine import W1, W2, bare_rounds, median_wall
from keel.benchmarks.report import Row, collect, write
from keel.benchmarks.steps import Keys, Run, frozen_passes, local_training, random_source
from protocol.config import keel_home
from server_app.inline import run_inline

WAYS: dict[str, Keys] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "bf16, compiled": {"precision": "bf16", "compile": True},
}
target_accuracy = 0.85  # of FedReco's time to it


def least_seconds(run: Run, device: str, repetitions: int) -> float:
    """Wall seconds of one run, after one that does not count."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    seconds = []
    for _ in range(repetitions):
        wait()
        started = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def product_rate(device: str, precision: str, size: int) -> float:
    """Floating-point operations a second of a square matrix product of this precision."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def run() -> None:
        with products(precision):
            for _ in range(10):
                torch.mm(a, b)

    return 10 * 2 * size**3 / least_seconds(run, device, 5)


def operations(run: Run) -> int:
    """Those of the products and convolutions of one run, forward and backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())


def training(device: str, home: Path, quick: bool) -> Iterator[Row]:
    """Local training of one round: FedRCL and FedIntR, with FedAvg beside them."""
    num, epochs = (256, 2) if quick else (10_000, 2)
    rates = {p: product_rate(device, p, 512 if quick else 8192) for p in ("fp32", "tf32", "bf16")}
    for model, batch, method in (("resnet18", 128, "fedrcl"), ("cnn-fedintr", 512, "fedintr")):
        common: Keys = {
            "source": random_source(home, num),
            "model": model,
            "device": device,
            "batch-size": batch,
            "local-epochs": epochs,
        }
        for name in ("fedavg", method):
            count = operations(local_training({**common, "method": name}))
            for way, keys in WAYS.items():
                if quick and "compile" in keys:
                    continue
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                run = local_training({**common, **keys, "method": name})
                seconds = least_seconds(run, device, 1 if quick else 3)
                rate = rates[str(keys["precision"])]
                peak_mb = torch.cuda.max_memory_allocated() >> 20 if device == "cuda" else None
                yield {
                    "what": f"{model}, batch {batch}: {name}, {way}",
                    "samples_a_second": round(epochs * num / seconds),
                    "share_of_bound": round(count / rate / seconds, 3),
                    "peak_mb": peak_mb,
                    "wall_seconds": round(seconds, 4),
                }


def frozen(device: str) -> Iterator[Row]:
    """The global and the previous model, as one batched pass or one after the other."""
    for model, batch in (("cnn-fedintr", 512), ("cnn-fedcka", 128), ("resnet18", 128)):
        apart, batched = (least_seconds(r, device, 5) for r in frozen_passes(model, batch, device))
        yield {
            "what": f"{model}, batch {batch}, both frozen models: batched / apart",
            "ratio": round(batched / apart, 3),
            "wall_seconds": [round(batched, 5), round(apart, 5)],
        }


def history_of(keys: Keys, num_clients: int) -> list[dict[str, Any]]:
    """history.jsonl of a run of the inline engine, whose folder is gone then."""
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as out:
        folder = run_inline({**keys, "output-dir": out}, num_clients)
        return [json.loads(line) for line in (folder / "history.jsonl").open()]


def seconds_of(line: dict[str, Any]) -> float:
    """Of one round: training, aggregation and evaluation."""
    return float(sum(line["seconds"].values()))


def rounds(device: str, home: Path, quick: bool) -> Iterator[Row]:
    """W1 and W2: the inline engine against the plain loop in one process, on the same device."""
    count = 2 if quick else 6
    for name, keys in (("W1", W1), ("W2 (MOON)", W2)):
        lines = history_of({**keys, "device": device, "num-rounds": count}, 10)
        ours = statistics.median(seconds_of(line) for line in lines[1:])
        bare = median_wall(bare_rounds(home, str(keys["method"]), 1, count, device))
        yield {
            "what": f"{name}: inline engine / bare, 1 process, s a round",
            "ratio": round(ours / bare, 3),
            "wall_seconds": [round(ours, 3), round(bare, 3)],
            "mb_down_and_up": [round(lines[-1][k] / 1e6, 2) for k in ("bytes_down", "bytes_up")],
        }


def way_to_target(device: str, folder: str, quick: bool) -> Row:
    """FedReco on CIFAR-10, 50 clients of 2 classes: seconds until 85 % personal accuracy."""
    keys: Keys = {
        "preset": "fedreco-table1-cifar10",
        "source": f"folder:{folder}",
        "classes-per-client": 2,
        "num-rounds": 2 if quick else 300,
        "evaluate-every": 1 if quick else 5,
        "device": device,
    }
    spent, best = 0.0, 0.0
    reached: tuple[int, float] | None = None
    for line in history_of(keys, 50):
        spent += seconds_of(line)
        if "personal" in line:
            best = max(best, line["personal"]["mean"])
        if reached is None and best >= target_accuracy:
            reached = (line["round"], round(spent, 1))
    return {
        "what": "FedReco, CIFAR-10, 50 clients of 2 classes: to 85 % personal",
        "round_and_seconds": reached,
        "best": round(best, 4),
        "wall_seconds": round(spent, 1),
    }


def main() -> None:
    """Write bench-gpu.json and bench-gpu.md."""
    parser = argparse.ArgumentParser(prog="python -m keel.benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only that it runs")
    parser.add_argument("--cifar10", metavar="FOLDER", help="train/ and test/, a folder a class")
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"))
    arguments = parser.parse_args()
    device, quick = arguments.device, arguments.quick
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible (torch.cuda.is_available()); --device cpu --quick tries this")
    home = keel_home()
    home.mkdir(parents=True, exist_ok=True)
    rows = collect(training(device, home, quick)) + collect(frozen(device))
    rows += collect(rounds(device, home, quick))
    if arguments.cifar10:
        rows += collect([way_to_target(device, arguments.cifar10, quick)])
    write(rows, arguments.out)


if __name__ == "__main__":
    main()
