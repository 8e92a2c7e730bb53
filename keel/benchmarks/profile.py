"""What a method's step costs beside FedAvg's, by operator, on one core: `cnn-fedcka`, batch 128.

python -m keel.benchmarks.profile fedcka

The profiler takes memory of its own, and operators that write first to fresh pages, `fill_` above
all, pay for it in some runs and not in others: of such a line believe the least of several runs.
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from keel.benchmarks.steps import Run, methods_of
from protocol.config import keel_home

num, batch, epochs = 1280, 128, 10


def milliseconds(run: Run) -> dict[str, tuple[float, float]]:
    """(milliseconds, calls) a step of each operator's own time."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        run()
    steps = epochs * num // batch
    return {
        each.key: (each.self_cpu_time_total / 1e3 / steps, each.count / steps)
        for each in watched.key_averages()
    }


def main() -> None:
    """Print the twenty operators that a method spends most on beyond FedAvg."""
    parser = argparse.ArgumentParser(prog="python -m keel.benchmarks.profile", description=__doc__)
    parser.add_argument("method", help="any but fedavg")
    method = parser.parse_args().method
    torch.set_num_threads(1)
    home = keel_home()
    home.mkdir(parents=True, exist_ok=True)
    keys = {"batch-size": batch, "local-epochs": epochs}
    try:
        runs = methods_of(home, "cnn-fedcka", num, ["fedavg", method], **keys)
    except ValueError as error:  # an unknown method: what is allowed stands in it
        parser.error(str(error))
    for _ in range(2):  # in turns; the first pass makes memory and caches warm
        base, ours = (milliseconds(run) for run in runs.values())
    rows = []
    for name, (spent, calls) in ours.items():
        before, fewer = base.get(name, (0.0, 0.0))
        rows.append((spent - before, calls - fewer, name))
    print("ms a step more than FedAvg's, calls more, operator")
    for more, calls, name in sorted(rows, reverse=True)[:20]:
        print(f"{more:7.2f} {calls:6.1f} {name}")


if __name__ == "__main__":
    main()
