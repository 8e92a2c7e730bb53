"""The manifest of a run and `keel experiments verify`."""

import errno
import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import server_app.federation
import torch
from data_fixtures import random_images
from rich.console import Console
from run_fixtures import resume, summary_of

import server_app.manifest
from client_app.setup import client_indices, device_for, forget_sources, open_source
from client_app.state import ResetNeeded
from keel.experiments.runs import machines_of, status_of
from keel.experiments.verify import checks, unfinished, verify
from protocol.code import sources_digest
from protocol.config import keel_version, resolve_config
from protocol.files import digest
from server_app.load_model import load_model
from server_app.manifest import begin_manifest, versions
from server_app.summary import read_manifest

MISSING = object()
keys = {"source": "digits", "model": "cnn-fedreco", "num-clients": 4}


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


def test_a_state_that_was_added_is_found_and_not_used(run):
    folder = run({"num-rounds": 2, "method": "local", "local-test-fraction": 0.2})
    *_, (_, client), (name, other) = sorted(
        (n, c) for c, n in read_manifest(folder)["kept"].items()
    )
    shutil.copy(folder / "clients" / other / name, folder / "clients" / client)
    with pytest.raises(ResetNeeded, match=f"is of client {other!r}"):  # the later name is taken
        load_model(folder, client)
    (folder / "clients" / "stranger").mkdir()
    shutil.copy(folder / "clients" / other / name, folder / "clients" / "stranger")
    (check,) = [c for c in checks(folder, rounds=0) if not c.passed]
    added = f"clients/{client}/{name}, clients/stranger/{name}"
    assert check.found == f"state of 4 clients: missing, damaged or added: {added}"


def test_an_audit_log_without_its_last_line_is_found(run):
    folder = run({"num-rounds": 1})
    path = folder / "audit.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    (check,) = [c for c in checks(folder, rounds=0) if not c.passed]
    assert check.found.endswith("its end was changed")


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_damaged_checkpoint_with_fedpacs_heads_is_found_and_not_used(run, is_cut):
    folder = run({"num-rounds": 2, "method": "fedpac", "local-test-fraction": 0.2})
    (path,) = folder.glob("checkpoints/*2-*")
    assert [c.found for c in checks(folder, 0) if "checkpoints" in c.found] == [
        f"checkpoints/{path.name}: unchanged"
    ]
    load_model(folder, "client-0001")
    content = path.read_bytes()
    path.write_bytes(content[:1000] if is_cut else content[:-9] + b"?" + content[-8:])
    (check,) = [c for c in checks(folder, 0) if not c.passed]
    assert check.found == f"checkpoints/{path.name}: missing or damaged"
    with pytest.raises(ValueError, match=f"{path.name} is damaged and may have client-0001's head"):
        load_model(folder, "client-0001")
    if is_cut:  # before its digest was taken: it was an exception of the file format
        cut = path.rename(path.with_name(f"round-00002-{digest(content[:1000])}.safetensors"))
        with pytest.raises(ValueError, match=f"{cut.name} is damaged and may have client-0001's h"):
            load_model(folder, "client-0001")


def test_what_a_manifest_says_forges_no_line_of_the_checks(tmp_path):
    """A run directory of someone else's could hide that a check failed."""
    files = {"config.json": "ab\n  passed \x1b[1A\x1b[2K\u202e[green]passed[/]"}
    manifest = {"versions": {}, "clients": 1, "simulated": False, "split": "cd", "files": files}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    out = io.StringIO()
    assert verify(tmp_path, 1, Console(file=out, width=300)) == 1
    _, *lines, last = out.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("  failed ") for line in lines)
    assert last == f"1 run, {len(lines)} checks failed"


def test_data_that_has_changed_is_found(run, tmp_path):
    """Beyond what the first rounds read: one pixel of a test image, evaluated in the last round."""
    images, labels = random_images(40, 28, 28), np.arange(40) % 2
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:9], "y_test": labels[:9]}
    np.savez(tmp_path / "data.npz", **arrays)
    keys = {"source": f"npz:{tmp_path / 'data.npz'}", "partition": "iid", "min-samples": 1}
    folder = run({**keys, "num-rounds": 3, "evaluate-every": 3, "data-fraction": 1.0})
    assert all(check.passed for check in checks(folder, rounds=2))
    arrays["x_test"] = images[:9] ^ (np.arange(9) == 8)[:, None, None].astype(np.uint8)
    np.savez(tmp_path / "data.npz", **arrays)
    forget_sources()
    (check,) = [c for c in checks(folder, rounds=2) if not c.passed]
    assert check.found.startswith("data: ")
    assert check.found.endswith(f", expected {read_manifest(folder)['data']}")


odd_values = (3, "x", [1], {"a": 1}, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, MISSING) for key in ("versions", "clients", "simulated", "split")),
        *(("versions", value) for value in odd_values),
        *(("code", value) for value in (3, [1], None)),
        *(("machines", value) for value in (3, [1])),
        *(("rounds", value) for value in (3, [1], {"a": "1"}, {"1": 1})),
        *(("files", value) for value in (3, "x", [1], {"config.json": 1})),
        *(("kept", value) for value in odd_values),
        *(("audit", value) for value in ({}, *odd_values)),
        *(("clients", value) for value in ("x", [1])),
    ],
)
def test_a_manifest_of_odd_values_is_damaged(run, key, value):
    """It is JSON still, as after a bit has flipped in a name: named, and set aside by a resume."""
    folder = run({"num-rounds": 1})
    manifest = read_manifest(folder) | {key: value}
    if value is MISSING:
        del manifest[key]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (check,) = checks(folder, rounds=0)
    what = f"it has no key {key!r}" if value is MISSING else f"{key} = {value!r}"
    assert (check.passed, check.found) == (False, f"{folder}/manifest.json is damaged: {what}")


@pytest.mark.parametrize("content", [b"{", None])
def test_a_damaged_config_does_not_keep_other_runs_from_being_verified(run, tmp_path, content):
    folder = run({"num-rounds": 1})
    for name in ("a", "b"):
        shutil.copytree(folder, tmp_path / "runs" / name)
    path = tmp_path / "runs" / "a" / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    out = io.StringIO()
    assert verify(tmp_path / "runs", 0, Console(file=out, width=300)) == 1
    assert f"failed {path.parent if content is None else path} " in out.getvalue()
    assert f"{tmp_path / 'runs' / 'b'}\n  passed config.json" in out.getvalue()
    assert "2 runs, 2 checks failed" in out.getvalue()


@pytest.mark.parametrize("name", ["manifest.json", "summary.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_a_failed_check_of_its_run(run, tmp_path, monkeypatch, name):
    """The runs after it were not verified."""
    folder = run({"num-rounds": 1})
    for copy in ("a", "b"):
        shutil.copytree(folder, tmp_path / "runs" / copy)
    refused, opened = tmp_path / "runs" / "a" / name, Path.open

    def open_or_refuse(path, *how, **options):
        if path == refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *how, **options)

    monkeypatch.setattr(Path, "open", open_or_refuse)  # tests may run as root
    out = io.StringIO()
    assert verify(tmp_path / "runs", 1, Console(file=out, width=300)) == 1
    assert f"failed {refused}: Permission denied" in out.getvalue()
    assert "passed round 1: bit-identical" in out.getvalue().rpartition(str(tmp_path))[2]
    assert out.getvalue().endswith("2 runs, 1 check failed\n")


def test_a_manifest_with_a_misspelt_name_does_not_stop_a_resume(run):
    folder = run({"num-rounds": 1})
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"versions"', '"wersions"'))
    resume(folder, num_rounds=2)
    assert '"wersions"' in (folder / "manifest.json.damaged").read_text()
    assert read_manifest(folder).keys() >= {"versions", "files", "kept"}


def test_rounds_whose_history_is_lost_are_replayed_against_their_digests(run):
    folder = run({"num-rounds": 2})
    (folder / "history.jsonl").unlink()
    resume(folder, num_rounds=4)
    replayed = [check for check in checks(folder, rounds=4) if check.found.startswith("round ")]
    assert [check.passed for check in replayed] == [True] * 4
    *noted, last = (check.found for check in replayed)
    expected = read_manifest(folder)["rounds"].items()
    assert noted == [f"round {number}: bit-identical ({recorded})" for number, recorded in expected]
    assert last == "round 4: no digest recorded, accuracies differ by 0.00 points"


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


def test_a_run_of_a_gpu_is_replayed_on_the_cpu_where_there_is_none(run, monkeypatch):
    """The missing GPU was a failed check of the run."""
    folder = run({"num-rounds": 1})
    config = json.loads((folder / "config.json").read_text())
    for keys in config["config"], config["overrides"]:
        keys["device"] = "cuda"
    (folder / "config.json").write_text(json.dumps(config))
    manifest = read_manifest(folder)
    manifest["files"]["config.json"] = sha((folder / "config.json").read_bytes())
    manifest["versions"]["gpu"], manifest["machines"] = "H", ["cuda: H"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    device_for.cache_clear()
    found = list(checks(folder, rounds=1))
    device_for.cache_clear()
    assert all(check.passed for check in found), found
    texts = [check.found for check in found]
    assert "device = 'cuda': this machine has 0 GPUs: replayed on the CPU" in texts
    assert texts[-1].startswith("round 1: ")


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
    monkeypatch.setattr(server_app.manifest, "versions", lambda device: {"torch": "another"})
    begin_manifest(folder, resolve_config(keys), 0, True, "")
    assert machines_of(folder) == [here, "cuda: another"]
    assert read_manifest(folder)["versions"] == manifest["versions"]


def test_other_code_after_a_resume_is_named(run, monkeypatch):
    folder = run({"num-rounds": 1})
    assert not [check for check in checks(folder, 1) if check.found.startswith("code:")]
    monkeypatch.setattr(server_app.manifest, "code_version", lambda: "another")
    resume(folder, num_rounds=2)
    (check,) = [check for check in checks(folder, 1) if check.found.startswith("code:")]
    assert check.found.endswith(", then another")


def test_another_commit_of_the_same_sources_is_the_same_place(run, monkeypatch):
    folder = run({"num-rounds": 1})
    monkeypatch.setattr(server_app.manifest, "commit", lambda: "another")
    *_, found = (check.found for check in checks(folder, 1) if "versions" in check.found)
    assert found.startswith("versions: the same here (the run's Keel: ")
    monkeypatch.setattr(
        "keel.experiments.verify.versions", lambda device: {**versions(device), "sources": "f" * 16}
    )
    *_, found = (check.found for check in checks(folder, 1) if "versions" in check.found)
    assert found.startswith(f"versions: sources {sources_digest()}, here {'f' * 16} (")


def test_a_run_that_was_killed_at_its_very_end_is_resumed_and_not_called_changed(run, monkeypatch):
    """Between its last summary and its manifest, which has the files of an earlier ending."""
    folder = run({"num-rounds": 2})
    with monkeypatch.context() as patch:
        patch.setattr(server_app.federation, "finish_manifest", lambda *given: None)
        resume(folder, num_rounds=3)
    assert summary_of(folder)["status"] == "finished"
    assert unfinished(folder) == "the run has not ended: its manifest is incomplete"
    assert status_of(folder) == ""  # `keel experiments run` goes on with it
    resume(folder)
    assert status_of(folder) == "finished"
    assert all(check.passed for check in checks(folder, 1))


@pytest.mark.parametrize("place", ["federation.finish_manifest", "summary.shutil.rmtree"])
def test_a_run_that_is_killed_as_its_state_is_to_be_removed_is_not_lost(run, tmp_path, place):
    """It is complete, or can be resumed; its status is finished already."""

    def killed(path, *keeps_clients):
        if path.name == "checkpoints":
            real_rmtree(path)
        raise KeyboardInterrupt

    real_rmtree = shutil.rmtree
    keys = {"method": "moon", "keep-state": False, "num-rounds": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"server_app.{place}", killed)
        with pytest.raises(KeyboardInterrupt):
            run(keys | {"output-dir": str(tmp_path), "run-name": "a"})
    folder = tmp_path / "a"
    assert summary_of(folder)["status"] == "finished"
    if unfinished(folder):
        resume(folder)
    assert all(check.passed for check in checks(folder, 1))
    assert read_manifest(folder)["kept"] == {}


def test_a_run_of_very_many_clients_is_replayed_with_its_split(run, monkeypatch):
    """Of more than 10,000, whose entries are not all read, the split has a digest of its own."""
    monkeypatch.setattr("server_app.inline.MAX_NODES", 3)
    monkeypatch.setattr(
        "server_app.federation.shown_entries", lambda roster: [roster[n] for n in (2, 3)]
    )
    folder = run({"num-rounds": 2})
    assert [c.found for c in checks(folder, rounds=2) if not c.passed] == []
