"""`group-by`: a patient's images are in train or in test, and at one client; `test-fraction`."""

import csv

import numpy as np
import pytest
from data_fixtures import make_folder, make_npz, random_images, rejected, save_image
from hypothesis import given
from hypothesis import strategies as st

from client_app.setup import client_indices, open_source
from data.decoding import ImageFileError
from data.partitions import group_labels, split_local_test
from protocol.config import resolve_config
from protocol.options import ConfigError
from server_app.simulated_roster import SimulatedRoster


def patients(root, num=30, each=3, test=()):
    """The source of three images a patient in train/, of `test` in test/, with labels.csv."""
    rows = []
    for patient in range(num):
        for n, pixels in enumerate(random_images(each, 30, 30, seed=patient)):
            part, label = ("test" if patient in test else "train"), ("mass", "normal")[patient % 2]
            path = f"{part}/{label}/{patient:02d}_{n}.png"
            save_image(root / path, pixels)
            rows.append({"path": path, "label": label, "patient": f"p{patient:02d}"})
    with (root / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "patient"])
        writer.writeheader()
        writer.writerows(rows)
    return f"folder:{root}"


def assert_of_other_patients(source):
    patient_of = {
        image.tobytes(): patient
        for patient in range(30)
        for image in random_images(3, 30, 30, seed=patient)
    }
    train, test = ({patient_of[i.tobytes()] for i in p.images} for p in (source.train, source.test))
    assert (len(train), len(test)) == (24, 6)
    assert not train & test


KEYS = {"group-by": "patient", "test-fraction": 0.2, "local-test-fraction": 0.25, "min-samples": 1}


@pytest.mark.parametrize("partition", ["iid", "dirichlet-balanced"])
def test_a_patient_is_in_one_part_and_at_one_client(tmp_path, monkeypatch, partition):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    spec = patients(tmp_path / "mine")
    keys = KEYS | {"source": spec, "partition": partition, "model": "cnn-fedreco"}
    config = resolve_config(keys | {"data-fraction": 0.9})
    source = open_source(config)
    groups = source.train.groups
    assert len(source.test.labels) == 18  # of 6 of 30 patients
    assert_of_other_patients(source)
    places = [part for i in range(4) for part in client_indices(config, i, 4)]
    seen = [set(groups[place].tolist()) for place in places]
    assert sum(len(patients) for patients in seen) == len(set.union(*seen)) == 22
    assert all(
        len(place) == 3 * len(patients) for place, patients in zip(places, seen, strict=True)
    )
    assert min(map(len, seen[::2])) > 0
    sizes = [[len(place) for place in client_indices(config, i, 4)] for i in range(4)]
    assert SimulatedRoster(config, source, 4).sizes.tolist() == sizes


def test_a_patient_in_train_and_test_is_named(load, tmp_path):
    spec = patients(tmp_path / "mine", test=(4, 5))
    assert len(load(spec, group_by="patient").test.labels) == 6
    labels = tmp_path / "mine/labels.csv"
    labels.write_text(labels.read_text().replace("p04", "p07"))
    with pytest.raises(ImageFileError, match="p07") as refusal:
        load(spec, group_by="patient")
    assert "p07" not in refusal.value.nameless


def test_what_is_wrong_with_labels_csv_is_named(load, tmp_path):
    spec = patients(tmp_path / "mine", test=(4, 5))
    labels = tmp_path / "mine/labels.csv"
    assert "'case'" in rejected(load, spec, group_by="case")
    text = labels.read_text()
    labels.write_text(text.replace("train/normal/03_1.png", "train/normal/x.png"))
    assert "normal/03_1.png" in rejected(load, spec, group_by="patient")
    labels.write_text(text + "./train/mass/00_0.png,mass,p07\n")
    assert "train/mass/00_0.png" in rejected(load, spec, group_by="patient")
    labels.write_bytes(text.replace("p07", "p\xe97").encode("latin-1"))
    assert "labels.csv" in rejected(load, spec, group_by="patient")
    labels.unlink()
    assert "labels.csv" in rejected(load, spec, FileNotFoundError, group_by="patient")
    assert "group-by" in rejected(load, "digits", group_by="patient")


def test_a_column_that_is_not_used_is_noted(load, tmp_path):
    spec = patients(tmp_path / "mine", test=(4, 5))
    [note] = load(spec).notes
    assert "labels.csv" in note
    assert "patient" in note
    assert load(spec, group_by="patient").notes == ()


def test_groups_of_an_npz_file(load, tmp_path):
    groups = {"patient_train": np.array([7, 7, 8, 8, 9, 9]), "patient_test": np.array([1, 2, 3])}
    source = load(make_npz(tmp_path / "mine.npz", **groups), group_by="patient")
    assert source.train.groups.tolist() == [0, 0, 1, 1, 2, 2]
    groups["patient_test"][0] = 9
    assert "'9'" in rejected(load, make_npz(tmp_path / "mine.npz", **groups), group_by="patient")
    spec = make_npz(tmp_path / "mine.npz", patient_train=np.arange(5))
    assert "patient_train" in rejected(load, spec, group_by="patient")


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_source_without_test_images_needs_a_test_fraction(load, tmp_path, is_empty):
    spec = make_folder(root := tmp_path / "mine", random_images(20, 30, 30))
    assert "test-fraction" in rejected(load, spec, ConfigError, test_fraction=0.2)
    for file in (root / "test").rglob("*.png"):
        file.unlink()
    if not is_empty:
        for name in ("ant", "bee", ""):
            (root / "test" / name).rmdir()
        assert "test" in rejected(load, spec, FileNotFoundError)
    else:
        assert "test-fraction" in rejected(load, spec, ConfigError)
    source = load(spec, test_fraction=0.2)
    assert np.bincount(source.train.labels).tolist() == [8, 8]
    assert np.bincount(source.test.labels).tolist() == [2, 2]
    both = {image.tobytes() for part in (source.train, source.test) for image in part.images}
    assert len(both) == 20


def test_an_npz_file_without_test_arrays(load, tmp_path):
    spec = make_npz(tmp_path / "mine.npz", x_test=None, y_test=None)
    assert "test-fraction" in rejected(load, spec, ConfigError)
    assert len(load(spec, test_fraction=0.5).test.labels) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=2), st.integers(0, 99))
def test_groups_are_split_like_samples_with_their_most_frequent_label(pairs, seed):
    labels, groups = np.array(pairs).T
    _, groups = np.unique(groups, return_inverse=True)
    expected = [
        max(range(4), key=lambda k: (((labels == k) & (groups == g)).sum(), -k))
        for g in range(groups.max() + 1)
    ]
    assert group_labels(labels, groups).tolist() == expected
    train, test = split_local_test(np.arange(len(labels)), labels, 0.3, seed, groups)
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert not set(groups[train]) & set(groups[test])
    of_groups = split_local_test(np.arange(len(expected)), np.array(expected), 0.3, seed)
    assert set(groups[test]) == set(of_groups[1])
