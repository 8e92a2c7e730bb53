"""One reader for each data source: from its published files to a `RawSource`.

To add a source, write a function that reads it, add a line to `READERS`, and its name to
`protocol.source_spec.SOURCE_NAMES`.
"""

import gzip
import http.client
import logging
import math
import os
import shutil
import struct
import unicodedata
import uuid
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from data.cache import files_under
from data.decoding import ImageFileError, RawSource, RawSplit, one_line
from data.partitions import split_local_test
from protocol.text import num_of, printable

log = logging.getLogger("keel.data")

DIGITS_TEST_FRACTION = 0.2
DIGITS_SPLIT_SEED = 1797
MAX_CLASSES = 100_000  # of an npz file; each has a name, and an output of the network
DEBIAN_DATASETS = Path("/usr/share/datasets")  # of the package dataset-fashion-mnist
IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff",
    ".webp",
)  # fmt: skip

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
    """

    read: Callable[[Path], RawSource]
    description: str
    published: PublishedSizes | None = None
    watched: tuple[str, ...] = ()
    layout: str = ""


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
    train = _labelled_images(root / "train", wnids, wnids, beside=("_boxes.txt",))
    return RawSource(class_names, train, test)


def _read_folder(path: Path) -> RawSource:
    class_names = _class_folders(path / "train")
    test_names = _class_folders(path / "test")
    unknown = sorted(set(test_names) - set(class_names))
    if unknown:
        reason = f"this class is not in train/, which has {', '.join(class_names)}"
        raise ImageFileError(
            f"{path / 'test' / unknown[0]}: {reason}", f"a folder in test/: {reason}"
        )
    return RawSource(
        tuple(class_names),
        _labelled_images(path / "train", class_names, class_names),
        _labelled_images(path / "test", test_names, class_names),
    )


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder with one folder per class")
    entries = [f for f in folder.iterdir() if not f.name.startswith(".")]
    names = sorted(f.name for f in entries if f.is_dir())
    loose = {f.name for f in entries if f.suffix.lower() in IMAGE_SUFFIXES} - set(names)
    if loose:
        log.warning(
            "%s: images outside the class folders are not read: %d, such as %s",
            folder,
            len(loose),
            printable(min(loose)),
        )
    if not names:
        raise ValueError(f"{folder} is empty; expected one folder of images per class")
    for name in names:
        # Cs: no UTF-8; the others break lines
        if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
            raise ValueError(
                f"{folder} has the class {name!r}: rename it without line breaks and control "
                "characters, in UTF-8"
            )
    return names


def _labelled_images(
    folder: Path, present: list[str], class_names: list[str], beside: tuple[str, ...] = ()
) -> RawSplit:
    """The images at or below folder/<class> for each class in `present`.

    beside: endings of files that belong there too; others are warned of.
    """
    files, labels = [], []
    for class_name in present:
        found = files_under(folder / class_name)
        images = [f for f in found if os.path.splitext(f)[1].lower() in IMAGE_SUFFIXES]
        if not images:
            reason = f"has no images; expected files ending in one of {', '.join(IMAGE_SUFFIXES)}"
            raise ImageFileError(f"{folder / class_name} {reason}", f"a folder of a class {reason}")
        if others := sorted(f for f in set(found) - set(images) if not f.endswith(beside)):
            example = printable(os.path.basename(others[0]))
            log.warning(
                "%s: %d of %d files are not read, such as %s: expected the endings %s",
                folder / class_name,
                len(others),
                len(found),
                example,
                ", ".join(IMAGE_SUFFIXES),
            )
        files += images
        labels += [class_names.index(class_name)] * len(images)
    return RawSplit(files, np.array(labels))


def _read_npz(path: Path) -> RawSource:
    keys = ("x_train", "y_train", "x_test", "y_test")
    if path.is_dir() or not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not an npz file, as numpy.savez writes it")
    try:
        with np.load(path) as file:
            found = ", ".join(file.files[:10]) or "no arrays"
            arrays = {key: file[key] for key in keys if key in file}
    except Exception as error:  # those of zipfile and zlib, and MemoryError for a damaged header
        raise ValueError(f"{path}: not a readable npz file: {one_line(error)}") from error
    missing = [key for key in keys if key not in arrays]
    if missing:
        lack = f"no {', '.join(missing)}; expected {', '.join(keys)}"
        raise ImageFileError(f"{path} has {found} and {lack}", f"an npz file has {lack}")
    for split in ("train", "test"):
        labels, num_images = arrays[f"y_{split}"], len(np.atleast_1d(arrays[f"x_{split}"]))
        if labels.dtype.kind not in "iu" or labels.shape != (num_images,):
            raise ValueError(
                f"{path}: y_{split} is {labels.dtype} {list(labels.shape)}; expected "
                f"integers [{num_images}], because x_{split} has {num_of('image', num_images)}"
            )
    train, test = (
        RawSplit(
            _npz_images(path, f"x_{split}", arrays[f"x_{split}"]),
            arrays[f"y_{split}"],
            array=f"{path}: x_{split}",
        )
        for split in ("train", "test")
    )
    num_classes = int(train.labels.max()) + 1
    if num_classes > MAX_CLASSES:
        raise ValueError(
            f"{path}: y_train has the label {num_classes - 1}; expected less than {MAX_CLASSES}: "
            "number the classes from 0"
        )
    if len(absent := np.setdiff1d(np.arange(num_classes), train.labels)):
        log.warning(
            "%s: y_train has labels up to %d, but not %s: if there are no such classes, number the "
            "classes from 0 without gaps",
            path,
            num_classes - 1,
            ", ".join(map(str, absent[:5])) + ", ..." * (len(absent) > 5),
        )
    for split, labels in (("train", train.labels), ("test", test.labels)):
        outside = labels[(labels < 0) | (labels >= num_classes)]
        if len(outside):
            raise ValueError(
                f"{path}: y_{split} has the label {outside[0]}; expected 0 to {num_classes - 1}, "
                "the largest label of y_train"
            )
    return RawSource(tuple(str(label) for label in range(num_classes)), train, test)


def _npz_images(path: Path, key: str, x: np.ndarray) -> np.ndarray:
    """`x` as [N, H, W] or [N, H, W, 3]."""
    channels_last, channels_first = (x.ndim == 4 and x.shape[axis] in (1, 3) for axis in (-1, 1))
    if x.dtype != np.uint8 or x.size == 0 or (x.ndim != 3 and channels_last == channels_first):
        raise ValueError(
            f"{path}: {key} is {x.dtype} {list(x.shape)}; expected uint8 [N, H, W], "
            "[N, H, W, C] or [N, C, H, W] with at least 1 image and C = 1 or 3"
        )
    if channels_first:
        x = x.transpose(0, 2, 3, 1)
    return x[..., 0] if x.ndim == 4 and x.shape[-1] == 1 else x


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
        _read_folder,
        "your own images in PATH/train/<class>/ and PATH/test/<class>/",
        watched=("train", "test"),
        layout="a folder with images in train/<class>/ and test/<class>/",
    ),
    "npz:PATH": Reader(
        _read_npz,
        "your own arrays x_train, y_train, x_test, y_test in a NumPy file",
        watched=("",),
        layout="a file with x_train, y_train, x_test, y_test",
    ),
}
