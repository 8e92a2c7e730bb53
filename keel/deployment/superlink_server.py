"""`flower-superlink`, with the same options, patched in `flower_adapter/superlink.py`.

Creates the directory of its database, and names a database that cannot be used.
"""

import argparse
import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from flower_adapter.superlink import main
from keel.deployment.credentials import warn_of_certificates
from protocol.processes import return_large_blocks


def check_database(words: Sequence[str]) -> None:
    """Create the directory of --database; end the process, with one line, if it is unusable."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--database", nargs="?")  # Flower refuses it without a value
    name = (parser.parse_known_args(words)[0].database or "").strip()
    if not name or name.startswith(":") or "://" in name:  # such as :flwr-in-memory:, or a URL
        return
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version")
        if not os.access(path, os.W_OK):
            raise PermissionError(f"not writable for user id {os.getuid()}")
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"error: --database {path}: {error}")


if __name__ == "__main__":
    return_large_blocks()
    os.umask(0o077)  # the database, among others, is for this user alone
    warn_of_certificates(sys.argv[1:])
    check_database(sys.argv[1:])
    main()
