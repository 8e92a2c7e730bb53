"""Processes: ending with the parent, forks, freed memory, cores."""

import ctypes
import os
import platform
import signal
import sys
from functools import cache

set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
trim_threshold, mmap_threshold = -1, -3  # parameters of mallopt(3), in bytes


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when the thread that started it ends.

    parent: its process id. If that process has already ended, this one exits with status 1. Does
    nothing outside Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


@cache
def process_with_threads() -> int:
    """The id of the process that first called this; processes forked from it inherit the value."""
    return os.getpid()


def check_not_forked() -> None:
    """ValueError in a process forked after the first call: PyTorch would wait there for ever.

    Its threads are those of the process that computed first, so call this before it computes.
    """
    import torch

    if process_with_threads() != os.getpid() and torch.get_num_threads() > 1:
        raise ValueError(
            "this process was forked after a run had begun or a model was loaded, and lacks its "
            'parent\'s PyTorch threads: start it with multiprocessing.get_context("spawn")'
        )


def keep_freed_memory() -> None:
    """Keep up to 128 MiB of freed memory at the end of the heap, for this process's next request.

    glibc's malloc gives it back to the system when a backward pass has freed it, and requests it
    again in the next step, page by page. How often this happens depends on what else is allocated,
    so it differs between two processes of one run. Does nothing where the environment configures
    malloc (MALLOC_... or GLIBC_TUNABLES).
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        # 32 MiB: the maximum of older glibc on 64 bits
        _set_malloc({mmap_threshold: 32 * 2**20, trim_threshold: 128 * 2**20})


def return_large_blocks() -> None:
    """Return each block of 256 KiB or more to the system as soon as it is freed.

    For a process with many threads: they have several heaps, and each would keep some.
    """
    _set_malloc({mmap_threshold: 2**18})


def _set_malloc(parameters: dict[int, int]) -> None:
    if platform.libc_ver()[0] == "glibc":
        for parameter, value in parameters.items():
            ctypes.CDLL(None).mallopt(parameter, value)


def num_cores() -> int:
    """CPU cores that this process may use: fewer than the machine's under taskset or Slurm."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
