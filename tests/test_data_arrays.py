"""Arrays, Datasets and own functions as a run's data."""

import re

import numpy as np
import own_fixtures
import pytest
import torch
from run_fixtures import assert_same_run

import keel
from client_app.setup import open_source
from data.arrays import arrays_of, stored
from data.sources import Reading, load_source
from protocol.config import resolve_config
from protocol.options import ConfigError

rng = np.random.default_rng(3)
IMAGES, LABELS = rng.random((60, 2, 30, 36)).astype(np.float32), np.arange(60) % 3
KEYS = {"model": "cnn-fedreco", "num-rounds": 2, "partition": "iid", "threads": 1}
LOAD = """import numpy as np

import keel


def load():
    rng = np.random.default_rng(3)
    images = rng.random((60, 2, 30, 36)).astype(np.float32)
    return keel.Arrays(images, np.arange(60) % 3)
"""


def source_of(data, folder, **reading):
    """The data as a run reads it."""
    return load_source(stored(data, folder), folder, folder / "cache", Reading(**reading))


@pytest.mark.parametrize("shape", [(2, 30, 36), (30, 36, 2), (30, 36), (5, 30, 36), (3, 30, 36)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_images_keep_their_values(tmp_path, shape, kind):
    images = rng.integers(0, 256, (12, *shape)).astype(np.uint8)
    data = images if kind is np.uint8 else images / np.float32(255)
    labels = np.array(["cat", "dog"] * 6)
    source = source_of(keel.Arrays(data, labels, data[:4], labels[:4]), tmp_path)
    expected = images[:, None] if len(shape) == 2 else images
    expected = expected.transpose(0, 3, 1, 2) if shape[-1] == 2 else expected
    assert source.class_names == ("cat", "dog")
    assert np.allclose(source.train.images, expected, atol=1e-4)
    assert source.train.images.dtype == kind
    assert source.train.labels.tolist() == [0, 1] * 6
    assert source.mean == pytest.approx((expected / 255).mean((0, 2, 3)))
    assert source.std == pytest.approx((expected / 255).std((0, 2, 3)))


def test_a_test_set_is_held_out_with_every_class(tmp_path):
    source = source_of(keel.Arrays(IMAGES, LABELS), tmp_path, test_fraction=0.2)
    assert np.bincount(source.test.labels).tolist() == [4, 4, 4]
    with pytest.raises(ConfigError, match="test-fraction"):
        source_of(keel.Arrays(IMAGES, LABELS), tmp_path)


def test_a_dataset_of_torch(tmp_path):
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    assert stored(dataset, tmp_path) == stored(keel.Arrays(IMAGES, LABELS), tmp_path)
    assert stored(keel.Arrays(IMAGES, LABELS[::-1]), tmp_path) != stored(dataset, tmp_path)
    assert len(list(tmp_path.glob("*"))) == 2  # each content once
    pair = arrays_of((dataset, dataset))
    assert np.array_equal(pair.x_test, IMAGES)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        (lambda: keel.Arrays(IMAGES, LABELS[:9]), "y_train has 9 labels"),
        (lambda: keel.Arrays(IMAGES, LABELS, classes=["a", "b"]), "y_train has the label 2"),
        (lambda: keel.Arrays(IMAGES, -LABELS), "y_train has the label -2"),
        (lambda: keel.Arrays(IMAGES, LABELS, IMAGES), "x_test and y_test"),
        (lambda: keel.Arrays(IMAGES, LABELS, IMAGES[:, :1], LABELS), "x_test"),
        (lambda: keel.Arrays(IMAGES[0, 0], LABELS), "x_train is float32 [30, 36]"),
        (lambda: keel.Arrays(IMAGES * np.nan, LABELS), "x_train has values"),
        (lambda: arrays_of(3), "int"),
        (lambda: arrays_of((IMAGES, LABELS)), "ndarray and ndarray"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arrays, named):
    with pytest.raises(ConfigError) as refused:
        arrays()
    assert refused.value.key == "source"
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.end_to_end
def test_arrays_and_a_function_that_returns_them_have_the_same_bits(tmp_path, no_pictures):
    keys = KEYS | {"output-dir": str(tmp_path / "runs"), "test-fraction": 0.2}
    mine = own_fixtures.file(tmp_path, LOAD)
    config = resolve_config(keys | {"source": f"{mine}:load"})
    assert config.flat["source"] == "mine.py:load"
    assert len(open_source(config).train.labels) == 48
    runs = [
        keel.run(keys, data=keel.Arrays(IMAGES, LABELS), clients=2, quiet=True),
        keel.run(keys, data=f"{mine}:load", clients=2, quiet=True),
        keel.run(keys, data=own_fixtures.cell(LOAD, "load"), clients=2, quiet=True),
    ]
    for run in runs[1:]:
        assert_same_run(run.directory, runs[0].directory)
    mine.unlink()
    more = keel.run(keys | {"keep-state": True}, data=keel.Arrays(IMAGES, LABELS), clients=2)
    resumed = keel.run(resume=more.directory, num_rounds=3, quiet=True)
    assert resumed.summary["rounds"] == 3
    guess = runs[0].model().predict(IMAGES)
    assert guess == runs[0].model().predict(IMAGES.transpose(0, 2, 3, 1))
    assert {*guess} <= {"0", "1", "2"}
    part = runs[0].client_data("client-0000")
    assert all(min(np.abs(IMAGES - x).max(axis=(1, 2, 3))) < 1e-5 for x in part.train.images)
    with pytest.raises(ValueError, match="5 channels"):
        runs[0].model().predict(rng.random((1, 5, 30, 36)))
    assert re.fullmatch(r"npz:.*/arrays-\w{16}\.npz", resumed.config["source"])


def test_data_and_source_exclude_each_other():
    with pytest.raises(ConfigError) as refused:
        keel.run(data="digits", source="digits")
    assert refused.value.key == "source"
