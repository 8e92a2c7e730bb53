"""bundle.json and data-fraction: what a run says of itself, and a smaller share of the data."""

import hashlib
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import server_app.bundle
from client_app.setup import client_indices, open_source
from data.partitions import partition_indices, stratified_share
from experiments.plan import machines_of
from experiments.verify import checks, round_check
from protocol.config import keel_version, resolve_config
from protocol.seeds import seed_of
from server_app.bundle import begin_bundle, commit, read_bundle

keys = {"source": "digits", "model": "cnn-fedreco", "num-clients": 4}


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 1.0])
def test_a_stratified_share_has_its_part_of_each_class(fraction):
    labels = np.random.default_rng(3).permutation(np.repeat([0, 1, 2, 7], [400, 200, 40, 1]))
    share = stratified_share(labels, fraction, seed=5)
    assert len(set(share.tolist())) == len(share)
    assert share.tolist() == sorted(share.tolist())
    for label, size in ((0, 400), (1, 200), (2, 40), (7, 1)):
        assert (labels[share] == label).sum() == max(1, round(fraction * size))
    assert (stratified_share(labels, fraction, seed=5) == share).all()
    if fraction < 0.9:
        assert share.tolist() != stratified_share(labels, fraction, seed=6).tolist()


def test_clients_split_the_share_alone():
    config = resolve_config({**keys, "data-fraction": 0.25, "alpha": 1.0})
    labels = np.asarray(open_source(config).train.labels)
    parts = [client_indices(config, i, 4)[0] for i in range(4)]
    together = np.sort(np.concatenate(parts))
    share = stratified_share(labels, 0.25, seed_of(0, "data-fraction"))
    assert together.tolist() == share.tolist()


def test_the_whole_fraction_is_the_split_as_it_was():
    config = resolve_config({**keys, "alpha": 1.0})
    labels = np.asarray(open_source(config).train.labels)
    seed = seed_of(0, "partition")
    whole = partition_indices(
        "dirichlet",
        labels,
        4,
        alpha=1.0,
        classes_per_client=2,
        shards_per_client=2,
        min_size=10,
        seed=seed,
    )
    for i, part in enumerate(whole):
        assert client_indices(config, i, 4)[0].tolist() == part.tolist()


@pytest.mark.parametrize("value", [0.0, 1.5, -0.1])
def test_other_fractions_are_refused(value):
    with pytest.raises(ValueError, match=r"data-fraction = .*\(0, 1\]"):
        resolve_config({"data-fraction": value})


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def test_a_bundle_holds_digests_of_files_rounds_and_split(run):
    folder = run({"num-rounds": 4})
    bundle = read_bundle(folder)
    assert bundle["files"] == {
        name: sha((folder / name).read_bytes())
        for name in ("config.json", "history.jsonl", "summary.json", "model.safetensors")
    }
    assert list(bundle["rounds"]) == ["1", "2", "3"]
    kept = {path.name.split("-")[1]: path for path in folder.glob("checkpoints/*")}
    assert sha(kept["00003"].read_bytes()) == bundle["rounds"]["3"]
    assert bundle["versions"].keys() >= {"torch", "numpy", "flwr", "python", "cpu", "gpu"}
    assert (bundle["clients"], bundle["simulated"]) == (4, True)
    other = read_bundle(run({"num-rounds": 4, "alpha": 0.5}))
    assert other["split"] != bundle["split"]
    assert other["rounds"]["1"] != bundle["rounds"]["1"]


def test_a_split_that_differs_in_which_samples_alone_has_another_digest(run):
    """IID parts of equal class counts: only the indices tell two seeds apart."""
    iid = {"partition": "classes", "classes-per-client": 10, "num-rounds": 1}
    counts, digests = [], []
    for seed in (0, 1):
        folder = run({**iid, "seed": seed})
        config = resolve_config(json.loads((folder / "config.json").read_text())["given"])
        labels = np.asarray(open_source(config).train.labels)
        parts = [client_indices(config, i, 4)[0] for i in range(4)]
        counts.append([np.bincount(labels[part]).tolist() for part in parts])
        digests.append(read_bundle(folder)["split"])
    assert counts[0] == counts[1]
    assert digests[0] != digests[1]


# --- verify ---------------------------------------------------------------------------------------


def test_a_run_that_did_not_finish_is_not_called_right(run):
    folder = run({"num-rounds": 1})
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "failed: no more disk"}))
    (check,) = checks(folder, rounds=1)
    assert not check.is_right
    assert check.found == "the run did not finish: failed: no more disk"


def test_other_bits_without_an_accuracy_to_compare_are_not_called_right():
    line = {"round": 1}
    bundle, again = ({"rounds": {"1": bits}, "versions": {"gpu": "some"}} for bits in "ab")
    assert round_check(line, line, bundle, bundle, same_place=True).is_right
    check = round_check(line, line, bundle, again, same_place=False)
    assert not check.is_right
    assert "no accuracy to compare" in check.found


# --- where it was run ---------------------------------------------------------------------------


def test_a_bundle_names_keel_and_every_machine_that_worked_on_the_run(run, monkeypatch):
    folder = run({"num-rounds": 1})
    bundle = read_bundle(folder)
    assert bundle["versions"]["keel"].startswith(keel_version())
    assert machines_of(folder) == bundle["machines"]
    (here,) = bundle["machines"]
    assert here.startswith("cpu: ")
    # resumed elsewhere: round 1 keeps the versions that its digest is of
    monkeypatch.setattr(server_app.bundle, "machine", lambda device: "cuda: another")
    monkeypatch.setattr(server_app.bundle, "versions", lambda: {"torch": "another"})
    begin_bundle(folder, resolve_config(keys), [])
    assert machines_of(folder) == [here, "cuda: another"]
    assert read_bundle(folder)["versions"] == bundle["versions"]


def test_the_commit_is_keels_own_or_none(tmp_path, monkeypatch):
    if not shutil.which("git"):
        pytest.skip("no git on PATH")
    monkeypatch.setattr(server_app.bundle, "app_folder", tmp_path)
    commit.cache_clear()
    assert commit() == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    commit.cache_clear()
    assert re.fullmatch("[0-9a-f]{12}", commit())
    commit.cache_clear()


def test_a_bundle_of_before_says_its_kind_of_processor(tmp_path):
    for gpu, expected in (("none", "cpu: x86_64 AVX2"), ("some GPU", "cuda: some GPU")):
        versions = {"cpu": "x86_64 AVX2", "gpu": gpu}
        (tmp_path / "bundle.json").write_text(json.dumps({"versions": versions}))
        assert machines_of(tmp_path) == [expected]
