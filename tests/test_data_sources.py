"""Every source from files made here; CIFAR and SVHN, whose real files are checked by MD5, from
stand-ins for torchvision's classes, as nothing can be downloaded here."""

import gzip
import multiprocessing
import os
import struct
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import decoding, readers, sources
from data.sources import (
    SourceInfo,
    list_sources,
    load_source,
    source_info,
    source_names,
)
from protocol.source_spec import SOURCE_NAMES


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


@pytest.fixture
def load(tmp_path):
    """load_source with its folders below tmp_path."""

    def load(spec, **recipe):
        return load_source(spec, tmp_path / "data", tmp_path / "cache", **recipe)

    return load


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


# --- sources ----------------------------------------------------------------------------------


def test_digits_are_scikit_learns_scaled_to_bytes_and_split_by_class(load):
    from sklearn.datasets import load_digits  # in tests alone: spawned processes import this file

    digits = load("digits", image_size=8)
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


def test_a_source_of_small_images_becomes_32_pixels(load):
    digits = load("digits")
    assert digits.image_shape == (1, 32, 32)
    assert digits.num_classes == 10
    assert digits.name == "digits"


@pytest.mark.parametrize("debian", [True, False])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_fashion_mnist_from_idx_files(load, tmp_path, monkeypatch, debian, suffix):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(readers, "DEBIAN_DATASETS", tmp_path / "usr")
    train = write_idx(tmp_path / ("usr" if debian else "data") / "fashion-mnist", suffix)
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


class DownloadableSVHN(Downloadable):
    def __init__(self, root, which, download=False):
        super().__init__(root, which, download)
        self.data, self.labels = self.data.transpose(0, 3, 1, 2), np.array(self.targets)


@pytest.mark.parametrize(
    ("spec", "dataset", "stand_in"),
    [
        ("cifar10", "CIFAR10", Downloadable),
        ("cifar100", "CIFAR100", Downloadable),
        ("svhn", "SVHN", DownloadableSVHN),
    ],
)
def test_torchvision_sources_are_downloaded_once(
    load, tmp_path, monkeypatch, spec, dataset, stand_in
):
    monkeypatch.setattr(f"torchvision.datasets.{dataset}", stand_in)
    monkeypatch.setattr(stand_in, "downloads", 0)
    source = load(spec)
    for split, is_train in ((source.train, True), (source.test, False)):
        pixels = random_images(4, 32, 32, 3, seed=is_train)
        assert np.array_equal(split.images, pixels.transpose(0, 3, 1, 2))
    assert source.train.labels.tolist() == [1, 0, 1, 1]
    assert source.test.labels.tolist() == [1, 1, 0, 1]
    assert source.class_names == (("0", *"123456789") if spec == "svhn" else ("cat", "dog"))
    load(spec, channels=1)
    assert stand_in.downloads == 1
    assert [f.name for f in (tmp_path / "data").iterdir()] == ["published"]


@pytest.mark.parametrize(
    ("spec", "dataset", "files"),
    [
        ("cifar10", "CIFAR10", "cifar-10-batches-py"),
        ("cifar100", "CIFAR100", "cifar-100-python"),
        ("svhn", "SVHN", "{train,test}_32x32.mat"),
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
    assert f"source = {spec!r}: {tmp_path}/data/{files} is missing or incomplete" in message
    assert "URLError" in message
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
    (root / "words.txt").write_text("n00\tentity\nn01\tgoldfish, Carassius\nn02\tbell\n")
    rows = [f"val_{i}.JPEG\t{wnid}\t0\t0\t9\t9\n" for i, wnid in enumerate(["n02", "n01", "n02"])]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    return root


def test_tiny_imagenet_as_published(load, tmp_path):
    root = make_tiny_imagenet(tmp_path / "data")
    tiny = load("tiny-imagenet")
    assert tiny.class_names == ("goldfish", "bell")
    assert tiny.image_shape == (3, 64, 64)
    assert tiny.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert tiny.test.labels.tolist() == [1, 0, 1]
    decoded = np.asarray(Image.open(root / "train" / "n01" / "images" / "n01_2.JPEG"))
    assert np.array_equal(tiny.train.images[2], decoded.transpose(2, 0, 1))
    grey = np.asarray(Image.open(root / "train" / "n02" / "images" / "n02_0.JPEG"))
    assert np.array_equal(tiny.train.images[3], np.stack([grey] * 3))  # some of its files are grey


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


def test_a_class_may_be_missing_from_test(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30))
    for file in (tmp_path / "mine" / "test" / "ant").iterdir():
        file.unlink()
    (tmp_path / "mine" / "test" / "ant").rmdir()
    assert load(spec).test.labels.tolist() == [1, 1]


def test_home_is_expanded(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "mine", random_images(2, 30, 30))
    assert load("folder:~/mine").name == f"folder:{tmp_path}/mine"


@pytest.mark.parametrize("axes", ["NHW", "NHWC", "NCHW", "NHW1"])
def test_npz_in_every_layout(load, tmp_path, axes):
    if axes == "NHW":
        x, expected = (a := random_images(6, 28, 30)), a[:, None]
    elif axes == "NHWC":
        x, expected = (a := random_images(6, 28, 30, 3)), a.transpose(0, 3, 1, 2)
    elif axes == "NCHW":
        x, expected = (a := random_images(6, 3, 28, 30)), a
    else:
        x, expected = (a := random_images(6, 28, 30, 1)), a.transpose(0, 3, 1, 2)
    source = load(make_npz(tmp_path / "mine.npz", x_train=x, x_test=x[:3]))
    assert np.array_equal(source.train.images, expected)
    assert source.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert source.train.labels.dtype == np.int64
    assert source.class_names == ("0", "1", "2")


# --- size, channels, mean and deviation -------------------------------------------------------


def test_resizing_is_bilinear_and_antialiased(load, tmp_path):
    import torch

    smooth = np.add.outer(np.arange(60), np.arange(48))[..., None] * [2, 1, 0] + [0, 9, 80]
    noise = random_images(60, 48, 3) // 8
    image = (smooth + noise).astype(np.uint8)
    source = load(make_folder(tmp_path / "mine", [image, image]), image_size=28)
    as_tensor = torch.from_numpy(image).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(as_tensor, (28, 28), mode="bilinear", antialias=True)
    assert abs(source.train.images[0] - expected[0].numpy()).max() <= 1.1  # Pillow rounds twice


def test_images_of_several_sizes_need_an_image_size(load, tmp_path):
    spec = make_folder(tmp_path / "mine", [random_images(30, 40), random_images(32, 28)])
    with pytest.raises(
        ValueError, match=r"ant/0.png is 40x30 .*bee/1.png is 28x32; set image-size"
    ):
        load(spec)
    assert load(spec, image_size=32).image_shape == (1, 32, 32)


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


# --- the cache --------------------------------------------------------------------------------


def entries(tmp_path):
    return sorted(entry.name for entry in (tmp_path / "cache").iterdir())


def test_the_second_load_reads_no_image(load, tmp_path, monkeypatch):
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30, 3))
    first = load(spec)
    monkeypatch.setattr(decoding.Image, "open", lambda _: pytest.fail("decoded again"))
    second = load(spec)
    for a, b in ((first.train, second.train), (first.test, second.test)):
        assert np.array_equal(a.images, b.images)
        assert np.array_equal(a.labels, b.labels)
    assert isinstance(second.train.images, np.memmap)
    assert not second.train.images.flags.writeable
    assert (second.mean, second.std, second.class_names, second.name) == (
        first.mean,
        first.std,
        first.class_names,
        first.name,
    )


def test_each_size_and_number_of_channels_is_cached_on_its_own(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30, 3))
    for recipe in ({}, {"image_size": 28}, {"channels": 1}, {"image_size": 28}):
        load(spec, **recipe)
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize("change", ["new file", "other size", "other time", "renamed"])
def test_a_changed_folder_is_decoded_again_and_its_old_entries_are_removed(load, tmp_path, change):
    other = make_folder(tmp_path / "elsewhere" / "mine", random_images(2, 30, 30))
    load(other)
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    load(spec)
    load(spec, channels=3)
    before = entries(tmp_path)
    file = tmp_path / "mine" / "train" / "ant" / "0.png"
    if change == "new file":
        save_image(file.with_name("new.png"), random_images(30, 30, seed=9))
    elif change == "other size":
        times = file.stat()
        save_image(file, np.zeros((30, 30), dtype=np.uint8))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "other time":
        os.utime(file, ns=(0, 0))
    else:
        file.rename(file.with_name("9.png"))
    source = load(spec)
    assert len(source.train.labels) == (3 if change == "new file" else 2)
    assert (source.train.images[0] == 0).all() == (change == "other size")
    after = entries(tmp_path)
    assert len(before) == 3
    assert len(after) == 2  # both recipes of the folder as it was are gone
    load(other)
    assert entries(tmp_path) == after


def test_an_entry_of_an_earlier_version_is_removed(load, tmp_path, monkeypatch):
    spec = make_npz(tmp_path / "mine.npz")
    monkeypatch.setattr(sources, "CACHE_VERSION", 0)
    load(spec)
    (earlier,) = entries(tmp_path)
    monkeypatch.undo()
    load(spec)
    (now,) = entries(tmp_path)
    assert now != earlier


def test_a_failed_decoding_leaves_no_entry(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30))
    (tmp_path / "mine" / "test" / "bee" / "3.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"test/bee/3\.png: not a readable image"):
        load(spec)
    assert entries(tmp_path) == []


def load_when_both_are_reading(spec, root, barrier, results):
    """In a process of its own: hold the reading until the other process reads as well."""
    write_entry = sources._write_entry

    def write_at_once(*args, **kwargs):
        barrier.wait(60)
        write_entry(*args, **kwargs)
        barrier.wait(60)  # both entries are complete before either is put in place

    sources._write_entry = write_at_once
    source = load_source(spec, root / "data", root / "cache")
    results.put((source.train.images.tobytes(), source.test.labels.tolist(), source.mean))


def test_two_processes_at_once_share_one_entry(tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30, 3))
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    processes = [
        spawn.Process(target=load_when_both_are_reading, args=(spec, tmp_path, barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    first, second = results.get(timeout=90), results.get(timeout=90)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert first == second
    assert len(entries(tmp_path)) == 1


# --- sizes before decoding ------------------------------------------------------------------------


def test_every_source_name_has_a_reader():
    assert source_names() == SOURCE_NAMES == tuple(info.name for info in list_sources())


def test_the_published_sizes_are_those_of_the_decoded_digits(load, tmp_path):
    folders = (tmp_path / "data", tmp_path / "cache")
    for recipe in ({}, {"image_size": 40}, {"channels": 3}):
        before = source_info("digits", *folders, **recipe)
        digits = load("digits", **recipe)
        assert before == source_info("digits", *folders, **recipe)
        assert before.image_shape == digits.image_shape
        assert (before.num_train, before.num_test, before.num_classes) == (1438, 359, 10)


@pytest.mark.parametrize("kind", ["colour", "grey", "tiny"])
def test_the_sizes_of_the_users_files_are_known_before_they_are_decoded(
    load, tmp_path, monkeypatch, kind
):
    images = {
        "colour": [random_images(30, 40), random_images(30, 40, 3)],
        "grey": random_images(3, 30, 40),
        "tiny": random_images(3, 8, 8, 3),
    }[kind]
    spec = make_folder(tmp_path / "mine", images)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "decode", lambda *_: pytest.fail("decoded"))
        info = source_info(spec, tmp_path / "data", tmp_path / "cache")
    source = load(spec)
    assert info == SourceInfo(
        spec, info.description, len(images), len(images), 2, source.image_shape
    )
    assert info == source_info(spec, tmp_path / "data", tmp_path / "cache")


def test_reading_and_describing_sources_does_not_import_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from data.sources import load_source, source_info; "
        "import data.partitions; "
        "folders = Path(sys.argv[1]), Path(sys.argv[2]); "
        "source_info('cifar10', *folders); load_source('digits', *folders); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data"), str(tmp_path / "cache")]
    root = Path(sources.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- what is refused --------------------------------------------------------------------------


def rejected(load, spec, error=ValueError, **recipe):
    """The message, one line, with which `spec` is refused."""
    with pytest.raises(error) as refusal:
        load(spec, **recipe)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("spec", ["imagenet", "folder", "folder:", "digits:/tmp", ""])
def test_an_unknown_source_is_refused_with_the_allowed_names(load, spec):
    message = rejected(load, spec)
    assert message.startswith(f"source = {spec!r}: expected one of digits, fashion-mnist, ")
    assert all(name in message for name in source_names())


@pytest.mark.parametrize("recipe", [{"image_size": -1}, {"channels": 2}])
def test_impossible_recipes(load, recipe):
    ((name, value),) = recipe.items()
    assert f"{name.replace('_', '-')} = {value}" in rejected(load, "digits", **recipe)


def test_a_relative_path(load, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = rejected(load, "folder:mine")
    assert "working directory" in message
    assert f"it is folder:{tmp_path}/mine" in message


@pytest.mark.parametrize("missing", ["", "train", "test"])
def test_a_folder_that_is_not_there(load, tmp_path, missing):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    (tmp_path / "mine" / missing).rename(tmp_path / "gone")
    message = rejected(load, spec, FileNotFoundError)
    assert f"{tmp_path}/mine/{missing or 'train'} does not exist" in message
    assert "train/<class>/ and test/<class>/" in message


def test_an_empty_folder(load, tmp_path):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "test").mkdir()
    assert "mine/train is empty" in rejected(load, f"folder:{tmp_path}/mine")


def test_a_class_without_images(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    (tmp_path / "mine" / "train" / "cat").mkdir()
    (tmp_path / "mine" / "train" / "cat" / "cat.txt").touch()
    message = rejected(load, spec)
    assert "train/cat has no images" in message
    assert ".png" in message


def test_a_class_of_test_that_train_lacks(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    save_image(tmp_path / "mine" / "test" / "cat" / "0.png", random_images(30, 30))
    assert "test/cat: this class is not in train/, which has ant, bee" in rejected(load, spec)


@pytest.mark.parametrize("kind", ["text", "cut short", "empty"])
def test_an_unreadable_image_is_named(load, tmp_path, kind):
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30))
    file = tmp_path / "mine" / "train" / "bee" / "3.png"
    content = {"text": b"no image", "cut short": file.read_bytes()[:200], "empty": b""}[kind]
    file.write_bytes(content)
    assert f"{file}: not a readable image: " in rejected(load, spec)


def test_images_of_16_bits(load, tmp_path):
    spec = make_folder(tmp_path / "mine", np.zeros((2, 30, 30), dtype=np.uint16))
    assert "mode 'I;16'" in rejected(load, spec)


def test_tiny_imagenet_that_is_not_there_or_not_as_published(load, tmp_path):
    assert "the published layout" in rejected(load, "tiny-imagenet", FileNotFoundError)
    annotations = make_tiny_imagenet(tmp_path / "data") / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn77\t0\t0\t9\t9\n")
    assert "val_0.JPEG has class 'n77', which is not in wnids.txt" in rejected(
        load, "tiny-imagenet"
    )
    annotations.write_text("")
    assert "val_annotations.txt is empty" in rejected(load, "tiny-imagenet")


def test_idx_files_that_are_missing_or_broken(load, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "DEBIAN_DATASETS", tmp_path / "usr")
    folder = tmp_path / "data" / "fashion-mnist"
    write_idx(folder)
    labels = folder / "train-labels-idx1-ubyte.gz"
    good = labels.read_bytes()
    labels.write_bytes(good[:20])
    assert "idx1-ubyte.gz: not a readable gzip file" in rejected(load, "fashion-mnist")
    for kept in (-1, 6, 0):
        labels.write_bytes(gzip.compress(gzip.decompress(good)[:kept]))
        assert "truncated" in rejected(load, "fashion-mnist")
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(19, dtype=np.uint8))))
    assert "20 images and 19 labels" in rejected(load, "fashion-mnist")
    labels.unlink()
    message = rejected(load, "fashion-mnist", FileNotFoundError)
    assert message == f"{folder} has no {labels.name} and no {labels.stem}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"y_test": None}, "has no y_test; expected x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((6, 28, 28))}, "x_train is float64 [6, 28, 28]; expected uint8"),
        ({"x_test": random_images(3, 28)}, "x_test is uint8 [3, 28]"),
        ({"x_test": random_images(3, 28, 28, 2)}, "x_test is uint8 [3, 28, 28, 2]"),
        ({"x_test": random_images(3, 3, 28, 3)}, "x_test is uint8 [3, 3, 28, 3]"),
        (
            {"x_test": random_images(0, 28, 28), "y_test": np.zeros(0, dtype=int)},
            "with at least 1 image",
        ),
        ({"y_train": np.arange(5)}, "y_train is int64 [5]; expected integers [6]"),
        ({"y_train": np.zeros((6, 1), dtype=int)}, "y_train is int64 [6, 1]"),
        ({"y_train": np.zeros(6)}, "y_train is float64 [6]"),
        ({"y_test": np.array([0, 3, 1])}, "y_test has the label 3; expected 0 to 2"),
        ({"y_train": np.array([0, 1, -1, 0, 1, 2])}, "y_train has the label -1"),
        ({"y_train": np.array([None] * 6)}, "not a readable npz file: ValueError: Object arrays"),
    ],
)
def test_invalid_npz_files_are_refused(load, tmp_path, changes, problem):
    assert f"{tmp_path}/mine.npz" in (
        message := rejected(load, make_npz(tmp_path / "mine.npz", **changes))
    )
    assert problem in message


@pytest.mark.parametrize("kind", ["npy", "text", "cut short"])
def test_files_that_are_not_npz_are_refused(load, tmp_path, kind):
    path = tmp_path / "mine.npz"
    make_npz(path)
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(b"text" if kind == "text" else path.read_bytes()[:5000])
    assert f"{path}: not a readable npz file" in rejected(load, f"npz:{path}")


def test_an_npz_file_that_is_not_there(load, tmp_path):
    message = rejected(load, f"npz:{tmp_path}/no.npz", FileNotFoundError)
    assert f"{tmp_path}/no.npz does not exist; expected a file with x_train" in message
