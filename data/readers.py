"""One reader for each data source: from its published files to a `RawSource`.

To add a source, write a function that reads it, add a line to `READERS`, and its name to
`protocol.source_spec.SOURCE_NAMES`.
"""

import gzip
import http.client
import math
import shutil
import struct
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from data.decoding import RawSource, RawSplit, one_line
from data.folders import LABELS_FILE, grouped_folder, labelled_images, read_folder
from data.npz import grouped_npz, read_npz
from data.partitions import split_local_test
from protocol.text import num_of

DIGITS_TEST_FRACTION = 0.2
DIGITS_SPLIT_SEED = 1797
DEBIAN_DATASETS = Path("/usr/share/datasets")  # of the package dataset-fashion-mnist

DIGIT_NAMES = tuple("0123456789")
FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class PublishedSizes:
    """What a published data set is known to hold, before any of its files is read."""

    num_train: int
    num_test: int
    num_classes: int
    image_shape: tuple[int, int, int]  # (channels, height, width)


@dataclass(frozen=True)
class Reader:
    """How a source is read.

    read: takes the data directory, or PATH.
    description: one line for listings.
    published: sizes of a published data set; None for the user's own files.
    watched: paths relative to what `read` takes; a change below them rebuilds the cache. Published
        data sets that never change are not watched: once cached, their files are not read again.
    layout: the expected files, for error messages.
    grouped: the source with the groups of its images, by the value of `group-by`.
    """

    read: Callable[[Path], RawSource]
    description: str
    published: PublishedSizes | None = None
    watched: tuple[str, ...] = ()
    layout: str = ""
    grouped: Callable[[Path, str, RawSource], RawSource] | None = None


def _read_digits(_data_dir: Path) -> RawSource:
    # scikit-learn's file: to import it for `load_digits` takes a process 2 s
    (folder,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    rows = np.loadtxt(Path(folder, "datasets/data/digits.csv.gz"), delimiter=",")
    images = np.round(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[:, -1].astype(np.int64)
    train, test = split_local_test(
        np.arange(len(images)), labels, DIGITS_TEST_FRACTION, DIGITS_SPLIT_SEED
    )
    return RawSource(
        DIGIT_NAMES, RawSplit(images[train], labels[train]), RawSplit(images[test], labels[test])
    )


def _read_mnist_like(
    name: str, dataset: str, class_names: tuple[str, ...], data_dir: Path
) -> RawSource:
    """Four idx files, gzipped or not, from Debian's package, data_dir or a download."""
    folders = [DEBIAN_DATASETS / name, data_dir / name]
    raw = data_dir / dataset / "raw"  # torchvision's copy, which it does not check
    if len([*raw.glob("*-ubyte")]) == 4:
        folders.append(raw)
    for folder in folders:
        if folder.is_dir():
            train, test = _read_idx_split(folder, "train"), _read_idx_split(folder, "t10k")
            return RawSource(class_names, train, test)
    splits = _torchvision_splits(name, dataset, data_dir, f"{name}/*-ubyte.gz")
    train, test = (RawSplit(split.data.numpy(), split.targets.numpy()) for split in splits)
    return RawSource(class_names, train, test)


def _read_idx_split(folder: Path, prefix: str) -> RawSplit:
    images = _read_idx(folder, f"{prefix}-images-idx3-ubyte", num_axes=3)
    labels = _read_idx(folder, f"{prefix}-labels-idx1-ubyte", num_axes=1)
    if len(images) != len(labels) or len(labels) == 0 or labels.max() > 9:
        raise ValueError(
            f"{folder}: {prefix} has {num_of('image', images)} and {num_of('label', labels)}; "
            "expected equally many of both, at least 1, with labels from 0 to 9"
        )
    return RawSplit(images, labels)


def _read_idx(folder: Path, name: str, num_axes: int) -> np.ndarray:
    """The array in an idx file: bytes 0, 0, 8 (uint8), number of axes; sizes; values."""
    file = next((f for f in (folder / f"{name}.gz", folder / name) if f.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder} has no {name}.gz and no {name}")
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: not a readable gzip file: {one_line(error)}") from error
    header_bytes = 4 + 4 * num_axes
    header = content[:header_bytes].ljust(header_bytes, b"\0")
    shape = struct.unpack(f">{num_axes}I", header[4:])
    if header[:4] != bytes([0, 0, 8, num_axes]) or len(content) != header_bytes + math.prod(shape):
        raise ValueError(f"{file}: not an idx file of uint8 with {num_axes} axes, or truncated")
    return np.frombuffer(content, dtype=np.uint8)[header_bytes:].reshape(shape)


def _read_cifar(name: str, dataset: str, folder: str, data_dir: Path) -> RawSource:
    splits = _torchvision_splits(name, dataset, data_dir, folder)
    train, test = (RawSplit(split.data, np.array(split.targets)) for split in splits)
    return RawSource(tuple(splits[0].classes), train, test)


def _read_svhn(data_dir: Path) -> RawSource:
    files = "{train,test}_32x32.mat"
    splits = _torchvision_splits("svhn", "SVHN", data_dir, files, which=("train", "test"))
    train, test = (RawSplit(split.data.transpose(0, 2, 3, 1), split.labels) for split in splits)
    return RawSource(DIGIT_NAMES, train, test)


def _torchvision_splits(
    name: str, dataset: str, data_dir: Path, files: str, which: tuple[Any, Any] = (True, False)
) -> tuple[Any, Any]:
    """Both splits of a torchvision data set, from `files` in data_dir, else downloaded.

    which: torchvision's names for the two splits (its second argument, `train` or `split`).
    A download goes to a temporary folder first, as torchvision writes where others may be reading.
    """
    from torchvision import datasets  # imports torch

    def open_both(root: Path, download: bool) -> tuple[Any, Any]:
        train, test = (getattr(datasets, dataset)(root, w, download=download) for w in which)
        return train, test

    with suppress(RuntimeError):  # torchvision raises it if files are missing
        return open_both(data_dir, download=False)
    arrivals = data_dir / f".{name}-{uuid.uuid4().hex}"
    try:
        arrivals.mkdir(parents=True)
        splits = open_both(arrivals, download=True)
        for item in arrivals.iterdir():
            with suppress(OSError):  # another process was faster
                item.rename(data_dir / item.name)
        return splits
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise FileNotFoundError(
            f"source = {name!r}: {data_dir / files} is missing or incomplete, and the "
            f"download failed; put the files there. Cause: {one_line(error)}"
        ) from error
    finally:
        shutil.rmtree(arrivals, ignore_errors=True)


def _read_tiny_imagenet(data_dir: Path) -> RawSource:
    """The published layout. Its test split has no labels, so val serves as the test split."""
    root = data_dir / "tiny-imagenet-200"
    wnids = sorted((root / "wnids.txt").read_text().split())
    names = dict(
        line.partition("\t")[::2] for line in (root / "words.txt").read_text().splitlines()
    )
    class_names = tuple(names.get(wnid, wnid).split(",")[0] for wnid in wnids)
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = root / "val" / "val_annotations.txt"
    files, labels = [], []
    for line in annotations.read_text().splitlines():
        file, wnid = [*line.split("\t"), ""][:2]  # a bounding box follows
        if wnid not in label_of:
            raise ValueError(f"{annotations}: {file} has class {wnid!r}, which is not in wnids.txt")
        files.append(str(root / "val" / "images" / file))
        labels.append(label_of[wnid])
    if not files:
        raise ValueError(f"{annotations} is empty; expected a line for each image in val/images")
    test = RawSplit(files, np.array(labels))
    train = labelled_images(root / "train", wnids, wnids, [])
    return RawSource(class_names, train, test)


READERS: dict[str, Reader] = {
    "digits": Reader(
        _read_digits,
        "handwritten digits, included with scikit-learn",
        PublishedSizes(1438, 359, 10, (1, 8, 8)),
    ),
    "fashion-mnist": Reader(
        partial(_read_mnist_like, "fashion-mnist", "FashionMNIST", FASHION_NAMES),
        "articles of clothing",
        PublishedSizes(60_000, 10_000, 10, (1, 28, 28)),
    ),
    "mnist": Reader(
        partial(_read_mnist_like, "mnist", "MNIST", DIGIT_NAMES),
        "handwritten digits",
        PublishedSizes(60_000, 10_000, 10, (1, 28, 28)),
    ),
    "cifar10": Reader(
        partial(_read_cifar, "cifar10", "CIFAR10", "cifar-10-batches-py"),
        "photographs of 10 kinds of objects",
        PublishedSizes(50_000, 10_000, 10, (3, 32, 32)),
    ),
    "cifar100": Reader(
        partial(_read_cifar, "cifar100", "CIFAR100", "cifar-100-python"),
        "photographs of 100 kinds of objects",
        PublishedSizes(50_000, 10_000, 100, (3, 32, 32)),
    ),
    "svhn": Reader(
        _read_svhn,
        "house numbers, cropped to one digit",
        PublishedSizes(73_257, 26_032, 10, (3, 32, 32)),
    ),
    "tiny-imagenet": Reader(
        _read_tiny_imagenet,
        "photographs of 200 kinds of objects; not downloaded, put the published files in data-dir",
        PublishedSizes(100_000, 10_000, 200, (3, 64, 64)),
        watched=tuple(
            f"tiny-imagenet-200/{part}" for part in ("wnids.txt", "words.txt", "train", "val")
        ),
        layout="the published layout: wnids.txt, words.txt, train/<wnid>/images/, val/images/",
    ),
    "folder:PATH": Reader(
        read_folder,
        "your own images in PATH/train/<class>/ and PATH/test/<class>/",
        watched=("train", "test", LABELS_FILE),
        layout="a folder with images in train/<class>/ and test/<class>/",
        grouped=grouped_folder,
    ),
    "npz:PATH": Reader(
        read_npz,
        "your own arrays x_train, y_train, x_test, y_test in a NumPy file",
        watched=("",),
        layout="a file with x_train, y_train, x_test, y_test",
        grouped=grouped_npz,
    ),
}
