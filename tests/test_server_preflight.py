"""What is refused, and what is a warning, of the machines of a simulation."""

import logging
import resource
from concurrent.futures import Future
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from run_fixtures import FACTS, SMALL

from client_app import machine
from client_app.handlers import answer
from client_app.machine import data_digest, report_of
from client_app.setup import device_for, forget_sources
from data.partitions import PARTITIONS, Parts
from data.sources import ImageSplit, Source
from flower_adapter.simulation import WorkerReply
from protocol.config import resolve_config
from protocol.messages import (
    MachineReport,
    PreflightRequest,
    machine_content,
    machine_report,
    request_record,
)
from server_app import preflight
from server_app.inline import InlineGrid
from server_app.manifest import versions
from server_app.preflight import (
    WorkerOnNode,
    checked_workers,
    log_lines,
    token_in,
    worker_warnings,
    workers_in,
)

GOOD = MachineReport(
    versions="torch 2",
    machine="cpu: A",
    capability="x86_64 AVX2",
    device="cpu",
    precision="fp32",
    has_directory=True,
    data="d",
    split="s",
)
CPU = torch.device("cpu")


def reply(report, node="10.0.0.2"):
    return WorkerReply(node, machine_content(report))


def test_a_report_is_read_back_as_it_was_sent():
    assert machine_report(machine_content(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (replace(GOOD, data="e"), "has the digest e, the server's d"),
        (replace(GOOD, has_directory=False), "worker on 10.0.0.2 does not see /runs"),
        (
            replace(GOOD, split="t"),
            "partition = 'mine' splits the data in another way there .* t, .* s",
        ),
    ],
)
def test_what_gives_another_model_is_refused(report, message):
    folder = Path("/runs")
    assert workers_in([reply(GOOD)], lambda: "d", folder, "s") == [WorkerOnNode("10.0.0.2", GOOD)]
    with pytest.raises(ValueError, match=message):
        workers_in([reply(GOOD), reply(report)], lambda: "d", folder, "s", "mine")


def test_what_a_method_does_not_need_is_not_asked_for():
    absent = replace(GOOD, has_directory=False, data="")
    assert len(workers_in([reply(absent)], lambda: pytest.fail("read the data"), None, "s")) == 1


def test_a_worker_that_gives_no_answer_is_named():
    error = WorkerReply("10.0.0.3", None, "No module named 'client_app'")
    with pytest.raises(ValueError, match=r"^worker on 10\.0\.0\.3: No module named 'client_app'$"):
        workers_in([error], lambda: "d", None)


def test_what_changes_the_last_bits_is_a_warning():
    workers = [WorkerOnNode(f"10.0.0.{n}", GOOD) for n in range(3)]
    assert worker_warnings(workers, GOOD) == []
    workers[1] = WorkerOnNode("10.0.0.1", replace(GOOD, capability="x86_64 AVX512"))
    [line] = worker_warnings(workers, GOOD)
    assert "10.0.0.1 has cpu: A (x86_64 AVX512); the others have cpu: A (x86_64 AVX2)" in line
    workers[1] = WorkerOnNode("10.0.0.1", replace(GOOD, machine="cpu: B"))
    [line] = worker_warnings(workers, GOOD)
    assert "10.0.0.1 has cpu: B (x86_64 AVX2); the others have cpu: A " in line
    workers[1] = WorkerOnNode("10.0.0.1", replace(GOOD, versions="torch 3"))
    [line] = worker_warnings(workers, GOOD)
    assert "10.0.0.1 has torch 3" in line
    workers[1] = WorkerOnNode("10.0.0.1", replace(GOOD, precision="bf16"))
    [line] = worker_warnings(workers, GOOD)
    assert "10.0.0.1 has precision bf16; the others have precision fp32" in line
    assert line.endswith("trains whom: set precision to fp32 or bf16")


def test_a_server_and_workers_on_different_devices_are_a_warning():
    workers = [WorkerOnNode("10.0.0.1", GOOD)]
    [line] = worker_warnings(workers, replace(GOOD, device="cuda:0"))
    assert line.startswith("the server computes on cuda, workers on cpu")
    assert line.endswith("or give workers a GPU (client-resources-num-gpus)")
    workers = [WorkerOnNode("10.0.0.2", replace(GOOD, device="cuda:0"))]
    [line] = worker_warnings(workers, GOOD)
    assert line == (
        "the server computes on cpu, workers on cuda: set device to cpu, or start the run on a "
        "machine with a GPU"
    )


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (replace(GOOD, versions="torch 3"), "the server has torch 3, which no worker has; most"),
        (replace(GOOD, capability="x86_64 AVX512"), "the server has cpu: A (x86_64 AVX512), which"),
    ],
)
def test_a_server_unlike_all_workers_is_a_warning(server, words):
    """As on a cluster whose head has no worker."""
    workers = [WorkerOnNode("10.0.0.1", GOOD), WorkerOnNode("10.0.0.2", GOOD)]
    [line] = worker_warnings(workers, server)
    assert line.startswith(words)
    mixed = [*workers, WorkerOnNode("10.0.0.3", server)]
    [line] = worker_warnings(mixed, server)
    assert line.startswith("workers differ: 10.0.0.3 has ")


def test_each_workers_device_is_named():
    labels = ["cuda:0", "cuda:1", "cuda:1"]
    workers = [WorkerOnNode("a", replace(GOOD, device=label)) for label in labels]
    assert log_lines([*workers, WorkerOnNode("b", GOOD)]) == [
        (logging.INFO, "workers on a: 1 on cuda:0, 2 on cuda:1"),
        (logging.INFO, "workers on b: 1 on cpu"),
    ]
    assert log_lines([]) == []


def test_what_rays_start_showed_is_noted_once():
    lines = [(logging.WARNING, "1 of 3 workers did not start")]
    replies = [replace(reply(replace(GOOD, device="cuda:0")), log_lines=lines)] * 2
    assert log_lines(workers_in(replies, lambda: "d", None, "s")) == [
        (logging.INFO, "workers on 10.0.0.2: 2 on cuda:0"),
        *lines,
    ]


def test_the_token_is_there_while_it_is_looked_for_and_gone_then(tmp_path):
    with token_in(tmp_path / "runs") as (path, token):
        assert path.parent == tmp_path / "runs"
        assert path.read_text() == token
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_token_that_does_not_fit_on_the_disk_is_named_and_removed(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match=r"too large: '.*/\.preflight-"), token_in(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def request(tmp_path, **keys):
    config = resolve_config(SMALL | keys)
    return PreflightRequest(config, FACTS, str(tmp_path / "token"), "abc", reads_data=False)


@pytest.mark.usefixtures("task_identity")
def test_a_worker_that_runs_other_code_is_no_client_without_a_name(tmp_path):
    record = request_record(request(tmp_path))
    record["code"] = "0123456789abcdef"
    message = Message(RecordDict({"round": record}), dst_node_id=2, message_type="query")
    refused = answer(message, Context(1, 2, {}, RecordDict(), {}))
    assert refused.reason.startswith("this client runs code ")


def test_a_worker_reports_whether_it_shares_the_directory(tmp_path):
    assert not report_of(request(tmp_path)).has_directory
    (tmp_path / "token").write_text("another")
    assert not report_of(request(tmp_path)).has_directory
    (tmp_path / "token").write_text("abc")
    found = report_of(request(tmp_path))
    assert found.has_directory
    assert found.data == ""
    assert f"torch {version('torch')}, " in found.versions


def test_a_split_that_ignores_its_seed_is_another_one_on_each_worker(tmp_path, monkeypatch):
    """Each worker trained its clients on samples of others, and nothing said so."""

    def mine(labels, num_clients, seed):
        owners = np.random.permutation(len(labels)) % num_clients  # noqa: NPY002
        return Parts(np.arange(len(labels)), owners, num_clients)

    def digest(name):
        forget_sources()
        return report_of(replace(request(tmp_path, partition=name), num_clients=3)).split

    monkeypatch.setitem(PARTITIONS, "iid", (mine, ()))
    assert digest("iid") != digest("iid")
    assert digest("dirichlet") == digest("dirichlet") != ""
    assert report_of(request(tmp_path)).split == ""
    forget_sources()


@pytest.mark.parametrize(
    ("precision", "has_bf16", "expected"),
    [("auto", True, "bf16"), ("auto", False, "fp32"), ("tf32", True, "tf32")],
)
def test_a_worker_reports_the_precision_that_it_trains_in(
    tmp_path, monkeypatch, precision, has_bf16, expected
):
    """Under auto it is the worker's CPU that decides."""
    monkeypatch.setattr("client_app.precision.cpu_has_bf16", lambda: has_bf16)
    keys = {"precision": precision, "device": "cpu", "model": "resnet18"}
    assert report_of(request(tmp_path, **keys)).precision == expected


@pytest.fixture
def gpus():
    """Forgets before and after the test which devices there are."""
    device_for.cache_clear()
    yield
    device_for.cache_clear()


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("visible", "device", "label"),
    [
        ("", "auto", "cuda:0"),
        ("3", "auto", "cuda:3"),
        ("3,5", "cuda:1", "cuda:5"),
        ("3", "cpu", "cpu"),
    ],
)
def test_a_worker_names_the_gpu_that_it_was_given(tmp_path, monkeypatch, visible, device, label):
    """With a torch.cuda that says it has one GPU for each one visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    names = {1: "T2"}  # all others are called H1
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda device=None: names.get(device.index if device else 0, "H1"),
    )
    found = report_of(request(tmp_path, device=device))
    assert found.device == label
    name = names.get(device_for(device).index, "H1")
    assert found.machine == (f"cuda: {name}" if device != "cpu" else machine.machine(CPU))
    assert found.capability.endswith(f", {name}") == (device != "cpu")
    assert versions(device_for(device))["gpu"] == name


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "this machine has 1 GPU"),
        ("3", "this process sees 1 GPU, CUDA_VISIBLE_DEVICES='3'"),  # as in a Ray worker
    ],
)
def test_a_device_that_a_worker_lacks_is_refused(tmp_path, monkeypatch, visible, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"^device = 'cuda:1': {found}$"):
        report_of(request(tmp_path, device="cuda:1"))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("number", [2, 128, 256])
def test_a_gpu_number_beyond_torchs_range_is_refused_too(number, monkeypatch):
    """To torch, cuda:256 is cuda:0."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=f"^device = 'cuda:{number}': this machine has 2 GPUs$"):
        device_for(f"cuda:{number}")


@pytest.mark.parametrize("name", ["xpu:3", "mps"])
def test_a_device_that_this_torch_lacks_is_named(name, monkeypatch):
    def fails(*size, device):
        raise (AssertionError if name == "mps" else RuntimeError)("a long text")

    monkeypatch.setattr(torch, "empty", fails)  # as this machine's torch may have it
    expected = f"^device = '{name}': torch cannot use it here: expected auto, cpu, cuda or cuda:N$"
    device_for.cache_clear()
    with pytest.raises(ValueError, match=expected):
        device_for(name)


def test_a_device_without_values_is_named():
    """A client of a deployment with such a node config failed in its first round."""
    with pytest.raises(ValueError, match=r"^device = 'meta': .* expected auto, cpu, cuda or cuda:"):
        device_for("meta")


def source(train, labels, classes=("a", "b")):
    split = ImageSplit(np.asarray(train, dtype=np.uint8), np.asarray(labels))
    return Source("s", split, split, classes, (0.5,), (0.5,))


def test_the_digest_of_data_depends_on_each_part_of_it():
    images = np.arange(2 * 4).reshape(2, 1, 2, 2)
    variants = [
        source(images, [0, 1]),
        source(images[::-1], [0, 1]),
        source(images, [1, 0]),
        source(images, [0, 1], ("b", "a")),
        source(images.reshape(2, 1, 4, 1), [0, 1]),
    ]
    assert len({data_digest(each) for each in variants}) == len(variants)
    assert data_digest(source(images.copy(), [0, 1])) == data_digest(variants[0])


def test_the_inline_engine_has_no_workers_to_ask(tmp_path, task_identity):
    grid = InlineGrid(lambda message, context: message, [{}])
    config = resolve_config(SMALL)
    assert checked_workers(grid, config, FACTS, source([], []), tmp_path / "runs", 1) == []
    assert not (tmp_path / "runs").exists()


def test_a_simulation_that_does_not_start_is_an_error_with_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "has_own_backend", lambda grid: True)
    monkeypatch.setattr(preflight, "started", Future())
    monkeypatch.setattr(preflight, "START_TIMEOUT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"^Ray and its workers did not start in 0\.01 s"):
        checked_workers(None, resolve_config(SMALL), FACTS, source([], []), tmp_path, 1)


def test_processors_of_two_makers_with_the_same_instructions_are_told_apart(monkeypatch):
    """Their bits differ, and `keel experiments verify` demanded the same ones."""
    about = [
        {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17"},
        {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "207"},
        {"CPU implementer": "0x41", "CPU part": "0xd40"},  # Arm's
        {},
    ]
    found = []
    for info in about:
        monkeypatch.setattr(machine, "cpu_info", lambda info=info: info)
        found.append(machine.processors(torch.device("cpu"))["cpu"])
    assert len({*found}) == 4
    assert found[1].endswith(" GenuineIntel/6/207")


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="needs Linux's /proc/cpuinfo")
def test_the_processor_of_this_machine_has_a_maker():
    names = {"vendor_id", "CPU implementer"}
    assert names & machine.cpu_info().keys()
