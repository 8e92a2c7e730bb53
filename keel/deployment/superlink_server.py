"""`flower-superlink`, with the same options, patched in `protocol/flower_compat/superlink.py`."""

import ctypes
import os
import platform
import sys

from keel.deployment.credentials import warn_of_certificates
from protocol.flower_compat.superlink import main

MMAP_THRESHOLD, MAX_IN_HEAP = -3, 2**18  # of mallopt(3), bytes


def give_back_freed_memory() -> None:
    """Return freed objects of clients to the system at once, where malloc is glibc's.

    It has a heap for every few of the SuperLink's many threads, and each would keep some.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MAX_IN_HEAP)


if __name__ == "__main__":
    give_back_freed_memory()
    os.umask(0o077)  # the database, among others, is for this user alone
    warn_of_certificates(sys.argv[1:])
    main()
