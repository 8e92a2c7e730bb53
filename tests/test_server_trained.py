"""Models of finished runs: images become probabilities as in training, and nothing is guessed."""

import numpy as np
import pytest
import torch
from data_fixtures import make_folder, random_images
from PIL import Image
from run_fixtures import history_of, summary_of

import keel
from client_app.state import StateFolder
from server_app.run_directory import read_arrays, save_arrays
from server_app.summary import newest_version
from server_app.trained import IMAGES_AT_A_TIME, check_rounds, grey, load_model


@pytest.fixture
def trained(run):
    return run({"num-rounds": 1, "local-epochs": 0})


def test_a_file_that_only_looks_like_a_version_is_none(tmp_path):
    for name in ("round-00002-0123456789abcdef", "round-3", "round-x-0123456789abcdef"):
        (tmp_path / f"{name}.safetensors").touch()
    assert newest_version(tmp_path, last_round=9).name == "round-00002-0123456789abcdef.safetensors"


def test_colours_become_grey_as_pillow_makes_them():
    colours = random_images(50, 40, 3, seed=3)
    x = torch.from_numpy(colours).permute(2, 0, 1)[None].float()
    expected = np.asarray(Image.fromarray(colours).convert("L"))
    assert np.array_equal(grey(x)[0, 0].numpy(), expected)


def test_a_grey_model_classifies_colour_images_as_it_was_evaluated(run, tmp_path):
    """Red and blue of one mean differ in luma alone."""
    images = np.zeros((20, 32, 32, 3), np.uint8)
    images[::2, ..., 0] = images[1::2, ..., 2] = 250
    images[..., 1] = np.arange(20)[:, None, None]
    make_folder(tmp_path / "colours", images)
    keys = {"source": f"folder:{tmp_path / 'colours'}", "channels": 1, "num-rounds": 3}
    keys |= {"partition": "iid", "lr": 0.1, "local-epochs": 5, "batch-size": 4, "min-samples": 1}
    folder = run(keys, 2)
    accuracy = summary_of(folder)["results"]["global.accuracy"]["final"]
    found = load_model(folder).predict(images)
    assert accuracy == 1
    assert found == ["ant", "bee"] * 10


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((32, 32, 3), r"images are \[32, 32, 3\]: .*; of one image, pass image\[None\]"),
        ((2, 3, 32, 3), r"images are \[2, 3, 32, 3\]: expected \[N, H, W\]"),
        ((2, 32, 32, 2), r"images are \[2, 32, 32, 2\]"),
        ((2, 0, 0), r"images are \[2, 0, 0\]|images are \[2, 1, 0, 0\]"),
        ((32, 32), r"images are \[32, 32\]"),
    ],
)
def test_an_array_whose_axes_are_not_clear_is_refused(trained, shape, words):
    with pytest.raises(ValueError, match=words):
        load_model(trained).probabilities(np.zeros(shape, np.uint8))


def test_many_images_are_classified_in_parts(trained):
    model = load_model(trained)
    images = random_images(IMAGES_AT_A_TIME + 3, 28, 28)
    together = model.probabilities(images)
    one_by_one = torch.cat([model.probabilities(image[None]) for image in images])
    torch.testing.assert_close(together, one_by_one)
    assert model.probabilities(images[:0]).shape == (0, len(model.class_names))


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 28, 28, 3)])
def test_read_only_arrays_are_classified_without_a_warning(trained, shape, recwarn):
    """As `np.asarray` makes them of Pillow's images. torch warns of the first in a process."""
    model, images = load_model(trained), random_images(*shape)
    expected = model.probabilities(images)
    images.flags.writeable = False
    torch.set_warn_always(True)
    try:
        assert torch.equal(model.probabilities(images), expected)
    finally:
        torch.set_warn_always(False)
    assert [str(warning.message) for warning in recwarn] == []


def test_a_client_is_a_name_and_a_run_is_a_run(trained):
    run = keel.load_run(trained)
    with pytest.raises(ValueError, match="client = 0: expected a name, such as client-0000"):
        run.model(0)
    assert keel.load_model(run).class_names == run.model().class_names


def test_a_model_that_is_not_the_run_s_is_refused(trained):
    model = trained / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-8:] = bytes(8)
    model.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not as the run wrote it: its di"):
        load_model(trained)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("shape", None, "it has no key 'shape'"),
        ("classes", None, "it has no key 'classes'"),
        ("shape", "1,28", "not enough values to unpack"),
        ("shape", "1,28,x", "invalid literal for int"),
        ("shape", [1, 28, 28], "'list' object has no attribute 'split'"),
        ("mean", "0.1,0.2", "expected a mean and a std above 0 for each of 1 channels"),
        ("std", "0", "expected a mean and a std above 0 for each of 1 channels"),
        ("std", "nan", "expected a mean and a std above 0 for each of 1 channels"),
    ],
)
def test_a_model_without_a_manifest_whose_metadata_is_damaged_is_named(trained, key, value, fault):
    """As one that was copied by itself; it ended in a traceback."""
    (trained / "manifest.json").unlink()
    path = trained / "model.safetensors"
    arrays, about = read_arrays(path)
    changed = {name: each for name, each in (about | {key: value}).items() if each is not None}
    save_arrays(path, arrays, changed)
    with pytest.raises(ValueError, match=f"^{path} has damaged metadata: .*{fault}.*; restore it$"):
        load_model(trained)


def test_a_finished_run_without_its_model_is_not_said_to_be_unfinished(trained):
    (trained / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors: the run has finished:"):
        load_model(trained)
    (trained / "summary.json").unlink()
    with pytest.raises(ValueError, match="it is not a run that has ended"):
        load_model(trained)


def test_a_damaged_state_of_a_client_is_named_and_left_as_it_is(run):
    """The version before it was used, with a warning."""
    keys = {"method": "fedreco", "local-test-fraction": 0.2, "fraction-train": 1}
    folder = run(keys | {"num-rounds": 2})
    [old, new] = sorted((folder / "clients" / "client-0001").glob("round-*"))
    new.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"^{new} is damaged: restore it from a backup$"):
        load_model(folder, "client-0001")
    assert sorted((folder / "clients" / "client-0001").glob("round-*")) == [old, new]


def test_a_client_of_a_method_without_personal_models_has_none(trained):
    with pytest.raises(ValueError, match="client-0000': fedavg trains a global model only: leave"):
        load_model(trained, "client-0000")


def test_of_a_client_that_is_not_there_the_others_are_named(run):
    folder = run({"method": "fedreco", "local-test-fraction": 0.2, "num-rounds": 1})
    with pytest.raises(ValueError, match="/clients, which has state of client-0000, client-0001"):
        load_model(folder, "client-00")


def test_a_personal_model_is_asked_for_by_the_name_of_a_client_that_has_one(run):
    keys = {"method": "fedreco", "local-test-fraction": 0.2, "fraction-train": 0.25}
    folder = run(keys | {"num-rounds": 1, "local-epochs": 0, "seed": 3})
    [trained] = history_of(folder)[0]["participants"]
    assert trained != "client-0000"
    with pytest.raises(ValueError, match=f"name a client, such as {trained} "):
        load_model(folder)


def test_a_history_that_is_shorter_than_its_finished_run_is_named(run, caplog):
    """It said that there was no personal model, or that the run had rounds left."""
    folder = run({"method": "fedreco", "local-test-fraction": 0.2, "num-rounds": 4})
    history = folder / "history.jsonl"
    history.write_text(history.read_text().splitlines(keepends=True)[0])
    words = "history.jsonl ends at round 1, but the run has finished all 4"
    with pytest.raises(ValueError, match=f"client = 'client-0000': {words}"):
        load_model(folder, "client-0000")
    check_rounds(folder)
    assert words in caplog.text
    assert "is not final" not in caplog.text


def test_client_state_under_other_names_is_named(run):
    """It said that there was no personal model, although the file was there."""
    folder = run({"method": "fedreco", "local-test-fraction": 0.2, "num-rounds": 1})
    clients = folder / "clients" / "client-0000"
    for path in clients.glob("round-*"):
        path.unlink()
    StateFolder(clients).save(1, {"mine": {"w": torch.zeros(1)}})
    words = r"client-0000': its client state has the groups 'mine': .*'personal' or 'head'"
    with pytest.raises(ValueError, match=words):
        load_model(folder, "client-0000")
