"""Damaged files: Keel gives the pixels that their decoder gives, or refuses them by name."""

import io
import warnings

import numpy as np
import pytest
from data_fixtures import make_npz, random_images, rejected
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFile, ImageOps

from data.decoding import ImageFileError, open_image

FORMATS = ["png", "jpeg", "gif", "bmp", "ppm", "tiff", "webp"]
OPTIONS = {"tiff": [{}, {"compression": "tiff_lzw"}, {"compression": "tiff_deflate"}]}


def encoded(ending, options):
    """A file of noise with EXIF data that turns it, where the format has such."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    content = io.BytesIO()
    image = Image.fromarray(random_images(40, 30, 3))
    image.save(
        content, ending, **options, **({} if ending in ("gif", "bmp", "ppm") else {"exif": exif})
    )
    return content.getvalue()


FILES = [
    (ending, encoded(ending, options))
    for ending in FORMATS
    for options in OPTIONS.get(ending, [{}])
]


DAMAGES = {
    "byte": lambda b, place, value: b[:place] + bytes([b[place] ^ (value or 1)]) + b[place + 1 :],
    "block": lambda b, place, value: b[:place] + bytes(1 + value) + b[place + 1 + value :],
    "cut": lambda b, place, value: b[:place],
    "text mode": lambda b, place, value: b.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"),
    "shifted": lambda b, place, value: b[:place] + bytes([value]) + b[place:],
}


def as_decoded(content):
    """What Pillow makes of it, checksums included; None if it refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content))
            image.verify()
            image = Image.open(io.BytesIO(content))
            image.load()
            return ImageOps.exif_transpose(image)
        except Exception:  # each decoder raises its own
            return None


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FILES),
    st.sampled_from(list(DAMAGES)),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
)
def test_a_damaged_file_is_what_its_decoder_makes_of_it(tmp_path_factory, file, kind, where, value):
    ending, content = file
    damaged = DAMAGES[kind](content, int(where * len(content)), value)
    path = tmp_path_factory.getbasetemp() / f"damaged.{ending}"
    path.write_bytes(damaged)
    expected = as_decoded(damaged)
    refusal = ""
    try:
        found = open_image(str(path))
    except ImageFileError as error:  # also what Keel does not read, such as 16-bit colours
        refusal = str(error)
    assert path.name in refusal or not refusal
    if not refusal:
        assert expected is not None
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_a_wrong_checksum_of_right_pixels_is_an_error_too(tmp_path):
    path = tmp_path / "damaged.png"
    Image.fromarray(random_images(8, 8)).save(path)
    content = path.read_bytes()
    end = content.rindex(b"IEND") - 8  # of the checksum of the pixel data
    path.write_bytes(content[:end] + bytes([content[end] ^ 1]) + content[end + 1 :])
    np.asarray(Image.open(path))  # Pillow gives the pixels
    with pytest.raises(ImageFileError, match=path.name):
        open_image(str(path))


def test_half_a_file_is_refused_whatever_other_packages_set(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = tmp_path / "half.jpeg"
    content = encoded("jpeg", {})
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageFileError, match=path.name):
        open_image(str(path))


def test_a_changed_byte_of_an_npz_file_is_found(load, tmp_path):
    path = tmp_path / "mine.npz"
    spec = make_npz(path)
    content = path.read_bytes()
    middle = content.index(b"x_train") + 300
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert str(path) in rejected(load, spec)
