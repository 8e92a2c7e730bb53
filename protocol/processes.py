"""Processes: ending with the parent, returning freed memory, and how many fit on a machine."""

import ctypes
import os
import signal
import sys

set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when the thread that started it ends.

    parent: its process id. If that process has already ended, this one exits with status 1. Does
    nothing outside Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


def give_back_freed_memory() -> None:
    """Return the memory that this process has freed to the system, where malloc is glibc's.

    Otherwise each thread's malloc arena keeps the memory of the previous round's arrays.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def num_cores() -> int:
    """CPU cores that this process may use: fewer than the machine's under taskset or Slurm."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_shares(available: float, share: float) -> int:
    """How many processes fit on this many GPUs, each with this share of one.

    A share below 1 is always of a single GPU.
    """
    if share < 1:
        return int(available) * int(1 / share + 1e-9)
    return int(available / share + 1e-9)
