"""The command lines of Keel 0.1 (`python -m experiments ...`), which work until 0.3."""

import sys

from keel.cli.main import main


def forward(old: str, *new: str) -> None:
    """Name the new command on stderr, run it with the words of the command line, and exit."""
    command = " ".join(["keel", *new])
    print(f"python -m {old} is now `{command}`; the old line works until Keel 0.3", file=sys.stderr)
    sys.exit(main([*new, *sys.argv[1:]]))
