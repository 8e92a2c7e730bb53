"""Decoding images, from files or arrays, into one uint8 array of one size and channel count."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

T = TypeVar("T")

SMALLEST_OWN_SIZE = 28  # pixels; a smaller source is enlarged to ENLARGED_SIZE
ENLARGED_SIZE = 32
DECODE_CHUNK = 256  # images a thread decodes at a time
# Pillow's names of the formats that are read, whatever a file's ending: it would give EPS, for
# example, to Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # Pillow decodes no larger image
# Pillow's warnings about transparency, which is discarded, and metadata do not name the file.
warnings.filterwarnings(
    "ignore",
    message="Palette images with Transparency|.*corrupt EXIF|Truncated File|Metadata",
    module="PIL",
)
# Channels of Pillow's modes of up to 8 bits; deeper ones would lose more than a user may expect.
CHANNELS_OF_MODE = {"1": 1, "L": 1, "LA": 1, "P": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}


@dataclass(frozen=True)
class RawSplit:
    """Images as file names, or as uint8 [N, H, W] or [N, H, W, 3], and integer labels [N].

    array: what errors call an array of images.
    """

    images: list[str] | np.ndarray
    labels: np.ndarray
    array: str = "images"

    def name(self, i: int) -> str:
        """How an error message refers to image i."""
        return f"{self.array}[{i}]" if isinstance(self.images, np.ndarray) else self.images[i]


@dataclass(frozen=True)
class RawSource:
    """What a reader returns; a label is an index into `class_names`."""

    class_names: tuple[str, ...]
    train: RawSplit
    test: RawSplit

    @property
    def first_size(self) -> tuple[int, int]:
        """(width, height) of the first training image, in pixels."""
        size: tuple[int, int] = _with_image(self.train, 0, lambda image: image.size)
        return size


class ImageFileError(ValueError):
    """Images that cannot be used. nameless: the same message without file names."""

    def __init__(self, message: str, nameless: str) -> None:
        super().__init__(message)
        self.nameless = nameless


def decoded_size(own_size: tuple[int, int], image_size: int) -> tuple[int, int]:
    """(width, height) in pixels: `image_size` if set, else the own size, enlarged if tiny."""
    if image_size:
        return image_size, image_size
    return own_size if min(own_size) >= SMALLEST_OWN_SIZE else (ENLARGED_SIZE, ENLARGED_SIZE)


def own_channels(raw: RawSource) -> int:
    """3 if any image has colour, else 1. Only the headers of files are read."""
    for split in (raw.train, raw.test):
        num_alike = len(split.images) if isinstance(split.images, np.ndarray) else 1
        for i in range(0, len(split.images), num_alike):
            if _with_image(split, i, lambda image: CHANNELS_OF_MODE[image.mode], False) == 3:
                return 3
    return 1


def decode(raw: RawSource, split: RawSplit, into: np.ndarray, any_size: bool) -> None:
    """Decode `split` of `raw` into the array [N, C, H, W], resizing and converting as needed.

    any_size: whether images may differ in size. If not, ValueError names the first whose size is
    not that of the first training image.
    """
    _, channels, height, width = into.shape
    mode = "L" if channels == 1 else "RGB"
    required = raw.first_size

    def read(image: Image.Image) -> tuple[tuple[int, int], np.ndarray]:
        own_size, image = image.size, image.convert(mode)
        if own_size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return own_size, np.asarray(image)

    def decode_chunk(start: int) -> None:
        for i in range(start, min(start + DECODE_CHUNK, len(into))):
            own_size, pixels = _with_image(split, i, read)
            if not any_size and own_size != required:
                first, other = (f"{width}x{height}" for width, height in (required, own_size))
                advice = "set image-size to resize all images"
                raise ImageFileError(
                    f"images differ in size: {raw.train.name(0)} is {first} pixels, "
                    f"{split.name(i)} is {other}; {advice}",
                    f"images differ in size: {first} and {other} pixels; {advice}",
                )
            into[i] = pixels if channels == 1 else pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the GIL
        for _ in pool.map(decode_chunk, range(0, len(into), DECODE_CHUNK)):
            pass


def mean_and_std(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Exact mean and deviation of pixel/255 per channel; the std of a constant channel is 1."""
    channels = images.shape[1]
    histogram = np.zeros((channels, 256), dtype=np.int64)
    for start in range(0, len(images), 1024):  # bincount makes int64 copies
        for c in range(channels):
            histogram[c] += np.bincount(images[start : start + 1024, c].ravel(), minlength=256)
    values = np.arange(256) / 255
    mean = histogram @ values / histogram.sum(axis=1)
    variance = (histogram * (values - mean[:, None]) ** 2).sum(axis=1) / histogram.sum(axis=1)
    is_constant = np.count_nonzero(histogram, axis=1) == 1  # its variance may be rounding alone
    return mean.tolist(), np.where(is_constant, 1.0, np.sqrt(variance)).tolist()


def one_line(error: Exception) -> str:
    """The error's type and message without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _with_image(
    split: RawSplit, i: int, use: Callable[[Image.Image], T], upright: bool = True
) -> T:
    """use(image i); ImageFileError if its file cannot be used."""
    item = split.images[i]
    if isinstance(item, np.ndarray):
        return use(Image.fromarray(item))
    return with_file(item, use, upright)


def with_file(item: str, use: Callable[[Image.Image], T], upright: bool = True) -> T:
    """use(the image in a file); ImageFileError for whatever Pillow raises.

    upright: turned as its EXIF data says, as cameras note how they were held. For that, all of a
    PNG file is read.
    """
    try:
        # By its name, Pillow would map an uncompressed file into memory, where it scrambles a TIFF
        # file that is to be turned, and a file cut short meanwhile kills the process.
        with open(item, "rb") as file, Image.open(file, formats=FORMATS) as image:
            if image.mode in CHANNELS_OF_MODE and not _is_deep(image):
                is_turned = upright and _orientation(image) != 1
                return use(ImageOps.exif_transpose(image) if is_turned else image)
            mode = image.mode
    except IsADirectoryError as error:
        raise ImageFileError(
            f"{item} is a folder: name the images in it, such as {item}/*.png",
            "an image is a folder",
        ) from error
    except Exception as error:  # each of Pillow's decoders raises its own
        reason = one_line(error)
        if isinstance(error, UnidentifiedImageError):  # it would name a Python object
            reason = f"its format is none of {', '.join(FORMATS)}"
        if isinstance(error, Image.DecompressionBombError):  # before any pixel is decoded
            reason = f"it has more than {MAX_PIXELS:,} pixels: scale it down"
        raise ImageFileError(
            f"{item}: not a readable image: {reason}", "an image cannot be read"
        ) from error
    wrong = f"pixels have Pillow's mode {mode!r}; expected one of {', '.join(CHANNELS_OF_MODE)}: "
    wrong += "convert the image to 8 bits per channel"
    if mode in CHANNELS_OF_MODE:
        wrong = "pixels have more than 8 bits per channel; expected 8: convert the image"
    raise ImageFileError(f"{item}: its {wrong}", f"an image's {wrong}")


def _is_deep(image: Image.Image) -> bool:
    """Whether the file has more than 8 bits per channel. Pillow cuts them off colours silently."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return bool(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))) > 8)
    if image.format not in ("PNG", "PPM"):
        return False
    args = image.tile[0][3]  # type: ignore[attr-defined]
    is_scaled = isinstance(args, tuple) and args[1] > 255  # PPM: (mode, largest value)
    return is_scaled or ";16" in str(args)  # PNG: mode;bits


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1, upright, where there is none or it cannot be read."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow reads the image nevertheless
        return 1
