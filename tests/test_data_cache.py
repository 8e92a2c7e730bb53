"""The cache of decoded sources."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from data_fixtures import make_folder, random_images, rejected, save_image

from data import decoding, sources


def entries(tmp_path):
    return sorted(about.parent.name for about in (tmp_path / "cache").glob("*/about.json"))


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


def test_decoded_images_are_for_their_owner_alone(load, tmp_path):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30, 3))
    os.umask(0)
    load(spec)
    made = list((tmp_path / "cache").rglob("*"))
    assert not any(path.stat().st_mode & 0o077 for path in made)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("change", ["new file", "other pixels", "renamed"])
def test_a_changed_folder_is_decoded_again(load, tmp_path, change, split):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    load(spec)
    [before] = entries(tmp_path)
    file = tmp_path / "mine" / split / "ant" / "0.png"
    if change == "new file":
        save_image(file.with_name("new.png"), random_images(30, 30, seed=9))
    elif change == "other pixels":
        times = file.stat()
        save_image(file, np.zeros((30, 30), dtype=np.uint8))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        file.rename(file.with_name("9.png"))
    changed = getattr(load(spec), split)
    assert len(changed.labels) == (3 if change == "new file" else 2)
    assert (changed.images[0] == 0).all() == (change == "other pixels")
    assert before in entries(tmp_path)  # another process may use it
    assert len(entries(tmp_path)) == 2


def test_a_full_disk_is_an_error_that_names_the_file(load, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"train-images\.npy"):
        load(make_folder(tmp_path / "mine", random_images(2, 30, 30)))
    assert not list((tmp_path / "cache").glob("*-*"))


@pytest.mark.parametrize("name", ["about.json", "train-images.npy", "test-labels.npy"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_entry_is_named(load, tmp_path, name, is_there):
    spec = make_folder(tmp_path / "mine", random_images(2, 30, 30))
    load(spec)
    entry = tmp_path / "cache" / entries(tmp_path)[0]
    (entry / name).unlink()
    if is_there:
        (entry / name).touch()
    assert str(entry) in rejected(load, spec)


def test_two_loads_at_once_share_one_entry(load, tmp_path, monkeypatch):
    """As in two processes: each writes a whole entry before either is put in place."""
    spec = make_folder(tmp_path / "mine", random_images(4, 30, 30, 3))
    barrier, write_entry = threading.Barrier(2), sources._write_entry

    def write_at_once(*args, **kwargs):
        write_entry(*args, **kwargs)
        barrier.wait(60)

    monkeypatch.setattr(sources, "_write_entry", write_at_once)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(load, [spec, spec])
    assert np.array_equal(first.train.images, second.train.images)
    assert first.mean == second.mean
    assert len(entries(tmp_path)) == 1
