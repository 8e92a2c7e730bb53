"""A plot of how labels are distributed over clients, and `save_png` for any figure."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protocol.files import write_atomically
from protocol.text import in_one_line

# Up to these sizes, cells show their count and classes their name.
MAX_NUMBERED_CLIENTS = 20
MAX_NAMED_CLASSES = 40
MAX_COLUMNS = 500  # with more clients, several share one
MAX_NAME = 24  # characters of a class name
# a line for each character of a class name, such as a Chinese one; it is drawn as a box
warnings.filterwarnings("ignore", message="Glyph .* missing from")


def plot_label_distribution(
    label_counts: Sequence[Sequence[int]], class_names: Sequence[str], path: Path
) -> None:
    """Write a heat map to `path` (PNG): a column per client, a row per class, darker is more.

    Below it, the total of each client. More than MAX_COLUMNS clients are put in the order of their
    most frequent class, and neighbours share a column, which shows their mean.
    label_counts[i][k]: client i's samples of class k. As in Fig. 3 of the FedIntR paper.
    """
    counts = np.asarray(label_counts)  # [N, K]
    num_clients, num_classes = counts.shape
    edges, what = np.arange(num_clients + 1), "client"
    if num_clients > MAX_COLUMNS:
        order = np.lexsort((counts.sum(axis=1), counts.argmax(axis=1)))
        edges = np.linspace(0, num_clients, MAX_COLUMNS + 1).astype(int)
        counts = np.add.reduceat(counts[order], edges[:-1]) / np.diff(edges)[:, None]
        what = (
            f"{num_clients:,} clients in the order of their most frequent class; "
            f"a column is the mean of {num_clients / MAX_COLUMNS:.3g}"
        )
    figure = Figure(
        figsize=(min(3 + 0.5 * num_clients, 12), min(3 + 0.32 * num_classes, 11)),
        layout="constrained",
    )
    axes, below = figure.subplots(
        2, sharex=True, height_ratios=(max(1.5, min(0.32 * num_classes, 8)), 1)
    )
    shade = PowerNorm(0.5, vmin=0, vmax=max(counts.max(), 1))  # few samples are told from none
    heat = axes.imshow(
        counts.T.astype(np.float32),
        cmap="Blues",
        norm=shade,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, num_clients - 0.5, num_classes - 0.5, -0.5),
    )
    below.stairs(counts.sum(axis=1), edges - 0.5, fill=True)
    below.set(xlabel=what, ylabel="samples", ylim=(0, None))
    axes.set_ylabel("class")
    if num_classes <= MAX_NAMED_CLASSES:
        names = [in_one_line(name, MAX_NAME) for name in class_names]
        axes.set_yticks(range(num_classes), names, parse_math=False)  # "$" is a character
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
    save_png(figure, path)


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_atomically(path, picture.getbuffer())
