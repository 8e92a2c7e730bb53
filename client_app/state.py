"""Client state: files in one folder for each client of a run, in simulation and deployment alike.

A file is one version, the whole state after one round: `round-00012-<digest>.safetensors`. It is
written under another name and renamed, so that an interrupted process leaves the old versions
intact; the digest of its content is in its name, so that damage is noticed. Versions that a resume
of the server may need are not deleted: an earlier round can be trained again, with the same result.

State that is damaged, lost, older than the client's last accepted update, ahead of the server or of
another run is refused until it is restored or an operator creates the file `reset-state` beside it.
In deployment the file `run-id` names the run that the state belongs to.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from protocol.arrays import Arrays, packed_pieces, unpacked
from protocol.files import (
    RESET_FILE,
    STATE_FILE,
    VERSION_NAME,
    digest,
    remove_parts,
    round_of,
    versions_in,
    write_atomically,
    write_version,
)

log = logging.getLogger("keel.client")
Groups = dict[str, Arrays]
reset_record = re.compile(r"state-was-reset-(\d+)")  # the round that followed
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
    """Client state is damaged, lost, ahead of the server or of another run: restore or reset it.

    nameless: the same message without the state folder's path.
    """

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        nameless = message.replace(f"{folder}{os.sep}", "")
        self.nameless = nameless.replace(str(folder), "its state folder")


class StateFolder:
    """The versions of one client's state in one run.

    max_ahead: rounds that a resume may repeat. run_id: the id of a deployment's run, as another run
    directory may have its name; "" in a simulation.
    """

    def __init__(
        self, folder: Path, max_ahead: int = max_rounds_ahead(1), run_id: str = ""
    ) -> None:
        self.folder, self.max_ahead, self.run_id = folder, max_ahead, run_id
        self._newer: set[Path] = set()  # versions that `load` found of later rounds

    def load(self, before_round: int, last_accepted_round: int = 0) -> Groups:
        """The newest version of a round < `before_round`; {} if this client has no state yet.

        last_accepted_round: the last round in which this client's update was aggregated; 0: none.
        ResetNeeded if that version is damaged, another client's, or of an earlier round than that;
        also if a version is newer by more rounds than a resume repeats, or another run's: the
        server has lost its state. With a file `reset-state` in the folder the client continues from
        the newest intact version, or without state; the round that follows renames the file, and
        may be trained again.
        """
        versions = versions_in(self.folder)
        newest = round_of(versions[-1]) if versions else 0
        if newest and self._is_of_another_run():
            self._refuse_unless_allowed(
                f"{self.folder} has state of another run of this name, up to round {newest}",
                "restore that run's directory on the server and resume it, choose another run-name",
                to="set that state aside",
            )
            return {}
        self._newer = {path for path in versions if round_of(path) >= before_round}
        if newest - before_round >= self.max_ahead:
            self._refuse_unless_allowed(
                f"the server is behind: it asks for round {before_round}, this client has round "
                f"{newest}",
                "resume the run from a newer checkpoint",
                to="set the newer state aside and let it return to that round",
            )
        problem, found = "", 0
        groups: Groups = {}
        for path in reversed([each for each in versions if each not in self._newer]):
            try:
                groups, found = read_version(path), round_of(path)
                break
            except DamagedVersion as error:
                problem = problem or str(error)
        if not problem and found < last_accepted_round:
            newest_there = f"no newer state than that of round {found}" if found else "no state"
            problem = (
                f"this client's update of round {last_accepted_round} was aggregated, and "
                f"{self.folder} holds {newest_there}"
            )
        if problem:
            self._refuse_unless_allowed(
                problem,
                "restore it from a backup",
                to="let it continue without",
                was_allowed=before_round <= self._last_reset_round(),
            )
        return groups

    def _refuse_unless_allowed(
        self, problem: str, remedy: str, to: str, was_allowed: bool = False
    ) -> None:
        """ResetNeeded unless the operator allows a reset, or did before; then a warning.

        to: what the file `reset-state` is created for.
        """
        marker = self.folder / RESET_FILE
        if not (was_allowed or marker.exists()):
            self.folder.mkdir(parents=True, exist_ok=True)  # so that its owner may write there
            raise ResetNeeded(
                f"{problem}: {remedy}, or create the file {marker} on this client's machine to "
                f"{to}",
                self.folder,
            )
        log.warning("%s: %s, as an operator has allowed", problem, to)

    def save(self, round_: int, groups: Groups) -> None:
        """Write the version of this round; it replaces those of later rounds that `load` found.

        If one is newer than a resume repeats, or of another run, all are renamed to `*.set-aside`.
        Do not modify the arrays later. ValueError if a newer version has appeared since `load`: a
        worker that is late must not replace what another one has trained since.
        """
        if self._is_of_another_run():
            for path in sorted(self.folder.iterdir()):
                if VERSION_NAME.fullmatch(path.name) or reset_record.fullmatch(path.name):
                    path.rename(path.with_suffix(".set-aside"))
        replaced = [path for path in versions_in(self.folder) if round_of(path) >= round_]
        last = round_of(replaced[-1]) if replaced else round_
        if any(round_of(path) > round_ and path not in self._newer for path in replaced):
            raise ValueError(
                f"round {round_} is over, and this client has since trained in round {last}: the "
                "late result is dropped, and the newer state stays"
            )
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
        path = write_version(self.folder, round_, *pieces)
        for stale in replaced:
            if stale == path:
                continue
            if last - round_ >= self.max_ahead:
                stale.rename(stale.with_suffix(".set-aside"))
            else:
                stale.unlink(missing_ok=True)
        marker = self.folder / RESET_FILE
        if marker.exists():
            marker.rename(self.folder / f"state-was-reset-{round_:05d}")

    def prune(self, checkpoint_rounds: Sequence[int]) -> None:
        """Delete the versions that a resume from these checkpoints does not read.

        A resume reads the newest version up to the checkpoint's round. The two newest versions
        always stay: a round may be requested again, and the newest version may belong to the next
        checkpoint.
        """
        versions = versions_in(self.folder)
        needed = versions[-2:]
        for checkpoint in checkpoint_rounds:
            needed += [version for version in versions if round_of(version) <= checkpoint][-1:]
        for version in set(versions).difference(needed):
            version.unlink(missing_ok=True)  # a worker that is late may prune too

    def _saved_run_id(self) -> str:
        path = self.folder / RUN_ID_FILE
        return path.read_text(errors="replace") if path.exists() else ""

    def _is_of_another_run(self) -> bool:
        """Whether this folder is known to be of another run than `run_id`."""
        return self._saved_run_id() not in ("", self.run_id)

    def _last_reset_round(self) -> int:
        """The last round that followed a reset, by the files it left; 0 if there was none."""
        found = (reset_record.fullmatch(path.name) for path in self.folder.glob("*-*"))
        return max((int(match[1]) for match in found if match), default=0)


def newest_state(folder: Path, before_round: int) -> Groups:
    """The newest version of a round < `before_round` there, to be looked at; {} if there is none.

    ValueError, naming the file, if it is damaged.
    """
    paths = versions_in(folder, before_round - 1)
    return read_version(paths[-1]) if paths else {}


class DamagedVersion(ValueError):
    """The content of a version is not what was written."""


def read_version(path: Path) -> Groups:
    """The groups in a version. DamagedVersion; ResetNeeded if it is another client's."""
    content = path.read_bytes()
    if digest(content) not in path.name:
        raise DamagedVersion(f"{path} is damaged")
    arrays, about = unpacked(content)
    owner = about["client"]
    if owner != path.parent.name:
        raise ResetNeeded(
            f"{path} is of client {owner!r}, and this is {path.parent.name!r}: remove the file and "
            "restore this client's own from a backup",
            path.parent,
        )
    groups: Groups = {}
    for name, array in arrays.items():
        group, _, rest = name.partition(separator)
        groups.setdefault(group, {})[rest] = array
    return groups
