"""manifest.json and audit.jsonl: what a run consisted of and did, so that it can be verified.

manifest.json has

layout: the number of the directory's layout (run_reader.py). versions, code: of packages, Python,
processor, Keel's sources and own code; code has more entries after a resume with other code.
clients, simulated, data, split, weights (a SHA-256), precision: what the result depends on beside
the config. rounds: digests of the first checkpoints. files, kept, checkpoint, audit: once the run
has ended, digests of its files, the names of the newest client states and checkpoint, and the end
of the audit log. For information: keel (version and commit), machines, workers. `keel experiments
verify` reads it.

audit.jsonl has a line for who joined, was refused, was sent what, and released what. The lines are
chained (`protocol.files.Chain`); each has the time (UTC), the event and its fields. Lines that were
cut off at the end are found by the rounds of the history that they are about and, once the run has
ended, by the manifest, which then has their number and the last digest.

    started    round (the first to come)          joined    client, node
    refused    node, reason                       sent      round, kind, clients, bytes
    released   round, clients, epsilon, delta     rejected  round, kind, clients (name to reason)
    ended      status

A release is noted before it is requested: the privacy budget spent is counted from these lines.
"""

import datetime
import json
import logging
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from client_app.machine import machine, package_versions, processors
from client_app.setup import device_for
from models.weights import sha256_of
from protocol.code import code_of, sources_digest
from protocol.config import RunConfig, app_folder, keel_version
from protocol.files import Chain, digest, read_chain, versions_in, write_atomically
from protocol.messages import MachineReport
from protocol.own_code import FOLDER, Own
from server_app.run_reader import (
    AUDIT_FILE,
    CLIENTS_FILE,
    CONFIG_FILE,
    HISTORY_FILE,
    LAYOUT,
    MANIFEST_FILE,
    MODEL_FILE,
    SUMMARY_FILE,
    RunReader,
)

log = logging.getLogger("keel.server")
NUM_NOTED_ROUNDS = 3  # rounds whose checkpoints a replay can be compared with
signed_files = (CONFIG_FILE, HISTORY_FILE, CLIENTS_FILE, SUMMARY_FILE, MODEL_FILE)


def versions(device: torch.device, own: Mapping[str, Own]) -> dict[str, str]:
    """Versions that the bits of a result depend on: sources, packages, Python, processor type.

    device: that the run trains on. own: the run's own code.
    """
    keels = {"sources": sources_digest(), "python": platform.python_version()}
    codes = {spec: own[spec].digest for spec in sorted(own)}
    return package_versions() | keels | codes | processors(device)


@lru_cache(maxsize=1)
def commit() -> str:
    """Keel's commit, with -dirty if files have changed; "" where the code is not a checkout."""
    if not (app_folder / ".git").exists():
        return ""
    command = ["git", "-C", str(app_folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


def check_same_data(directory: Path, config: RunConfig, data: str, split: str) -> None:
    """ValueError if the data set, or its split, is no longer that of the run in `directory`.

    Scores and client state of the rounds before would be of other samples.
    """
    before = RunReader(directory).manifest
    for key, what, found in (
        ("data", "the data", data),
        ("split", "the split over clients", split),
        ("weights", "weights", weights_digest(config)),
    ):
        if before.get(key, found) != found:
            raise ValueError(
                f"resume = {str(directory)!r}: {what} of source = {config.data.source!r} has "
                f"changed since the run began: its digest was {before[key]}, is {found}: restore "
                "the data, or start a new run"
            )


def weights_digest(config: RunConfig) -> str:
    """The SHA-256 of the file of initial weights; "" without one."""
    path = config.model.weights
    return sha256_of(Path(path).expanduser()) if path else ""


def begin_manifest(
    directory: Path,
    config: RunConfig,
    num_clients: int,
    is_simulated: bool,
    split: str,
    data: str = "",
    workers: Sequence[MachineReport] = (),
    precisions: Sequence[str] = (),
    trains: bool = True,
) -> None:
    """Write the manifest before the first round, or update it on a resume.

    A resume adds its code, version of Keel and machines to those of earlier calls; the field
    `versions` stays as it was for the noted rounds.

    split, data: digests; data: "" in a deployment. workers: of Flower's simulation. precisions:
    what "auto" resolved to, on the simulation's workers or else here; empty if the run sets another
    precision. trains: whether rounds are left: code that only completes a run is not noted.
    """
    before = RunReader(directory).manifest
    code, device = before.get("code", []), device_for(config.train.device)
    code_now = code_of(config.own)
    if trains and before.get("rounds") and code_now not in code:
        log.warning(
            "the code has changed since this run's last rounds (%s; now %s): the run will mix both",
            "; ".join(code),
            code_now,
        )
    fields: dict[str, Any] = {
        "layout": LAYOUT,
        "versions": before["versions"] if before.get("rounds") else versions(device, config.own),
        "code": appended(code, code_now) if trains else code,
        "keel": appended(before.get("keel", []), f"{keel_version()} {commit()}".strip()),
        "clients": num_clients,
        "simulated": is_simulated,
        "split": split,
        "files": {},  # until the run ends; a resume clears those of its last end
    }
    if data:
        fields["data"] = data
    if config.model.weights:
        fields["weights"] = weights_digest(config)
    if precisions:
        fields["precision"] = appended(before.get("precision", []), *precisions)
    if is_simulated:
        found = (machine(device), *(each.machine for each in workers))
        fields["machines"] = appended(before.get("machines", []), *found)
    if workers:
        fields["workers"] = [
            {"node": each.host, "device": each.device, "machine": each.machine} for each in workers
        ]
    update(directory, **fields)


def appended(names: Sequence[str], *more: str) -> list[str]:
    """The names, then those of `more` that are not among them."""
    return list(dict.fromkeys([*names, *more]))


def note_round(
    directory: Path, config: RunConfig, server_round: int, checkpoint_digest: str
) -> None:
    """Record the checkpoint digest of one of the first rounds.

    Only if this and all rounds before it ran with the manifest's versions: after a resume with
    others nothing is recorded, and the digest of a repeated round is dropped.
    """
    manifest = RunReader(directory).manifest
    rounds = {n: noted for n, noted in manifest.get("rounds", {}).items() if int(n) < server_round}
    now = versions(device_for(config.train.device), config.own)
    if len(rounds) == server_round - 1 and manifest["versions"] == now:
        rounds[str(server_round)] = checkpoint_digest
    update(directory, rounds=rounds)


def finish_manifest(directory: Path, last_round: int, keeps_clients: bool) -> None:
    """Record the digests of the files of a run that has ended after `last_round`.

    keeps_clients: also record each simulated client's newest state and the newest checkpoint, which
    hold the personal models: their digests are in the files' names.
    """
    # a run that ended before its first round has no history
    paths = [path for name in signed_files if (path := directory / name).exists()]
    paths += sorted((directory / FOLDER).glob("*"))
    files = {str(p.relative_to(directory)): digest(p.read_bytes()) for p in paths}
    kept = newest_states(directory, last_round) if keeps_clients else {}
    checkpoints = versions_in(directory / "checkpoints", last_round) if keeps_clients else []
    name = checkpoints[-1].name if checkpoints else ""
    update(directory, files=files, kept=kept, checkpoint=name, audit=audit_end(directory))


def newest_states(directory: Path, last_round: int) -> dict[str, str]:
    """The name of each simulated client's newest state of a run that ended after `last_round`."""
    folders = sorted(directory.glob("clients/*"))
    found = {folder.name: versions_in(folder, last_round) for folder in folders}
    return {client: states[-1].name for client, states in found.items() if states}


def update(directory: Path, **fields: Any) -> None:
    """Set these fields of manifest.json."""
    text = json.dumps(RunReader(directory).manifest | fields, indent=2)
    write_atomically(directory / MANIFEST_FILE, text.encode())


# --- audit.jsonl ----------------------------------------------------------------------------------


class AuditLog:
    """Appends to a run directory's audit log. releases: requested so far, by client.

    ValueError naming the file if the lines that are there are not intact.
    """

    def __init__(self, directory: Path) -> None:
        self.chain = Chain(directory / AUDIT_FILE)
        self.releases = Counter[str]()
        for line in read_chain(self.chain.path) if self.chain.newest else ():
            self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "released":
            self.releases.update(line["clients"])

    def note(self, event: str, **fields: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, **fields}
        self.chain.append(line)
        self._count(line)


def audit_end(directory: Path) -> dict[str, Any]:
    """The number of lines and the last digest, for the manifest."""
    lines = list(read_chain(directory / AUDIT_FILE))
    return {"lines": len(lines), "digest": lines[-1]["digest"]}


def check_audit(run: RunReader, is_resumed: bool = False) -> int:
    """ValueError naming the file if a run's audit log was changed; the number of its lines.

    is_resumed: a later call may have added lines since the manifest was written.
    """
    path = run.directory / AUDIT_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: restore it from a backup")
    lines = list(read_chain(path))
    sent = {line["round"] for line in lines if line["event"] == "sent"}
    if unsent := {line["round"] for line in run.history} - sent:
        raise ValueError(
            f"{path} was cut short: round {min(unsent)} of the history is not in it: restore it "
            "from a backup"
        )
    end = run.manifest.get("audit")
    ends = [{"lines": number, "digest": line["digest"]} for number, line in enumerate(lines, 1)]
    if end and end not in (ends if is_resumed else ends[-1:]):
        raise ValueError(
            f"{path} has {len(lines)} lines, the manifest {end['lines']} and another last digest: "
            "restore it from a backup"
        )
    return len(lines)
