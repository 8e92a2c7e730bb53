"""Clients and runs that train as one batched model, against one after the other, on the CPU."""

import tempfile
from collections.abc import Iterator

import torch

from keel.benchmarks.gpu import clients_together
from keel.benchmarks.report import BenchOptions, Keys, Row, random_source
from keel.benchmarks.steps import Run, ratios
from server_app.inline import run_inline
from server_app.stacked_runs import run_stacked

FORMS = {"one after the other": False, "stacked": True}  # whether it is stacked


def runs_together(keys: Keys, num_runs: int, is_stacked: bool) -> Run:
    """Runs of 10 clients with different seeds, one after the other or stacked."""

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
            runs = [{**keys, "seed": seed, "output-dir": folder} for seed in range(num_runs)]
            if not is_stacked:
                for each in runs:
                    run_inline(each, 10)
                return
            for outcome in run_stacked([{**each, "stacked-runs": num_runs} for each in runs], 10):
                if isinstance(outcome, BaseException):
                    raise outcome

    return run


def stacked(options: BenchOptions) -> Iterator[Row]:
    """Processor seconds of one thread: 10 clients of 8 batches each, and three whole runs."""
    torch.set_num_threads(1)
    repetitions = 1 if options.is_quick else 3
    for model, batch in (("cnn-fedreco", 10), ("cnn-fedintr", 64)):
        num_batches = 1 if options.is_quick else 8
        keys: Keys = {
            "source": random_source(options.home, 10 * batch * num_batches),
            "model": model,
            "batch-size": batch,
            "local-epochs": 1,
            "device": "cpu",
        }
        forms = {name: clients_together(keys, 10, each) for name, each in FORMS.items()}
        what = f"{10 * num_batches} steps of 10 clients, {model}, batch {batch}"
        yield from ratios(what, forms, repetitions)
    keys = {
        "source": "digits",
        "partition": "iid",
        "model": "cnn-fedreco",
        "batch-size": 10,
        "num-rounds": 1 if options.is_quick else 4,
        "device": "cpu",
        "threads": 1,
    }
    forms = {name: runs_together(keys, 3, each) for name, each in FORMS.items()}
    what = "3 runs of cnn-fedreco on digits, batch 10"
    yield from ratios(what, forms, 1 if options.is_quick else 2)
