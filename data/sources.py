"""Sources of images, each read once into a cache and then opened as memory-mapped arrays.

Reading is slow (60,000 JPEG files take 15 s) and every message to a deployed client starts a new
process, so what a process opens is `cache_dir/<source>-<hash>/`: uint8 images [N, C, H, W] brought
to one size and number of channels, int64 labels [N], and about.json. The hash covers the source,
the size, the channels and, where the files are the user's, their names, sizes and times.
To add a source, write a function that reads it and add a line to `SOURCES`.
"""

import gzip
import hashlib
import http.client
import json
import logging
import math
import os
import re
import shutil
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from PIL import Image

from data.partitions import split_local_test

log = logging.getLogger(__name__)
T = TypeVar("T")

CACHE_VERSION = 1  # raise it when the same files would give other arrays
SMALLEST_OWN_SIZE = 28  # pixels; a source below this is enlarged to ENLARGED_SIZE
ENLARGED_SIZE = 32
DIGITS_TEST_FRACTION = 0.2
DIGITS_SPLIT_SEED = 1797
DEBIAN_DATASETS = Path("/usr/share/datasets")  # of the package dataset-fashion-mnist
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
DECODE_CHUNK = 256  # images a thread takes at a time
# Channels of Pillow's modes of 8 bits or less; deeper ones would lose more than a user may expect.
CHANNELS_OF_MODE = {"1": 1, "L": 1, "LA": 1, "P": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}

DIGIT_NAMES = tuple("0123456789")
FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class ImageSplit:
    """Images uint8 [N, C, H, W] and labels int64 [N]; both are read-only and memory-mapped."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Source:
    """A data set. `mean` and `std`, one a channel, are of pixel/255 over the train split."""

    name: str
    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Labels go from 0 to this, exclusive."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width


@dataclass(frozen=True)
class RawSplit:
    """Images of any size, as files or as an array uint8 [N, H, W] or [N, H, W, 3]."""

    images: list[str] | np.ndarray
    labels: np.ndarray

    def name(self, i: int) -> str:
        """What a message calls image i."""
        return f"image {i}" if isinstance(self.images, np.ndarray) else self.images[i]


@dataclass(frozen=True)
class RawSource:
    """What a reader returns; a label is an index into `class_names`."""

    class_names: tuple[str, ...]
    train: RawSplit
    test: RawSplit


@dataclass(frozen=True)
class Origin:
    """Where a source comes from: a reader of the data folder (or PATH), and what to keep watch on.

    A change to what is `watched` (relative to the reader's path) rebuilds the cache. Published data
    sets that never change need no watch: once cached, their files are not looked at again.
    """

    read: Callable[[Path], RawSource]
    watched: tuple[str, ...] = ()
    layout: str = ""


def load_source(
    spec: str, data_dir: Path, cache_dir: Path, image_size: int = 0, channels: int = 0
) -> Source:
    """The source `spec`, a key of `SOURCES` with PATH filled in, from the cache or else its files.

    image_size: height and width in pixels; 0: the source's own, or 32 if that is below 28.
    channels: 1 or 3; 0: the source's own, which is 1 only where every image is grey.
    Images of other shapes are resized (bilinear, antialiased; not cropped) and converted.
    ValueError or FileNotFoundError, one line, for whatever is wrong with `spec` or its files.
    """
    if image_size < 0:
        raise ValueError(f"image-size = {image_size}: it has to be a number of pixels, or 0")
    if channels not in (0, 1, 3):
        raise ValueError(f"channels = {channels}: it has to be 0 (the source's own), 1 or 3")
    origin, path, name = _resolve(spec, data_dir.expanduser())
    key = {
        "version": CACHE_VERSION,
        "source": name,
        "image_size": image_size,
        "channels": channels,
        "fingerprint": _fingerprint(origin, path, name),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    entry = cache_dir.expanduser() / f"{_slug(name)}-{digest}"
    if not entry.is_dir():
        log.info("reading source %s into %s, once", name, entry)
        _make_once(entry, partial(_write_entry, key=key, raw=origin.read(path)))
        _remove_superseded(entry, key)
    return _open_entry(entry)


def _resolve(spec: str, data_dir: Path) -> tuple[Origin, Path, str]:
    """Where `spec` comes from, the path that its reader takes, and its name with `~` expanded."""
    kind, colon, location = spec.partition(":")
    known_as = f"{kind}:PATH" if colon else kind
    if known_as not in SOURCES or (colon and not location):
        raise ValueError(f"source = {spec!r}: it has to be one of {', '.join(SOURCES)}")
    if not colon:
        return SOURCES[known_as], data_dir, kind
    path = Path(location).expanduser()
    if not path.is_absolute():
        raise ValueError(
            f"source = {spec!r}: PATH has to be absolute, as a Flower run has a working directory "
            f"of its own; from here it would be {kind}:{path.absolute()}"
        )
    return SOURCES[known_as], path, f"{kind}:{path}"


# --- the cache --------------------------------------------------------------------------------


def _slug(name: str) -> str:
    """A short name of the source that is fit for a folder: of folder:PATH, PATH's last part."""
    kind, _, path = name.partition(":")
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{Path(path).stem}".lower()).strip("-")


def _fingerprint(origin: Origin, path: Path, name: str) -> str:
    """A hash that changes with the files that the source is read from; "" if they never change."""
    digest = hashlib.sha256()
    for watched in (path / part for part in origin.watched):
        if not watched.exists():
            raise FileNotFoundError(
                f"source = {name!r}: {watched} does not exist; expected is {origin.layout}"
            )
        for file in [str(watched)] if watched.is_file() else _files_under(watched):
            found = os.stat(file)
            relative = file.removeprefix(str(path))
            digest.update(f"{relative}\t{found.st_size}\t{found.st_mtime_ns}\n".encode())
    return digest.hexdigest() if origin.watched else ""


def _make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` make `folder`, whole or not at all.

    Of several processes that do so at once the first to finish wins; what the others made goes.
    """
    building = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    building.mkdir(parents=True)
    try:
        fill(building)
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _remove_superseded(entry: Path, key: dict[str, Any]) -> None:
    """Remove entries made from earlier files of the same source, or by an earlier Keel."""
    for about in entry.parent.glob(f"{_slug(key['source'])}-*/about.json"):
        with suppress(FileNotFoundError):  # another process is at the same
            other = json.loads(about.read_text())["key"]
            is_current = all(other[part] == key[part] for part in ("version", "fingerprint"))
            if other["source"] == key["source"] and not is_current:
                # Out of sight first: nobody opens an entry that is half gone.
                doomed = about.parent.rename(entry.with_name(f".{uuid.uuid4().hex}"))
                shutil.rmtree(doomed, ignore_errors=True)


def _open_entry(entry: Path) -> Source:
    about = json.loads((entry / "about.json").read_text())
    train, test = (
        ImageSplit(
            np.load(entry / f"{split}-images.npy", mmap_mode="r"),
            np.load(entry / f"{split}-labels.npy", mmap_mode="r"),
        )
        for split in ("train", "test")
    )
    return Source(
        name=about["key"]["source"],
        train=train,
        test=test,
        class_names=tuple(about["class_names"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
    )


# --- from files to arrays of one shape --------------------------------------------------------


def _write_entry(entry: Path, key: dict[str, Any], raw: RawSource) -> None:
    size: tuple[int, int] = _use_image(raw.train, 0, lambda image: image.size)  # (W, H)
    required_size = None if key["image_size"] else size
    if key["image_size"]:
        size = (key["image_size"], key["image_size"])
    elif min(size) < SMALLEST_OWN_SIZE:
        size = (ENLARGED_SIZE, ENLARGED_SIZE)
    channels = key["channels"] or _own_channels(raw)
    for name, split in (("train", raw.train), ("test", raw.test)):
        images = np.lib.format.open_memmap(
            entry / f"{name}-images.npy", "w+", np.uint8, (len(split.images), channels, *size[::-1])
        )
        _decode(split, images, required_size, raw.train.name(0))
        images.flush()
        np.save(entry / f"{name}-labels.npy", split.labels.astype(np.int64))
        if name == "train":
            mean, std = _mean_and_std(images)
    about = {"key": key, "class_names": raw.class_names, "mean": mean, "std": std}
    (entry / "about.json").write_text(json.dumps(about, indent=1))


def _use_image(split: RawSplit, i: int, use: Callable[[Image.Image], T]) -> T:
    """use(image i); ValueError, naming the file, for all that Pillow raises on a bad one."""
    item = split.images[i]
    if isinstance(item, np.ndarray):
        return use(Image.fromarray(item))
    try:
        with Image.open(item) as image:
            if image.mode in CHANNELS_OF_MODE:
                return use(image)
            mode = image.mode
    except Exception as error:  # each of Pillow's decoders has its own
        raise ValueError(f"{item}: not a readable image: {_one_line(error)}") from error
    raise ValueError(
        f"{item}: its pixels are of Pillow's mode {mode!r}; allowed are "
        f"{', '.join(CHANNELS_OF_MODE)}"
    )


def _own_channels(raw: RawSource) -> int:
    """3 if any image has colour, else 1. Of files only the headers are read."""
    for split in (raw.train, raw.test):
        num_alike = len(split.images) if isinstance(split.images, np.ndarray) else 1
        for i in range(0, len(split.images), num_alike):
            if _use_image(split, i, lambda image: CHANNELS_OF_MODE[image.mode]) == 3:
                return 3
    return 1


def _decode(
    split: RawSplit, into: np.ndarray, required_size: tuple[int, int] | None, like: str
) -> None:
    """Fill `into` [N, C, H, W]; refuse images not of `required_size` (W, H), which `like` has."""
    _, channels, height, width = into.shape
    mode = "L" if channels == 1 else "RGB"

    def read(image: Image.Image) -> tuple[tuple[int, int], np.ndarray]:
        own_size = image.size
        image = image.convert(mode)
        if own_size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return own_size, np.asarray(image)

    def decode_chunk(start: int) -> None:
        for i in range(start, min(start + DECODE_CHUNK, len(into))):
            own_size, pixels = _use_image(split, i, read)
            if required_size is not None and own_size != required_size:
                raise ValueError(
                    f"images differ in size: {like} is {_by(required_size)} pixels, "
                    f"{split.name(i)} is {_by(own_size)}; set image-size to bring all to one"
                )
            into[i] = pixels if channels == 1 else pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the GIL
        for _ in pool.map(decode_chunk, range(0, len(into), DECODE_CHUNK)):
            pass


def _mean_and_std(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Of pixel/255, per channel, exactly; a channel that never varies has std 1, to divide by."""
    channels = images.shape[1]
    histogram = np.zeros((channels, 256), dtype=np.int64)
    for start in range(0, len(images), 1024):  # bincount makes int64 copies
        for c in range(channels):
            pixels = images[start : start + 1024, c].ravel()
            histogram[c] += np.bincount(pixels, minlength=256)
    values = np.arange(256) / 255
    mean = histogram @ values / histogram.sum(axis=1)
    variance = (histogram * (values - mean[:, None]) ** 2).sum(axis=1) / histogram.sum(axis=1)
    std = np.sqrt(variance)
    return mean.tolist(), np.where(std > 0, std, 1.0).tolist()


# --- readers: each takes the data folder, or PATH, and returns a RawSource --------------------


def _read_digits(_data_dir: Path) -> RawSource:
    from sklearn.datasets import load_digits  # half a second, so only where it is needed

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    train, test = split_local_test(
        np.arange(len(images)), digits.target, DIGITS_TEST_FRACTION, DIGITS_SPLIT_SEED
    )
    return RawSource(
        DIGIT_NAMES,
        RawSplit(images[train], digits.target[train]),
        RawSplit(images[test], digits.target[test]),
    )


def _read_mnist_like(
    name: str, dataset: str, class_names: tuple[str, ...], data_dir: Path
) -> RawSource:
    """Four idx files, gzipped or not, of Debian's package or in data_dir/name; or a download."""
    for folder in (DEBIAN_DATASETS / name, data_dir / name):
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
            f"{folder}: {prefix} has {len(images)} images and {len(labels)} labels; they have to "
            "be equally many, at least 1, with labels from 0 to 9"
        )
    return RawSplit(images, labels)


def _read_idx(folder: Path, name: str, num_axes: int) -> np.ndarray:
    """The array in an idx file: bytes 0, 0, 8 (uint8), number of axes; sizes; then the values."""
    file = next((f for f in (folder / f"{name}.gz", folder / name) if f.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder} has no {name}.gz and no {name}")
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: not a readable gzip file: {_one_line(error)}") from error
    header_bytes = 4 + 4 * num_axes
    header = content[:header_bytes].ljust(header_bytes, b"\0")
    shape = struct.unpack(f">{num_axes}I", header[4:])
    if header[:4] != bytes([0, 0, 8, num_axes]) or len(content) != header_bytes + math.prod(shape):
        raise ValueError(f"{file}: not an idx file of uint8 with {num_axes} axes, or cut short")
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
    """Both splits of a torchvision data set: from `files` in data_dir, or else from the network.

    which: what torchvision calls them (the second argument, `train` or `split`).
    A download goes to a folder of this process first: torchvision itself would write where another
    worker reads.
    """
    from torchvision import datasets  # a second, so only where it is needed

    def open_both(root: Path, download: bool) -> tuple[Any, Any]:
        train, test = (getattr(datasets, dataset)(root, w, download=download) for w in which)
        return train, test

    with suppress(RuntimeError):  # torchvision's way to say that they are not there
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
            f"source = {name!r}: {data_dir / files} is not there, or not as published, and the "
            f"download failed; put the files there. The cause: {_one_line(error)}"
        ) from error
    finally:
        shutil.rmtree(arrivals, ignore_errors=True)


def _read_tiny_imagenet(data_dir: Path) -> RawSource:
    """The published layout; its test split has no labels, so val is the test split here."""
    root = data_dir / "tiny-imagenet-200"
    wnids = sorted((root / "wnids.txt").read_text().split())
    words = dict(
        line.partition("\t")[::2] for line in (root / "words.txt").read_text().splitlines()
    )
    class_names = tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = root / "val" / "val_annotations.txt"
    files, labels = [], []
    for line in annotations.read_text().splitlines():
        file, wnid = [*line.split("\t"), ""][:2]  # a bounding box follows
        if wnid not in label_of:
            raise ValueError(f"{annotations}: {file} is of class {wnid!r}, which wnids.txt lacks")
        files.append(str(root / "val" / "images" / file))
        labels.append(label_of[wnid])
    if not files:
        raise ValueError(f"{annotations} is empty: it has to name the images in val/images")
    test = RawSplit(files, np.array(labels))
    return RawSource(class_names, _labelled_images(root / "train", wnids, wnids), test)


def _read_folder(path: Path) -> RawSource:
    class_names = _class_folders(path / "train")
    test_names = _class_folders(path / "test")
    unknown = sorted(set(test_names) - set(class_names))
    if unknown:
        raise ValueError(
            f"{path / 'test' / unknown[0]}: a class that train/ lacks; train/ has "
            f"{', '.join(class_names)}"
        )
    return RawSource(
        tuple(class_names),
        _labelled_images(path / "train", class_names, class_names),
        _labelled_images(path / "test", test_names, class_names),
    )


def _class_folders(folder: Path) -> list[str]:
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} is empty: it has to hold one folder of images for each class")
    return names


def _labelled_images(folder: Path, present: list[str], class_names: list[str]) -> RawSplit:
    """The images at or below folder/<class> of the classes `present`."""
    files, labels = [], []
    for class_name in present:
        images = [
            file
            for file in _files_under(folder / class_name)
            if os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES
        ]
        if not images:
            raise ValueError(
                f"{folder / class_name} has no images; they have to end in one of "
                f"{', '.join(IMAGE_SUFFIXES)}"
            )
        files += images
        labels += [class_names.index(class_name)] * len(images)
    return RawSplit(files, np.array(labels))


def _read_npz(path: Path) -> RawSource:
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(path) as file:
            arrays = {key: file[key] for key in keys if key in file}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a readable npz file: {_one_line(error)}") from error
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; it has to hold {', '.join(keys)}")
    for split in ("train", "test"):
        labels, num_images = arrays[f"y_{split}"], len(arrays[f"x_{split}"])
        if labels.dtype.kind not in "iu" or labels.shape != (num_images,):
            raise ValueError(
                f"{path}: y_{split} is {labels.dtype} {list(labels.shape)}; it has to be integers "
                f"[{num_images}], as x_{split} has {num_images} images"
            )
    train, test = (
        RawSplit(_npz_images(path, f"x_{split}", arrays[f"x_{split}"]), arrays[f"y_{split}"])
        for split in ("train", "test")
    )
    num_classes = int(train.labels.max()) + 1
    for split, labels in (("train", train.labels), ("test", test.labels)):
        wrong = labels[(labels < 0) | (labels >= num_classes)]
        if len(wrong):
            raise ValueError(
                f"{path}: y_{split} has the label {wrong[0]}; labels go from 0 to the largest of "
                f"y_train, {num_classes - 1}"
            )
    return RawSource(tuple(str(label) for label in range(num_classes)), train, test)


def _npz_images(path: Path, key: str, x: np.ndarray) -> np.ndarray:
    """`x` as [N, H, W] or [N, H, W, 3]."""
    channels_last, channels_first = (x.ndim == 4 and x.shape[axis] in (1, 3) for axis in (-1, 1))
    if x.dtype != np.uint8 or x.size == 0 or (x.ndim != 3 and channels_last == channels_first):
        raise ValueError(
            f"{path}: {key} is {x.dtype} {list(x.shape)}; it has to be uint8 [N, H, W], "
            "[N, H, W, C] or [N, C, H, W] with at least 1 image, and 1 or 3 channels C"
        )
    if channels_first:
        x = x.transpose(0, 2, 3, 1)
    return x[..., 0] if x.ndim == 4 and x.shape[-1] == 1 else x


# --- files and messages -----------------------------------------------------------------------


def _files_under(folder: Path) -> list[str]:
    """Every file at or below `folder`, sorted, but for hidden ones (.DS_Store, ._image.jpg)."""

    def refuse(error: OSError) -> NoReturn:
        raise error  # os.walk would pass over a folder that may not be read

    files: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


SOURCES: dict[str, Origin] = {
    "digits": Origin(_read_digits),
    "fashion-mnist": Origin(
        partial(_read_mnist_like, "fashion-mnist", "FashionMNIST", FASHION_NAMES)
    ),
    "mnist": Origin(partial(_read_mnist_like, "mnist", "MNIST", DIGIT_NAMES)),
    "cifar10": Origin(partial(_read_cifar, "cifar10", "CIFAR10", "cifar-10-batches-py")),
    "cifar100": Origin(partial(_read_cifar, "cifar100", "CIFAR100", "cifar-100-python")),
    "svhn": Origin(_read_svhn),
    "tiny-imagenet": Origin(
        _read_tiny_imagenet,
        watched=tuple(
            f"tiny-imagenet-200/{part}" for part in ("wnids.txt", "words.txt", "train", "val")
        ),
        layout="the published layout: wnids.txt, words.txt, train/<wnid>/images/, val/images/",
    ),
    "folder:PATH": Origin(
        _read_folder,
        watched=("train", "test"),
        layout="a folder with images in train/<class>/ and test/<class>/",
    ),
    "npz:PATH": Origin(
        _read_npz, watched=("",), layout="a file with x_train, y_train, x_test, y_test"
    ),
}
