"""A plot of how labels are distributed over clients."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Up to these sizes, cells show their count and classes their name.
MAX_NUMBERED_CLIENTS = 20
MAX_NAMED_CLASSES = 40


def plot_label_distribution(
    label_counts: Sequence[Sequence[int]], class_names: Sequence[str], path: Path
) -> None:
    """Write a heat map to `path` (PNG): a column per client, a row per class, darker is more.

    Below it, the total of each client.
    label_counts[i][k]: client i's samples of class k. As in Fig. 3 of the FedIntR paper.
    """
    counts = np.asarray(label_counts)  # [N, K]
    if counts.ndim != 2 or counts.shape[1] != len(class_names) or len(counts) == 0:
        raise ValueError(
            f"label_counts has shape {counts.shape}: expected a row per client with a "
            f"number for each of the {len(class_names)} classes"
        )
    num_clients, num_classes = counts.shape
    figure = Figure(
        figsize=(min(3 + 0.5 * num_clients, 12), min(3 + 0.32 * num_classes, 11)),
        layout="constrained",
    )
    axes, below = figure.subplots(
        2, sharex=True, height_ratios=(max(1.5, min(0.32 * num_classes, 8)), 1)
    )
    shade = PowerNorm(
        0.5, vmin=0, vmax=max(counts.max(), 1)
    )  # so that few samples are told from none
    heat = axes.imshow(
        counts.T.astype(np.float32),
        cmap="Blues",
        norm=shade,
        aspect="auto",
        interpolation="nearest",
        interpolation_stage="data",  # resampling colours took 80 MB for 2,000 clients
    )
    below.stairs(counts.sum(axis=1), np.arange(num_clients + 1) - 0.5, fill=True)
    below.set(xlabel="client", ylabel="samples", ylim=(0, None))
    axes.set_ylabel("class")
    if num_classes <= MAX_NAMED_CLASSES:
        axes.set_yticks(range(num_classes), class_names)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if num_clients <= MAX_NUMBERED_CLIENTS:
        below.set_xticks(range(num_clients))
    else:
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    if num_clients <= MAX_NUMBERED_CLIENTS and num_classes <= MAX_NAMED_CLASSES:
        for client, k in zip(*np.nonzero(counts), strict=True):
            count = counts[client, k]
            colour = "white" if shade(count) > 0.6 else "black"
            axes.text(client, k, str(count), color=colour, size=7, ha="center", va="center")
    figure.colorbar(heat, ax=(axes, below), label="samples")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")
