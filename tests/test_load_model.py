"""Models of finished runs: images become probabilities as in training, and nothing is guessed."""

import logging

import numpy as np
import pytest
import torch
from data_fixtures import make_folder
from run_fixtures import summary_of

import keel
from client_app.state import StateFolder
from protocol.files import versions_in
from server_app.load_model import load_model

pytestmark = pytest.mark.end_to_end  # they train whole runs

PERSONAL = {"method": "fedreco", "local-test-fraction": 0.2}


@pytest.fixture
def trained(run):
    return run({"num-rounds": 1, "local-epochs": 0})


def test_a_grey_model_classifies_colour_images_as_it_was_evaluated(run, tmp_path):
    """Red and blue of one mean differ in luma alone."""
    images = np.zeros((20, 32, 32, 3), np.uint8)
    images[::2, ..., 0] = images[1::2, ..., 2] = 250
    images[..., 1] = np.arange(20)[:, None, None]
    make_folder(tmp_path / "colours", images)
    keys = {"source": f"folder:{tmp_path / 'colours'}", "channels": 1, "num-rounds": 3}
    keys |= {"partition": "iid", "lr": 0.1, "local-epochs": 5, "batch-size": 4, "min-samples": 1}
    folder = run(keys, 2)
    assert summary_of(folder)["results"]["global.accuracy"]["final"] == 1
    assert load_model(folder).predict(images) == ["ant", "bee"] * 10


def test_a_run_and_its_directory_give_the_same_model(trained):
    run = keel.load_run(trained)
    assert keel.load_model(run).class_names == run.model().class_names
    with pytest.raises(ValueError, match="client = 0"):
        run.model(0)


def test_a_model_that_is_not_as_the_run_wrote_it_is_refused(trained):
    model = trained / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ValueError, match=str(model)):
        load_model(trained)
    model.unlink()
    with pytest.raises(ValueError, match=str(model)):
        load_model(trained)


def test_a_run_with_rounds_left_is_named_and_one_without_a_round_is_refused(trained, caplog):
    (trained / "summary.json").write_text('{"status": "stopped"}')
    config = trained / "config.json"
    config.write_text(config.read_text().replace('"num-rounds": 1', '"num-rounds": 2'))
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        load_model(trained)
    assert str(trained) in caplog.text
    (trained / "history.jsonl").write_text("")
    with pytest.raises(ValueError, match=str(trained)):
        load_model(trained)


@pytest.mark.parametrize("method", ["fedreco", "local", "fedrep", "fedpac", "ditto"])
def test_a_personal_model_scores_as_it_was_evaluated(run, method):
    """On the client's own test part, the mean over all clients."""
    from client_app.setup import client_indices, open_source
    from server_app.run_reader import RunReader

    folder = run(PERSONAL | {"method": method, "num-rounds": 2, "evaluate-clients": "all"})
    read = RunReader(folder)
    source, config = open_source(read.run_config), read.run_config
    *_, accuracies = (line["personal"] for line in read.clients())
    for number, (client, accuracy) in enumerate(sorted(accuracies.items())):
        part = client_indices(config, number, 4)[1]
        images, labels = np.asarray(source.train.images)[part], source.train.labels[part]
        found = load_model(folder, client).predict(images)
        share = np.mean(
            [name == source.class_names[k] for name, k in zip(found, labels, strict=True)]
        )
        assert share == pytest.approx(accuracy)


def test_a_damaged_state_of_a_client_is_named_and_left_as_it_is(run):
    folder = run(PERSONAL | {"num-rounds": 2})
    old, new = versions_in(folder / "clients" / "client-0001")
    new.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=str(new)):
        load_model(folder, "client-0001")
    assert versions_in(folder / "clients" / "client-0001") == [old, new]


def test_who_has_no_personal_model_is_told(trained, run):
    with pytest.raises(ValueError, match="client-0000"):
        load_model(trained, "client-0000")
    folder = run(PERSONAL | {"num-rounds": 1})
    with pytest.raises(ValueError, match="client-00'"):
        load_model(folder, "client-00")
    with pytest.raises(ValueError, match="client-0000"):  # name one, such as this
        load_model(folder)
    clients = folder / "clients" / "client-0000"
    for path in clients.glob("round-*"):
        path.unlink()
    StateFolder(clients).save(1, {"mine": {"w": torch.zeros(1)}})
    with pytest.raises(ValueError, match="client-0000"):
        load_model(folder, "client-0000")
