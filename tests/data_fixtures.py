"""Image files and arrays for the tests of data sources."""

import numpy as np
import pytest
from PIL import Image


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def save_image(file, pixels):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


def make_folder(root, images, classes=("ant", "bee")):
    """train/ and test/ with images[i] as a PNG in class i modulo their number, in both."""
    for split in ("train", "test"):
        for i, pixels in enumerate(images):
            save_image(root / split / classes[i % len(classes)] / f"{i}.png", pixels)
    return f"folder:{root}"


def make_npz(path, **changes):
    arrays = {
        "x_train": random_images(6, 28, 30, 3),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": random_images(3, 28, 30, 3, seed=1),
        "y_test": np.array([2, 1, 0]),
    }
    arrays |= changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return f"npz:{path}"


def rejected(load, spec, error=ValueError, **recipe):
    """The message, one line, with which `spec` is refused."""
    with pytest.raises(error) as refusal:
        load(spec, **recipe)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)
