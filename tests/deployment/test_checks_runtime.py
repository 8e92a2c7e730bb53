"""Checks of where Keel's code runs, for deployment and simulation."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from deployment_fixtures import problem, result

from client_app.setup import device_for
from keel.deployment import checks_runtime
from keel.deployment.checks_runtime import (
    check_data,
    check_data_sets,
    check_device,
    check_disk,
    check_entry_points,
    check_memory,
    check_ray,
    check_simulation,
    check_versions,
    check_worker,
)
from protocol.code import code_digest


def test_versions_that_match_and_one_that_differs(monkeypatch):
    is_problem, text = result(check_versions())
    assert not is_problem
    assert "flwr 1.39" in text
    real = checks_runtime.metadata.version
    monkeypatch.setattr(
        checks_runtime.metadata, "version", lambda n: "1.41.0" if n == "flwr" else real(n)
    )
    assert "flwr is 1.41.0" in problem(check_versions())


def test_a_full_disk(tmp_path, monkeypatch):
    assert not result(check_disk(tmp_path / "not" / "yet"))[0]
    monkeypatch.setattr(checks_runtime, "min_disk_bytes", 2**60)
    assert "make room" in problem(check_disk(tmp_path))


def test_other_disks_are_checked_and_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    """Runs or temporary files on a full disk of their own were not found before a run failed."""
    home, shared = tmp_path / "home", Path("/dev/shm")
    monkeypatch.setenv("KEEL_HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(checks_runtime, "min_disk_bytes", 0)
    (home / "runs").mkdir(parents=True)

    def disks():
        return [f.text.partition(" free at ")[2] for f in check_simulation() if "disk:" in f.text]

    assert disks() == [str(home)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != home / "runs")
        [found] = [f for f in check_simulation() if f.is_problem and "disk:" in f.text]
        assert found.text.startswith(f"disk: {home / 'runs'} is not writable")
        assert found.text.endswith("set output-dir to another directory")
    if shared.is_dir() and shared.stat().st_dev != tmp_path.stat().st_dev:
        monkeypatch.setattr(tempfile, "tempdir", str(shared))
        assert disks() == [str(home), str(shared)]


def test_a_device_that_is_not_there():
    assert result(check_device("cpu")) == (False, "device: cpu")
    assert "cuda:63" in problem(check_device("cuda:63"))


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_gpu_that_torch_does_not_find_is_explained(has_driver, monkeypatch):
    """As if torch were built without CUDA, or for a newer driver."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(checks_runtime.shutil, "which", lambda name: name if has_driver else None)
    device_for.cache_clear()
    is_problem, auto = result(check_device("auto"))
    asked = problem(check_device("cuda"))
    device_for.cache_clear()
    found = "this machine has NVIDIA's driver, torch is built without CUDA"
    assert not is_problem
    assert auto == "device: cpu; auto finds no GPU" + (f": {found}" if has_driver else "")
    absent = "no NVIDIA driver is visible here; a container needs compose.gpu.yml"
    assert asked.endswith(f"; {found if has_driver else absent}")


def test_a_gpu_is_named_with_its_free_memory(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros", lambda count, device: zeros(count))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H{device.index}")
    device_for.cache_clear()
    found = result(check_device("cuda:1"))
    device_for.cache_clear()
    assert found == (False, "device: cuda:1, H1, 3 of 8 GiB free")


def test_data_in_order_missing_and_with_a_wrong_class(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        x_train=rng.integers(0, 255, (30, 28, 28), dtype=np.uint8),
        y_train=np.arange(30) % 3,
        x_test=rng.integers(0, 255, (6, 28, 28), dtype=np.uint8),
        y_test=np.arange(6) % 3,
    )
    own = f"npz:{tmp_path / 'own.npz'}"
    is_problem, text = result(check_data(own, ["0", "1", "2"], {}))
    assert not is_problem
    assert "30 training images" in text
    assert "has the class '2'" in problem(check_data(own, ["0", "1"], {}))
    is_problem, text = result(check_data(own, ["anna", "bert", "carl"], {}))
    assert not is_problem  # as in a run: its labels stand for these classes
    text = problem(check_data(f"folder:{tmp_path / 'nothing'}", [], {}))
    assert str(tmp_path / "nothing") in text


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_data_that_the_user_must_not_read(monkeypatch, is_wrapped):
    denied = PermissionError(13, "Permission denied", "/srv/train/cat")  # root may read everything

    def open_source(*_):
        if is_wrapped:
            raise ValueError(f"/srv/own.npz: {denied}") from denied
        raise denied

    monkeypatch.setattr("client_app.setup.open_source", open_source)
    text = problem(check_data("folder:/srv", [], {}))
    assert text.startswith("data: ")
    assert "Permission denied" in text
    assert f"not readable for user id {os.getuid()}: " in text
    assert "KEEL_UID" in text


def test_a_home_that_the_user_cannot_write_to_is_not_the_data_s_fault(monkeypatch, home):
    denied = PermissionError(13, "Permission denied", str(home / "cache"))

    def open_source(*_):
        raise denied

    monkeypatch.setattr("client_app.setup.open_source", open_source)
    text = problem(check_data("folder:/srv", [], {}))
    assert f"cannot write to {home}, where decoded images are stored" in text
    assert "mode of the data" not in text


def test_a_worker_with_other_code_and_one_in_order(tmp_path, monkeypatch):
    status = {"pid": 7, "code": code_digest(), "versions": {"flwr": "1.39.0", "torch": "2.9"}}
    monkeypatch.setattr(checks_runtime, "worker_status", lambda *_: status)
    fine = (False, "worker: process id 7, flwr 1.39.0, torch 2.9")
    assert result(check_worker(tmp_path)) == fine
    status["code"] = "other"
    assert "runs code other" in result(check_worker(tmp_path))[1]


def test_a_worker_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(checks_runtime, "timeout_s", 0.3)
    assert "no worker answers" in problem(check_worker(tmp_path / "nobody.sock"))
    assert list(check_worker(None)) == []


def test_requirements_of_simulation_in_order():
    for findings in (check_memory(), check_ray(), check_entry_points(), check_data_sets()):
        for finding in findings:
            assert not finding.is_problem, finding.text


def test_too_little_memory_names_the_way_out(monkeypatch):
    monkeypatch.setattr(checks_runtime, "min_memory_bytes", 2**60)
    assert "end other programs" in problem(check_memory())


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="no shared memory as a folder")
def test_too_little_shared_memory_for_ray_names_the_containers_option(monkeypatch):
    monkeypatch.setattr(checks_runtime, "min_shared_memory_bytes", 2**60)
    memory, shared = check_memory()
    assert not memory.is_problem
    assert shared.is_problem
    assert "--shm-size" in shared.text


def test_ray_that_is_missing_or_another_version_is_a_problem(monkeypatch):
    real = checks_runtime.metadata.version
    for version in ("1.0.0", None):

        def find(name, version=version):
            if name != "ray":
                return real(name)
            if version is None:
                raise checks_runtime.metadata.PackageNotFoundError
            return version

        monkeypatch.setattr(checks_runtime.metadata, "version", find)
        assert f"Ray is {version or 'not installed'}, expected" in problem(check_ray())


def test_a_python_without_flowers_programs_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(checks_runtime.sys, "executable", str(tmp_path / "python"))
    assert "lacks flwr, " in problem(check_entry_points())


def test_data_sets_in_the_cache_are_listed(home):
    (home / "cache" / "cifar10-0123456789abcdef").mkdir(parents=True)
    caches, data_sets = check_data_sets()
    assert str(home) in caches.text
    assert "cifar10" in data_sets.text
