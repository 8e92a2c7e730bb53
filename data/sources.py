"""Image data sources: decoded once into a cache, then opened as memory-mapped arrays.

Decoding is slow (60,000 JPEG files take 15 s) and every message to a deployed client starts a new
process, so a process opens a cache entry: uint8 images [N, C, H, W] of one size and channel count,
int64 labels [N], with `group-by` int64 groups [N], and about.json. Its key covers the source, what
`Reading` says of decoding and, for the user's own files, their names and content. Nothing here
imports torch.
"""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.cache import (
    Key,
    build_once,
    content_digest,
    entry_path,
    read_about,
    reserve,
    write_numbers,
)
from data.decoding import (
    ImageFileError,
    RawSource,
    RawSplit,
    Window,
    decode,
    decoded_size,
    mean_and_std,
    one_line,
    own_channels,
    own_window,
)
from data.folders import LABELS_FILE
from data.notes import notes_on_images
from data.npz import label_names
from data.partitions import split_local_test
from data.plain import is_plain, plain_channels, plain_mean_and_std, write_plain
from data.readers import READERS, PublishedSizes, Reader
from protocol.files import naming
from protocol.models import IMAGE_SIZES, OWN_SIZE, Size
from protocol.options import ConfigError
from protocol.source_spec import SITES, parse_source
from protocol.text import num_of, printable, shortened

log = logging.getLogger(__name__)

CACHE_VERSION = 4  # raise it when the same files would decode to other arrays
TEST_SPLIT_SEED = 1797  # of `test-fraction`: the test set is the same whatever the run's seed


@dataclass(frozen=True)
class ImageSplit:
    """Images uint8 [N, C, H, W] and labels int64 [N], read-only and memory-mapped.

    Images of arrays of floats are float32.

    groups: with `group-by`, of training images, the number of each image's group, int64 [N].
    """

    images: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None


@dataclass(frozen=True)
class Source:
    """A data set. `mean` and `std` are per channel, of pixel/255 over the train split.

    own_labels: what the files call each class, such as the numbers of an npz file. window: values
    of images of 16 bits that became 0 and 255; (): the images have 8. notes: what is unusual about
    the data, a line each, which may name files.
    """

    name: str
    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    own_labels: tuple[str, ...] = ()
    window: Window = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Classes that the files do not call otherwise are called by their names."""
        if not self.own_labels:
            object.__setattr__(self, "own_labels", self.class_names)

    @property
    def num_classes(self) -> int:
        """How many classes the labels run over."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width


@dataclass(frozen=True)
class Reading:
    """How the files of a source become arrays.

    image_size: height and width in pixels; 0: the source's own, or 32 for squares below 28.
    channels: 1 or 3; 0: the source's own, which is 1 only if every image is grey.
    window: values of images of 16 bits that become 0 and 255; None: the smallest and the largest of
        the training images; (): images must have 8 bits.
    classes: names of the labels, as `classes` of the config or of a node config has them; "": the
        source's own.
    group_by: a column of labels.csv, or the arrays GROUP-BY_train and GROUP-BY_test; "": none.
    test_fraction: share of the training images, or of their groups, that becomes the test set of a
        source that has none.
    pool_test: `train` has the test images too, after its own.
    """

    image_size: Size = OWN_SIZE
    channels: int = 0
    window: Window | None = None
    classes: str = ""
    group_by: str = ""
    test_fraction: float = 0.0
    pool_test: bool = False


AS_IT_IS = Reading()


def names_in_order(classes: str) -> dict[str, str]:
    """The names of the labels in a value of `classes`: separated by commas, or a JSON list."""
    if not classes.lstrip().startswith("["):
        return label_names(classes.split(","))
    try:
        return label_names(json.loads(classes))
    except json.JSONDecodeError as error:
        raise ConfigError("classes", f"classes = {classes!r}: not a JSON list: {error}") from error


def source_without_images(reading: Reading) -> Source:
    """What a server knows of `source = sites`: classes, shape, and no image. Its mean is 0.5.

    ConfigError naming the key that is missing.
    """
    hint = 'with source = "sites", the server has no images'
    if not reading.classes:
        raise ConfigError("classes", f"classes = '': {hint}: name the classes, as in cat,dog")
    for key, value in (("image-size", reading.image_size[0]), ("channels", reading.channels)):
        if not value:
            raise ConfigError(key, f"{key} = 0: {hint}: set it to what the sites convert to")
    names, channels = names_in_order(reading.classes), reading.channels
    nothing = ImageSplit(np.empty((0, channels, *reading.image_size), np.uint8), np.empty(0, int))
    half = (0.5,) * channels
    return Source(
        SITES, nothing, nothing, tuple(names.values()), half, half, tuple(names),
        reading.window or (),
    )  # fmt: skip


def published_size(
    spec: str, image_size: Size = OWN_SIZE, channels: int = 0, pool_test: bool = False
) -> PublishedSizes | None:
    """The sizes of what `load_source` returns for these arguments; None if they are not known."""
    reader = READERS.get(parse_source(spec)[0])
    if reader is None or reader.published is None:
        return None
    sizes = reader.published
    if pool_test:
        sizes = replace(sizes, num_train=sizes.num_train + sizes.num_test)
    own, height, width = sizes.image_shape
    width, height = decoded_size((width, height), image_size)
    return replace(sizes, image_shape=(channels or own, height, width))


def load_source(spec: str, data_dir: Path, cache_dir: Path, reading: Reading = AS_IT_IS) -> Source:
    """The source `spec`, one of SOURCE_NAMES with PATH filled in, from the cache or its files.

    Images of other shapes are resized (bilinear, antialiased; not cropped) and converted.
    ValueError or FileNotFoundError, one line, if `spec` or its files are invalid, or the images are
    larger than any network takes.
    """
    reader, path, key = _locate(spec, data_dir, cache_dir, reading)
    entry = entry_path(cache_dir, key)
    if not entry.is_dir():
        log.info("decoding source %s into %s, once", key["source"], entry)
        raw = with_groups(reader, path, reader.read(path), reading)
        raw = with_test_split(raw, reading, key["source"])

        def fill(building: Path) -> None:
            _write_entry(building, key, raw, reading, is_own=reader.published is None)
            if _locate(spec, data_dir, cache_dir, reading)[2] != key:
                wrong = "its files changed during decoding: start again once they are complete"
                raise ImageFileError(f"source = {key['source']!r}: {wrong}", f"a source: {wrong}")

        build_once(entry, fill)
    source = _open_entry(entry)
    if reading.pool_test:
        source = _pooled(source)
    return with_names(source, names_in_order(reading.classes)) if reading.classes else source


def with_names(source: Source, names: dict[str, str]) -> Source:
    """The source with these names of its labels, in this order; one may have no image.

    ConfigError naming a label that has no name.
    """
    if unknown := [label for label in source.own_labels if label not in names]:
        raise ConfigError(
            "classes",
            f"classes = {shortened([f'{k}={v}' for k, v in names.items()])!r}: it does not name "
            f"{unknown[0]!r}, which {source.name} has beside {shortened(list(source.own_labels))}: "
            'name each, as in classes="1=cat,2=dog"',
        )
    new = np.array([list(names).index(label) for label in source.own_labels], dtype=np.int64)
    train, test = (replace(part, labels=new[part.labels]) for part in (source.train, source.test))
    return replace(
        source,
        train=train,
        test=test,
        class_names=tuple(names.values()),
        own_labels=tuple(names),
    )


def with_groups(reader: Reader, path: Path, raw: RawSource, reading: Reading) -> RawSource:
    """The source with the groups of its images, if `group-by` is set.

    ImageFileError naming a group that has images in both train and test.
    """
    column = reading.group_by
    if column and reading.pool_test:
        raise ConfigError("pool-test", f"pool-test = true: has no groups for group-by = {column!r}")
    if reader.grouped is None:
        if not column:
            return raw
        raise ConfigError("group-by", f"group-by = {column!r}: only for folder:PATH and npz:PATH")
    raw = reader.grouped(path, column, raw)
    if not column:
        return raw
    train, test = (set(map(str, part.groups)) for part in (raw.train, raw.test))  # type: ignore[arg-type]
    if both := sorted(train & test):
        wrong = f"{num_of('group is', both, 'groups are')} in train and in test"
        raise ImageFileError(
            f"group-by = {column!r}: {wrong}, such as {printable(both[0])!r}: move each to one of "
            "them",
            f"group-by: {wrong}: move each to one of them",
        )
    return raw


def with_test_split(raw: RawSource, reading: Reading, name: str) -> RawSource:
    """The source with a test set: its own, or `test-fraction` of the training images.

    ConfigError if it has both or neither.
    """
    fraction, num_test = reading.test_fraction, len(raw.test.labels)
    if (num_test > 0) == (fraction > 0):
        found = f"{name} has {num_of('test image', num_test)} of its own: expected 0"
        if not num_test:
            found = f"{name} has no test images: expected a share of the training images, as 0.2"
        raise ConfigError("test-fraction", f"test-fraction = {fraction:g}: {found}")
    if num_test:
        return raw
    labels, groups = raw.train.labels, raw.train.groups
    numbers = None if groups is None else np.unique(groups, return_inverse=True)[1]
    parts = split_local_test(np.arange(len(labels)), labels, fraction, TEST_SPLIT_SEED, numbers)
    train, test = (part_of(raw.train, part) for part in parts)
    return replace(raw, train=train, test=test)


def part_of(split: RawSplit, indices: np.ndarray) -> RawSplit:
    """These samples of a split."""
    images = split.images
    chosen = images[indices] if isinstance(images, np.ndarray) else [images[i] for i in indices]
    groups = None if split.groups is None else split.groups[indices]
    return RawSplit(chosen, split.labels[indices], split.array, groups)


def _locate(
    spec: str, data_dir: Path, cache_dir: Path, reading: Reading
) -> tuple[Reader, Path, Key]:
    """The source's reader, the path that it takes, and the key of its cache entry."""
    known_as, path = parse_source(spec)
    reader = READERS[known_as]
    name = f"{known_as.removesuffix('PATH')}{path}" if path else spec
    root = path or data_dir.expanduser()
    unneeded = {"test"} if reading.test_fraction else set[str]()
    unneeded |= set() if reading.group_by else {LABELS_FILE}
    watched = [root / part for part in reader.watched if part not in unneeded]
    for file in watched:
        if not file.exists():
            raise FileNotFoundError(
                f"source = {name!r}: {file} does not exist; expected {reader.layout}"
            )
    watched += [root / part for part in unneeded & {"test"} if (root / part).exists()]
    key = {
        "version": CACHE_VERSION,
        "source": name,
        # names and pooling are applied to what was decoded
        **{k: v for k, v in vars(reading).items() if k not in ("classes", "pool_test")},
        "content": content_digest(cache_dir, root, watched) if watched else "",
    }
    return reader, root, key


def _write_entry(entry: Path, key: Key, raw: RawSource, reading: Reading, is_own: bool) -> None:
    """Decode a source into a new entry. is_own: the user's own files, of which notes are made."""
    width, height = decoded_size(raw.first_size, reading.image_size)
    if not {width, height} <= {*IMAGE_SIZES}:  # before disk space and time are spent on them
        wrong = (
            f"images are {width} x {height} pixels: expected {IMAGE_SIZES[0]} to "
            f"{IMAGE_SIZES[-1]} a side: set image-size"
        )
        raise ImageFileError(wrong, wrong)
    arrays_are_plain, window = is_plain(raw.train.images), reading.window
    if arrays_are_plain:
        channels, window = plain_channels(raw, reading.channels), ()
    else:
        channels = reading.channels or own_channels(raw)
    if window is None:
        window = own_window(raw.train) if raw.train.kind(0)[1] else ()
    is_float = arrays_are_plain and np.asarray(raw.train.images).dtype.kind == "f"
    kind = np.float32 if is_float else np.uint8
    decoded = []
    for name, split in (("train", raw.train), ("test", raw.test)):
        file, shape = entry / f"{name}-images.npy", (len(split.images), channels, height, width)
        with naming(file):
            images = np.lib.format.open_memmap(file, "w+", kind, shape)
            reserve(file)
        if arrays_are_plain:
            write_plain(np.asarray(split.images), images)
        else:
            decode(raw, split, images, window, any_size=reading.image_size != OWN_SIZE)
        images.flush()
        decoded.append(images)
        write_numbers(entry / f"{name}-labels.npy", split.labels)
    if raw.train.groups is not None:  # numbers, without what the groups are called
        numbers = np.unique(raw.train.groups, return_inverse=True)[1]
        write_numbers(entry / "train-groups.npy", numbers)
    mean, std = (plain_mean_and_std if arrays_are_plain else mean_and_std)(decoded[0])
    about = {"key": key, "class_names": raw.class_names, "mean": mean, "std": std}
    about |= {"own_labels": raw.own_labels, "window": window}
    about["notes"] = [*raw.notes, *(notes_on_images(raw, decoded) if is_own else ())]
    file = entry / "about.json"
    with naming(file):
        file.write_text(json.dumps(about, indent=1))


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
            own_labels=tuple(about["own_labels"]),
            window=tuple(about["window"]),
            notes=tuple(about["notes"]),
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
    file = entry / f"{name}-groups.npy"
    return ImageSplit(images, labels, np.load(file) if file.exists() else None)
