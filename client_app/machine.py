"""What the bits of a result depend on that a machine may have otherwise: versions, processor, data.

Read for the run's manifest, and on each worker of a simulation before round 1.
"""

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from client_app.networks import resolved
from client_app.setup import build_network, device_for, open_source, split_over_clients
from data.sources import Source
from protocol.messages import MachineReport, PreflightRequest

# of x86 and Arm processors, in /proc/cpuinfo
CPU_KIND = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
PACKAGES = ("flwr", "torch", "torchvision", "numpy", "scipy", "safetensors")


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that the bits of a result depend on."""
    return {name: version(name) for name in PACKAGES}


@cache
def cpu_info() -> dict[str, str]:
    """What Linux says of the first processor; elsewhere nothing."""
    path = Path("/proc/cpuinfo")
    text = path.read_text().partition("\n\n")[0] if path.is_file() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processors(device: torch.device) -> dict[str, str]:
    """{"cpu": architecture, instruction set and model, "gpu": name, or "none"}.

    Libraries choose their kernels by the CPU's instruction set, as torch names it, and by its maker
    and model: an Intel CPU gives other bits than an AMD CPU with the same instructions. The GPU is
    `device`, or, if that is the CPU, the machine's first GPU.
    """
    gpu = device if device.type == "cuda" else None
    info, capability = cpu_info(), torch.backends.cpu.get_cpu_capability()
    kind = [info[name] for name in CPU_KIND if name in info] or [platform.processor()]
    return {
        "cpu": f"{platform.machine()} {capability} {'/'.join(kind)}".strip(),
        "gpu": torch.cuda.get_device_name(gpu) if torch.cuda.is_available() else "none",
    }


def machine(device: torch.device) -> str:
    """The processor of this device, as `cuda: NAME` or `cpu: NAME`."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = cpu_info().get("model name")
    return f"cpu: {name or platform.processor() or platform.machine()}"


def host_name() -> str:
    """The name of this machine."""
    return platform.node()


def device_label(device: torch.device) -> str:
    """`cpu`, or the GPU as the machine numbers it, of which this process may see a part."""
    if device.type != "cuda":
        return str(device)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return f"cuda:{visible[index] if index < len(visible) else index}"


def data_digest(source: Source) -> str:
    """The first 16 hex digits of the SHA-256 of a data set's images, labels and classes."""
    digest = hashlib.sha256("\0".join(source.class_names).encode())
    for split in (source.train, source.test):
        for array in (split.images, split.labels):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.data if array.flags.c_contiguous else array.tobytes())
    return digest.hexdigest()[:16]


def report_of(request: PreflightRequest) -> MachineReport:
    """What a worker answers to a preflight. ValueError for a device that it does not have."""
    device = device_for(request.config.train.device)
    path, found = Path(request.token_path), processors(device)
    precision, data = request.config.train.precision, request.data
    clients = request.num_clients
    if precision == "auto":
        model = build_network(request.config, data.image_shape, data.num_classes)
        precision = resolved(precision, model, device)
    return MachineReport(
        host=host_name(),
        process=os.getpid(),
        versions=", ".join(f"{name} {v}" for name, v in package_versions().items()),
        machine=machine(device),
        capability=found["cpu"] if device.type == "cpu" else f"{found['cpu']}, {found['gpu']}",
        device=device_label(device),
        precision=precision,
        has_directory=path.is_file() and path.read_text() == request.token,
        data="" if host_name() == request.host else data_digest(open_source(request.config)),
        split=split_over_clients(request.config, clients).digest() if clients else "",
    )
