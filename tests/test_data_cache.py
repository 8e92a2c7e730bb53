"""The cache of decoded sources."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_fixtures import make_folder, make_npz, random_images, rejected, save_image

from data import decoding, sources
from data.sources import load_source


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


FILL_A_DISK = """
import sys
from pathlib import Path
from data.sources import load_source
try:
    load_source(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[2], "cache"))
except OSError as error:
    print(error.strerror, Path(error.filename).name, len(list(Path(sys.argv[2]).glob("cache/*-*"))))
"""


@pytest.mark.parametrize("size", ["2m", "4k"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, size):
    """A write to the memory map of a file for which there is no space kills the process."""
    spec = make_npz(
        tmp_path / "mine.npz",
        x_train=np.ones((6000, 28, 28), np.uint8),
        y_train=np.arange(6000) % 3,
    )
    (disk := tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3" "$4" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    arguments = [str(disk), sys.executable, FILL_A_DISK, spec]
    root = Path(sources.__file__).parent.parent
    if subprocess.run([*command, str(disk), "true"], capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    done = subprocess.run([*command, *arguments], cwd=root, capture_output=True, text=True)
    assert done.stdout == "No space left on device train-images.npy 0\n"


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


@pytest.mark.end_to_end
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
