"""The doctor's checks of where Keel's code runs: versions, disk, device, data, worker, Ray."""

import math
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir

from packaging.requirements import Requirement

from keel.deployment.doctor import Finding, check, fine, problem, skipped
from protocol.code import code_digest
from protocol.config import keel_home, project_file, resolve_config
from protocol.text import labels_text, num_of

GiB = 2**30
MIN_DISK_BYTES = 2 * GiB  # a few models' checkpoints and decoded data
MIN_SHARED_MEMORY_BYTES = GiB // 4
WORKER_TIMEOUT_S = 10.0


def check_runtime(
    machine: str,
    code: str = "",
    device: str = "auto",
    source: str = "",
    classes: Sequence[str] = (),
    model: str = "",
    worker: Path | None = None,
    names: str = "",
) -> Iterator[Finding]:
    """Everything where the code of a `server` or a `client` runs; data and worker if given.

    code: the digest that Keel's client code should have; "": any. names: `classes` of the client's
    node config.
    """
    yield from check_versions(code)
    yield from check_disk(keel_home(), "KEEL_HOME")
    if machine == "client":
        yield from check_device(device)
        yield from check_data(source, classes, {"model": model} if model else {}, names)
        yield from check_privacy_limits()
        yield from check_worker(worker)


def check_simulation() -> Iterator[Finding]:
    """Everything that a simulation on this machine needs."""
    yield from check_versions()
    yield from check_device("auto")
    yield from check_disk(keel_home(), "KEEL_HOME")
    yield from check_disk(Path(gettempdir()), "TMPDIR")
    yield from check_ray()


def requirement_problem(required: Requirement) -> str:
    """What is wrong with the installed version of a requirement; else empty."""
    try:
        version = metadata.version(required.name)
    except metadata.PackageNotFoundError:
        version = ""
    if version and required.specifier.contains(version, prereleases=True):
        return ""
    return f"{required.name} is {version or 'not installed'}, expected {required.specifier}"


@check
def check_versions(code: str = "") -> Iterator[Finding]:
    """Python and the packages that Keel requires and, if given, the digest of Keel's code."""
    project = tomllib.loads(project_file().read_text())["project"]
    wrong = list(filter(None, map(requirement_problem, map(Requirement, project["dependencies"]))))
    for each in wrong:
        yield problem(f"{each}: install Keel's requirements (`make env`, `make image`)")
    if code and code != code_digest():
        yield problem(
            f"versions: Keel's client code is {code_digest()} here, {code} in the checkout that "
            "the doctor was called from: take the same version, then `make image` and deploy again"
        )
    elif not wrong:
        names = ", ".join(f"{name} {metadata.version(name)}" for name in ("flwr", "torch"))
        yield fine(
            f"versions: Python {'.'.join(map(str, sys.version_info[:3]))}, {names}; "
            f"Keel's client code is {code_digest()}"
        )


@check
def check_disk(folder: Path, variable: str) -> Iterator[Finding]:
    """There is room, and write access, where state, runs, decoded data or temporary files go."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = f"disk: {shutil.disk_usage(existing).free / GiB:.1f} GiB free at {folder}"
    if shutil.disk_usage(existing).free < MIN_DISK_BYTES:
        yield problem(f"{free}: make room, or set {variable} to another disk")
    elif not os.access(existing, os.W_OK):
        yield problem(f"disk: {existing} is not writable for user id {os.getuid()}: set {variable}")
    else:
        yield fine(free)


@check
def check_device(name: str) -> Iterator[Finding]:
    """torch can use the device."""
    import torch

    from client_app.setup import device_for

    driver = "no NVIDIA driver is visible here; a container needs compose.gpu.yml"
    if shutil.which("nvidia-smi"):
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        driver = f"this machine has NVIDIA's driver, torch is built {built}"
    try:
        device = device_for(name)
    except ValueError as error:
        yield problem(f"{error}; {driver}")
        return
    about = f"; {driver}" if name == "auto" else ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        gpu = torch.cuda.get_device_name(device)
        about = f", {gpu}, {free / GiB:.0f} of {total / GiB:.0f} GiB free"
    yield fine(f"device: {device}{about}")


@check
def check_data(
    source: str, classes: Sequence[str], run_config: dict[str, str], names: str = ""
) -> Iterator[Finding]:
    """The data can be read, and the run knows its classes. names: `classes` of the node config."""
    import numpy as np

    from client_app.node_config import how_to_name, labels_in_run, own_labels_in_run
    from client_app.setup import open_site

    if not source:
        yield skipped("data: neither --source nor KEEL_SOURCE names it")
        return
    data = open_site(resolve_config(run_config), source, names, None)
    run_classes = list(classes or data.class_names)
    try:
        labels = labels_in_run(data, run_classes)
    except ValueError as error:
        way_out = "" if how_to_name(data) else ": rename or remove it"
        yield problem(f"data: {source}: {error}{way_out}")
        return
    if not classes and (advice := how_to_name(data)):
        yield skipped(f"data: whether the run has its labels: --classes names none{advice}")
    counts = np.bincount(labels[data.train.labels], minlength=len(run_classes)).tolist()
    meaning = labels_text(own_labels_in_run(data, run_classes), run_classes, counts)
    shape = " x ".join(map(str, data.image_shape))
    yield fine(f"data: {num_of('training image', sum(counts))} of {shape}: {meaning}")
    for note in data.notes:
        yield fine(f"data: note: {note}")


@check
def check_privacy_limits() -> Iterator[Finding]:
    """Which limits the site's environment sets, and that they are valid; the budget spent."""
    from client_app.site_privacy import VARIABLES, site_limits, spent_epsilon

    limits = site_limits()
    stated = [f"{name} = {os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    yield fine(f"privacy limits: {', '.join(stated) or 'none in the environment'}")
    if math.isfinite(limits.budget_epsilon):
        spent = spent_epsilon(limits.budget_delta)
        yield fine(
            f"privacy limits: epsilon {spent:.4g} of {limits.budget_epsilon:g} is spent, at delta "
            f"{limits.budget_delta:g}"
        )


@check
def check_worker(path: Path | None) -> Iterator[Finding]:
    """The resident worker answers, and runs this machine's code."""
    from client_app.worker_client import worker_status

    if path is None:
        yield skipped("worker: neither --worker nor KEEL_WORKER names its socket")
        return
    status = worker_status(str(path), WORKER_TIMEOUT_S)
    if status["code"] != code_digest():
        yield problem(f"worker: runs code {status['code']}, here is {code_digest()}: restart it")
    else:
        versions = ", ".join(f"{name} {version}" for name, version in status["versions"].items())
        yield fine(f"worker: process id {status['pid']}, {versions}")


@check
def check_ray() -> Iterator[Finding]:
    """Ray is installed, in the version that Flower requires, and has the shared memory it needs."""
    lines = map(Requirement, metadata.requires("flwr") or [])
    wanted = {"extra": "simulation"}
    required = [r for r in lines if r.name == "ray" and (not r.marker or r.marker.evaluate(wanted))]
    if not required:
        yield problem("Ray: flwr has no `simulation` for this Python: use --engine inline")
    elif wrong := requirement_problem(required[0]):
        yield problem(
            f"{wrong}: install Keel's extra `simulation` (`make env`), or run with --engine inline"
        )
    else:
        cluster = os.environ.get("RAY_ADDRESS")
        yield fine(f"Ray {metadata.version('ray')}" + (f", cluster {cluster}" if cluster else ""))
    shared = Path("/dev/shm")  # through which Ray's object store passes models
    if shared.exists() and (size := shutil.disk_usage(shared).total) < MIN_SHARED_MEMORY_BYTES:
        yield problem(
            f"Ray needs {MIN_SHARED_MEMORY_BYTES / 2**20:.0f} MiB of shared memory, /dev/shm has "
            f"{size / 2**20:.0f}: start the container with --shm-size=1g"
        )
