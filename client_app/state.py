"""Client state: files in one folder for each client of a run, in simulation and deployment alike.

A file is one version, the whole state after one round: `round-00012-<digest>.safetensors`. It is
written under another name and renamed, so that an interrupted process leaves the old versions
intact; the digest of its content is in its name, so that damage is noticed. Versions that a resume
of the server may need are not deleted: an earlier round can be trained again, with the same result.
A server that requests a round before those has lost its run directory or checkpoints: it is
refused, as is another run of the same name. In deployment the file `run-id` names the run
that the state belongs to.
"""

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load

from protocol.files import (
    HISTORY_FILE,
    RESET_FILE,
    STATE_FILE,
    digest,
    remove_parts,
    write_atomically,
)
from protocol.messages import UNREADABLE, Arrays
from protocol.packing import packed_pieces

log = logging.getLogger("keel.client")
Groups = dict[str, Arrays]
version_name = re.compile(r"round-(\d+)-([0-9a-f]{16})\.(safetensors|damaged)")
reset_markers = (RESET_FILE, "begin-anew")  # the second is its old name
reset_record = re.compile(r"(?:state-was-reset|begun-anew)-(\d+)")  # the round that followed
state_file = re.compile(STATE_FILE)
NUM_CHECKPOINTS = 2  # that the server keeps
RUN_ID_FILE = "run-id"
separator = "/"  # between group and array name; no parameter name has one


def max_rounds_ahead(checkpoint_interval: int) -> int:
    """Clients are always fewer rounds ahead of a resumed server than this.

    A resume may begin from the older checkpoint, and clients may have trained in a round while the
    one before was being written.
    """
    return NUM_CHECKPOINTS * checkpoint_interval + 1


class ResetNeeded(ValueError):
    """Client state is lost, ahead of the server, or belongs to another run: restore or reset it.

    nameless: the same message without the state folder's path.
    """

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        nameless = message.replace(f"{folder}{os.sep}", "").replace(str(folder), "its state folder")
        self.nameless = f"{nameless} (this client's log names the folder)"


class StateFolder:
    """The versions of one client's state in one run.

    max_ahead: rounds that a resume may repeat.
    run_directory: of a simulation, whose workers may train a client while another is late with it.
    run_id: the id of a deployment's run; another run directory may have its name. "": none, as in a
    simulation.
    reads_only: `load` raises ValueError for a damaged version, ignores `reset-state`, and returns
    {} where it would raise ResetNeeded for lost state.
    """

    def __init__(
        self,
        folder: Path,
        max_ahead: int = max_rounds_ahead(1),
        run_directory: Path | None = None,
        run_id: str = "",
        reads_only: bool = False,
    ) -> None:
        self.reads_only = reads_only
        self.old_round = 0  # of the version that `load` read, if a later update was aggregated
        self.folder, self.max_ahead = folder, max_ahead
        self.run_directory, self.run_id = run_directory, run_id

    def load(self, before_round: int, last_accepted_round: int = 0) -> Groups:
        """The newest version of a round < `before_round`; {} if this client has no state yet.

        last_accepted_round: the last round in which this client's update was aggregated; 0: none.
        ResetNeeded if a version is newer by more rounds than a resume repeats, or another run's:
        the server has lost its state. A damaged version is renamed to `*.damaged` and the next
        older one is read, with a warning. ResetNeeded if only damaged versions are left, or none
        although the client has trained: lost state is never replaced silently. A file `reset-state`
        in the folder allows either once; the round that follows renames it, and may be trained
        again. ResetNeeded too if the version is another client's, until the file is removed.
        """
        newest = max((round_ for round_, _ in self._versions()), default=0)
        if newest and self._is_of_another_run():
            self._refuse_unless_allowed(
                f"{self.folder} has state of another run of this name, up to round {newest}",
                "restore that run's directory on the server and resume it, choose another run-name",
                to="set that state aside",
                then="it is set aside",
            )
            return {}
        if newest - before_round >= self.max_ahead:
            self._refuse_unless_allowed(
                f"the server is behind: it asks for round {before_round}, this client has round "
                f"{newest}",
                "resume the run from a newer checkpoint",
                to="set the newer state aside and let it return to that round",
                then="it returns to that round",
            )
        for round_, path in reversed(self._versions()):
            if round_ >= before_round:
                continue
            if (groups := _read(path)) is not None:
                if round_ < last_accepted_round:
                    self.old_round = round_
                    log.warning(
                        "%s is older than round %d, in which this client's update was aggregated: "
                        "the state since then is lost",
                        path,
                        last_accepted_round,
                    )
                return groups
            if self.reads_only:
                raise ValueError(f"{path} is damaged: restore it from a backup")
            path.rename(path.with_suffix(".damaged"))
            log.warning("%s is damaged and was renamed to *.damaged", path)
        if self.reads_only:
            return {}
        damaged = [path for r, path in self._versions("damaged") if r < before_round]
        lost, remedy = "", "restore it from a backup"
        if damaged:
            lost = f"{damaged[-1]} is damaged and there is no older version of this client's state"
        elif last_accepted_round:
            lost = (
                f"this client trained in round {last_accepted_round}, and {self.folder} holds no "
                "state of it"
            )
            if name := self._old_name():
                remedy = (
                    f"rename the run directory on the server to {name!r}, of which this client has "
                    "state"
                )
        if lost:
            self._refuse_unless_allowed(
                lost,
                remedy,
                to="let it start again without state",
                then="the client starts again without state",
                was_allowed=before_round <= self._last_reset_round(),
            )
        return {}

    def _refuse_unless_allowed(
        self, problem: str, remedy: str, to: str, then: str, was_allowed: bool = False
    ) -> None:
        """ResetNeeded unless the operator allows a reset, or did before; then a warning.

        to: what the file `reset-state` is created for. then: what happens where it is there.
        """
        if not (was_allowed or any((self.folder / name).exists() for name in reset_markers)):
            self.folder.mkdir(parents=True, exist_ok=True)  # so that its owner may write there
            raise ResetNeeded(
                f"{problem}: {remedy}, or create the file {self.folder / reset_markers[0]} on "
                f"this client's machine to {to}",
                self.folder,
            )
        log.warning("%s: %s, as an operator has allowed", problem, then)

    def save(self, round_: int, groups: Groups) -> None:
        """Write the version of this round; it replaces those that a resume repeats.

        If one is newer than that, or of another run, all are renamed to `*.set-aside`. Do not
        modify the arrays later.
        ValueError if there is a newer version and the server has ended this round: it is too late.
        """
        if self._is_of_another_run():
            for path in sorted(self.folder.iterdir()):  # *.damaged first, *.safetensors replaces it
                if version_name.fullmatch(path.name) or reset_record.fullmatch(path.name):
                    path.rename(path.with_suffix(".set-aside"))
        replaced = [(r, path) for r, path in self._versions() if r >= round_]
        if replaced and replaced[-1][0] > round_ and self._has_ended(round_):
            raise ValueError(
                f"round {round_} is over, and this client has since trained in round "
                f"{replaced[-1][0]}: the late result is dropped, and the newer state stays"
            )
        if self.run_id and not self._saved_run_id():  # of Keel before ids: maybe of another run
            for _, path in replaced:
                path.rename(path.with_suffix(".set-aside"))
            replaced = []
        flat = {
            f"{group}{separator}{name}": array
            for group, arrays in groups.items()
            for name, array in arrays.items()
        }
        pieces = packed_pieces(flat, {"client": self.folder.name})
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_parts(self.folder)
        if self._saved_run_id() != self.run_id:
            write_atomically(self.folder / RUN_ID_FILE, self.run_id.encode())
        path = self.folder / f"round-{round_:05d}-{digest(*pieces)}.safetensors"
        write_atomically(path, *pieces)
        is_reset = bool(replaced) and replaced[-1][0] - round_ >= self.max_ahead
        for _, stale in replaced:
            if stale == path:
                continue
            if is_reset:
                stale.rename(stale.with_suffix(".set-aside"))
            else:
                stale.unlink(missing_ok=True)
        for name in reset_markers:
            with suppress(FileNotFoundError):
                (self.folder / name).rename(self.folder / f"state-was-reset-{round_:05d}")

    def _saved_run_id(self) -> str:
        path = self.folder / RUN_ID_FILE
        return path.read_text(errors="replace") if path.exists() else ""

    def _old_name(self) -> str:
        """The name under which this client has state of this run, whose directory was renamed."""
        for path in self.folder.parent.parent.glob(f"*/{self.folder.name}/{RUN_ID_FILE}"):
            if self.run_id and path.read_text(errors="replace") == self.run_id:
                return path.parent.parent.name
        return ""

    def _last_reset_round(self) -> int:
        """The last round that followed a reset, by the files it left; 0 if there was none."""
        found = (reset_record.fullmatch(path.name) for path in self.folder.glob("*-*"))
        return max((int(match[1]) for match in found if match), default=0)

    def _is_of_another_run(self) -> bool:
        """Whether this folder is known to be of another run than `run_id`."""
        return not self.reads_only and self._saved_run_id() not in ("", self.run_id)

    def _has_ended(self, round_: int) -> bool:
        """Whether the server has recorded this round; a resume removes the rounds it repeats."""
        if self.run_directory is None:
            return False
        history = self.run_directory / HISTORY_FILE
        lines = history.read_bytes().splitlines() if history.exists() else []
        return bool(lines) and int(json.loads(lines[-1])["round"]) >= round_

    def prune(self, checkpoint_rounds: Sequence[int]) -> None:
        """Delete the versions that a resume from these checkpoints does not read.

        A resume reads the newest version up to the checkpoint's round. The two newest versions
        always stay: a round may be requested again, and the newest version may belong to the next
        checkpoint.
        """
        versions = self._versions()
        needed = versions[-2:]
        for checkpoint in checkpoint_rounds:
            needed += [version for version in versions if version[0] <= checkpoint][-1:]
        for version in set(versions).difference(needed):
            version[1].unlink(missing_ok=True)  # a worker that is late may prune too

    def _versions(self, kind: str = "safetensors") -> list[tuple[int, Path]]:
        if not self.folder.exists():
            return []
        found = ((version_name.fullmatch(p.name), p) for p in self.folder.iterdir())
        return sorted((int(m[1]), p) for m, p in found if m and m[3] == kind)


def _read(path: Path) -> Groups | None:
    """The groups in a version; None if it is damaged. ResetNeeded if it is another client's."""
    content = path.read_bytes()
    if digest(content) not in path.name:
        return None
    try:
        groups = _grouped(load(content))
    except UNREADABLE:  # damaged before it was written
        return None
    about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    owner = about.get("__metadata__", {}).get("client", path.parent.name)  # older: not recorded
    if owner != path.parent.name:
        raise ResetNeeded(
            f"{path} is of client {owner!r}, and this is {path.parent.name!r}: remove the file and "
            "restore this client's own from a backup",
            path.parent,
        )
    return groups


def _grouped(flat: Arrays) -> Groups:
    groups: Groups = {}
    for name, array in flat.items():
        group, _, rest = name.partition(separator)
        groups.setdefault(group, {})[rest] = array
    return groups
