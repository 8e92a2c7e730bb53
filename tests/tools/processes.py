"""Processes below a parent, from Linux's /proc."""

from pathlib import Path


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
