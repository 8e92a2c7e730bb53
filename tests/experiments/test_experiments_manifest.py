"""manifest.json and data-fraction: what a run says of itself, and a smaller share of the data."""

import hashlib
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import client_app.worker_client
import server_app.manifest
from client_app.setup import client_indices, open_source
from client_app.worker_client import code_digest, run_by_worker
from data.partitions import partition_indices, stratified_share
from keel.experiments.runs import machines_of
from keel.experiments.verify import checks, round_check
from protocol.config import app_folder, keel_version, resolve_config
from protocol.files import digest
from protocol.messages import RosterEntry
from protocol.seeds import seed_of
from server_app.manifest import (
    begin_manifest,
    commit,
    note_round,
    read_manifest,
    run_by_server,
    sources_digest,
    versions,
)

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


def test_a_manifest_holds_digests_of_files_rounds_and_split(run):
    folder = run({"num-rounds": 4})
    manifest = read_manifest(folder)
    assert manifest["files"] == {
        name: sha((folder / name).read_bytes())
        for name in ("config.json", "history.jsonl", "summary.json", "model.safetensors")
    }
    assert list(manifest["rounds"]) == ["1", "2", "3"]
    states = {path.name.split("-")[1]: path for path in folder.glob("checkpoints/*")}
    assert sha(states["00003"].read_bytes()) == manifest["rounds"]["3"]
    assert manifest["versions"].keys() >= {"torch", "numpy", "flwr", "python", "cpu", "gpu"}
    assert (manifest["clients"], manifest["simulated"]) == (4, True)
    other = read_manifest(run({"num-rounds": 4, "alpha": 0.5}))
    assert other["split"] != manifest["split"]
    assert other["rounds"]["1"] != manifest["rounds"]["1"]


def test_a_split_that_differs_in_which_samples_alone_has_another_digest(run):
    """IID parts of equal class counts: only the indices tell two seeds apart."""
    iid = {"partition": "classes", "classes-per-client": 10, "num-rounds": 1}
    counts, digests = [], []
    for seed in (0, 1):
        folder = run({**iid, "seed": seed})
        config = resolve_config(json.loads((folder / "config.json").read_text())["overrides"])
        labels = np.asarray(open_source(config).train.labels)
        parts = [client_indices(config, i, 4)[0] for i in range(4)]
        counts.append([np.bincount(labels[part]).tolist() for part in parts])
        digests.append(read_manifest(folder)["split"])
    assert counts[0] == counts[1]
    assert digests[0] != digests[1]


# --- verify ---------------------------------------------------------------------------------------


def test_client_state_is_verified_by_its_digest(run):
    folder = run({"num-rounds": 2, "method": "local", "local-test-fraction": 0.2})
    states = read_manifest(folder)["kept"]
    assert sorted(states) == [f"client-000{i}" for i in range(4)]
    assert all(name.startswith("round-00002-") for name in states.values())
    (check,) = [c for c in checks(folder, rounds=1) if "state of" in c.found]
    assert (check.passed, check.found) == (True, "state of 4 clients: unchanged")
    (folder / "clients" / "client-0001" / states["client-0001"]).unlink()
    path = folder / "clients" / "client-0003" / states["client-0003"]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (check,) = [c for c in checks(folder, rounds=1) if "state of" in c.found]
    assert not check.passed
    assert "client-0001/round-00002-" in check.found
    assert "client-0003/round-00002-" in check.found
    assert "client-0002" not in check.found


def test_a_run_that_did_not_finish_is_not_passed(run):
    folder = run({"num-rounds": 1})
    summary = json.loads((folder / "summary.json").read_text())
    text = json.dumps(summary | {"status": "failed: no more disk"})
    (folder / "summary.json").write_text(text)
    assert [c.found[:13] for c in checks(folder, rounds=1) if not c.passed] == ["summary.json:"]
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["summary.json"] = digest(text.encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (check,) = checks(folder, rounds=1)
    assert not check.passed
    assert check.found == "the run did not finish: failed: no more disk"


def test_other_bits_without_an_accuracy_to_compare_are_not_passed():
    line = {"round": 1}
    manifest, again = ({"rounds": {"1": bits}, "versions": {"gpu": "some"}} for bits in "ab")
    assert round_check(line, line, manifest, manifest, is_same_setup=True).passed
    check = round_check(line, line, manifest, again, is_same_setup=False)
    assert not check.passed
    assert "no accuracy to compare" in check.found


# --- where it was run ---------------------------------------------------------------------------


def test_a_manifest_names_keel_and_every_machine_that_worked_on_the_run(run, monkeypatch):
    folder = run({"num-rounds": 1})
    manifest = read_manifest(folder)
    (keel,) = manifest["keel"]
    assert keel.startswith(keel_version())
    assert "keel" not in manifest["versions"]
    assert machines_of(folder) == manifest["machines"]
    (here,) = manifest["machines"]
    assert here.startswith("cpu: ")
    # resumed elsewhere: round 1 keeps the versions that its digest is of
    monkeypatch.setattr(server_app.manifest, "machine", lambda device: "cuda: another")
    monkeypatch.setattr(server_app.manifest, "versions", lambda: {"torch": "another"})
    begin_manifest(folder, resolve_config(keys), [])
    assert machines_of(folder) == [here, "cuda: another"]
    assert read_manifest(folder)["versions"] == manifest["versions"]


def test_only_rounds_of_the_versions_of_the_manifest_and_of_no_others_before_are_noted(
    tmp_path, monkeypatch
):
    def noted(*rounds, torch="a"):
        """The rounds noted after a start, or resume, under this torch that does these rounds."""
        monkeypatch.setattr(server_app.manifest, "versions", lambda: {"torch": torch})
        begin_manifest(folder, resolve_config(keys), [])
        for number in rounds:
            note_round(folder, number, f"{torch}{number}")
        manifest = read_manifest(folder)
        return manifest["versions"]["torch"], " ".join(manifest.get("rounds", {}).values())

    folder = tmp_path / "1"
    folder.mkdir()
    assert noted(1) == ("a", "a1")
    assert noted(2, torch="b") == ("a", "a1")
    assert noted(3, 4) == ("a", "a1")  # from a round of b
    folder = tmp_path / "2"
    folder.mkdir()
    assert noted(1, 2, 3) == ("a", "a1 a2 a3")
    assert noted(4, torch="b") == ("a", "a1 a2 a3")
    assert noted(2, 3, torch="b") == ("a", "a1")  # done again
    assert noted(1, 2, torch="b") == ("a", "")
    assert noted(1, 2, torch="b") == ("b", "b1 b2")


def test_where_sites_trained_is_not_said_to_be_the_servers_machine(tmp_path):
    counts = np.ones(10, dtype=int).tolist()
    site = RosterEntry("a", counts, counts, [1, 32, 32], "cnn-fedreco", 10, "", num_partitions=0)
    begin_manifest(tmp_path, resolve_config(keys), [site])
    assert "machines" not in read_manifest(tmp_path)
    assert machines_of(tmp_path) == ["its clients' own"]


def test_an_app_bundle_is_the_same_place_as_the_checkout_and_changed_sources_are_not(
    tmp_path, monkeypatch
):
    ours = sources_digest()
    for package in {*run_by_worker, *run_by_server}:
        shutil.copytree(app_folder / package, tmp_path / package)
    for module in (server_app.manifest, client_app.worker_client):
        monkeypatch.setattr(module, "app_folder", tmp_path)

    def again():
        code_digest.cache_clear()
        sources_digest.cache_clear()
        return sources_digest()

    try:
        assert again() == ours
        for package in sorted({*run_by_worker, *run_by_server}):
            path = tmp_path / package / "__init__.py"
            text = path.read_text()
            path.write_text(text + "x = 1\n")
            assert again() != ours, package
            path.write_text(text)
        assert again() == ours
    finally:
        code_digest.cache_clear()
        sources_digest.cache_clear()


def test_all_packages_that_a_run_loads_are_in_the_digest():
    script = "import sys, server_app.app, client_app.app; print(*sys.modules)"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=app_folder, capture_output=True, text=True, check=True)
    own = {path.parent.name for path in app_folder.glob("*/__init__.py")}
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & own <= {*run_by_worker, *run_by_server}


def test_another_commit_of_the_same_sources_is_the_same_place(run, monkeypatch):
    folder = run({"num-rounds": 1})
    monkeypatch.setattr(server_app.manifest, "commit", lambda: "another")
    *_, found = (check.found for check in checks(folder, 1) if "versions" in check.found)
    assert found.startswith("versions: the same here (the run's Keel: ")
    monkeypatch.setattr(
        "keel.experiments.verify.versions", lambda: {**versions(), "sources": "f" * 16}
    )
    *_, found = (check.found for check in checks(folder, 1) if "versions" in check.found)
    assert found.startswith(f"versions: sources {sources_digest()}, here {'f' * 16} (")


def test_the_commit_is_keels_own_or_none(tmp_path, monkeypatch):
    if not shutil.which("git"):
        pytest.skip("no git on PATH")
    monkeypatch.setattr(server_app.manifest, "app_folder", tmp_path)
    commit.cache_clear()
    assert commit() == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    commit.cache_clear()
    assert re.fullmatch("[0-9a-f]{12}", commit())
    commit.cache_clear()


def test_a_manifest_of_before_says_its_kind_of_processor(tmp_path):
    for gpu, expected in (("none", "cpu: x86_64 AVX2"), ("some GPU", "cuda: some GPU")):
        versions = {"cpu": "x86_64 AVX2", "gpu": gpu}
        (tmp_path / "manifest.json").write_text(json.dumps({"versions": versions}))
        assert machines_of(tmp_path) == [expected]
