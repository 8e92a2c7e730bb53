"""Local training, whole rounds and FedReCo's time to 85 % on one GPU: `keel bench gpu`.

Samples a second of each method in each precision, and their share of the arithmetic bound: the
operations of products and convolutions that torch counts in the same run, at the rate that this
device achieves on one large matrix product of the same precision. Wall seconds with the device
synchronised; the minimum of the repetitions. `--device cpu --quick` tries the code without a GPU.
"""

import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from client_app.methods import method_of
from client_app.precision import products
from client_app.process_cache import ProcessCache
from keel.benchmarks.engine import history_of
from keel.benchmarks.frameworks import Measurement, rounds
from keel.benchmarks.model_speed import min_seconds
from keel.benchmarks.report import BenchOptions, Keys, Row, random_source
from keel.benchmarks.steps import Run, local_training, round_of
from protocol.config import refuse_unknown, resolve_config
from protocol.text import in_one_line

WAYS: dict[str, Keys] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
}

target_accuracy = 0.85  # personal accuracy whose time is measured


def product_rate(device: str, precision: str, size: int) -> float:
    """Floating-point operations a second of a square matrix product of this precision."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def run() -> None:
        with products(precision):
            for _ in range(10):
                torch.mm(a, b)

    return 10 * 2 * size**3 / min_seconds(run, device, 5)


def operations(run: Run) -> int:
    """Floating-point operations of all products and convolutions of one run."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())


def training(options: BenchOptions) -> Iterator[Measurement]:
    """Local training of one round: FedRCL and FedIntR beside FedAvg."""
    device, quick = options.device, options.is_quick
    num, epochs = (64, 1) if quick else (10_000, 2)
    rate_of = lru_cache(partial(product_rate, device, size=512 if quick else 8192))

    def measure(keys: Keys, precision: str) -> Row:
        count = operations(local_training({**keys, "precision": "fp32"}))
        seconds, row = measured(local_training(keys), options)
        return row | {
            "samples_a_second": round(epochs * num / seconds),
            "share_of_bound": round(count / rate_of(precision) / seconds, 3),
        }

    for model, batch, method in (("resnet18", 128, "fedrcl"), ("cnn-fedintr", 512, "fedintr")):
        common: Keys = {
            "source": random_source(options.home, num),
            "model": model,
            "device": device,
            "batch-size": batch,
            "local-epochs": epochs,
        }
        for name in ("fedavg", method):
            for way, keys in WAYS.items():
                overrides: Keys = {**common, **keys, "method": name}
                what = f"{model}, batch {batch}: {name}, {way}"
                yield what, partial(measure, overrides, str(keys["precision"]))


def num_steps(run: Run) -> int:
    """SGD steps of a run of local training; raises a client's error."""
    made = run()
    updates: list[Any] = made if isinstance(made, list) else [made]
    for update in updates:
        if isinstance(update, Exception):
            raise update
    return sum(update.num_steps for update in updates)


def measured(run: Run, options: BenchOptions) -> tuple[float, Row]:
    """The fewest wall seconds of a run, and its row; peak_mb, of the GPU, is None on a CPU."""
    device = options.device
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = min_seconds(run, device, 1 if options.is_quick else 3)
    peak_mb = torch.cuda.max_memory_allocated() >> 20 if device == "cuda" else None
    return seconds, {
        "steps_a_second": round(num_steps(run) / seconds, 1),
        "busy_share": round(busy_share(run, device), 3),
        "peak_mb": peak_mb,
        "wall_seconds": round(seconds, 4),
    }


def clients_together(keys: Keys, num_clients: int) -> Run:
    """Local training of this many clients, one after the other."""
    config, cache = resolve_config({"partition": "iid", **keys}), ProcessCache()
    method = method_of(config)
    ctxs = [round_of(config, cache, n, num_clients) for n in range(num_clients)]
    return lambda: [method.train(ctx) for ctx in ctxs]


def busy_share(run: Run, device: str) -> float:
    """The share of the run's wall seconds in kernels on the GPU; on a CPU, in operators."""
    kind = "CUDA" if device == "cuda" else "CPU"
    spent = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"  # us
    with torch.profiler.profile(
        activities=[getattr(torch.profiler.ProfilerActivity, kind)]
    ) as profile:
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return float(sum(getattr(event, spent) for event in profile.key_averages())) / 1e6 / seconds


STACKED = (  # network, method, batch size, clients
    ("cnn-fedreco", "fedavg", 10, 10),
    ("cnn-fedreco", "fedreco", 10, 50),
    ("cnn-fedintr", "fedavg", 64, 10),
    ("cnn-fedintr", "fedintr", 64, 10),
    ("cnn-fedcka", "fedavg", 64, 10),
    ("cnn-fedcka", "fedcka", 64, 10),
    ("resnet18", "fedavg", 50, 4),
    ("resnet18", "fedrcl", 50, 4),
)


def stacking(options: BenchOptions) -> Iterator[Measurement]:
    """Client steps a second: one client after the other, and with recorded steps."""
    quick = options.is_quick
    num_batches = 1 if quick else 8  # of each client
    recorded: Keys = {"cuda-graphs": True}

    def measure(keys: Keys, num_clients: int) -> Row:
        return measured(clients_together(keys, num_clients), options)[1]

    for model, name, batch, num_clients in STACKED:
        if quick:
            batch, num_clients = 2, 2
        keys: Keys = {
            "source": random_source(options.home, num_clients * batch * num_batches),
            "model": model,
            "method": name,
            "batch-size": batch,
            "local-epochs": 1 if quick else 5,
            "device": options.device,
        }
        for way, more in (("eager", {}), ("recorded", recorded)):
            what = f"{num_clients} clients, {model}, batch {batch}: {name}, {way}"
            yield what, partial(measure, keys | more, num_clients)


def time_to_target(options: BenchOptions) -> Row:
    """FedReCo on CIFAR-10, 50 clients of 2 classes: seconds until 85 % personal accuracy."""
    keys: Keys = {
        "preset": "fedreco-table1-cifar10",
        "source": f"folder:{options.cifar10}",
        "classes-per-client": 2,
        "num-rounds": 2 if options.is_quick else 300,
        "evaluate-every": 1 if options.is_quick else 5,
        "device": options.device,
    }
    spent_s, best = 0.0, 0.0
    reached: tuple[int, float] | None = None
    for line in history_of(keys, 50):
        spent_s += sum(line["seconds"].values())
        if "personal" in line:
            best = max(best, line["personal"]["mean"])
        if reached is None and best >= target_accuracy:
            reached = (line["round"], round(spent_s, 1))
    return {"round_and_seconds": reached, "best": round(best, 4), "wall_seconds": round(spent_s, 1)}


def measurements(options: BenchOptions) -> Iterator[Measurement]:
    """All of the above; with `cifar10`, also FedReCo's time to 85 %, which takes longest."""
    yield from stacking(options)
    yield from training(options)
    yield from rounds(options)
    if options.cifar10:
        what = "FedReCo, CIFAR-10, 50 clients of 2 classes: to 85 % personal"
        yield what, partial(time_to_target, options)


def gpu(options: BenchOptions) -> Iterator[Row]:
    """The measurements that `options.done` lacks; none begins after `options.max_seconds`.

    ValueError at the end if some failed; the results of the others are kept.
    """
    refuse_unknown("--device", options.device, ["cuda", "cpu"])
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU is visible (torch.cuda.is_available()): try --device cpu --quick")
    started, failed = time.monotonic(), []
    for what, measure in measurements(options):
        if what in options.done:
            continue
        if time.monotonic() - started > options.max_seconds:
            print(f"time limit of {options.max_seconds:.0f} s: repeat the command to continue")
            break
        try:
            row = measure()
        except (ValueError, OSError, RuntimeError) as error:  # out of memory is a RuntimeError
            failed.append(f"{what}: {in_one_line(error)}")
            print(f"failed: {failed[-1]}", flush=True)
            continue
        yield {"what": what, **row}
    if failed:
        raise ValueError(
            f"failed measurements: {len(failed)}; repeat the command to try them again; the first "
            f"is {failed[0]}"
        )
