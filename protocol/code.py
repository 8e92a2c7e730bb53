"""The digest of the code that clients run, by which server and clients know that it is the same."""

import hashlib
from functools import lru_cache

from protocol.config import app_folder

run_by_worker = ("client_app", "data", "models", "protocol")  # packages


@lru_cache(maxsize=1)
def code_digest() -> str:
    """The first 16 hex digits of the SHA-256 of the sources that a client or a worker runs.

    The ClientApp's process has them from the app of the run, the worker from its own machine, those
    of a simulation from wherever their Python found them: nobody trains with code other than the
    server's.
    """
    digest = hashlib.sha256()
    for package in run_by_worker:
        for path in sorted((app_folder / package).rglob("*.py")):
            digest.update(str(path.relative_to(app_folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
