"""manifest.json: what makes a run's folder verify itself.

Digests of Keel's sources, of the split, of the first rounds' checkpoints and, once the run has
ended, of its files; package versions; how many clients there were. For information: Keel's version
and commit, and the machines that a simulation trained on. `python -m keel.experiments verify` reads
it.
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
from client_app.worker_client import code_digest
from protocol.config import RunConfig, app_folder, keel_version
from protocol.files import digest, write_atomically
from protocol.messages import RosterEntry

noted_rounds = 3  # how many rounds a replay can be held to
packages = ("flwr", "torch", "torchvision", "numpy", "scipy", "safetensors")
run_by_server = ("diagnostics", "server_app", "strategies")  # packages, beside the clients'
signed_files = ("config.json", "history.jsonl", "summary.json", "model.safetensors")


def versions() -> dict[str, str]:
    """What the bits of a result depend on: Keel's sources, packages, Python, kind of processor."""
    return {name: version(name) for name in packages} | {
        "sources": sources_digest(),
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """The first 16 hex digits of the SHA-256 of all sources that a run depends on.

    The same in a checkout, of whatever commit, and in the app bundle that was made of it.
    """
    found = hashlib.sha256(code_digest().encode())
    for package in run_by_server:
        for path in sorted((app_folder / package).rglob("*.py")):
            found.update(str(path.relative_to(app_folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


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


def begin_manifest(folder: Path, config: RunConfig, roster: Sequence[RosterEntry]) -> None:
    """Before the first round, or again on a resume: noted rounds keep the versions they had.

    keel and machines: each that worked on the run. Sites train on machines that are not known here.
    """
    before = read_manifest(folder)
    fields: dict[str, Any] = {
        "versions": before["versions"] if before.get("rounds") else versions(),
        "keel": with_one(before.get("keel", []), f"{keel_version()} {commit()}".strip()),
        "clients": len(roster),
        "simulated": all(entry.num_partitions for entry in roster),
        "split": split_digest(config, roster),
    }
    if fields["simulated"]:
        here = machine(device_for(config.train.device))
        fields["machines"] = with_one(before.get("machines", []), here)
    update(folder, **fields)


def with_one(names: Sequence[str], name: str) -> list[str]:
    """The names and this one, each once."""
    return list(dict.fromkeys([*names, name]))


def note_round(folder: Path, server_round: int, checkpoint_digest: str) -> None:
    """Keep the digest of one of the first rounds' checkpoints.

    Only if this and all rounds before it are of the bundle's versions: on a resume under others,
    nothing is noted any more, and a round that is done again is noted no longer.
    """
    if server_round > noted_rounds:
        return
    bundle = read_manifest(folder)
    rounds = {n: noted for n, noted in bundle.get("rounds", {}).items() if int(n) < server_round}
    if len(rounds) == server_round - 1 and bundle["versions"] == versions():
        rounds[str(server_round)] = checkpoint_digest
    update(folder, rounds=rounds)


def finish_manifest(folder: Path) -> None:
    """Digests of the files of a run that has ended, in simulation what each client kept last too.

    That is where personal models are. Its digest is in the file's name.
    """
    files = {name: digest((folder / name).read_bytes()) for name in signed_files}
    versions_kept = sorted(folder.glob("clients/*/round-*.safetensors"))  # the newest comes last
    update(folder, files=files, kept={path.parent.name: path.name for path in versions_kept})


def read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.json; empty if there is none yet."""
    path = folder / "manifest.json"
    if not path.exists():
        path = folder / "bundle.json"  # its name before 0.2
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def update(folder: Path, **fields: Any) -> None:
    """Set these fields of manifest.json."""
    text = json.dumps(read_manifest(folder) | fields, indent=2)
    write_atomically(folder / "manifest.json", text.encode())
