"""Processes: those below a parent, and ending with one's parent. Linux; elsewhere, nothing."""

import ctypes
import signal
import sys
from pathlib import Path

set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def descendants(pid: int) -> dict[int, str]:
    """Process id to command line of every living process below `pid`."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
            commands[int(entry.name)] = command
    found, parents = {}, [pid]
    while parents:
        for child in children.get(parents.pop(), []):
            found[child] = commands[child]
            parents.append(child)
    return found
