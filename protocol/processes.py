"""Ending with one's parent process. Linux; elsewhere, nothing."""

import ctypes
import signal
import sys

set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
