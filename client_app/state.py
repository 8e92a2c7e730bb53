"""What a client keeps between rounds: files in one folder of its own, in simulation and deployment.

A file is one version: everything kept after one round, `round-00012-<digest>.safetensors`. It is
written beside and renamed, so a kill leaves the old versions; the digest of its content is in its
name, so a damaged file is noticed. Versions that the server could still resume from stay: an
older round can be trained again, and gives the same result again.
"""

import logging
import re
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load, save

from protocol.files import digest, write_atomically
from protocol.messages import with_current_names

log = logging.getLogger("keel.client")
Arrays = dict[str, torch.Tensor]
Groups = dict[str, Arrays]
version_name = re.compile(r"round-(\d+)-([0-9a-f]{16})\.(safetensors|damaged)")
begin_anew = "begin-anew"  # the name of a file by which an operator gives up what was lost
separator = "/"  # between group and array name; no parameter name has one


class StateFolder:
    """The versions of one client's state in one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, before_round: int, last_accepted_round: int = 0) -> Groups:
        """The newest version of a round < `before_round`; {} if this client kept nothing yet.

        last_accepted_round: the last round that the server knows this client to have trained; 0: none.
        A damaged version is set aside as `*.damaged` and the next older one taken, with a warning.
        ValueError if a damaged one is all there is, or nothing although the client has trained: a
        fresh model must not replace what is lost in silence. A file `begin-anew` allows it; it is
        renamed by the round that begins, which may be trained again.
        """
        for round_, path in reversed(self._versions()):
            if round_ >= before_round:
                continue
            content = path.read_bytes()
            if digest(content) in path.name:
                if round_ < last_accepted_round:
                    log.warning(
                        "%s is older than round %d, which the server counted: what this client "
                        "kept since is lost",
                        *(path, last_accepted_round),
                    )
                return _grouped(load(content))
            path.rename(path.with_suffix(".damaged"))
            log.warning("%s is damaged (its digest differs) and was set aside as *.damaged", path)
        damaged = [path for r, path in self._versions("damaged") if r < before_round]
        lost = ""
        if damaged:
            lost = f"{damaged[-1]} is damaged and there is no older version of this client's state"
        elif last_accepted_round:
            lost = f"this client trained in round {last_accepted_round}, and {self.folder} keeps nothing"
        if lost:
            marker = self.folder / begin_anew
            begun = [int(p.name[-5:]) for p in self.folder.glob("begun-anew-?????")]
            if not marker.exists() and before_round > max(begun, default=0):
                self.folder.mkdir(parents=True, exist_ok=True)  # whose owner may write there
                raise ValueError(
                    f"{lost}: restore it from a backup, or create the file {marker} on this "
                    "client's machine to let it begin anew"
                )
            log.warning("%s: it begins anew, as %s says", lost, marker)
        return {}

    def save(self, round_: int, groups: Groups) -> None:
        """Keep `groups` as the version of this round; it replaces one of the same round."""
        flat = {
            f"{group}{separator}{name}": array.detach().cpu().contiguous()
            for group, arrays in groups.items()
            for name, array in arrays.items()
        }
        content = save(flat)
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in self.folder.glob(".*.part"):  # of a process that was killed as it wrote
            part.unlink()
        older = [path for r, path in self._versions() if r >= round_]
        path = self.folder / f"round-{round_:05d}-{digest(content)}.safetensors"
        write_atomically(path, content)
        for stale in older:
            if stale != path:
                stale.unlink()
        with suppress(FileNotFoundError):
            (self.folder / begin_anew).rename(self.folder / f"begun-anew-{round_:05d}")

    def prune(self, checkpoint_round: int) -> None:
        """Delete what no resume can ask for: all before the newest version <= checkpoint_round."""
        usable = [path for r, path in self._versions() if r <= checkpoint_round]
        for path in usable[:-1]:
            path.unlink()

    def _versions(self, kind: str = "safetensors") -> list[tuple[int, Path]]:
        if not self.folder.exists():
            return []
        found = ((version_name.fullmatch(p.name), p) for p in self.folder.iterdir())
        return sorted((int(m[1]), p) for m, p in found if m and m[3] == kind)


def _grouped(flat: Arrays) -> Groups:
    groups: Groups = {}
    for name, array in with_current_names(flat).items():
        group, _, rest = name.partition(separator)
        groups.setdefault(group, {})[rest] = array
    return groups
