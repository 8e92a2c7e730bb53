"""Which processes there are: found by parent and command, for tests and measurements."""

from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Process id to command line of every living process below `pid`."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(folder.name))
            commands[int(folder.name)] = command
    found, waiting = {}, [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found[child] = commands[child]
            waiting.append(child)
    return found
