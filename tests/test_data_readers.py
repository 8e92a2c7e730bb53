"""Every reader from files made here; CIFAR and SVHN, whose real files are checked by MD5, from
stand-ins for torchvision's classes, as nothing can be downloaded here.
"""

import gzip
import struct
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from data_fixtures import make_folder, make_npz, random_images, rejected, save_image
from PIL import Image

from data import readers
from data.decoding import ImageFileError
from protocol.source_spec import SOURCE_NAMES


def idx_bytes(array):
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_idx(folder, suffix=".gz"):
    """A small MNIST; returns its train images."""
    folder.mkdir(parents=True)
    train = random_images(20, 28, 28)
    for name, array in {
        "train-images-idx3-ubyte": train,
        "train-labels-idx1-ubyte": np.arange(20, dtype=np.uint8) % 10,
        "t10k-images-idx3-ubyte": random_images(10, 28, 28, seed=1),
        "t10k-labels-idx1-ubyte": np.arange(10, dtype=np.uint8),
    }.items():
        content = idx_bytes(array)
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return train


@pytest.mark.end_to_end  # imports scikit-learn
def test_digits_are_scikit_learns_scaled_to_bytes_and_split_by_class(load):
    from sklearn.datasets import load_digits  # in tests alone: spawned processes import this file

    digits = load("digits", image_size=(8, 8))
    assert (len(digits.train.labels), len(digits.test.labels)) == (1438, 359)
    original = load_digits()
    expected = sorted(
        (label, *np.round(image * 255 / 16).astype(int).ravel())
        for label, image in zip(original.target, original.images, strict=True)
    )
    found = sorted(
        (label, *image.ravel())
        for split in (digits.train, digits.test)
        for label, image in zip(split.labels, split.images, strict=True)
    )
    assert found == expected
    share = np.bincount(digits.test.labels) / np.bincount(original.target)
    assert abs(share - 0.2).max() < 0.004
    # as in every version, or a run could not be resumed or compared
    assert digits.test.labels[:15].tolist() == [4, 6, 1, 3, 5, 6, 5, 9, 0, 6, 6, 9, 5, 0, 2]


@pytest.mark.parametrize("place", ["usr", "data"])
def test_fashion_mnist_from_idx_files(load, tmp_path, monkeypatch, place):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(readers, "DEBIAN_DATASETS", tmp_path / "usr")
    train = write_idx(tmp_path / place / "fashion-mnist")
    fashion = load("fashion-mnist")
    assert np.array_equal(fashion.train.images, train[:, None])
    assert fashion.train.labels.tolist() == [*range(10), *range(10)]
    assert fashion.class_names == tuple(FashionMNIST.classes)
    assert fashion.test.images.shape == (10, 1, 28, 28)


def test_mnist_from_what_torchvision_keeps(load, tmp_path):
    train = write_idx(tmp_path / "data" / "MNIST" / "raw", suffix="")
    mnist = load("mnist")
    assert np.array_equal(mnist.train.images[:, 0], train)
    assert mnist.class_names == tuple("0123456789")


class Downloadable:
    """A stand-in for a torchvision data set: there once it was downloaded to `root`."""

    downloads = 0

    def __init__(self, root, which, download=False):
        marker = Path(root) / "published" / "files"
        if download and not marker.exists():
            type(self).downloads += 1
            marker.parent.mkdir()
            marker.touch()
        if not marker.exists():
            raise RuntimeError("Dataset not found or corrupted.")
        is_train = which in (True, "train")
        self.data, numbers = random_images(4, 32, 32, 3, seed=is_train), [1, 0, 1, 1]
        self.targets = numbers if is_train else numbers[::-1]
        self.classes = ["cat", "dog"]


def test_torchvision_sources_are_downloaded_once(load, tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", Downloadable)
    monkeypatch.setattr(Downloadable, "downloads", 0)
    source = load("cifar10")
    for split, is_train in ((source.train, True), (source.test, False)):
        pixels = random_images(4, 32, 32, 3, seed=is_train)
        assert np.array_equal(split.images, pixels.transpose(0, 3, 1, 2))
    assert source.train.labels.tolist() == [1, 0, 1, 1]
    assert source.test.labels.tolist() == [1, 1, 0, 1]
    assert source.class_names == ("cat", "dog")
    load("cifar10", channels=1)
    assert Downloadable.downloads == 1
    assert [f.name for f in (tmp_path / "data").iterdir()] == ["published"]


@pytest.mark.parametrize(
    ("spec", "dataset", "files"),
    [
        ("cifar100", "CIFAR100", "cifar-100-python"),
        ("mnist", "MNIST", "mnist/*-ubyte.gz"),
    ],
)
def test_a_failed_download_says_where_files_may_be_put(
    load, tmp_path, monkeypatch, spec, dataset, files
):
    def unreachable(root, which, download):
        if download:
            raise urllib.error.URLError("no\nroute")
        raise RuntimeError("Dataset not found")

    monkeypatch.setattr(f"torchvision.datasets.{dataset}", unreachable)
    with pytest.raises(FileNotFoundError) as refusal:
        load(spec)
    message = str(refusal.value)
    assert f"{tmp_path}/data/{files}" in message
    assert "\n" not in message
    assert list((tmp_path / "data").iterdir()) == []
    assert not (tmp_path / "cache").exists()


def make_tiny_imagenet(data_dir):
    """The published layout with two classes; returns the train images of the first, n01."""
    root = data_dir / "tiny-imagenet-200"
    first = random_images(3, 64, 64, 3)
    for wnid, images in {"n02": random_images(2, 64, 64), "n01": first}.items():
        for i, pixels in enumerate(images):
            save_image(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels)
        (root / "train" / wnid / f"{wnid}_boxes.txt").touch()
    for i in range(3):
        save_image(root / "val" / "images" / f"val_{i}.JPEG", random_images(64, 64, 3, seed=i))
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius\n")
    rows = [
        f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9\n" for i, wnid in ((2, "n02"), (0, "n01"), (1, "n02"))
    ]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    return root


def test_tiny_imagenet_as_published(load, tmp_path, caplog):
    root = make_tiny_imagenet(tmp_path / "data")
    tiny = load("tiny-imagenet")
    assert caplog.messages == []  # each of its 200 folders has a file of boxes
    assert tiny.class_names == ("goldfish", "n02")  # which words.txt does not have
    assert tiny.image_shape == (3, 64, 64)
    assert tiny.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert tiny.test.labels.tolist() == [1, 0, 1]
    decoded = np.asarray(Image.open(root / "train" / "n01" / "images" / "n01_2.JPEG"))
    assert np.array_equal(tiny.train.images[2], decoded.transpose(2, 0, 1))
    grey = np.asarray(Image.open(root / "train" / "n02" / "images" / "n02_0.JPEG"))
    assert np.array_equal(tiny.train.images[3], np.stack([grey] * 3))  # some of its files are grey
    for place, i in enumerate((2, 0, 1)):  # as the annotations name them
        pixels = np.asarray(Image.open(root / "val" / "images" / f"val_{i}.JPEG"))
        assert np.array_equal(tiny.test.images[place], pixels.transpose(2, 0, 1))


def test_folder_of_images(load, tmp_path):
    images = random_images(5, 30, 40, 3)
    spec = make_folder(tmp_path / "mine", images)
    (tmp_path / "mine" / "train" / "bee" / "._1.png").write_bytes(b"what macOS leaves behind")
    for hidden in (".thumbnails", "bee/.thumbnails"):
        save_image(tmp_path / "mine" / "train" / hidden / "0.png", images[0])
    source = load(spec)
    assert source.class_names == ("ant", "bee")
    assert source.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert np.array_equal(source.train.images, images[[0, 2, 4, 1, 3]].transpose(0, 3, 1, 2))
    assert source.name == spec


@pytest.mark.parametrize("shape", [(28, 30), (28, 30, 3), (3, 28, 30), (28, 30, 1)])
def test_npz_in_every_layout(load, tmp_path, shape):
    x = random_images(6, *shape)
    expected = x[..., None] if len(shape) == 2 else x
    expected = expected if shape[0] == 3 else expected.transpose(0, 3, 1, 2)
    source = load(make_npz(tmp_path / "mine.npz", x_train=x, x_test=x[:3]))
    assert np.array_equal(source.train.images, expected)
    assert source.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert source.train.labels.dtype == np.int64
    assert source.class_names == ("0", "1", "2")


@pytest.mark.parametrize("spec", ["imagenet", "folder", "folder:", "digits:/tmp", ""])
def test_an_unknown_source_is_refused_with_the_allowed_names(load, spec):
    assert tuple(readers.READERS) == SOURCE_NAMES
    assert all(name in rejected(load, spec) for name in SOURCE_NAMES)


# --- invalid files ----------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_folder_that_is_not_there(load, tmp_path, missing):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    (tmp_path / "mine" / missing).rename(tmp_path / "gone")
    assert f"{tmp_path}/mine/{missing}" in rejected(load, spec, FileNotFoundError)


def test_idx_files_that_are_missing_or_broken(load, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "DEBIAN_DATASETS", tmp_path / "usr")
    folder = tmp_path / "data" / "fashion-mnist"
    write_idx(folder)
    labels = folder / "train-labels-idx1-ubyte.gz"
    good = labels.read_bytes()
    for damaged in (good[:20], gzip.compress(gzip.decompress(good)[:-1]), gzip.compress(b"")):
        labels.write_bytes(damaged)
        assert labels.name in rejected(load, "fashion-mnist")
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(19, dtype=np.uint8))))
    assert str(folder) in rejected(load, "fashion-mnist")
    labels.unlink()
    assert labels.name in rejected(load, "fashion-mnist", FileNotFoundError)


@pytest.mark.parametrize(
    ("changes", "array"),
    [
        ({"x_train": np.uint8(3)}, "y_train"),
        ({"y_test": None}, "y_test"),
        ({"x_train": np.zeros((6, 28, 28))}, "x_train"),
        ({"x_test": random_images(3, 28)}, "x_test"),
        ({"x_test": random_images(3, 3, 28, 3)}, "x_test"),
        ({"x_test": random_images(0, 28, 28), "y_test": np.zeros(0, dtype=int)}, "test-fraction"),
        ({"classes": np.array(["a", "b"])}, "y_train"),
        ({"classes": np.array(["a", "b", "b"])}, "classes"),
        ({"y_train": np.arange(5)}, "y_train"),
        ({"y_train": np.zeros(6)}, "y_train"),
        ({"y_test": np.array([0, 3, 1])}, "y_test"),
        ({"y_train": np.array([0, 1, -1, 0, 1, 2])}, "y_train"),
        ({"y_train": np.array([None] * 6)}, ""),
    ],
)
def test_invalid_npz_files_are_refused(load, tmp_path, changes, array):
    message = rejected(load, make_npz(tmp_path / "mine.npz", **changes))
    assert f"{tmp_path}/mine.npz" in message
    assert array in message


def test_the_names_of_other_arrays_of_an_npz_file_stay_at_the_site(load, tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, anna_meier=np.zeros(3), x_train=np.zeros(3))
    with pytest.raises(ImageFileError, match="anna_meier") as caught:
        load(f"npz:{path}")
    assert "anna" not in caught.value.nameless
    assert "y_train" in caught.value.nameless
