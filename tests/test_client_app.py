"""The ClientApp through Flower's messages: what it answers, what it keeps, how it says no."""

import json
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import own_fixtures
import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    Client,
    add_small_cnn,
    assert_same_bits,
    facts,
    initial,
    make_config,
    make_round,
    pictures,
    small_source,
)
from method_fixtures import METHODS
from PIL import Image

from client_app.methods import method_of
from client_app.node_config import own_architecture
from client_app.process_cache import ProcessCache
from client_app.setup import build_network, client_indices, open_site, open_source, pixels_of
from client_app.state import StateFolder
from flower_adapter import GPU_LOST
from protocol.config import config_from_json
from protocol.messages import (
    RESET_NEEDED,
    TrainRequest,
    read_reply,
    read_roster,
)
from strategies import strategy_for


def error_of(reply, code=1):
    """The reason of an error reply, which has to be one line."""
    assert reply.has_error()
    assert reply.error.code == code
    assert "\n" not in reply.error.reason
    return reply.error.reason


def splits_of(config, partition, of):
    """(training, test) images and labels of a simulated client."""
    train = open_source(config).train
    indices = client_indices(config, partition, of)
    return [(np.asarray(train.images)[i], np.asarray(train.labels)[i]) for i in indices]


def score_by_hand(config, weights, images, labels):
    """(accuracy, mean loss) of cnn-fedreco with these weights, image by image in float64."""
    source, network = open_source(config), build_network(config, SHAPE, NUM_CLASSES).double()
    network.load_state_dict(weights)
    right, loss = 0, 0.0
    for image, label in zip(images, labels, strict=True):
        x = (torch.from_numpy(image.copy()).double()[None] / 255 - source.mean[0]) / source.std[0]
        logits = network(x)
        right += int(logits.argmax() == label)
        loss += F.cross_entropy(logits, torch.tensor([int(label)])).item()
    return right / len(labels), loss / len(labels)


def write_folder(path, classes, names, seed, num=12):
    """A source folder: train/<class>/*.png and test/<class>/*.png, of the classes at hand."""
    for split, count in (("train", num), ("test", num // 2)):
        images, labels = pictures(3 * count, seed)
        for n, (image, label) in enumerate(zip(images, labels, strict=True)):
            if int(label) in classes:
                (path / split / names[label]).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path / split / names[label] / f"{n}.png")
    return path


def npz_site(path, num, num_classes=3, size=28):
    """A real site's own file; returns its `source`."""
    generator = np.random.default_rng(8)
    x = generator.integers(0, 256, (num, size, size), dtype=np.uint8)
    y = np.arange(num) % num_classes
    np.savez(path, x_train=x, y_train=y, x_test=x[: num // 2], y_test=y[: num // 2])
    return f"npz:{path}"


# --- query ----------------------------------------------------------------------------------------


def test_a_simulated_client_says_what_it_holds(tmp_path):
    config = make_config(local_test_fraction=0.3)
    client = Client(config, tmp_path, {"partition-id": 1, "num-partitions": 4})
    entry = read_roster(client.ask("query"))
    (_, train), (_, test) = splits_of(config, partition=1, of=4)
    assert entry.client == "client-0001"
    assert entry.label_counts == [list(train).count(n) for n in range(3)]
    assert entry.test_label_counts == [list(test).count(n) for n in range(3)]
    assert sum(entry.label_counts) + sum(entry.test_label_counts) == 15
    assert entry.num_examples == len(train)
    assert entry.image_shape == [1, 28, 28]
    assert entry.model == "cnn-fedreco"
    assert entry.representation_width == 84
    assert entry.num_partitions == 4
    assert torch.__version__ in entry.versions


def test_a_query_reads_the_sites_data_anew(tmp_path):
    """A resident worker lives longer than the file that it read for an earlier run."""
    config = make_config()
    node = {"name": "site-a", "source": npz_site(tmp_path / "a.npz", num=10)}
    client = Client(config, tmp_path, node)
    for num in (10, 14):
        npz_site(tmp_path / "a.npz", num)
        assert sum(read_roster(client.ask("query")).label_counts) == num
        reply = read_reply(client.ask("train", 1, initial(config)))
        assert reply.metrics["num-examples"] == num


# --- train and evaluate ---------------------------------------------------------------------------


def test_train_answers_with_the_update_and_its_figures(tmp_path):
    config = make_config(local_epochs=2)
    reply = read_reply(Client(config, tmp_path).ask("train", 3, initial(config)))
    update = method_of(config).train(make_round(config, number=3))
    assert (reply.client, reply.round) == ("client-0000", 3)
    assert_same_bits(reply.arrays, update.arrays)
    assert reply.extra == {}
    assert reply.metrics["num-examples"] == 30
    assert reply.metrics["num-steps"] == 8
    assert reply.metrics["loss.supervised"] == pytest.approx(update.terms["supervised"])
    assert reply.metrics["seconds"] > 0
    assert reply.metrics["cpu-seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]  # FedAvg keeps nothing


def test_evaluate_judges_the_received_model_on_the_local_test_part(tmp_path):
    config = make_config(local_test_fraction=0.3)
    weights = initial(config, seed=5)
    reply = read_reply(Client(config, tmp_path).ask("evaluate", 3, weights))
    (_, train), (images, labels) = splits_of(config, partition=0, of=2)
    accuracy, loss = score_by_hand(config, weights, images, labels)
    assert reply.arrays == {}
    assert reply.metrics["num-test"] == len(labels) > 5
    assert reply.metrics["num-examples"] == len(train)
    assert reply.metrics["global-accuracy"] == pytest.approx(accuracy)
    assert reply.metrics["global-loss"] == pytest.approx(loss, rel=1e-5)
    assert "personal-accuracy" not in reply.metrics


def test_personal_figures_come_with_the_training_and_are_of_the_model_kept(tmp_path):
    config = make_config(method="fedreco", local_test_fraction=0.3, fedreco__eta_u=0.1)
    weights = initial(config)
    u_0 = {n: w for n, w in weights.items() if not n.startswith("classifier")}
    client = Client(config, tmp_path)
    trained = read_reply(client.ask("train", 1, u_0, evaluate=True))
    kept = StateFolder(tmp_path / "clients" / "client-0000").load(before_round=2)["model"]
    _, (images, labels) = splits_of(config, partition=0, of=2)
    accuracy, loss = score_by_hand(config, kept, images, labels)
    assert trained.metrics["personal-accuracy"] == pytest.approx(accuracy)
    assert trained.metrics["personal-loss"] == pytest.approx(loss, rel=1e-5)
    assert "global-accuracy" not in trained.metrics
    # asked again, with another u_0, it is the same model that is judged
    other = {n: w for n, w in initial(config, seed=7).items() if n in u_0}
    judged = read_reply(client.ask("evaluate", 1, other))
    assert judged.metrics["personal-loss"] == trained.metrics["personal-loss"]
    assert "personal-accuracy" not in read_reply(client.ask("train", 2, u_0)).metrics


def test_what_a_client_keeps_is_for_its_user_alone(tmp_path):
    """Whoever runs it: in Flower's simulation, Ray starts the process with a umask of its own."""
    os.umask(0o022)
    config = make_config(method="moon")
    read_reply(Client(config, tmp_path).ask("train", 1, initial(config)))
    kept = [tmp_path / "clients", *(tmp_path / "clients").rglob("*")]
    assert len(kept) == 3
    for path in kept:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# --- a node's own config --------------------------------------------------------------------------


def test_a_partition_of_another_copy_of_the_source_is_refused(tmp_path):
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, ["anna", "bert", "carl"], seed=3)
    client = Client(make_config(source=f"folder:{shared}"), tmp_path)
    client.facts = replace(facts(client.config), class_names=("anna", "carl", "bert"))
    assert "('anna', 'carl', 'bert')" in error_of(client.ask("query"))


def test_a_site_with_a_class_that_the_run_lacks_is_refused(tmp_path):
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, ["anna", "bert", "carl"], seed=3)
    own = write_folder(tmp_path / "own", {0, 1, 2}, ["anna", "bert", "dora"], seed=4)
    node = {"name": "site-a", "source": f"folder:{own}"}
    reason = error_of(Client(make_config(source=f"folder:{shared}"), tmp_path, node).ask("query"))
    assert "'dora'" in reason
    numbered = {"name": "site-b", "source": npz_site(tmp_path / "b.npz", num=12, num_classes=4)}
    assert "'3'" in error_of(Client(make_config(), tmp_path, numbered).ask("query"))


def test_a_state_dir_of_its_own_outlives_flowers_run(tmp_path):
    """A resumed run has another Flower run id, but the same run directory."""
    config = make_config(method="moon")
    source = npz_site(tmp_path / "own.npz", num=12)
    node = {"name": "site-a", "source": source, "state-dir": str(tmp_path / "volume")}
    run_dir = tmp_path / "server" / "20260101-moon"  # which this machine need not have
    first = Client(config, run_dir, node)
    trained = read_reply(first.ask("train", 1, initial(config)))
    assert not run_dir.exists()
    resumed = Client(config, run_dir, node)
    run_ids = {next(iter(c.grid.contexts.values())).run_id for c in (first, resumed)}
    assert len(run_ids) == 2
    reply = read_reply(resumed.ask("train", 2, initial(config, seed=4)))
    assert "loss.penalty" in reply.metrics  # it knows its previous model
    (folder,) = {p.parent for p in (tmp_path / "volume").rglob("*.safetensors")}
    assert_same_bits(StateFolder(folder).load(before_round=2)["previous"], trained.arrays)
    # another run starts anew
    other = Client(config, tmp_path / "server" / "20260102-moon", node)
    assert "loss.penalty" not in read_reply(other.ask("train", 2, initial(config))).metrics


def test_a_nodes_model_comes_before_client_models_and_the_runs(monkeypatch):
    add_small_cnn(monkeypatch)
    config = make_config(method="fedreco")
    mixed = make_config(method="fedreco", client_models="cnn-fedreco, small-cnn")
    partitions = [{"partition-id": n, "num-partitions": 3} for n in range(3)]
    assert [own_architecture(config, p) for p in partitions] == ["cnn-fedreco"] * 3
    expected = ["cnn-fedreco", "small-cnn", "cnn-fedreco"]
    assert [own_architecture(mixed, p) for p in partitions] == expected
    node = partitions[0] | {"model": "small-cnn"}
    entry = read_roster(Client(mixed, "", node).ask("query"))
    assert (entry.model, entry.representation_width) == ("small-cnn", 84)


def test_a_site_trains_under_the_runs_labels_and_normalisation(tmp_path):
    """Labels are places in the run's list of names, of which the site may lack some."""
    names = ["anna", "bert", "carl"]
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, names, seed=3)
    own = write_folder(tmp_path / "own", {0, 2}, names, seed=4)
    config = make_config(source=f"folder:{shared}")
    node = {"name": "site-a", "source": f"folder:{own}"}
    client, runs_pixels = Client(config, tmp_path, node), pixels_of(config, open_source(config))
    request = TrainRequest(config, client.facts, 1, [0], False, "")
    now = ProcessCache().begin_round(request, node, initial(config), {}, {})
    assert now.label_counts.tolist() == [12, 0, 12]
    assert now.train_samples.pixels == runs_pixels
    assert now.train_samples.pixels != pixels_of(config, open_site(config, f"folder:{own}", "", ()))
    shutil.rmtree(shared)  # the run's source is on the server's machine alone
    entry = read_roster(client.ask("query"))
    assert (entry.label_counts, entry.test_label_counts) == ([12, 0, 12], [6, 0, 6])


def test_a_nodes_device_comes_before_the_runs(tmp_path):
    node = {"partition-id": 0, "num-partitions": 2, "device": "cpu"}
    config = make_config(device="cuda:99")
    assert not Client(config, tmp_path, node).ask("train", 1, initial(config)).has_error()
    client = Client(make_config(), tmp_path, node | {"device": "cuda:99"})
    assert "device = 'cuda:99'" in error_of(client.ask("train", 1, initial(config)))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"name": "a", "source": "folder:relative"}, ["'folder:…'", "absolute"]),
        ({"partition-id": 0, "num-partitions": 2, "model": "resnet99"}, ["resnet99", "resnet20"]),
        ({"name": "a", "modle": "resnet20"}, ["modle"]),
        ({"name": "a", "partition-id": 0}, ["num-partitions"]),
        ({"name": "a", "partition-id": 2, "num-partitions": 2}, ["partition-id"]),
        ({"partition-id": math.inf, "num-partitions": 2}, ["partition-id"]),
        ({"name": "a", "source": small_source(), "model": ""}, ["model"]),
        ({}, ["'name'", "'partition-id'"]),
        ({"name": "a"}, ["source="]),
        ({"name": "a", "source": "npz:/nowhere/at-all.npz"}, ["npz:…"]),
    ],
)
def test_a_nodes_mistake_is_named(node, words, tmp_path):
    reason = error_of(Client(make_config(), tmp_path, node).ask("query"))
    assert all(word in reason for word in words)
    assert "at-all" not in reason


@pytest.mark.parametrize(
    ("method", "name", "array"),
    [
        ("fedavg", "classifier.bias", torch.zeros(1)),
        ("fedavg", "classifier.bias", torch.zeros(3).double()),
        ("fedavg", "classifier.bias", None),
        ("fedavg", "other", torch.zeros(1)),
        ("scaffold", "classifier.bias", None),
        ("fedrep", "stages.conv1.body.bias", None),
        ("local", "other", torch.zeros(1)),
    ],
)
def test_a_server_s_model_that_does_not_fit_is_an_error_of_one_line_in_the_log_too(
    method, name, array, tmp_path, caplog
):
    config = make_config(method=method, local_test_fraction=0.3)
    client = Client(config, tmp_path)
    network = build_network(config, SHAPE, NUM_CLASSES)
    arrays = strategy_for(config, network).initial_arrays(network)
    arrays = {n: a for n, a in (arrays | {name: array}).items() if a is not None}
    for kind in ("train", "evaluate"):
        assert name in error_of(client.ask(kind, 1, arrays))
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("kind", ["damaged", "lost"])
def test_the_path_of_lost_state_is_named_in_the_clients_log_alone(kind, tmp_path, caplog):
    volume = tmp_path / "volume"
    source = npz_site(tmp_path / "a.npz", num=10)
    node = {"name": "site-a", "source": source, "state-dir": str(volume)}
    client = Client(make_config(method="moon"), tmp_path, node)
    weights = initial(client.config)
    client.ask("train", 1, weights)
    (path,) = volume.rglob("round-*")
    path.unlink() if kind == "lost" else path.write_bytes(b"")
    reason = error_of(client.ask("train", 2, weights, counted=1), RESET_NEEDED)
    assert str(tmp_path) not in reason
    assert "reset-state" in reason
    assert str(path.parent / "reset-state") in caplog.text


ALLOC_FAILED = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported. For debugging"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), 1),
        (RuntimeError(ALLOC_FAILED), 1),
        (torch.AcceleratorError(f"CUDA error: unspecified launch failure{ASYNCHRONOUS}"), GPU_LOST),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), GPU_LOST),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), 1),
    ],
)
def test_a_full_gpu_is_told_from_a_lost_one(error, code, tmp_path, monkeypatch):
    def fail(self, batch):
        raise error

    monkeypatch.setattr(METHODS["fedavg"], "supervised", fail)
    config = make_config()
    reply = Client(config, tmp_path).ask("train", 1, initial(config))
    is_full = code == 1 and ("out of memory" in str(error) or "ALLOC" in str(error))
    is_full &= isinstance(error, RuntimeError)
    reason = error_of(reply, code)
    assert ("batch-size" in reason) == is_full


def test_a_site_runs_own_code_that_it_offers_and_has(tmp_path, monkeypatch):
    own_fixtures.module(tmp_path, monkeypatch, name="offered")
    config = make_config(method="offered:FedPull")
    client_node = {"name": "site-a", "source": small_source()}
    client = Client(config, tmp_path, client_node)
    assert "KEEL_OWN_CODE is not set" in error_of(client.ask("query"))
    monkeypatch.setenv("KEEL_OWN_CODE", "other, offered")
    assert read_roster(client.ask("query")).num_examples == 60
    assert not client.ask("train", 1, initial(config)).has_error()
    sent = json.loads(config.to_json())  # the server has read another file of the module
    sent["own"] = dict.fromkeys(sent["own"], "0" * 16)
    client = Client(config_from_json(json.dumps(sent)), tmp_path, client_node)
    assert "offered has the digest" in error_of(client.ask("query"))
