"""bundle.json: what makes a run's folder verify itself.

Package versions, machines, how many clients there were, digests of the split, of the first rounds'
checkpoints, and, once the run has ended, of its files. `python -m experiments verify` reads it.
"""

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from client_app.setup import client_indices, device_for
from protocol.config import RunConfig, app_folder, keel_version
from protocol.files import digest, write_atomically
from protocol.messages import RosterEntry

noted_rounds = 3  # how many rounds a replay can be held to
packages = ("flwr", "torch", "torchvision", "numpy", "scipy", "safetensors")
signed_files = ("config.json", "history.jsonl", "summary.json", "model.safetensors")


def versions() -> dict[str, str]:
    """What the bits of a result depend on: Keel, packages, Python, kind of processor."""
    return {name: version(name) for name in packages} | {
        "keel": f"{keel_version()} {commit()}".strip(),
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


@lru_cache(maxsize=1)
def commit() -> str:
    """Keel's commit, with -dirty after changes; empty where the code is no checkout of its own."""
    if not (app_folder / ".git").exists():
        return ""
    words = ["git", "-C", str(app_folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


def machine(device: torch.device) -> str:
    """The processor of this device, as `cuda: NAME` or `cpu: NAME`."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu: {names[0] if names else platform.processor() or platform.machine()}"


def split_digest(config: RunConfig, roster: Sequence[RosterEntry]) -> str:
    """A digest of who holds what: label counts, and in simulation every sample's index."""
    clients = sorted(roster, key=lambda entry: entry.client)
    counts = [[e.client, e.label_counts, e.test_label_counts] for e in clients]
    hashed = hashlib.sha256(json.dumps(counts).encode())
    if all(entry.num_partitions for entry in clients):
        for partition in range(len(clients)):
            for part in client_indices(config, partition, len(clients)):
                hashed.update(part.astype("<i8").tobytes())
    return hashed.hexdigest()[:16]


def begin_bundle(folder: Path, config: RunConfig, roster: Sequence[RosterEntry]) -> None:
    """Before the first round, or again on a resume: noted rounds keep the versions they had."""
    before = read_bundle(folder)
    here = machine(device_for(config.train.device))
    update(
        folder,
        versions=before["versions"] if before.get("rounds") else versions(),
        machines=list(dict.fromkeys([*before.get("machines", []), here])),
        clients=len(roster),
        simulated=all(entry.num_partitions for entry in roster),
        split=split_digest(config, roster),
    )


def note_round(folder: Path, server_round: int, checkpoint_digest: str) -> None:
    """Keep the digest of one of the first rounds' checkpoints."""
    if server_round <= noted_rounds:
        rounds = read_bundle(folder).get("rounds", {})
        update(folder, rounds=rounds | {str(server_round): checkpoint_digest})


def finish_bundle(folder: Path) -> None:
    """Digests of the files of a run that has ended."""
    update(folder, files={name: digest((folder / name).read_bytes()) for name in signed_files})


def read_bundle(folder: Path) -> dict[str, Any]:
    """bundle.json; empty if there is none yet."""
    path = folder / "bundle.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def update(folder: Path, **fields: Any) -> None:
    """Set these fields of bundle.json."""
    text = json.dumps(read_bundle(folder) | fields, indent=2)
    write_atomically(folder / "bundle.json", text.encode())
