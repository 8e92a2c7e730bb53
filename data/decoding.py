"""Decoding images, from files or arrays, into one uint8 array of one size and channel count."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin, UnidentifiedImageError

from protocol.models import Size

Picture = Image.Image | np.ndarray  # an array is uint8 or uint16, [H, W] or [H, W, 3]
Window = tuple[int, ...]  # (low, high), or () for images of 8 bits

SMALLEST_OWN_SIZE = 28  # pixels; smaller squares are enlarged to ENLARGED_SIZE
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
# Channels of Pillow's modes of up to 8 bits
CHANNELS_OF_MODE = {"1": 1, "L": 1, "LA": 1, "P": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L")  # grey, up to 16 bits as `_problem_of` sees to


class ImageFileError(ValueError):
    """Images that cannot be used. nameless: the same message without file names."""

    def __init__(self, message: str, nameless: str) -> None:
        super().__init__(message)
        self.nameless = nameless


@dataclass(frozen=True)
class RawSplit:
    """Images as file names, or as uint8 or uint16 [N, H, W] or [N, H, W, 3]; integer labels [N].

    array: what errors call an array of images. groups: the text in the column or array that
    `group-by` names, of each image [N]; None where it is not set.
    """

    images: list[str] | np.ndarray
    labels: np.ndarray
    array: str = "images"
    groups: np.ndarray | None = None

    def name(self, i: int) -> str:
        """How a message refers to image i."""
        return f"{self.array}[{i}]" if isinstance(self.images, np.ndarray) else self.images[i]

    def picture(self, i: int) -> Picture:
        """Image i, decoded and upright; ImageFileError if its file cannot be used."""
        item: str | np.ndarray = self.images[i]
        return item if isinstance(item, np.ndarray) else open_image(item)

    def kind(self, i: int) -> tuple[int, bool]:
        """(channels, whether it has 16 bits a channel) of image i, by the header of its file."""
        item: str | np.ndarray = self.images[i]
        if isinstance(item, np.ndarray):
            return (1 if item.ndim == 2 else 3), is_deep(item)
        with _opened(item) as image:
            return CHANNELS_OF_MODE.get(image.mode, 1), is_deep(image)


@dataclass(frozen=True)
class RawSource:
    """What a reader returns; a label is an index into `class_names`.

    own_labels: what the files call each class; () where that is its name. notes: what is unusual
    about the files, a line each.
    """

    class_names: tuple[str, ...]
    train: RawSplit
    test: RawSplit
    own_labels: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def first_size(self) -> tuple[int, int]:
        """(width, height) of the first training image, in pixels."""
        return size_of(self.train.picture(0))


@dataclass(frozen=True)
class Preparation:
    """How an image becomes pixels: the one rule of training, prediction and exported models.

    In this order: turn the image upright by its EXIF orientation (`open_image`); map the values of
    the window to 0..255; convert to Pillow's mode L or RGB; resize both sides with Pillow's
    BILINEAR filter, which is antialiased. window: values that become 0 and 255 in images of 16
    bits, others in proportion, rounded, and values outside as its ends; (): images have 8 bits.
    """

    channels: int
    width: int
    height: int
    window: Window = ()

    def pixels(self, picture: Picture, name: str) -> np.ndarray:
        """uint8 [C, H, W]; ImageFileError, with this name, for an image of another depth."""
        if is_deep(picture) != bool(self.window):
            raise other_depth(name, self.window)
        if self.window:
            picture = windowed(np.asarray(picture), self.window)
        image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
        image = image.convert("L" if self.channels == 1 else "RGB")
        if image.size != (self.width, self.height):
            image = image.resize((self.width, self.height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)


def other_depth(name: str, window: Window) -> ImageFileError:
    """The refusal of an image that has 16 bits a channel where others have 8, or the reverse."""
    found, others = (8, 16) if window else (16, 8)
    wrong = f"has {found} bits a channel, the others have {others}: convert it"
    if not window:
        wrong += ", or set window to the values that become 0 and 255, such as window=0,4095"
    return ImageFileError(f"{name} {wrong}", f"an image {wrong}")


def is_deep(picture: Picture) -> bool:
    """Whether the image has 16 bits a channel."""
    if isinstance(picture, np.ndarray):
        return picture.dtype == np.uint16
    return picture.mode in DEEP_MODES


def size_of(picture: Picture) -> tuple[int, int]:
    """(width, height) in pixels."""
    if isinstance(picture, np.ndarray):
        return picture.shape[1], picture.shape[0]
    return picture.size


def windowed(values: np.ndarray, window: Window) -> np.ndarray:
    """The values of the window as 0..255, uint8 in the same shape."""
    low, high = window
    scaled = (values.astype(np.float64) - low) * (255 / (high - low))
    pixels: np.ndarray = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return pixels


def decoded_size(own_size: tuple[int, int], image_size: Size) -> tuple[int, int]:
    """(width, height) in pixels: `image_size` if set, else the own size; a tiny square enlarged."""
    height, width = image_size
    if height:
        return width, height
    is_tiny = own_size[0] == own_size[1] < SMALLEST_OWN_SIZE
    return (ENLARGED_SIZE, ENLARGED_SIZE) if is_tiny else own_size


def own_channels(raw: RawSource) -> int:
    """3 if any image has colour, else 1. Only the headers of files are read."""
    for split in (raw.train, raw.test):
        num = 1 if isinstance(split.images, np.ndarray) else len(split.images)
        if any(split.kind(i)[0] == 3 for i in range(num)):
            return 3
    return 1


def own_window(split: RawSplit) -> Window:
    """The smallest and the largest value of the images, which have 16 bits."""

    def extremes(i: int) -> tuple[int, int]:
        values = np.asarray(split.picture(i))
        return int(values.min()), int(values.max())

    with ThreadPoolExecutor() as pool:
        lows, highs = zip(*pool.map(extremes, range(len(split.images))), strict=True)
    return min(lows), max(*highs, min(lows) + 1)


def decode(
    raw: RawSource, split: RawSplit, into: np.ndarray, window: Window, any_size: bool
) -> None:
    """Decode `split` of `raw` into the array [N, C, H, W], as `Preparation` says.

    any_size: whether images may differ in size. If not, ValueError names the first whose size is
    not that of the first training image.
    """
    _, channels, height, width = into.shape
    preparation, required = Preparation(channels, width, height, window), raw.first_size

    def decode_chunk(start: int) -> None:
        for i in range(start, min(start + DECODE_CHUNK, len(into))):
            picture = split.picture(i)
            if not any_size and (own_size := size_of(picture)) != required:
                first, other = (f"{width}x{height}" for width, height in (required, own_size))
                advice = "set image-size to resize all images"
                raise ImageFileError(
                    f"images differ in size: {raw.train.name(0)} is {first} pixels, "
                    f"{split.name(i)} is {other}; {advice}",
                    f"images differ in size: {first} and {other} pixels; {advice}",
                )
            into[i] = preparation.pixels(picture, split.name(i))

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


def open_image(path: str) -> Image.Image:
    """The image in a file, decoded and turned as its EXIF data says.

    Cameras note how they were held. ImageFileError for whatever its decoder refuses, in the pixels,
    the checksums of a PNG file or the EXIF data.
    """
    with _opened(path, verify=True) as image:
        image.load()  # first: to read EXIF data may decode pixels, and lose the error
        return ImageOps.exif_transpose(image)


@contextmanager
def _opened(path: str, verify: bool = False) -> Iterator[Image.Image]:
    """The image in a file, of which only the header has been read.

    verify: read the file once for its checksums, which Pillow does not look at when it decodes the
    pixels of a PNG file. ImageFileError for whatever Pillow raises, here or in the block.
    """
    try:
        # Another package may have set it, and then half an image passes for one.
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        # By its name, Pillow would map an uncompressed file into memory, where it scrambles a TIFF
        # file that is to be turned, and a file cut short meanwhile kills the process.
        with open(path, "rb") as file:
            image = Image.open(file, formats=FORMATS)
            if verify and image.format == "PNG":
                image.verify()
                file.seek(0)
                image = Image.open(file, formats=FORMATS)
            if wrong := _problem_of(image):
                raise ImageFileError(f"{path}: its {wrong}", f"an image's {wrong}")
            yield image
    except ImageFileError:
        raise
    except IsADirectoryError as error:
        raise ImageFileError(
            f"{path} is a folder: name the images in it, such as {path}/*.png",
            "an image is a folder",
        ) from error
    except Exception as error:  # each of Pillow's decoders raises its own
        reason = one_line(error)
        if isinstance(error, UnidentifiedImageError):  # it would name a Python object
            reason = f"its format is none of {', '.join(FORMATS)}"
        if isinstance(error, Image.DecompressionBombError):  # before any pixel is decoded
            reason = f"it has more than {MAX_PIXELS:,} pixels: scale it down"
        raise ImageFileError(
            f"{path}: not a readable image: {reason}", "an image cannot be read"
        ) from error


def _problem_of(image: Image.Image) -> str:
    """Why an image, of which the header has been read, cannot be used; "" if it can."""
    bits, is_grey = _bits(image), image.mode in DEEP_MODES
    if (is_grey and bits <= 16) or (image.mode in CHANNELS_OF_MODE and bits <= 8):
        return ""
    if image.mode in CHANNELS_OF_MODE:  # Pillow cuts off the others silently
        return "colours have 16 bits a channel; expected 8, or a grey image: convert it"
    allowed = ", ".join((*CHANNELS_OF_MODE, *DEEP_MODES[1:]))
    return f"pixels have Pillow's mode {image.mode!r}; expected one of {allowed}: convert it"


def _bits(image: Image.Image) -> int:
    """Bits a channel in the file, of which only the header has been read: 8, 16 or more."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))
    if image.format not in ("PNG", "PPM"):
        return 8
    args = image.tile[0][3]  # type: ignore[attr-defined]
    is_scaled = isinstance(args, tuple) and args[1] > 255  # PPM: (mode, largest value)
    return 16 if is_scaled or ";16" in str(args) else 8  # PNG: mode;bits
