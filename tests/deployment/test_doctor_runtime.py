"""The doctor where Keel's code runs, for deployment and simulation."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from deployment_fixtures import doctor, problem, result

from client_app import site_privacy, worker_client
from client_app.setup import device_for
from keel.deployment import doctor_runtime as checks
from protocol.code import code_digest


@pytest.mark.parametrize(("name", "version"), [("flwr", "1.0.0"), ("flwr", None), ("ray", "1.0.0")])
def test_a_version_that_is_missing_or_another_is_named(monkeypatch, name, version):
    assert not result(checks.check_versions())[0]
    real = checks.metadata.version

    def find(asked):
        if asked == name and version is None:
            raise checks.metadata.PackageNotFoundError
        return version if asked == name else real(asked)

    monkeypatch.setattr(checks.metadata, "version", find)
    text = problem(checks.check_ray() if name == "ray" else checks.check_versions())
    assert f"{name} is {version or 'not installed'}" in text


def test_a_full_disk_and_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "yet"
    assert not result(checks.check_disk(folder, "X"))[0]
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert str(tmp_path) in problem(checks.check_disk(folder, "X"))
    monkeypatch.setattr(checks, "MIN_DISK_BYTES", 2**60)
    assert "set X" in problem(checks.check_disk(folder, "X"))


@pytest.fixture
def gpus(monkeypatch):
    """A function that lets torch find so many GPUs."""

    def find(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        device_for.cache_clear()

    yield find
    device_for.cache_clear()


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_gpu_that_torch_does_not_find_is_explained(has_driver, monkeypatch, gpus):
    """Torch is built without CUDA, or for a newer driver."""
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(checks.shutil, "which", lambda name: name if has_driver else None)
    is_problem, auto = result(checks.check_device("auto"))
    asked = problem(checks.check_device("cuda"))
    assert not is_problem
    assert auto.startswith("device: cpu; ")
    assert ("torch is built without CUDA" in auto) == has_driver
    assert ("compose.gpu.yml" in asked) == (not has_driver)


def test_a_gpu_is_named_with_its_free_memory(monkeypatch, gpus):
    gpus(2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H{device.index}")
    assert result(checks.check_device("cuda:1")) == (False, "device: cuda:1, H1, 3 of 8 GiB free")


def test_data_in_order_missing_and_with_a_wrong_class(tmp_path, home):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        x_train=rng.integers(0, 255, (30, 28, 28), dtype=np.uint8),
        y_train=np.arange(30) % 3,
        x_test=rng.integers(0, 255, (6, 28, 28), dtype=np.uint8),
        y_test=np.arange(6) % 3,
    )
    own = f"npz:{tmp_path / 'own.npz'}"
    is_problem, text = result(checks.check_data(own, ["0", "1", "2"], {}))
    assert not is_problem
    assert "30 training images" in text
    assert "'2'" in problem(checks.check_data(own, ["0", "1"], {}))
    names = ["anna", "bert", "carl"]
    assert "classes=" in problem(checks.check_data(own, names, {}))
    is_problem, text = result(checks.check_data(own, names, {}, "0=bert,1=anna,2=carl"))
    assert not is_problem
    assert "1 = anna (10), 0 = bert (10), 2 = carl (10)" in text
    nothing = f"folder:{tmp_path / 'nothing'}"
    assert str(tmp_path / "nothing") in problem(checks.check_data(nothing, [], {}))
    assert result(checks.check_data("", [], {}))[0] is False


def test_data_that_the_user_must_not_read(monkeypatch):
    def open_site(*_):  # root may read everything
        raise PermissionError(13, "Permission denied", "/srv/train/cat")

    monkeypatch.setattr("client_app.setup.open_site", open_site)
    text = problem(checks.check_data("folder:/srv", [], {}))
    assert f"user id {os.getuid()}" in text
    assert "/srv/" in text


def test_privacy_limits_of_the_environment(home, monkeypatch):
    """With a limit that cannot be read the worker starts, and refuses every run."""
    for name in site_privacy.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def limits():
        words = ("client", "--inside", "--device", "cpu")
        return [line for line in doctor(*words)[1] if " privacy limits: " in line]

    assert len(limits()) == 1
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "8")
    stated, spent = limits()
    assert "KEEL_PRIVACY_BUDGET_EPSILON = 8" in stated
    assert "epsilon 0 of 8 is spent" in spent
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "8,0")
    [line] = limits()
    assert line.startswith("PROBLEM")
    assert "KEEL_PRIVACY_BUDGET_EPSILON" in line
    monkeypatch.setenv("KEEL_PRIVACY_BUDGET_EPSILON", "8")
    misspelt = "KEEL_PRIVACY_" + "BUGDET"  # in two parts: no variable to document
    monkeypatch.setenv(misspelt, "8")
    assert any(line.startswith("PROBLEM") and misspelt in line for line in limits())


def test_a_worker_in_order_one_with_other_code_and_none(tmp_path, monkeypatch):
    status = {"pid": 7, "code": code_digest(), "versions": {"flwr": "1.39.0", "torch": "2.9"}}
    with monkeypatch.context() as patch:
        patch.setattr(worker_client, "worker_status", lambda *_: status)
        is_problem, text = result(checks.check_worker(tmp_path))
        assert not is_problem
        assert "process id 7" in text
        status["code"] = "other"
        assert "code other" in problem(checks.check_worker(tmp_path))
    monkeypatch.setattr(checks, "WORKER_TIMEOUT_S", 0.3)
    socket = tmp_path / "nobody.sock"
    assert str(socket) in problem(checks.check_worker(socket))


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="no shared memory as a folder")
def test_too_little_shared_memory_for_ray_is_named(monkeypatch):
    assert not result(checks.check_ray())[0]
    monkeypatch.setattr(checks, "MIN_SHARED_MEMORY_BYTES", 2**60)
    assert [finding.is_problem for finding in checks.check_ray()] == [False, True]
