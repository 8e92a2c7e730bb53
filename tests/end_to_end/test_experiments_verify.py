"""The manifest of a run and `keel experiments verify`."""

import hashlib
import io
import json
import shutil

import numpy as np
import pytest
import torch
from data_fixtures import random_images
from rich.console import Console
from run_fixtures import resume, summary_of

import server_app.manifest
import server_app.run_directory
from client_app.setup import client_indices, device_for, forget_sources, open_source
from keel.experiments.runs import machines_of
from keel.experiments.verify import checks, unfinished, verify
from protocol.config import keel_version
from server_app.load_model import load_model
from server_app.run_reader import RunReader

PERSONAL = {"num-rounds": 2, "method": "local", "local-test-fraction": 0.2}


def failed(folder, rounds=0):
    """What the checks that fail found."""
    found = checks(RunReader(folder), rounds)
    return [check.found for check in found if not check.passed]


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def test_a_manifest_holds_digests_of_files_rounds_and_split(run):
    folder = run({"num-rounds": 4})
    manifest = RunReader(folder).manifest
    names = ("config.json", "history.jsonl", "clients.jsonl", "summary.json", "model.safetensors")
    assert manifest["files"] == {name: sha((folder / name).read_bytes()) for name in names}
    assert list(manifest["rounds"]) == ["1", "2", "3"]
    states = {path.name.split("-")[1]: path for path in folder.glob("checkpoints/*")}
    assert sha(states["00003"].read_bytes()) == manifest["rounds"]["3"]
    assert manifest["versions"].keys() >= {"torch", "numpy", "flwr", "python", "cpu", "gpu"}
    assert (manifest["clients"], manifest["simulated"]) == (4, True)
    assert manifest["keel"][0].startswith(keel_version())
    assert machines_of(folder) == manifest["machines"]
    other = RunReader(run({"num-rounds": 4, "alpha": 0.5})).manifest
    assert other["split"] != manifest["split"]
    assert other["rounds"]["1"] != manifest["rounds"]["1"]
    found = [check.found for check in checks(RunReader(folder), rounds=3)]
    assert failed(folder, 3) == []
    assert found[-1] == f"round 3: bit-identical ({manifest['rounds']['3']})"


def test_a_split_that_differs_in_which_samples_alone_has_another_digest(run):
    """IID parts of equal class counts: only the indices tell two seeds apart."""
    iid = {"partition": "classes", "classes-per-client": 10, "num-rounds": 1}
    counts, digests = [], []
    for seed in (0, 1):
        read = RunReader(run({**iid, "seed": seed}))
        labels = np.asarray(open_source(read.run_config).train.labels)
        parts = [client_indices(read.run_config, i, 4)[0] for i in range(4)]
        counts.append([np.bincount(labels[part]).tolist() for part in parts])
        digests.append(read.manifest["split"])
    assert counts[0] == counts[1]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "name", ["config.json", "history.jsonl", "clients.jsonl", "summary.json", "audit.jsonl"]
)
def test_a_changed_file_is_found(run, name):
    folder = run({"num-rounds": 2})
    path = folder / name
    content = path.read_text()
    path.write_text(content.replace("1", "2", 1))
    assert any(name in found for found in failed(folder))
    path.unlink()
    out = io.StringIO()
    assert verify(folder, 0, Console(file=out, width=300)) == 1
    assert name in out.getvalue()


@pytest.mark.parametrize("rounds", [{}, {"x": "y"}])
def test_a_manifest_without_the_digest_of_a_round_is_not_passed(run, rounds):
    folder = run({"num-rounds": 1})
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"rounds": rounds}))
    [found] = failed(folder, 2)
    assert found.startswith("round 1: ")


def test_client_state_that_is_missing_damaged_or_added_is_found(run):
    folder = run(PERSONAL)
    states = RunReader(folder).manifest["kept"]
    assert sorted(states) == [f"client-000{i}" for i in range(4)]
    assert failed(folder) == []
    (folder / "clients" / "client-0001" / states["client-0001"]).unlink()
    path = folder / "clients" / "client-0003" / states["client-0003"]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    name = states["client-0000"]
    (folder / "clients" / "stranger").mkdir()
    shutil.copy(folder / "clients" / "client-0000" / name, folder / "clients" / "stranger")
    [found] = failed(folder)
    assert all(client in found for client in ("client-0001/", "client-0003/", "stranger/"))
    assert "client-0002" not in found


def test_a_damaged_checkpoint_with_fedpacs_heads_is_found_and_not_used(run):
    folder = run(PERSONAL | {"method": "fedpac"})
    (path,) = folder.glob("checkpoints/*2-*")
    load_model(folder, "client-0001")
    path.write_bytes(path.read_bytes()[:-9] + b"?" * 9)
    [found] = failed(folder)
    assert path.name in found
    with pytest.raises(ValueError, match=path.name):
        load_model(folder, "client-0001")


def test_data_that_has_changed_is_found(run, tmp_path):
    """Beyond what the first rounds read: one pixel of a test image, evaluated in the last round."""
    images, labels = random_images(40, 28, 28), np.arange(40) % 2
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:9], "y_test": labels[:9]}
    np.savez(tmp_path / "data.npz", **arrays)
    keys = {"source": f"npz:{tmp_path / 'data.npz'}", "partition": "iid", "min-samples": 1}
    folder = run({**keys, "num-rounds": 3, "evaluate-every": 3, "data-fraction": 1.0})
    assert failed(folder, 2) == []
    arrays["x_test"] = images[:9] ^ (np.arange(9) == 8)[:, None, None].astype(np.uint8)
    np.savez(tmp_path / "data.npz", **arrays)
    forget_sources()
    [found] = failed(folder, 2)
    assert RunReader(folder).manifest["data"] in found


def test_what_a_manifest_says_forges_no_line_of_the_checks(tmp_path):
    """A run directory of someone else's could hide that a check failed."""
    files = {"config.json": "ab\n  passed \x1b[1A\x1b[2K\u202e[green]passed[/]"}
    manifest = {"layout": 2, "clients": 1, "simulated": False, "files": files}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    out = io.StringIO()
    assert verify(tmp_path, 1, Console(file=out, width=300)) == 1
    _, *lines, _ = out.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("  failed ") for line in lines)


def test_a_damaged_run_does_not_keep_others_from_being_verified(run, tmp_path):
    folder = run({"num-rounds": 1})
    for name in ("a", "b"):
        shutil.copytree(folder, tmp_path / "runs" / name)
    (tmp_path / "runs" / "a" / "config.json").write_text("{")
    out = io.StringIO()
    assert verify(tmp_path / "runs", 0, Console(file=out, width=300)) == 1
    assert f"{tmp_path / 'runs' / 'b'}\n  passed config.json" in out.getvalue()


def test_a_run_that_did_not_finish_is_not_passed(run):
    folder = run({"num-rounds": 1})
    text = json.dumps(summary_of(folder) | {"status": "failed: no more disk"})
    (folder / "summary.json").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["summary.json"] = sha(text.encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    [found] = failed(folder, 1)
    assert "no more disk" in found


def test_a_run_of_a_gpu_is_replayed_on_the_cpu_where_there_is_none(run, monkeypatch):
    folder = run({"num-rounds": 1})
    config = json.loads((folder / "config.json").read_text())
    for keys in config["config"], config["overrides"]:
        keys["device"] = "cuda"
    (folder / "config.json").write_text(json.dumps(config))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["config.json"] = sha((folder / "config.json").read_bytes())
    manifest["versions"]["gpu"], manifest["machines"] = "H", ["cuda: H"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    device_for.cache_clear()
    found = list(checks(RunReader(folder), rounds=1))
    device_for.cache_clear()
    assert all(check.passed for check in found), found
    assert found[-1].found.startswith("round 1: ")


def test_other_code_and_machines_after_a_resume_are_named(run, monkeypatch):
    folder = run({"num-rounds": 1})
    [here] = machines_of(folder)
    monkeypatch.setattr(server_app.manifest, "code_of", lambda own: "another")
    monkeypatch.setattr(server_app.manifest, "machine", lambda device: "cpu: another")
    resume(folder, num_rounds=2)
    assert machines_of(folder) == [here, "cpu: another"]
    assert any("another" in check.found for check in checks(RunReader(folder), 0))


def test_a_run_that_was_killed_at_its_very_end_is_completed_by_a_resume(run, monkeypatch):
    """Between its last summary and its manifest, which has the files of an earlier ending."""
    folder = run({"num-rounds": 2})
    with monkeypatch.context() as patch:
        patch.setattr(server_app.run_directory, "finish_manifest", lambda *given: None)
        resume(folder, num_rounds=3)
    assert summary_of(folder)["status"] == "finished"
    assert unfinished(RunReader(folder))
    assert not RunReader(folder).has_finished  # `keel experiments run` resumes it
    resume(folder)
    assert RunReader(folder).has_finished
    assert failed(folder, 1) == []


@pytest.mark.parametrize("step", ["finish_manifest", "remove_state"])
def test_a_run_that_is_killed_as_its_state_is_to_be_removed_is_not_lost(run, tmp_path, step):
    """It is complete, or can be resumed; its status is finished already."""

    def killed(*arguments):
        raise KeyboardInterrupt

    keys = {"method": "moon", "keep-state": False, "num-rounds": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app.run_directory, step, killed)
        with pytest.raises(KeyboardInterrupt):
            run(keys | {"output-dir": str(tmp_path), "run-name": "a"})
    folder = tmp_path / "a"
    if unfinished(RunReader(folder)):
        resume(folder)
    assert failed(folder, 1) == []
