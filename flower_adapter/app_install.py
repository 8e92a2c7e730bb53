"""`install_from_fab` for which an app is installed only if it is whole.

Replaces `install_from_fab` in the processes of ServerApps and ClientApps. Why: Flower considers an
app installed if its directory exists. One that is incomplete after a full disk or a kill, or that
was changed since, would stay as it is. Public way: none. It protects from accidents, not from code
of another run, which has the rights of the same user.

These processes have imported a part of Keel before they have the app: `install_to_run` lets them
import all of it again, from the app.
"""

import fcntl
import hashlib
import io
import logging
import shutil
import sys
import zipfile
from pathlib import Path

from flwr.cli.config_utils import get_fab_metadata
from flwr.cli.install import install_from_fab
from flwr.common.config import get_project_dir
from flwr.supercore.utils import get_flwr_home

log = logging.getLogger("keel.app")
LIST = ".info/CONTENT"  # in a FAB: its files with their SHA-256


def install_whole(fab: bytes, skip_prompt: bool = True) -> Path:
    """Install the FAB, and install it again if a file is not as the FAB says; return its folder.

    OSError, with nothing left behind, if that fails.
    """
    home = get_flwr_home()
    home.mkdir(parents=True, exist_ok=True)
    path = get_project_dir(*get_fab_metadata(fab), hashlib.sha256(fab).hexdigest())
    with (home / "apps.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and not is_whole(path, fab):
            log.warning("%s is damaged: the app is installed again", path)
            shutil.rmtree(path)
        try:
            return install_from_fab(fab, skip_prompt=skip_prompt)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise


def install_to_run(fab: bytes, skip_prompt: bool = True) -> Path:
    """`install_whole`; this process then forgets its own modules of the app's packages.

    Otherwise the app would run with those modules, and state their digest as its own.
    """
    path = install_whole(fab, skip_prompt)
    packages = {entry.name for entry in path.iterdir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]
    return path


def is_whole(path: Path, fab: bytes) -> bool:
    """Whether the directory has the FAB's files and no others, except Python's caches."""
    with zipfile.ZipFile(io.BytesIO(fab)) as archive:
        lines = archive.read(LIST).decode().split("\n")
    expected = {name: digest for name, digest, _ in (line.split(",") for line in lines if line)}
    found = {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file() and file.parent.name != "__pycache__"
    }
    return found == expected
