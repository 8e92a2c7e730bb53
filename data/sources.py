"""Image data sources: decoded once into a cache, then opened as memory-mapped arrays.

Decoding is slow (60,000 JPEG files take 15 s) and every message to a deployed client starts a new
process, so a process opens a cache entry: uint8 images [N, C, H, W] of one size and channel count,
int64 labels [N], and about.json. Its key covers the source, the image size, the channels and, for
the user's own files, their names and content. Nothing here imports torch.
"""

import io
import json
import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.cache import Key, build_once, content_digest, entry_path, read_about
from data.decoding import (
    ImageFileError,
    RawSource,
    decode,
    decoded_size,
    mean_and_std,
    one_line,
    own_channels,
)
from data.readers import READERS, PublishedSizes, Reader
from protocol.files import naming
from protocol.models import IMAGE_SIZES
from protocol.source_spec import parse_source

log = logging.getLogger(__name__)

CACHE_VERSION = 3  # raise it when the same files would decode to other arrays


@dataclass(frozen=True)
class ImageSplit:
    """Images uint8 [N, C, H, W] and labels int64 [N], read-only and memory-mapped."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Source:
    """A data set. `mean` and `std` are per channel, of pixel/255 over the train split."""

    name: str
    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """How many classes the labels run over."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width


def published_size(
    spec: str, image_size: int = 0, channels: int = 0, pool_test: bool = False
) -> PublishedSizes | None:
    """The sizes of what `load_source` returns for these arguments; None for a user's own files."""
    sizes = READERS[parse_source(spec)[0]].published
    if sizes is None:
        return None
    if pool_test:
        sizes = replace(sizes, num_train=sizes.num_train + sizes.num_test)
    own, height, width = sizes.image_shape
    width, height = decoded_size((width, height), image_size)
    return replace(sizes, image_shape=(channels or own, height, width))


def load_source(
    spec: str,
    data_dir: Path,
    cache_dir: Path,
    image_size: int = 0,
    channels: int = 0,
    pool_test: bool = False,
) -> Source:
    """The source `spec`, one of SOURCE_NAMES with PATH filled in, from the cache or its files.

    image_size: height and width in pixels; 0: the source's own, or 32 if that is below 28.
    channels: 1 or 3; 0: the source's own, which is 1 only if every image is grey.
    pool_test: `train` has the test images too, after its own.
    Images of other shapes are resized (bilinear, antialiased; not cropped) and converted.
    ValueError or FileNotFoundError, one line, if `spec` or its files are invalid, or the images are
    larger than any network takes.
    """
    reader, path, key = _locate(spec, data_dir, cache_dir, image_size, channels)
    entry = entry_path(cache_dir, key)
    if not entry.is_dir():
        log.info("decoding source %s into %s, once", key["source"], entry)
        raw = reader.read(path)

        def fill(building: Path) -> None:
            _write_entry(building, key, raw)
            if _locate(spec, data_dir, cache_dir, image_size, channels)[2] != key:
                wrong = "its files changed during decoding: start again once they are complete"
                raise ImageFileError(f"source = {key['source']!r}: {wrong}", f"a source: {wrong}")

        build_once(entry, fill)
    source = _open_entry(entry)
    return _pooled(source) if pool_test else source


def _locate(
    spec: str, data_dir: Path, cache_dir: Path, image_size: int, channels: int
) -> tuple[Reader, Path, Key]:
    """The source's reader, the path that it takes, and the key of its cache entry."""
    known_as, path = parse_source(spec)
    reader = READERS[known_as]
    name = f"{known_as.removesuffix('PATH')}{path}" if path else spec
    root = path or data_dir.expanduser()
    watched = [root / part for part in reader.watched]
    for file in watched:
        if not file.exists():
            raise FileNotFoundError(
                f"source = {name!r}: {file} does not exist; expected {reader.layout}"
            )
    key = {
        "version": CACHE_VERSION,
        "source": name,
        "image_size": image_size,
        "channels": channels,
        "content": content_digest(cache_dir, root, watched) if watched else "",
    }
    return reader, root, key


def _write_entry(entry: Path, key: Key, raw: RawSource) -> None:
    width, height = decoded_size(raw.first_size, key["image_size"])
    if max(width, height) > IMAGE_SIZES[-1]:  # before disk space and time are spent on them
        wrong = (
            f"images are {width} x {height} pixels: the networks take squares; set image-size to "
            f"a value from {IMAGE_SIZES[0]} to {IMAGE_SIZES[-1]}"
        )
        raise ImageFileError(wrong, wrong)
    channels = key["channels"] or own_channels(raw)
    any_size = bool(key["image_size"])
    for name, split in (("train", raw.train), ("test", raw.test)):
        file, shape = entry / f"{name}-images.npy", (len(split.images), channels, height, width)
        with naming(file):
            images = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
            _reserve(file)
        decode(raw, split, images, any_size)
        images.flush()
        labels = io.BytesIO()  # on a full disk, np.save raises an error without a reason
        np.save(labels, split.labels.astype(np.int64))
        file = entry / f"{name}-labels.npy"
        with naming(file):
            file.write_bytes(labels.getbuffer())
        if name == "train":
            mean, std = mean_and_std(images)
    about = {"key": key, "class_names": raw.class_names, "mean": mean, "std": std}
    file = entry / "about.json"
    with naming(file):
        file.write_text(json.dumps(about, indent=1))


def _reserve(file: Path) -> None:
    """Take the disk space of a file: without it, a write to its memory map kills the process."""
    if sys.platform == "darwin":  # has no such call
        return
    with file.open("r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


def _open_entry(entry: Path) -> Source:
    try:
        about = read_about(entry)
        return Source(
            name=about["key"]["source"],
            train=_open_split(entry, "train"),
            test=_open_split(entry, "test"),
            class_names=tuple(about["class_names"]),
            mean=tuple(map(float, about["mean"])),
            std=tuple(map(float, about["std"])),
        )
    except Exception as error:  # numpy raises many kinds for a damaged header
        if isinstance(error, (OSError, MemoryError)) and not isinstance(error, FileNotFoundError):
            raise
        advice = "remove it, so that the images are decoded again"
        raise ImageFileError(
            f"{entry} is damaged ({one_line(error)}): {advice}",
            f"an entry of the cache of decoded images is damaged: {advice}",
        ) from error


def _pooled(source: Source) -> Source:
    """All images in `train`, in memory; mean and deviation stay those of the training images."""
    splits = (source.train, source.test)
    images, labels = (
        np.concatenate([getattr(split, part) for split in splits]) for part in ("images", "labels")
    )
    return replace(source, train=ImageSplit(images, labels))


def _open_split(entry: Path, name: str) -> ImageSplit:
    images, labels = (
        np.load(entry / f"{name}-{part}.npy", mmap_mode="r") for part in ("images", "labels")
    )
    return ImageSplit(images, labels)
