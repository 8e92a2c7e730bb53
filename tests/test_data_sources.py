"""Names, sizes and `source` values, before anything is decoded."""

import subprocess
import sys
from pathlib import Path

import pytest
from data_fixtures import make_folder, random_images, rejected

from data import sources
from data.sources import SourceInfo, list_sources, source_info
from protocol.source_spec import SOURCE_NAMES


def test_every_source_name_has_a_reader():
    assert tuple(info.name for info in list_sources()) == SOURCE_NAMES


@pytest.mark.end_to_end  # decodes all digits, three times
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


@pytest.mark.end_to_end
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


def test_home_is_expanded(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "mine", random_images(2, 30, 30))
    assert load("folder:~/mine").name == f"folder:{tmp_path}/mine"


@pytest.mark.parametrize("spec", ["imagenet", "folder", "folder:", "digits:/tmp", ""])
def test_an_unknown_source_is_refused_with_the_allowed_names(load, spec):
    message = rejected(load, spec)
    assert message.startswith(f"source = {spec!r}: expected one of digits, fashion-mnist, ")
    assert all(name in message for name in SOURCE_NAMES)


def test_a_relative_path(load, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = rejected(load, "folder:mine")
    assert "working directory" in message
    assert f"it is folder:{tmp_path}/mine" in message
