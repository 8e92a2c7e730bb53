"""manifest.json and data-fraction: what a run says of itself, and a smaller share of the data."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from roster_fixtures import entry

import protocol.code
import server_app.manifest
from client_app.setup import client_indices, open_source
from data.partitions import partition_indices, stratified_share
from keel.experiments.runs import machines_of, precision_of
from keel.experiments.verify import differing_versions, round_check
from protocol.code import SERVER_PACKAGES, code_digest, run_by_worker, sources_digest
from protocol.config import app_folder, resolve_config
from protocol.messages import MachineReport
from protocol.seeds import seed_of
from server_app.manifest import begin_manifest, commit, note_round, read_manifest, split_digest
from server_app.preflight import WorkerOnNode

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


def test_other_bits_without_an_accuracy_to_compare_are_not_passed():
    line = {"round": 1}
    manifest, again = ({"rounds": {"1": bits}} for bits in "ab")
    assert round_check(line, line, manifest, manifest, is_same_setup=True).passed
    check = round_check(line, line, manifest, again, is_same_setup=False)
    assert not check.passed
    assert "no accuracy to compare" in check.found


def test_versions_that_one_side_alone_recorded_differ_and_an_unused_gpu_does_not():
    then = {"torch": "2.15.0", "gpu": "none"}
    here = {"torch": "2.15.0", "gpu": "some GPU"}
    assert differing_versions(then, here, is_on_gpu=False) == []
    assert differing_versions(then, here, is_on_gpu=True) == ["gpu none, here some GPU"]
    here |= {"gpu": "none", "sources": "ab"}  # a manifest of before sources were recorded
    assert differing_versions(then, here, False) == ["sources not recorded, here ab"]
    assert differing_versions(here, then, False) == ["sources ab, here not recorded"]


@pytest.mark.parametrize(("machine", "passed"), [("cpu: x", False), ("cuda: y", True)])
def test_other_bits_of_the_same_setup_are_passed_on_a_gpu_alone(machine, passed):
    """A GPU that is there and not used is no excuse."""
    line = {"round": 1, "global": {"accuracy": 0.5}}
    replay = {"rounds": {"1": "b"}, "versions": {"gpu": "y"}, "machines": [machine]}
    check = round_check(line, line, {"rounds": {"1": "a"}}, replay, is_same_setup=True)
    assert check.passed == passed


def test_the_same_bits_with_another_accuracy_are_not_passed():
    manifest, replay = {"rounds": {"1": "a"}}, {"rounds": {"1": "a"}, "machines": ["cpu: x"]}
    ours, theirs = ({"round": 1, "global": {"accuracy": a}} for a in (0.5, 0.51))
    assert round_check(ours, ours, manifest, replay, is_same_setup=True).passed
    assert not round_check(theirs, ours, manifest, replay, is_same_setup=True).passed


def test_other_bits_without_one_of_the_accuracies_are_not_passed():
    manifest, replay = {"rounds": {"1": "a"}}, {"rounds": {"1": "b"}, "machines": ["cpu: x"]}
    one = {"round": 1, "global": {"accuracy": 0.5}}
    both = one | {"personal": {"mean": 0.5}}
    assert round_check(both, both, manifest, replay, is_same_setup=False).passed
    assert not round_check(both, one, manifest, replay, is_same_setup=False).passed


@pytest.mark.parametrize(
    ("accuracy", "is_same_setup", "passed"),
    [
        *((0.5, True, True), (0.51, True, False), (0.53, True, False)),
        *((0.5, False, True), (0.51, False, True), (0.53, False, False)),
    ],
)
def test_a_round_without_a_digest_is_compared_by_its_accuracies(accuracy, is_same_setup, passed):
    ours, theirs = ({"round": 4, "global": {"accuracy": a}} for a in (accuracy, 0.5))
    replay = {"rounds": {}, "machines": ["cpu: x"]}
    check = round_check(theirs, ours, {"rounds": {"1": "a"}}, replay, is_same_setup)
    assert check.passed == passed
    assert check.found.startswith("round 4: no digest recorded, accuracies differ by ")
    bare = {"round": 4}
    assert round_check(bare, bare, {"rounds": {}}, replay, is_same_setup).passed


def test_only_rounds_of_the_versions_of_the_manifest_and_of_no_others_before_are_noted(
    tmp_path, monkeypatch
):
    def noted(*rounds, torch="a"):
        """The rounds noted after a start, or resume, under this torch that does these rounds."""
        monkeypatch.setattr(server_app.manifest, "versions", lambda device: {"torch": torch})
        begin_manifest(folder, resolve_config(keys), 0, True, "")
        for number in rounds:
            note_round(folder, resolve_config(keys), number, f"{torch}{number}")
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


def test_a_splits_digest_is_of_every_sample_in_a_simulation_and_of_counts_at_sites():
    """A resume compares it: label counts may be equal though the samples differ."""

    def digest(*names, seed=0, **about):
        config = resolve_config(keys | {"seed": seed})
        return split_digest(config, [entry(name, **about) for name in names])

    simulated = {"num_partitions": 2}
    assert digest("a", "b", **simulated) == digest("b", "a", **simulated)
    assert digest("a", "b", **simulated) != digest("a", "b", seed=1, **simulated)
    assert digest("a", "b") == digest("b", "a") == digest("a", "b", seed=1)
    assert digest("a", "b") != digest("a", "b", counts=(9, *(10,) * 9))
    withheld = {"counts": (), "test_label_counts": []}
    assert digest("a", num_train=90, **withheld) != digest("a", num_train=91, **withheld)


def test_a_resume_with_other_code_is_warned_of_once(tmp_path, monkeypatch, caplog):
    def begin(code):
        monkeypatch.setattr(server_app.manifest, "code_version", lambda: code)
        begin_manifest(tmp_path, resolve_config(keys), 0, True, "")

    begin("0")
    begin("a")
    assert not caplog.messages  # no round was trained with 0
    note_round(tmp_path, resolve_config(keys), 1, "0")
    for code in ("a", "b", "a", "b"):
        begin(code)
    (message,) = caplog.messages
    assert "since this run's last rounds (0; a; now b): the run will mix both" in message


def test_where_sites_trained_is_not_said_to_be_the_servers_machine(tmp_path):
    begin_manifest(tmp_path, resolve_config(keys), 1, False, "")
    assert "machines" not in read_manifest(tmp_path)
    assert machines_of(tmp_path) == ["its clients' own"]


def test_an_app_bundle_is_the_same_place_as_the_checkout_and_changed_sources_are_not(
    tmp_path, monkeypatch
):
    ours = sources_digest()
    for package in {*run_by_worker, *SERVER_PACKAGES}:
        shutil.copytree(
            app_folder / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc.*")
        )
    monkeypatch.setattr(protocol.code, "app_folder", tmp_path)

    def again():
        code_digest.cache_clear()
        sources_digest.cache_clear()
        return sources_digest()

    try:
        assert again() == ours
        for package in sorted({*run_by_worker, *SERVER_PACKAGES}):
            path = tmp_path / package / "__init__.py"
            text = path.read_text()
            path.write_text(text + "x = 1\n")
            assert again() != ours, package
            path.write_text(text)
        assert again() == ours
    finally:
        code_digest.cache_clear()
        sources_digest.cache_clear()


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
    for versions, expected in (
        ({"cpu": "x86_64 AVX2", "gpu": "none"}, "cpu: x86_64 AVX2"),
        ({"cpu": "x86_64 AVX2", "gpu": "some GPU"}, "cuda: some GPU"),
        ({"cpu": "x86_64 AVX2", "fpu": "none"}, "cpu: x86_64 AVX2"),  # a bit has flipped
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({"versions": versions}))
        assert machines_of(tmp_path) == [expected]


@pytest.mark.parametrize(("precision", "noted"), [("auto", ["bf16"]), ("fp32", ["fp32"])])
def test_what_auto_precision_was_is_noted(precision, noted, run, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr("client_app.precision.auto_min_parameters", 0)
    folder = run({"precision": precision, "num-rounds": 1, "device": "cpu"}, 2)
    assert precision_of(folder) == noted


def test_what_auto_precision_was_on_each_worker_is_noted(run, monkeypatch):
    """It was the server's alone, which trains nobody."""
    workers = [
        WorkerOnNode(name, MachineReport("v", "cpu: A", "x", "cpu", name, False, ""))
        for name in ("bf16", "fp32", "bf16")
    ]
    monkeypatch.setattr("server_app.federation.checked_workers", lambda *_: workers)
    folder = run({"precision": "auto", "num-rounds": 1, "device": "cpu"}, 2)
    assert precision_of(folder) == ["bf16", "fp32"]
