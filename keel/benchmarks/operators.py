"""Which operators a method spends more time in than FedAvg: `keel bench operators --method moon`.

`cnn-fedcka`, batch 128, one core. The profiler allocates memory itself, so operators that touch
fresh pages first (`fill_` above all) vary from run to run: read the minimum of several.
"""

from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from keel.benchmarks.report import BenchOptions, Row
from keel.benchmarks.steps import Run, methods_of

batch, epochs, num_shown = 128, 10, 20


def milliseconds(run: Run, num_steps: int) -> dict[str, tuple[float, float]]:
    """(milliseconds, calls) a step spent in each operator itself."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return {
        each.key: (each.self_cpu_time_total / 1e3 / num_steps, each.count / num_steps)
        for each in profiler.key_averages()
    }


def operators(options: BenchOptions) -> Iterator[Row]:
    """The operators with the largest additional time, largest first."""
    torch.set_num_threads(1)
    num = batch if options.is_quick else 10 * batch
    keys = {"batch-size": batch, "local-epochs": epochs}
    names = ["fedavg", options.method]
    runs = methods_of(options.home, "cnn-fedcka", num, names, **keys)
    for _ in range(2):  # the first pass warms memory and caches up
        base, own = (milliseconds(run, epochs * num // batch) for run in runs.values())
    differences = []
    for name, (spent, calls) in own.items():
        base_spent, base_calls = base.get(name, (0.0, 0.0))
        differences.append((spent - base_spent, calls - base_calls, name))
    for more_ms, more_calls, name in sorted(differences, reverse=True)[:num_shown]:
        yield {
            "what": f"{options.method}, more than fedavg: {name}",
            "ms_a_step": round(more_ms, 2),
            "calls_a_step": round(more_calls, 1),
        }
