"""The data of the benchmarks."""

from pathlib import Path

import numpy as np

from keel.benchmarks.report import BenchOptions
from protocol.options import OptionValue

Keys = dict[str, OptionValue]


def random_source(folder: Path, num: int) -> str:
    """The `source` key of `num` random 32 x 32 colour images in 10 classes, stored in `folder`."""
    path = folder / f"random-{num}.npz"
    if not path.exists():
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(num) % 10
        np.savez(path, x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
    return f"npz:{path}"


def workload_source(options: BenchOptions) -> str:
    """The `source` key of W1 and W2: Fashion-MNIST; for --quick a few random images."""
    return random_source(options.home, 600) if options.is_quick else "fashion-mnist"
