"""The memory of a worker on glibc."""

import os
import platform
import subprocess
import sys

import pytest

KEPT_OF_A_BLOCK = """
import ctypes
import sys
from pathlib import Path

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def own_mb():
    status = Path("/proc/self/status").read_text().splitlines()
    [own_kb] = [line.split()[1] for line in status if "RssAnon" in line]
    return int(own_kb) / 1024

if sys.argv[1] == "worker":
    from client_app.process_cache import ProcessCache

    ProcessCache()
elif sys.argv[1] == "told":  # as that does, without PyTorch
    from protocol.processes import keep_freed_memory

    keep_freed_memory()
before = own_mb()
block = libc.malloc(24 * 2**20)
libc.memset(block, 1, 24 * 2**20)
libc.free(block)
print(own_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")
@pytest.mark.parametrize(
    ("who", "environment", "is_kept"),
    [("nobody", {}, False), ("worker", {}, True), ("told", {"MALLOC_ARENA_MAX": "9"}, False)],
)
def test_a_worker_keeps_what_it_frees_unless_malloc_is_told_otherwise(who, environment, is_kept):
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))
    }
    said = subprocess.check_output(
        [sys.executable, "-c", KEPT_OF_A_BLOCK, who],
        env=plain | environment,
        text=True,
        timeout=120,
    )
    kept_mb = float(said)
    assert kept_mb > 20 if is_kept else kept_mb < 4
