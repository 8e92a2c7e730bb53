"""Reuse the memory that one training step frees in the next one.

glibc's malloc gives the top of its heap back to the system when a backward pass has freed it, and
requests it again in the next step, page by page. How often this happens depends on what else is
allocated, so it differs between two processes of one run.
"""

import ctypes
import os
import platform

# parameters of mallopt(3) and their values, in bytes
_trim_threshold, _max_free = -1, 128 * 2**20
_mmap_threshold, _max_in_heap = -3, 32 * 2**20  # the maximum of older glibc on 64 bits


def keep_freed_memory() -> None:
    """Keep up to `_max_free` free bytes at the end of the heap, in this process from now on.

    Does nothing without glibc, or where the environment configures malloc (MALLOC_... or
    GLIBC_TUNABLES).
    """
    is_configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not is_configured:
        library = ctypes.CDLL(None)
        library.mallopt(_mmap_threshold, _max_in_heap)
        library.mallopt(_trim_threshold, _max_free)
