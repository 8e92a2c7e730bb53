"""Decoding: sizes, channels, mean and deviation, unreadable images."""

import zlib

import numpy as np
import pytest
from data_fixtures import make_folder, make_npz, random_images, rejected, save_image
from PIL import ExifTags, Image


def test_resizing_is_bilinear_and_antialiased(load, tmp_path):
    import torch

    smooth = np.add.outer(np.arange(60), np.arange(48))[..., None] * [2, 1, 0] + [0, 9, 80]
    noise = random_images(60, 48, 3) // 8
    image = (smooth + noise).astype(np.uint8)
    source = load(make_folder(tmp_path / "mine", [image, image]), image_size=(28, 28))
    as_tensor = torch.from_numpy(image).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(as_tensor, (28, 28), mode="bilinear", antialias=True)
    assert abs(source.train.images[0] - expected[0].numpy()).max() <= 1.1  # Pillow rounds twice


def test_images_of_several_sizes_need_an_image_size(load, tmp_path):
    spec = make_folder(tmp_path / "mine", [random_images(30, 40), random_images(32, 28)])
    message = rejected(load, spec)
    assert all(word in message for word in ("ant/0.png", "bee/1.png", "image-size"))
    assert load(spec, image_size=(32, 32)).image_shape == (1, 32, 32)


def test_grey_and_colour_become_each_other(load, tmp_path):
    colour, grey = random_images(30, 30, 3), random_images(30, 30)
    spec = make_folder(tmp_path / "mine", [grey, colour])
    both = load(spec)  # colour anywhere means 3 channels
    assert np.array_equal(both.train.images[0], np.stack([grey] * 3))
    assert np.array_equal(both.train.images[1], colour.transpose(2, 0, 1))
    one = load(spec, channels=1)
    assert np.array_equal(one.train.images[0, 0], grey)
    luma = colour @ [0.299, 0.587, 0.114]  # ITU-R 601
    assert abs(one.train.images[1, 0] - luma).max() <= 1
    assert load(make_folder(tmp_path / "grey", [grey, grey])).image_shape == (1, 30, 30)


def test_mean_and_std_are_of_the_train_split(load, tmp_path):
    x_train = random_images(6, 28, 30, 3) // np.array([1, 2, 4], dtype=np.uint8)
    x_train[..., 2] = 51
    source = load(make_npz(tmp_path / "mine.npz", x_train=x_train))
    pixels = x_train.reshape(-1, 3) / 255
    assert source.mean == pytest.approx(pixels.mean(0), rel=1e-12)
    assert source.std[:2] == pytest.approx(pixels.std(0)[:2], rel=1e-12)
    assert source.mean[2] == pytest.approx(0.2)
    assert source.std[2] == 1.0  # never varies, and is divided by


def test_an_unreadable_image_is_named(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30))
    file = tmp_path / "mine" / "train" / "bee" / "3.png"
    file.write_bytes(b"no image")
    assert str(file) in rejected(load, spec)


def test_images_are_turned_as_their_exif_data_says(load, tmp_path):
    """Cameras store the image as the sensor saw it. Damaged EXIF data may be about that."""
    images = random_images(2, 30, 40)
    spec = make_folder(tmp_path / "mine", images)
    before = load(spec).train.images
    for number, orientation in enumerate((6, 3)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        [file] = (tmp_path / "mine" / "train").glob(f"*/{number}.png")
        back = {6: Image.Transpose.ROTATE_90, 3: Image.Transpose.ROTATE_180}[orientation]
        Image.fromarray(images[number]).transpose(back).save(file, exif=exif)
    assert np.array_equal(load(spec).train.images, before)
    [file] = (tmp_path / "mine" / "train").glob("*/0.png")
    Image.fromarray(images[0]).save(file, exif=b"Exif\0\0damaged")
    assert str(file) in rejected(load, spec)


def deep_images(num, low=300, high=4095):
    return np.random.default_rng(3).integers(low, high + 1, (num, 30, 34)).astype(np.uint16)


@pytest.mark.parametrize("ending", ["png", "tif", "npz"])
def test_images_of_16_bits_are_mapped_by_their_window(load, tmp_path, ending):
    """By default the smallest value of the training images is 0, the largest 255."""
    train, test = deep_images(4), deep_images(4, 0, 65535)
    train.flat[:2] = 300, 4095
    if ending == "npz":
        changes = {"x_train": train, "y_train": np.arange(4) % 2}
        spec = make_npz(tmp_path / "m.npz", **changes, x_test=test, y_test=np.arange(4) % 2)
    else:
        for split, images in (("train", train), ("test", test)):
            for i, pixels in enumerate(images):
                save_image(tmp_path / "mine" / split / "ab"[i % 2] / f"{i}.{ending}", pixels)
        spec = f"folder:{tmp_path / 'mine'}"
    source, order = load(spec), [0, 1, 2, 3] if ending == "npz" else [0, 2, 1, 3]
    assert source.window == (300, 4095)
    for images, split in ((train, source.train), (test, source.test)):
        expected = np.rint((images.astype(float) - 300) / 3795 * 255).clip(0, 255)
        assert np.array_equal(split.images[:, 0], expected[order])
    fixed = load(spec, window=(0, 65535)).test.images[:, 0]
    assert np.array_equal(fixed, np.rint(test[order] / 257))


def test_images_of_two_depths_and_deep_colours_are_refused(load, tmp_path):
    spec = make_folder(tmp_path / "mine", [random_images(30, 30), random_images(30, 30)])
    assert "ant/0.png" in rejected(load, spec, window=(0, 255))
    deep = tmp_path / "mine/test/bee/1.png"
    save_image(deep, deep_images(1)[0])
    assert str(deep) in rejected(load, spec)
    assert "0.png" in rejected(load, make_folder(tmp_path / "deep", deep_images(2)), window=())
    Image.new("RGB", (30, 30)).save(deep)
    content = bytearray(deep.read_bytes())
    content[24] = 16  # bits a channel, in the header
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    deep.write_bytes(content)
    assert str(deep) in rejected(load, spec)
