"""Processes below a parent, from Linux's /proc."""

import time
from pathlib import Path

from keel.deployment.loopback import Loopback


def client_app_pid(local: Loopback, client: str, wait_s: float) -> int:
    """The ClientApp of this client, which runs for as long as one message; 0 if none comes."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        if found := list(descendants(local.pid(f"executor-{client}"))):
            return found[0]
        time.sleep(0.02)
    return 0


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
