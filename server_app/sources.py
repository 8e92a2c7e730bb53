"""Which code a run is made with: its sources and the version of torch. Needs no torch."""

import hashlib
from functools import lru_cache
from importlib.metadata import version

from protocol.code import code_digest
from protocol.config import app_folder

SERVER_PACKAGES = ("server_app", "strategies")  # beside those of the clients


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """The first 16 hex digits of the SHA-256 of all sources that a run depends on.

    The same in a checkout and in the Flower app made from it.
    """
    found = hashlib.sha256(code_digest().encode())
    for package in SERVER_PACKAGES:
        for path in sorted((app_folder / package).rglob("*.py")):
            found.update(str(path.relative_to(app_folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


@lru_cache(maxsize=1)
def torch_version() -> str:
    """The installed torch's: looked up once, as a report asks for it thousands of times."""
    return version("torch")


def code_version(sources: str = "", torch: str = "") -> str:
    """One line naming sources and torch, by default the installed ones; without torch's build."""
    torch = (torch or torch_version()).partition("+")[0]
    return f"sources {sources or sources_digest()}, torch {torch}"
