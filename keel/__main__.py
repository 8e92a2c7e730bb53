"""The command `keel`, also as `python -m keel`."""

import os
import sys


def main() -> int:
    """The command line; returns the exit code."""
    # a notebook's kernel names its own, which may be missing here; Keel only writes files
    os.environ["MPLBACKEND"] = "agg"
    try:
        from keel.cli.main import main as command

        return command()
    except KeyboardInterrupt:  # while modules are imported
        return 130


if __name__ == "__main__":
    sys.exit(main())
