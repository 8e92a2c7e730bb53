"""Deletes the client state of runs that ended long ago; in the resident worker."""

import logging
import shutil
import time
from pathlib import Path

from protocol.files import DAY_S
from protocol.text import num_of

log = logging.getLogger("keel.client")


class OldState:
    """Deletes the client state of runs that ended more than a number of days ago.

    Neither a wrong clock nor a long pause of all runs may make state look old. A run is deleted
    only if, for at least a day by the monotonic clock, this process has not seen it change, and if
    both of these ages exceed the limit:

    - the time from the run's newest write to the newest write of any run, which is 0 for the
      newest run;
    - the time from the run's newest write until now, by the clock: a file that a jump of the clock
      has dated in the future is not yet old.

    Both are reduced by how far the clock has jumped ahead since the run was last seen to change.
    """

    def __init__(self, folder: Path, days: float) -> None:
        """folder: contains one folder per run. days: older runs are deleted; 0: none are."""
        self.folder, self.min_age_s = folder, days * DAY_S
        # the clock minus the monotonic clock at the last look: it changes when the clock jumps
        self.lead = time.time() - time.monotonic()
        # run: (newest write, monotonic time when it was first seen, the clock's lead before that)
        self.seen: dict[Path, tuple[float, float, float]] = {}

    def delete(self) -> None:
        """Delete the state of runs that are old now."""
        if self.min_age_s <= 0 or not self.folder.is_dir():
            return
        written = {
            run: max(path.lstat().st_mtime for path in [run, *run.rglob("*")])
            for run in self.folder.iterdir()
            if run.is_dir() and not run.is_symlink()  # a plain file beside them is not a run
        }
        now, lead = time.monotonic(), time.time() - time.monotonic()
        for run, at in written.items():
            if self.seen.get(run, (None,))[0] != at:
                self.seen[run] = (at, now, min(lead, self.lead))
            _, since, lead_then = self.seen[run]
            until = min(max(written.values()), now + lead)  # now + lead: the time by the clock
            jump_s = max(0.0, lead - lead_then)
            age_s = until - at - jump_s
            if age_s > self.min_age_s and now - since >= DAY_S:
                days = age_s / DAY_S
                log.warning(
                    "client state of run %s deleted: %s old", run.name, num_of("day", round(days))
                )
                shutil.rmtree(run)
        self.lead = lead

    def watch(self) -> None:
        """Call `delete` every hour, forever; to be run in a thread."""
        while True:
            try:
                self.delete()
            except OSError as error:
                log.warning("looking for old client state failed: %s", error)
            time.sleep(3600)
