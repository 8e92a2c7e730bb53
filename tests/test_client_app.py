"""The ClientApp through Flower's messages: what it answers, what it keeps, how it says no."""

import json
import logging
import math
import os
import re
import shutil
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    Client,
    add_small_cnn,
    assert_same_bits,
    differ,
    facts,
    initial,
    make_config,
    make_round,
    pictures,
    small_source,
)
from flwr.app import ConfigRecord, RecordDict
from method_fixtures import METHODS, FloatPenalty, ForgottenReturn, InPlace, with_method
from PIL import Image

import client_app.handlers
from client_app.handlers import advice, turn, without_file_names
from client_app.machine import machine
from client_app.method import Update, train_alone
from client_app.methods import method_of
from client_app.methods.fedprox import FedProx
from client_app.methods.fedrep import FedRep
from client_app.node_config import own_architecture
from client_app.objective import objective_phase
from client_app.process_cache import ProcessCache
from client_app.setup import build_network, client_indices, open_source, pixels_of
from client_app.state import StateFolder
from flower_adapter import GPU_LOST
from protocol.config import config_from_json
from protocol.messages import (
    RESET_NEEDED,
    TrainRequest,
    array_record,
    message_content,
    read_reply,
    read_roster,
    request_record,
)
from server_app.history import append_history, truncate_history
from server_app.inline import run_inline
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


def test_the_representation_is_as_wide_as_at_the_split(tmp_path):
    config = make_config(method="fedreco", fedreco__split="conv2")
    assert read_roster(Client(config, tmp_path).ask("query")).representation_width == 16 * 4 * 4


def test_a_real_site_says_what_its_own_data_is(tmp_path):
    config = make_config()
    node = {"name": "site-a", "source": npz_site(tmp_path / "a.npz", num=10, size=40)}
    entry = read_roster(Client(config, tmp_path, node).ask("query"))
    assert entry.client == "site-a"
    assert entry.label_counts == [4, 3, 3]
    assert entry.test_label_counts == [2, 2, 1]
    assert entry.image_shape == [1, 40, 40]  # its own: the server refuses what does not fit
    assert entry.num_partitions == 0
    assert entry.device == machine(torch.device("cpu"))


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


def test_a_simulated_client_names_no_device():
    node = {"partition-id": 0, "num-partitions": 2}
    assert read_roster(Client(make_config(), "", node).ask("query")).device == ""


def test_a_partition_may_have_a_name():
    config = make_config()
    node = {"name": "alpha", "partition-id": 0, "num-partitions": 2}
    assert read_roster(Client(config, "", node).ask("query")).client == "alpha"


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


def test_the_state_kept_is_the_model_sent_and_the_next_round_reads_it(tmp_path):
    config = make_config(method="moon")
    client = Client(config, tmp_path)
    first = read_reply(client.ask("train", 1, initial(config)))
    state = StateFolder(tmp_path / "clients" / "client-0000")
    assert_same_bits(state.load(before_round=2)["previous"], first.arrays)
    received = initial(config, seed=9)
    second = read_reply(client.ask("train", 2, received))
    now = make_round(config, number=2, received=received, state={"previous": first.arrays})
    assert_same_bits(second.arrays, method_of(config).train(now).arrays)
    assert "loss.penalty" in second.metrics
    assert "loss.penalty" not in first.metrics


def test_a_round_asked_for_again_is_the_same_to_the_bit_and_old_versions_go(tmp_path):
    """As after a server that died: the client is ahead, the server asks for a round again."""
    config = make_config(method="moon")
    client = Client(config, tmp_path)

    def train(number, seed, checkpoint):
        return read_reply(client.ask("train", number, initial(config, seed), checkpoint=checkpoint))

    train(1, 1, checkpoint=0)
    second = train(2, 2, checkpoint=1)
    third = train(3, 3, checkpoint=2)
    assert_same_bits(train(3, 3, checkpoint=2).arrays, third.arrays)
    # round 1's version is what round 2 reads: gone once the server cannot go back that far
    kept = sorted(p.name[:11] for p in (tmp_path / "clients" / "client-0000").iterdir())
    assert kept == ["round-00002", "round-00003"]
    fresh = Client(config, tmp_path / "fresh")
    fresh.ask("train", 1, initial(config, 1))
    assert_same_bits(read_reply(fresh.ask("train", 2, initial(config, 2))).arrays, second.arrays)


def test_what_a_client_keeps_is_for_its_user_alone(tmp_path):
    """Whoever runs it: in Flower's simulation, Ray starts the process with a umask of its own."""
    config, before = make_config(method="moon"), os.umask(0o022)
    try:
        read_reply(Client(config, tmp_path).ask("train", 1, initial(config)))
    finally:
        os.umask(before)
    kept = [tmp_path / "clients", *(tmp_path / "clients").rglob("*")]
    assert len(kept) == 3
    for path in kept:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_two_clients_keep_two_states(tmp_path):
    config = make_config(method="moon")
    for partition in (0, 1):
        node = {"partition-id": partition, "num-partitions": 2}
        Client(config, tmp_path, node).ask("train", 1, initial(config))
    names = {path.name for path in (tmp_path / "clients").iterdir()}
    assert names == {"client-0000", "client-0001"}
    kept = [StateFolder(tmp_path / "clients" / n).load(2)["previous"] for n in sorted(names)]
    assert differ(*kept)


def test_clients_of_two_runs_side_by_side_train_as_one_after_the_other(tmp_path, monkeypatch):
    """As in a worker that serves several clients: one reads and writes while another trains."""

    def rounds_of(method, partition, folder):
        config = make_config(method=method, local_test_fraction=0.2)
        node = {"partition-id": partition, "num-partitions": 3}
        client = Client(config, folder / method, node)
        return [
            read_reply(client.ask("train", n, weights, evaluate=True))
            for n, weights in enumerate(received[method], start=1)
        ]

    received = {
        method: [initial(make_config(method=method), seed) for seed in (1, 2)]
        for method in ("moon", "ditto")
    }
    pairs = [(method, partition) for method in received for partition in range(3)]
    for name in ("alone", "together"):
        for method, _ in pairs:
            (tmp_path / name / method).mkdir(parents=True, exist_ok=True)
    alone = [rounds_of(*pair, tmp_path / "alone") for pair in pairs]
    load = StateFolder.load
    monkeypatch.setattr(StateFolder, "load", lambda *about: time.sleep(0.02) or load(*about))
    with ThreadPoolExecutor(len(pairs)) as pool:
        together = list(pool.map(lambda pair: rounds_of(*pair, tmp_path / "together"), pairs))
    times = ("seconds", "cpu-seconds")
    replies = chain.from_iterable(together), chain.from_iterable(alone)
    for own, others in zip(*replies, strict=True):
        assert_same_bits(own.arrays, others.arrays)
        assert {k: v for k, v in own.metrics.items() if k not in times} == {
            k: v for k, v in others.metrics.items() if k not in times
        }


def test_an_update_leaves_the_device_before_the_turn_ends(tmp_path, monkeypatch):
    """Its copies would wait behind the next client's steps, and client state fill a GPU."""
    were_copied_in_turn = []

    class OnDevice(torch.Tensor):
        def to(self, device):
            were_copied_in_turn.append(turn._lock._is_owned())
            return self.as_subclass(torch.Tensor)

    def on_device(arrays):
        return {name: array.as_subclass(OnDevice) for name, array in arrays.items()}

    def trained(ctx, phases):
        update = train_alone(ctx, phases)
        update.arrays, update.extra = on_device(update.arrays), on_device({"c": torch.ones(1)})
        update.state = {group: on_device(arrays) for group, arrays in update.state.items()}
        return update

    monkeypatch.setattr("client_app.method.train_alone", trained)
    config = make_config(method="moon")
    reply = Client(config, tmp_path).ask("train", 1, initial(config))
    groups = StateFolder(tmp_path / "clients" / "client-0000").load(before_round=2)
    kept = [array for arrays in groups.values() for array in arrays.values()]
    sent = read_reply(reply)
    assert len(kept) == len(sent.arrays) > 0
    assert {type(each) for each in (*kept, *sent.arrays.values(), *sent.extra.values())} == {
        torch.Tensor
    }
    assert were_copied_in_turn == [True] * (2 * len(kept) + 1)


@dataclass(frozen=True)
class StoresExtra(FedProx):
    is_stateful: ClassVar[bool] = True

    def finish(self, update, ctx):
        return replace(update, state={"sent": ctx.extra, "model": ctx.received})


def test_kept_models_of_a_whole_run_are_of_before_the_averaging(home):
    keys = {"method": "moon", "num-rounds": 2, "source": small_source(), "model": "cnn-fedreco"}
    keys["keep-state"] = True
    partition = {"partition": "iid", "batch-size": 8, "min-samples": 1, "device": "cpu"}
    path = run_inline(keys | partition, num_clients=2)
    kept = [StateFolder(path / "clients" / f"client-000{n}").load(3)["previous"] for n in (0, 1)]
    assert differ(*kept)
    checkpoints = sorted((path / "checkpoints").iterdir())
    assert checkpoints
    lines = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    assert "penalty" not in lines[0]["losses"]
    assert lines[1]["losses"]["penalty"] > 0


# --- a node's own config --------------------------------------------------------------------------


def test_a_real_site_trains_on_its_own_folder(tmp_path):
    names = ["anna", "bert", "carl"]
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, names, seed=3)
    own = write_folder(tmp_path / "own", {0, 1, 2}, names, seed=4)
    config = make_config(source=f"folder:{shared}", normalise="half")
    weights = initial(config)
    replies = [
        read_reply(Client(config, tmp_path, node).ask("train", 1, weights))
        for node in (
            {"name": "site-a", "source": f"folder:{own}"},
            {"name": "site-a", "source": f"folder:{shared}"},
        )
    ]
    assert all(reply.metrics["num-examples"] == 36 for reply in replies)
    assert differ(replies[0].arrays, replies[1].arrays)


def test_a_site_that_lacks_a_class_means_the_same_by_the_others(tmp_path):
    """Labels are places in a list of names; a site's list is shorter than the run's."""
    names = ["anna", "bert", "carl"]
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, names, seed=3)
    own = write_folder(tmp_path / "own", {0, 2}, names, seed=4)
    config = make_config(source=f"folder:{shared}")
    node = {"name": "site-a", "source": f"folder:{own}"}
    client = Client(config, tmp_path, node)
    shutil.rmtree(shared)  # the run's source is on the server's machine alone
    entry = read_roster(client.ask("query"))
    assert entry.label_counts == [12, 0, 12]
    assert entry.test_label_counts == [6, 0, 6]


def test_a_site_trains_under_the_runs_labels_and_normalisation(tmp_path):
    """Whatever the run's source is called on its own machine, and whatever it holds itself."""
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, ["anna", "bert", "carl"], seed=3)
    own = write_folder(tmp_path / "own", {1, 2}, ["anna", "bert", "carl"], seed=4)
    config = make_config(source=f"folder:{shared}", model="cnn-fedreco")
    node = {"name": "site-a", "source": f"folder:{own}"}
    request = TrainRequest(config, facts(config), 1, [0], False, "")
    now = ProcessCache().begin_round(request, node, initial(config), {}, {})
    assert now.label_counts.tolist() == [0, 12, 12]
    assert now.train_samples.pixels == pixels_of(config, open_source(config))
    assert now.train_samples.pixels != pixels_of(config, open_source(config, f"folder:{own}"))


def test_a_partition_of_another_copy_of_the_source_is_refused(tmp_path):
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, ["anna", "bert", "carl"], seed=3)
    client = Client(make_config(source=f"folder:{shared}"), tmp_path)
    client.facts = replace(facts(client.config), class_names=("anna", "carl", "bert"))
    reason = error_of(client.ask("query"))
    assert "the classes ('anna', 'bert', 'carl') here, and ('anna', 'carl', 'bert') on" in reason


def test_a_site_with_a_class_that_the_run_lacks_is_refused(tmp_path):
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, ["anna", "bert", "carl"], seed=3)
    own = write_folder(tmp_path / "own", {0, 1, 2}, ["anna", "bert", "dora"], seed=4)
    node = {"name": "site-a", "source": f"folder:{own}"}
    reason = error_of(Client(make_config(source=f"folder:{shared}"), tmp_path, node).ask("query"))
    assert "site-a" in reason
    assert "'dora'" in reason
    assert "anna, bert, carl" in reason
    numbered = {"name": "site-b", "source": npz_site(tmp_path / "b.npz", num=12, num_classes=4)}
    reason = error_of(Client(make_config(), tmp_path, numbered).ask("query"))
    assert "site-b: its own data has the class '3'" in reason


def test_classes_whose_names_are_numbers_are_matched_by_name_too(tmp_path):
    """The names are sorted as text: the third is "10"."""
    numbers = [str(n) for n in range(12)]
    for first in range(0, 12, 3):
        names = numbers[first : first + 3]
        shared = write_folder(tmp_path / "shared", {0, 1, 2}, names, seed=3)
    config = make_config(source=f"folder:{shared}")
    own = write_folder(tmp_path / "own", {0, 1, 2}, numbers, seed=4)
    for source in (f"folder:{own}", npz_site(tmp_path / "own.npz", num=36)):
        client = Client(config, tmp_path, {"name": "site-a", "source": source})
        counts = dict(
            zip(sorted(numbers), read_roster(client.ask("query")).label_counts, strict=True)
        )
        assert {name for name, count in counts.items() if count} == {"0", "1", "2"}


def test_the_two_ways_to_write_an_accented_letter_are_one_name(tmp_path):
    """A site's images that were packed on macOS: there a file name has the accent by itself."""
    names = ["anna", "jos\u00e9", "zo\u00eb"]
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, names, seed=3)
    apart = [unicodedata.normalize("NFD", name) for name in names]
    own = write_folder(tmp_path / "own", {1, 2}, apart, seed=4)
    node = {"name": "site-a", "source": f"folder:{own}"}
    client = Client(make_config(source=f"folder:{shared}"), tmp_path, node)
    assert read_roster(client.ask("query")).label_counts == [0, 12, 12]


def test_only_the_labels_of_an_npz_file_stand_for_classes_of_other_names(tmp_path):
    names = ["anna", "bert", "carl"]
    shared = write_folder(tmp_path / "shared", {0, 1, 2}, names, seed=3)
    config = make_config(source=f"folder:{shared}")
    own = write_folder(tmp_path / "own", {0, 1}, ["0", "1"], seed=4)
    node = {"name": "site-a", "source": f"folder:{own}"}
    reason = error_of(Client(config, tmp_path, node).ask("query"))
    assert "has the class '0', the run has anna, bert, carl" in reason
    node = {"name": "site-b", "source": npz_site(tmp_path / "own.npz", num=12)}
    assert read_roster(Client(config, tmp_path, node).ask("query")).label_counts == [4, 4, 4]


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


def test_a_nodes_device_comes_before_the_runs(tmp_path):
    node = {"partition-id": 0, "num-partitions": 2, "device": "cuda:99"}
    config = make_config()
    reason = error_of(Client(config, tmp_path, node).ask("train", 1, initial(config)))
    assert "device = 'cuda:99'" in reason
    config = make_config(device="cuda:99")
    node["device"] = "cpu"
    reply = read_reply(Client(config, tmp_path, node).ask("train", 1, initial(config)))
    assert reply.metrics["num-steps"] == 4


def test_a_real_sites_noise_is_its_own_and_a_partitions_the_runs(tmp_path):
    config = make_config(method="fedreco", privacy__epsilon=0.5)
    nodes = [{"name": "a", "source": small_source()}, {"partition-id": 0, "num-partitions": 2}]
    u_0 = {n: w for n, w in initial(config).items() if not n.startswith("classifier")}
    repeats = []
    for node in nodes:
        one, two = (
            read_reply(Client(config, tmp_path / str(n), node).ask("train", 1, u_0)).arrays
            for n in (1, 2)
        )
        repeats.append(not differ(one, two))
    assert repeats == [False, True]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
def test_a_message_that_is_not_keels_is_answered_with_an_error(kind, tmp_path):
    client = Client(make_config(), tmp_path)
    reason = error_of(client.send(RecordDict({"config": ConfigRecord({"lr": 0.1})}), kind))
    said = "a message without the record 'round': not sent by Keel's ServerApp"
    named = "client client-0000: " if kind == "query" else ""  # the server knows its name later
    assert reason == named + said


@pytest.mark.parametrize(
    ("record", "key", "value", "said"),
    [
        ("client", "counted-round", [1, 2], "counted-round = [1, 2]: expected a whole number"),
        ("client", "counted-round", 1.5, "counted-round = 1.5: expected a whole number"),
        ("client", "counted-round", -1, "counted-round = -1: expected a whole number"),
        ("client", None, None, "the message has no record 'client'"),
        ("arrays", None, None, "the message has no record 'arrays'"),
        ("data", "mean", [0.1, 0.2, 0.3], "for each channel a mean and a std above 0"),
        ("data", "std", [], "for each channel a mean and a std above 0"),
        ("data", "std", [0.0], "for each channel a mean and a std above 0"),
        ("data", "std", ["x"], "for each channel a mean and a std above 0"),
        ("data", "mean", [math.nan], "for each channel a mean and a std above 0"),
        ("data", "mean", None, "the message's data is unreadable: TypeError"),
        ("data", "image_shape", [], "expected an image shape of three counts"),
        ("data", "image_shape", [1, -28, 28], "expected an image shape of three counts"),
        ("data", "class_names", [1, 2, 3], "names of classes"),
        ("round", "data", "[" * 100_000, "the message's data is unreadable: RecursionError"),
        ("round", "data", ["a"], "the message's data is unreadable: JSONDecodeError"),
        ("config", "model", "cnn-fedrec", "model = 'cnn-fedrec' is unknown; did you mean cnn-f"),
    ],
)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_odd_values_of_a_server_are_an_error_of_one_line_in_the_log_too(
    kind, record, key, value, said, tmp_path, caplog
):
    """A mean of another length than the channels' was broadcast, or ended in a traceback."""
    config = make_config()
    client = Client(config, tmp_path)
    request = dict(request_record(TrainRequest(config, client.facts, 1, [0], False, str(tmp_path))))
    content = message_content(
        ConfigRecord(request), array_record(initial(config)), array_record({}), 0
    )
    if record == "data":
        facts_sent = json.loads(request["data"]) | {key: value}
        content["round"]["data"] = json.dumps(facts_sent)
    elif record == "config":
        content["round"]["config"] = json.dumps(json.loads(request["config"]) | {key: value})
    elif key is None:
        del content[record]
    else:
        content[record][key] = value
    assert said in error_of(client.send(content, kind))
    assert all(logged.exc_info is None for logged in caplog.records)


def test_a_client_without_a_name_says_how_to_give_it_one(tmp_path):
    reason = error_of(Client(make_config(), tmp_path, {}).ask("query"))
    assert "neither 'name' nor 'partition-id'" in reason
    assert "source=" in reason


@pytest.mark.parametrize("node", [{}, {"source": ""}])  # "": from an unset variable, maybe
def test_a_client_without_data_says_how_to_give_it_some(node, tmp_path):
    """With an empty source, a site trained on all data of the run's source, if it was there."""
    reason = error_of(Client(make_config(), tmp_path, {"name": "site-a"} | node).ask("query"))
    assert reason.startswith("client site-a: its node config names no data: add source=")
    assert 'source="folder:PATH"' in reason


@pytest.mark.parametrize("kind", ["query", "train"])
def test_an_empty_model_in_the_node_config_is_refused_with_the_networks(kind, tmp_path, caplog):
    node = {"name": "site-a", "source": small_source(), "model": ""}
    config = make_config(method="fedreco")
    u_0 = {n: w for n, w in initial(config).items() if not n.startswith("classifier")}
    assert "model = '' is unknown" in error_of(Client(config, "runs/a", node).ask(kind, 1, u_0))
    assert all(logged.exc_info is None for logged in caplog.records)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"name": "a", "source": "folder:relative"}, ["'folder:…'", "absolute"]),
        ({"partition-id": 0, "num-partitions": 2, "model": "resnet99"}, ["resnet99", "resnet20"]),
        ({"name": "a", "modle": "resnet20"}, ["node config key = 'modle'", "did you mean model?"]),
        ({"name": "a", "max-clip-norm": 1.0}, ["'max-clip-norm' is unknown", "privacy-max-clip"]),
        ({"name": "a", "partition-id": 0}, ["num-partitions = None", "expected a whole number"]),
        ({"name": "a", "partition-id": 2, "num-partitions": 2}, ["partition-id = 2", "below"]),
        ({"partition-id": -1, "num-partitions": 2}, ["partition-id = -1, num-partitions = 2"]),
    ],
)
def test_a_nodes_mistake_is_named(node, words, tmp_path):
    reason = error_of(Client(make_config(), tmp_path, node).ask("query"))
    assert all(word in reason for word in words)
    assert "without a name" not in reason


@pytest.mark.parametrize("number", ["first", math.inf, math.nan])
def test_a_partition_that_is_no_number_is_named(number, tmp_path):
    """Infinity, which TOML has, ended the answer with an OverflowError."""
    node = {"partition-id": number, "num-partitions": 2}
    for kind in ("query", "train"):
        reason = error_of(Client(make_config(), tmp_path, node).ask(kind, 1))
        assert f"partition-id = {number!r} in its node config: expected a whole number" in reason


@pytest.mark.parametrize("spec", ["npz:/nowhere/at-all.npz", "npz:at-all.npz", "nzp:/at-all.npz"])
def test_a_source_that_is_missing_is_named_in_the_clients_log_alone(spec, tmp_path, caplog):
    reason = error_of(Client(make_config(), tmp_path, {"name": "a", "source": spec}).ask("query"))
    assert f"'{spec[:4]}…'" in reason
    assert "at-all" not in reason
    assert str(Path.cwd()) not in reason
    assert spec in caplog.text


@pytest.mark.parametrize("source", ["", "digits", "folder:/"])
def test_a_source_without_a_path_changes_no_error(source):
    reason = "device = 'cuda:63': /dev has 0 GPUs"
    assert without_file_names(reason, ValueError(reason), source) == reason


def test_a_method_that_is_unknown_is_named_with_its_neighbours(tmp_path):
    # the server refuses it before it sends anything; this is a server of another version
    flat = dict(make_config().flat) | {"method": "fedintr2"}
    config = config_from_json(json.dumps(flat))
    reason = error_of(Client(config, tmp_path).ask("train", 1, {}))
    assert "method = 'fedintr2' is unknown; did you mean fedintr" in reason


def test_arrays_that_do_not_fit_are_an_error_of_one_line(tmp_path):
    config = make_config()
    arrays = initial(config)
    arrays["classifier.bias"] = torch.zeros(4)
    assert "classifier.bias" in error_of(Client(config, tmp_path).ask("train", 1, arrays))


@pytest.mark.parametrize(
    ("method", "name", "array", "reason"),
    [
        ("fedavg", "classifier.bias", torch.zeros(1), "'classifier.bias' is [1], expected [3]"),
        ("fedavg", "classifier.bias", torch.zeros(3).double(), "is torch.float64, expected"),
        ("fedavg", "classifier.bias", None, "'classifier.bias' is missing (1 of 10)"),
        ("fedavg", "other", torch.zeros(1), "'other' is unknown (1 too many)"),
        ("scaffold", "classifier.bias", None, "'classifier.bias' is missing (1 of 10)"),
        ("fedrep", "stages.conv1.body.bias", None, "'stages.conv1.body.bias' is missing (1 of 8)"),
        ("local", "other", torch.zeros(1), "'other' is unknown (1 too many)"),
    ],
)
def test_a_server_s_model_that_does_not_fit_is_an_error_of_one_line_in_the_log_too(
    method, name, array, reason, tmp_path, caplog
):
    """A missing array of an extractor was replaced by its initial weights, without a word."""
    config = make_config(method=method, local_test_fraction=0.3)
    client = Client(config, tmp_path)
    network = build_network(config, SHAPE, NUM_CLASSES)
    arrays = strategy_for(config, network).initial_arrays(network)
    arrays = {n: a for n, a in (arrays | {name: array}).items() if a is not None}
    for kind in ("train", "evaluate"):
        found = error_of(client.ask(kind, 1, arrays))
        assert found.startswith("the model that the server sent does not fit cnn-fedreco: array")
        assert reason in found
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_method_that_compares_an_earlier_stage_gets_the_whole_extractor(
    kind, tmp_path, monkeypatch
):
    """`Average` sends all but the classifier, whatever `split_stage` says: clients refused it."""
    monkeypatch.setattr(FedRep, "split_stage", lambda self, model: model.stage_names[0])
    config = make_config(method="fedrep", local_test_fraction=0.3)
    network = build_network(config, SHAPE, NUM_CLASSES)
    arrays = strategy_for(config, network).initial_arrays(network)
    reply = Client(config, tmp_path).ask(kind, 1, arrays)
    assert not reply.has_error(), reply.error


@pytest.mark.parametrize(
    ("method", "name", "shape"),
    [
        ("scaffold", "c.classifier.weight", (1, 84)),
        ("fedcr", "S", (3, 1)),
        ("fedpac", "is-known", (1,)),
        ("fedproc", "prototypes", (4, 84)),
        ("fedpac", "head.classifier.bias", (1,)),
    ],
)
def test_what_a_server_sends_beside_the_model_is_not_broadcast(
    method, name, shape, tmp_path, caplog
):
    config = make_config(method=method, local_test_fraction=0.3)
    network = build_network(config, SHAPE, NUM_CLASSES)
    strategy = strategy_for(config, network)
    arrays, extra = strategy.initial_arrays(network), dict(strategy.extra_like())
    whole = [*extra[name].shape]
    extra[name] = torch.ones(shape)
    found = error_of(Client(config, tmp_path).ask("train", 1, arrays, extra=extra))
    assert found == (
        f"what the server sent alongside the model is unusable: array {name!r} is {[*shape]}, "
        f"expected {whole}"
    )
    assert all(record.exc_info is None for record in caplog.records)
    assert not [*tmp_path.rglob("*.safetensors")]  # client state


@pytest.mark.parametrize("method", ["scaffold", "fedcr", "fedpac", "fedproc"])
def test_a_method_that_extends_another_s_may_be_sent_further_arrays(method, tmp_path):
    config = make_config(method=method, local_test_fraction=0.3)
    network = build_network(config, SHAPE, NUM_CLASSES)
    strategy = strategy_for(config, network)
    arrays, extra = strategy.initial_arrays(network), dict(strategy.extra_like())
    more = extra | {"head.momentum": torch.ones(2)}
    replies = [
        read_reply(Client(config, tmp_path / name).ask("train", 1, arrays, extra=sent), 10**7)
        for name, sent in (("a", extra), ("b", more))
    ]
    for name, array in replies[0].arrays.items():
        assert torch.equal(replies[1].arrays[name], array)


def test_text_of_the_server_is_in_the_log_without_its_lines_and_control_characters(
    tmp_path, caplog, monkeypatch
):
    forged = "12:00:00 worker run x, round 9: client a: trained"
    config = make_config()
    arrays = initial(config) | {f"\x1b[2Jx\n{forged}": torch.zeros(1)}
    # as if only the network noticed, in an error of torch's
    monkeypatch.setattr(client_app.handlers, "check_received", lambda ctx: None)
    error_of(Client(config, tmp_path).ask("train", 1, arrays))
    [record] = [record for record in caplog.records if record.exc_info]
    text = logging.Formatter().format(record)
    assert "Traceback" in text
    assert "\x1b" not in text
    assert not any(line.startswith(forged) for line in text.splitlines())


@dataclass(frozen=True)
class ConstantLoss(FedProx):
    def supervised(self, batch):
        return torch.tensor(1.0)

    def penalty(self, batch):
        return torch.tensor(0.0)


@dataclass(frozen=True)
class PenaltyPerSample(FedProx):
    def penalty(self, batch):
        return batch.logits.square().sum(1)


@dataclass(frozen=True)
class NoUpdate(FedProx):
    def finish(self, update, ctx):
        return None


@dataclass(frozen=True)
class TextAsTerm(FedProx):
    def finish(self, update, ctx):
        return replace(update, terms={"supervised": "x"})


@dataclass(frozen=True)
class ExtraInPlace(FedProx):
    def begin_round(self, ctx):
        ctx.extra["prototypes"].mul_(0.5)


@dataclass(frozen=True)
class StateInPlace(FedProx):
    is_stateful: ClassVar[bool] = True

    def finish(self, update, ctx):
        ctx.state["h"]["n"] += 1
        return replace(update, state=ctx.state)


@dataclass(frozen=True)
class NanPenalty(FedProx):
    def penalty(self, batch):
        return (batch.logits.sum() - batch.logits.sum() - 1).sqrt()


@dataclass(frozen=True)
class StateNamedUpdate(FedProx):
    """Its state has the name under which the client checks what it sends."""

    is_stateful: ClassVar[bool] = True

    def finish(self, update, ctx):
        arrays = {name: array * torch.nan for name, array in update.arrays.items()}
        return replace(update, arrays=arrays, state={"update": update.arrays})


@dataclass(frozen=True)
class NanState(FedProx):
    is_stateful: ClassVar[bool] = True

    def finish(self, update, ctx):
        return replace(update, state={"head": {"bias": torch.tensor([1.0, torch.nan])}})


@dataclass(frozen=True)
class WithoutItsFlag(FedProx):
    def penalty(self, batch):
        (z_g,) = batch.reps_global
        return z_g.sum()


@dataclass(frozen=True)
class OneLayer(FedProx):
    def layers(self, model):
        return "features"


@dataclass(frozen=True)
class UnknownLayer(FedProx):
    def layers(self, model):
        return ["conv1", "conv99"]


@dataclass(frozen=True)
class EmptySearch(FedProx):
    """`next` of nothing raises what also ends a generator, such as `phases`."""

    def penalty(self, batch):
        return next(iter(batch.reps)).sum()


@dataclass(frozen=True)
class GlobalModelInPlace(FedProx):
    """Its weights lie in the memory of the received arrays, which other clients read too."""

    uses_global_model: ClassVar[bool] = True

    def penalty(self, batch):
        with torch.no_grad():
            batch.global_model.classifier.weight.mul_(0.9)
        return super().penalty(batch)


SCALAR = "expected a scalar Tensor"
MISTAKES = {
    ConstantLoss: r"method fedprox: the loss \(supervised \+ penalty\) depends on no weight that",
    FloatPenalty: rf"FloatPenalty.penalty \(.*:\d+\) returned float: {SCALAR}$",
    ForgottenReturn: rf"ForgottenReturn.penalty \(.*:\d+\) returned NoneType: {SCALAR}; for no p",
    PenaltyPerSample: rf"PenaltyPerSample.penalty \(.*:\d+\) returned shape \[\d+\]: {SCALAR}",
    WithoutItsFlag: r"WithoutItsFlag.penalty \(.*:\d+\) reads batch.reps_global: set uses_g",
    EmptySearch: r"StopIteration",
    NoUpdate: r"NoUpdate.finish \(.*:\d+\) returned NoneType: expected an Update$",
    TextAsTerm: r"TextAsTerm: Update.terms\['supervised'\] is 'x': expected a number$",
    InPlace: r"InPlace changes ctx.received\['stages.conv1.body.weight'\] in place",
    ExtraInPlace: r"ExtraInPlace changes ctx.extra\['prototypes'\] in place",
    StateInPlace: r"StateInPlace changes ctx.state\['h'\]\['n'\] in place",
    GlobalModelInPlace: r"GlobalModelInPlace changes classifier.weight of a frozen model in place",
    StateNamedUpdate: r"not finite in 'update'; the client state is unchanged",
    NanState: r"not finite in 'head'; the client state is unchanged",
    NanPenalty: r"not finite in 'update'; .* The loss term `penalty` is nan in step 1$",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_method_says_which_function_and_what_is_expected(
    mistake, tmp_path, monkeypatch
):
    with_method(monkeypatch, "fedprox", mistake)
    config = make_config(method="fedprox")
    extra = {"prototypes": torch.ones(3)}
    StateFolder(tmp_path / "clients" / "client-0000").save(1, {"h": {"n": torch.ones(1)}})
    reason = error_of(Client(config, tmp_path).ask("train", 2, initial(config), extra=extra))
    assert re.search(MISTAKES[mistake], reason), reason
    assert [path.name[:11] for path in tmp_path.glob("clients/*/*")] == ["round-00001"]


@dataclass(frozen=True)
class Uncopied(FedProx):
    """Returns the memory of the network itself, which the next client trains."""

    is_stateful: ClassVar[bool] = True

    def phases(self, ctx):
        ctx.model.load_state_dict(ctx.received)
        descent = yield objective_phase(self, ctx)
        arrays = ctx.model.state_dict()
        extra = {"head": arrays["classifier.weight"].T}
        return Update(arrays, descent.num_steps, {}, extra, state={"model": arrays})


def test_an_update_in_the_memory_of_the_network_is_not_the_next_clients(tmp_path, monkeypatch):
    """Else all clients of a process would send what the last one trained."""
    with_method(monkeypatch, "fedprox", Uncopied)
    config = make_config(method="fedprox")
    replies = []
    for number in range(2):
        client = Client(config, tmp_path, {"partition-id": number, "num-partitions": 2})
        replies.append(read_reply(client.ask("train", 1, initial(config))))
    first, second = (reply.arrays["classifier.weight"] for reply in replies)
    assert not torch.equal(first, second)
    for reply in replies:
        assert torch.equal(reply.extra["head"], reply.arrays["classifier.weight"].T)


@dataclass(frozen=True)
class InInferenceMode(FedProx):
    """Sends and stores inference tensors, which have no version counter."""

    is_stateful: ClassVar[bool] = True

    def finish(self, update, ctx):
        with torch.inference_mode():
            arrays = {name: 1 * array for name, array in update.arrays.items()}
            counts = 1 * ctx.label_counts
        return replace(update, arrays=arrays, state={"m": {"counts": counts}})


@dataclass(frozen=True)
class WithGradient(FedProx):
    """Stores an array that requires a gradient."""

    is_stateful: ClassVar[bool] = True

    def penalty(self, batch):
        bias = batch.ctx.model.classifier.bias
        stored = batch.ctx.state.get("m", {"bias": torch.zeros_like(bias)})
        return (bias - stored["bias"]).square().sum()

    def finish(self, update, ctx):
        return replace(update, state={"m": {"bias": 2 * ctx.model.classifier.bias}})


@pytest.mark.parametrize(
    ("mistake", "found"), [(OneLayer, "'features'"), (UnknownLayer, r"\['conv1', 'conv99'\]")]
)
def test_a_layer_that_the_network_lacks_is_refused_before_round_1(mistake, found):
    message = rf"{mistake.__name__}\.layers \(.*:\d+\) returned {found}: expected a list .*, logits"
    with pytest.raises(ValueError, match=message):
        mistake(mu=0.1, half=True, squared=True).check_model(
            build_network(make_config(), SHAPE, NUM_CLASSES)
        )


def test_data_of_one_class_is_refused_and_its_source_named():
    with pytest.raises(ValueError, match=r"source = 'npz:.*' has 1 class: expected at least 2"):
        build_network(make_config(), SHAPE, 1)


def test_images_that_are_not_square_are_refused_by_their_width_and_height():
    with pytest.raises(ValueError, match="images are 40 x 28 pixels: the networks take squares"):
        build_network(make_config(), (1, 28, 40), NUM_CLASSES)


def test_too_long_a_step_is_not_blamed_on_a_loss_term(tmp_path):
    config = make_config(method="fedprox", lr=1e30, **{"local-epochs": 3})
    reason = error_of(Client(config, tmp_path).ask("train", 1, initial(config)))
    assert reason.endswith(f"the client state is unchanged. {advice(['lr'])}")


def test_too_long_a_step_of_fedreco_names_its_own_learning_rates(tmp_path):
    config = make_config(method="fedreco", fedreco__eta_u=1e30, fedreco__k_u="3 epochs")
    u_0 = {n: w for n, w in initial(config).items() if not n.startswith("classifier")}
    reason = error_of(Client(config, tmp_path).ask("train", 1, u_0))
    assert "Lower fedreco.eta-u or fedreco.eta-v, set clip-norm above 0" in reason


def test_a_damaged_state_is_an_error_and_not_a_fresh_start(tmp_path):
    config = make_config(method="fedreco")
    u_0 = {n: w for n, w in initial(config).items() if not n.startswith("classifier")}
    client = Client(config, tmp_path)
    client.ask("train", 1, u_0)
    (path,) = (tmp_path / "clients" / "client-0000").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in error_of(client.ask("train", 2, u_0), RESET_NEEDED)
    assert "is damaged" in error_of(client.ask("evaluate", 2, u_0), RESET_NEEDED)


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
    assert "create the file reset-state on this client's machine" in reason
    assert reason.endswith("(this client's log names the folder)")
    assert f"create the file {path.parent / 'reset-state'}" in caplog.text


def test_lost_client_state_is_refused_until_it_is_reset(tmp_path):
    config = make_config(method="moon")
    client, weights = Client(config, tmp_path), initial(config)
    client.ask("train", 1, weights)
    kept = tmp_path / "clients" / "client-0000"
    shutil.rmtree(kept)
    reason = error_of(client.ask("train", 2, weights, counted=1), RESET_NEEDED)
    assert f"this client trained in round 1, and {kept} holds no state of it: restore it" in reason
    assert f"or create the file {kept / 'reset-state'}" in reason
    assert "holds no state" in error_of(client.ask("evaluate", 2, weights, counted=1), RESET_NEEDED)
    (kept / "reset-state").touch()
    assert not client.ask("train", 2, weights, counted=1).has_error()
    assert not (kept / "reset-state").exists()  # it is for once
    assert not client.ask("train", 3, weights, counted=2).has_error()


@pytest.mark.parametrize("resumes", [False, True])
def test_a_late_client_does_not_replace_the_state_of_a_newer_round(tmp_path, resumes):
    """Round 2 timed out while its worker was busy; another worker has trained round 3 meanwhile."""
    config = make_config(method="moon")
    client, weights = Client(config, tmp_path), initial(config)
    history, kept = tmp_path / "history.jsonl", tmp_path / "clients" / "client-0000"
    client.ask("train", 1, weights)
    append_history(history, {"round": 1})
    append_history(history, {"round": 2, "left_out": {"client-0000": "no answer in time"}})
    client.ask("train", 3, weights, counted=1)
    before = sorted(kept.iterdir())
    if resumes:
        truncate_history(history, 1)
    reply = client.ask("train", 2, weights, counted=1)
    if resumes:
        assert not reply.has_error()
        assert sorted(path.name[:11] for path in kept.iterdir()) == ["round-00001", "round-00002"]
    else:
        assert "round 2 is over" in error_of(reply)
        assert sorted(kept.iterdir()) == before


def test_methods_that_keep_nothing_miss_nothing(tmp_path):
    config = make_config()
    client = Client(config, tmp_path)
    assert not client.ask("train", 2, initial(config), counted=1).has_error()


def test_an_error_leaves_the_process_able_to_answer_the_next(tmp_path):
    config = make_config()
    client = Client(config, tmp_path)
    assert client.ask("train", 1, {}).has_error()
    with ThreadPoolExecutor(1) as pool:  # the turn is free, also for another client's thread
        assert pool.submit(turn._lock.acquire, blocking=False).result()
        pool.submit(turn._lock.release).result()
    assert not client.ask("train", 1, initial(config)).has_error()


ALLOC_FAILED = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported. For debugging"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), 1),
        (torch.AcceleratorError(f"CUDA error: out of memory{ASYNCHRONOUS}"), 1),
        (RuntimeError(ALLOC_FAILED), 1),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), 1),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 1),
        (torch.AcceleratorError(f"CUDA error: unspecified launch failure{ASYNCHRONOUS}"), GPU_LOST),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), GPU_LOST),
        (RuntimeError("CUDA driver error: an illegal memory access"), GPU_LOST),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), GPU_LOST),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), GPU_LOST),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), 1),
        (ValueError("/data/out of memory: there is no such folder"), 1),
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
    assert reason.endswith("or set precision=bf16") == is_full
    assert "Tried" not in reason
    assert not is_full or "asynchronously" not in reason


# --- the worker -----------------------------------------------------------------------------------


def test_a_worker_forgets_the_networks_of_the_run_before():
    worker, cpu = ProcessCache(), torch.device("cpu")
    one, two = make_config(seed=1), make_config(seed=2)
    data = facts(one)
    first = worker.network(one, data, "cnn-fedreco", "local", cpu)
    assert worker.network(one, data, "cnn-fedreco", "local", cpu) is first
    assert worker.network(one, data, "cnn-fedreco", "global", cpu) is not first
    second = worker.network(two, data, "cnn-fedreco", "local", cpu)
    assert_same_bits(second.state_dict(), initial(two))
    assert differ(second.state_dict(), initial(one))
