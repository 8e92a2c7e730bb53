"""Arrays that are no pictures: floats, or channels other than 1 and 3; Pillow only resizes them.

Floats count as pixels divided by 255: they are stored as float32 times 255, so that 1.0 is white
and the normalisation is that of pixels.
"""

import numpy as np
from PIL import Image

from data.decoding import RawSource
from protocol.options import ConfigError


def is_plain(images: object) -> bool:
    """Whether these are such an array, [N, H, W] or [N, H, W, C]."""
    if not isinstance(images, np.ndarray):
        return False
    return images.dtype.kind == "f" or (images.ndim == 4 and images.shape[-1] != 3)


def plain_channels(raw: RawSource, required: int) -> int:
    """The number of channels: of 1 or 3 the required one (0: any), of others their own.

    A grey image fills all of the required channels. ConfigError where one of colour would be grey.
    """
    train, test = (np.asarray(part.images) for part in (raw.train, raw.test))
    own = 1 if train.ndim == 3 else train.shape[-1]
    if len(test) and (test.ndim, test.dtype, test.shape[3:]) != (
        train.ndim,
        train.dtype,
        train.shape[3:],
    ):
        raise ValueError(
            f"{raw.test.array} is {test.dtype} {list(test.shape)}, {raw.train.array} {train.dtype} "
            f"{list(train.shape)}: expected the same type and channels"
        )
    if own == 3 and required == 1:
        found = f"{raw.train.array} has floats of 3 channels, the run 1"
        raise ConfigError("channels", f"{found}: convert them, or choose another model")
    return required if required and own == 1 else own


def write_plain(images: np.ndarray, into: np.ndarray) -> None:
    """Images [N, H, W] or [N, H, W, C] as [N, C, H, W], resized like pictures; floats times 255."""
    if images.ndim == 3:
        images = images[..., None]
    size = into.shape[:1:-1]  # (width, height)
    factor = 255 if images.dtype.kind == "f" else 1
    for i, image in enumerate(images):
        channels = np.moveaxis(image, -1, 0) * np.asarray(factor, image.dtype)
        if image.shape[:2] != into.shape[2:]:
            channels = np.stack([resized(channel, size) for channel in channels])
        into[i] = channels


def resized(channel: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """One channel [H, W] at another (width, height)."""
    picture = Image.fromarray(np.ascontiguousarray(channel))
    return np.asarray(picture.resize(size, Image.Resampling.BILINEAR))


def plain_mean_and_std(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and deviation of pixel/255 per channel of [N, C, H, W]; of a constant channel 1."""
    means, deviations = [], []
    for channel in np.moveaxis(images, 1, 0):
        values = channel.astype(np.float64) / 255
        means.append(float(values.mean()))
        deviations.append(float(values.std()) if values.min() < values.max() else 1.0)
    return means, deviations
