"""manifest.json: what a run says of itself, and how a replay is compared with it."""

import shutil

import pytest
import torch
from roster_fixtures import entry

import protocol.code
import server_app.manifest
from keel.experiments.runs import machines_of, precision_of
from keel.experiments.verify import differing_versions, round_check
from protocol.code import SERVER_PACKAGES, code_digest, run_by_worker, sources_digest
from protocol.config import app_folder, resolve_config
from server_app.manifest import begin_manifest, note_round
from server_app.roster import split_digest
from server_app.run_reader import RunReader

keys = {"source": "digits", "model": "cnn-fedreco", "num-clients": 4}


def line(accuracy):
    return {"round": 1, "global": {"accuracy": accuracy}}


@pytest.mark.parametrize(
    ("now", "accuracy", "has_to_be_same", "passed"),
    [
        ("a", 0.5, True, True),
        ("a", 0.51, True, False),  # the same bits with another accuracy
        ("b", 0.5, True, False),
        ("b", 0.51, False, True),
        ("b", 0.53, False, False),
        ("b", None, False, False),
    ],
)
def test_a_replayed_round_is_bit_identical_or_close(now, accuracy, has_to_be_same, passed):
    ours = {"round": 1} if accuracy is None else line(accuracy)
    assert round_check(line(0.5), ours, "a", now, has_to_be_same).passed == passed
    both = line(0.5) | {"personal": {"mean": 0.5}}  # of which the replay has one
    assert round_check(both, ours, "a", now, False).passed == (now == "a" and accuracy == 0.5)


def test_versions_that_differ_are_named_and_an_unused_gpu_is_not():
    then = {"torch": "2.15.0", "gpu": "none"}
    here = {"torch": "2.15.0", "gpu": "some GPU"}
    assert differing_versions(then, here, is_on_gpu=False) == []
    assert differing_versions(then, here, is_on_gpu=True) == ["gpu none, here some GPU"]
    assert differing_versions(then, then | {"torch": "3"}, False) == ["torch 2.15.0, here 3"]


def test_only_rounds_of_the_versions_of_the_manifest_and_of_no_others_before_are_noted(
    tmp_path, monkeypatch
):
    def noted(*rounds, torch="a"):
        """The rounds noted after a start, or resume, under this torch that does these rounds."""
        monkeypatch.setattr(server_app.manifest, "versions", lambda device, own: {"torch": torch})
        begin_manifest(folder, resolve_config(keys), 0, True, "")
        for number in rounds:
            note_round(folder, resolve_config(keys), number, f"{torch}{number}")
        manifest = RunReader(folder).manifest
        return manifest["versions"]["torch"], " ".join(manifest.get("rounds", {}).values())

    folder = tmp_path / "1"
    folder.mkdir()
    assert noted(1) == ("a", "a1")
    assert noted(2, torch="b") == ("a", "a1")
    assert noted(3, 4) == ("a", "a1")  # from a round of b
    folder = tmp_path / "2"
    folder.mkdir()
    assert noted(1, 2, 3) == ("a", "a1 a2 a3")
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
        monkeypatch.setattr(server_app.manifest, "code_of", lambda own: code)
        begin_manifest(tmp_path, resolve_config(keys), 0, True, "")

    begin("0")
    begin("a")
    assert not caplog.messages  # no round was trained with 0
    note_round(tmp_path, resolve_config(keys), 1, "0")
    for code in ("a", "b", "a", "b"):
        begin(code)
    assert len(caplog.messages) == 1
    assert "0; a; now b" in caplog.text


def test_where_sites_trained_is_not_said_to_be_the_servers_machine(tmp_path):
    begin_manifest(tmp_path, resolve_config(keys), 1, False, "")
    assert "machines" not in RunReader(tmp_path).manifest
    assert machines_of(tmp_path) == ["its clients' own"]


def test_an_app_bundle_has_the_digest_of_the_checkout_and_changed_sources_have_another(
    tmp_path, monkeypatch
):
    ours, packages = sources_digest(), sorted({*run_by_worker, *SERVER_PACKAGES})
    for package in packages:
        ignored = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(app_folder / package, tmp_path / package, ignore=ignored)
    monkeypatch.setattr(protocol.code, "app_folder", tmp_path)

    def again():
        code_digest.cache_clear()
        sources_digest.cache_clear()
        return sources_digest()

    try:
        assert again() == ours
        for package in packages:
            path = tmp_path / package / "__init__.py"
            text = path.read_text()
            path.write_text(text + "x = 1\n")
            assert again() != ours, package
            path.write_text(text)
        assert again() == ours
    finally:
        code_digest.cache_clear()
        sources_digest.cache_clear()


@pytest.mark.parametrize(("precision", "noted"), [("auto", ["bf16"]), ("fp32", ["fp32"])])
def test_what_auto_precision_was_is_noted(precision, noted, run, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr("client_app.networks.auto_min_parameters", 0)
    folder = run({"precision": precision, "num-rounds": 1, "device": "cpu"}, 2)
    assert precision_of(folder) == noted
