"""Pictures of `keel run`, `list` and `compare` in a terminal, for docs/development/house.md.

python -m tools.terminal_images docs/images

The commands run in a pseudo-terminal of 100 columns, in a Keel home of their own.
"""

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import tempfile
import termios
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 40
SETTING = "model=cnn-fedreco num-rounds=4 lr=0.05 --clients 4 run-name={0}"
RUNS = {
    "fedavg": f"method=fedavg {SETTING}",
    "fedcka": f"method=fedcka {SETTING}",
    "fedintr": f"method=fedintr fedintr.projection-width=32 {SETTING}",
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        lines: Sequence[str] = ()
        for name, words in RUNS.items():
            command = f"run {words.format(name)}"
            lines = screen(command, home)
        save(given.directory / "terminal-run.svg", command, lines)
        for command in ("list", f"compare {' '.join(RUNS)}"):
            name = command.split()[0]
            save(given.directory / f"terminal-{name}.svg", command, screen(command, home))


def screen(command: str, home: str) -> list[str]:
    """What a terminal shows after `keel COMMAND`: lines with their colours."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"HOME": home, "TERM": "xterm-256color", "FORCE_COLOR": "1"}
        os.environ.pop("KEEL_HOME", None)
        os.execv(sys.executable, [sys.executable, "-m", "keel", *shlex.split(command)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    received = b""
    with suppress(OSError):  # it has ended
        while block := os.read(terminal, 1 << 16):
            received += block
    _, status = os.waitpid(process, 0)
    assert status == 0, received.decode()
    lines = [""]
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[^\x1b]+", received.decode()):
        if part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part.endswith("m") or not part.startswith("\x1b"):
            first, *others = part.replace("\r", "").replace(home, "~").split("\n")
            lines[-1] += first
            lines += others
    return lines


def save(path: Path, command: str, lines: Sequence[str]) -> None:
    """Draw the command and what it printed."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(f"[bold]$[/] keel {command}", highlight=False)
    for line in lines:
        console.print(Text.from_ansi(line))
    picture = console.export_svg(title=f"keel {command.split()[0]}")
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", picture, flags=re.S))  # fonts of a CDN


if __name__ == "__main__":
    main()
