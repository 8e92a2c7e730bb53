"""Memory that one training step frees is for the next one.

glibc's malloc gives the top of its heap back to the system when a backward pass has freed it, and
gets it again in the next step, page by page: in how many steps depends on what happens to lie
above, and so differs between two workers of one run (docs/development/speed.md, "Page faults").
"""

import ctypes
import os
import platform

# parameters of mallopt(3), and what they are set to, in bytes
_trim_threshold, _freed_kept = -1, 128 * 2**20
_mmap_threshold, _largest_in_heap = -3, 32 * 2**20  # the most that older glibc takes, on 64 bits


def keep_freed_memory() -> None:
    """From now on up to `_freed_kept` bytes that are free at the end of the heap stay.

    For the whole process. Nothing without glibc, or where the environment tells malloc what to do
    (MALLOC_... or GLIBC_TUNABLES).
    """
    is_told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not is_told:
        library = ctypes.CDLL(None)
        library.mallopt(_mmap_threshold, _largest_in_heap)
        library.mallopt(_trim_threshold, _freed_kept)
