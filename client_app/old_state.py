"""Deletes the client state of runs that ended long ago; in the resident worker."""

import logging
import shutil
import time
from pathlib import Path

log = logging.getLogger("keel.client")
DAY_S = 86400.0


class OldState:
    """Deletes the client state of runs that have ended, when this process has run for a day.

    A run's age is the time from its newest write to the newest of all runs, so that neither a wrong
    clock nor a long pause of everything makes state old; the newest run is never deleted. Clocks
    that jump make files of the future: besides, this process has to have seen the run unchanged for
    a day by the monotonic clock, and its age by the clock has to agree.
    """

    def __init__(self, folder: Path, days: float) -> None:
        """folder: holds a folder a run. days: runs older than this are deleted; 0: none."""
        self.folder, self.min_age_s = folder, days * DAY_S
        self.seen: dict[Path, tuple[float, float]] = {}  # run: (newest write, monotonic time)

    def delete(self) -> None:
        """Delete what is old now."""
        if self.min_age_s <= 0 or not self.folder.is_dir():
            return
        written = {
            run: max(path.stat().st_mtime for path in [run, *run.rglob("*")])
            for run in self.folder.iterdir()
        }
        for run, at in written.items():
            if self.seen.get(run, (None, 0.0))[0] != at:
                self.seen[run] = (at, time.monotonic())
            age_s = min(max(written.values()), time.time()) - at
            if age_s > self.min_age_s and time.monotonic() - self.seen[run][1] >= DAY_S:
                days = age_s / DAY_S
                log.warning("client state of run %s deleted: %.0f days old", run.name, days)
                shutil.rmtree(run)

    def watch(self) -> None:
        """Look every hour, for ever; in a thread."""
        while True:
            try:
                self.delete()
            except OSError as error:
                log.warning("looking for old client state failed: %s", error)
            time.sleep(3600)
