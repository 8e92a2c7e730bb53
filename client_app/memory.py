"""Memory that one training step frees is for the next one.

glibc's malloc gives the top of its heap back to the system when a backward pass has freed it, and
gets it again in the next step, page by page. Whether it does so depends on what lies above: of two
workers of one run, one had 3,000 page faults in a round and the other 120,000.
"""

import ctypes
import sys
from functools import cache

# parameters of mallopt(3), and what they are set to, in bytes
_trim_threshold, _freed_kept = -1, 128 * 2**20
_mmap_threshold, _largest_in_heap = -3, 32 * 2**20  # the most that glibc allows everywhere


@cache
def keep_freed_memory() -> None:
    """From now on this process keeps the last `_freed_kept` bytes freed. Nothing without glibc."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_mmap_threshold, _largest_in_heap)
        library.mallopt(_trim_threshold, _freed_kept)
