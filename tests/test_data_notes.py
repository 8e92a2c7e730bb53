"""What is unusual about a data set, but allowed, is counted and named with an example."""

import json
import shutil

import numpy as np
import pytest
from data_fixtures import make_folder, make_npz, random_images, save_image
from PIL import Image
from run_fixtures import summary_of


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))


def test_the_same_image_in_train_and_test_and_in_two_classes(load, tmp_path):
    root = tmp_path / "mine"
    for split, seed in (("train", 1), ("test", 2)):
        for i, pixels in enumerate(random_images(6, 30, 30, seed=seed)):
            save_image(root / split / ("ant", "bee")[i % 2] / f"{i}.png", pixels)
    for name in ("1.png", "3.png"):
        shutil.copy(root / "train/bee" / name, root / f"test/bee/copy-{name}")
    Image.open(root / "train/bee/5.png").save(root / "train/ant/same.bmp")  # other bytes
    both, several = load(f"folder:{root}").notes
    assert "2 test images" in both
    assert str(root / "test/bee/copy-1.png") in both
    assert str(root / "train/bee/1.png") in both
    assert "1 image " in several
    assert str(root / "train/ant/same.bmp") in several
    assert str(root / "train/bee/5.png") in several


def test_blank_images_are_counted_and_are_no_duplicates(load, tmp_path):
    x = random_images(6, 28, 30, 3, seed=5)
    x[1], x[2], x[3] = 255, 255, [10, 20, 30]
    [note] = load(make_npz(tmp_path / "mine.npz", x_train=x)).notes
    assert "3 of 9" in note
    assert "x_train[1]" in note


def test_folders_of_systems_are_ignored_and_what_is_unusual_is_counted(load, tmp_path):
    """Thumbnails and deleted files are no pictures; masks may be, so they are named."""
    images = random_images(6, 30, 30)
    spec = make_folder(root := tmp_path / "mine", images)
    for system in (
        "train/@eaDir", "train/__MACOSX/ant", "train/bee/@eaDir/1.png", "train/bee/.thumbnails",
        "test/#recycle", "train/ant/$RECYCLE.BIN", "train/bee/@__thumb",
    ):  # fmt: skip
        save_image(root / system / "thumb.png", images[0])
    (root / "train/ant/Thumbs.db").write_bytes(b"thumbnails")
    (root / "train/ant/notes.txt").write_text("no image")
    save_image(root / "train/loose.png", random_images(30, 30, seed=5))
    for name in ("masks/1.png", "masks/deep/3.png", "old/5.png"):
        save_image(root / "train/bee" / name, random_images(30, 30, seed=9 + len(name)))
    source = load(spec)
    assert source.class_names == ("ant", "bee")
    assert np.bincount(source.train.labels).tolist() == [3, 6]
    [counts] = [note for note in source.notes if "subfolders" in note]
    assert str(root / "train/bee") in counts
    assert "3 of 6" in counts
    assert "masks (2), old (1)" in counts
    loose, others = [note for note in source.notes if "not read" in note]
    assert "loose.png" in loose
    assert "notes.txt" in others


def test_a_run_logs_the_notes_and_repeats_them_in_its_summary(run, tmp_path):
    x = random_images(20, 30, 30)
    x[19] = x[0]
    y = np.arange(20) % 2
    spec = make_npz(tmp_path / "m.npz", x_train=x, y_train=y, x_test=x[2:8], y_test=y[2:8])
    for _ in range(2):  # decoded, then cached
        folder = run({"source": spec, "partition": "iid", "num-rounds": 1, "data-fraction": 1.0}, 2)
        both, several, *_ = summary_of(folder)["warnings"]
        assert "6 test images" in both
        assert "x_train[19]" in several
        log = (folder / "run.log").read_text()
        assert both in log
        assert several in log
        assert "labels and training images" in log
        assert "0 (10), 1 (10)" in log


def test_the_listing_of_a_source_has_its_notes_and_names(home, tmp_path, printed):
    x = random_images(6, 28, 30, 3, seed=5)
    x[2] = 9
    spec = make_npz(tmp_path / "mine.npz", x_train=x)
    about = json.loads(printed("datasets", spec, "--classes", "ant,bee,cat", "--json"))
    [note] = about["warnings"]
    assert "x_train[2]" in note
    assert about["classes"][1] == {"class": "bee", "label": "1", "train": 2, "test": 1}
    assert "x_train[2]" in printed("datasets", spec)
