"""The processes of a deployment: Flower's programs, with the same options and Keel's patches.

    python -m keel.deployment superlink --database ...     flower-superlink
    python -m keel.deployment supernode --superlink ...    flower-supernode
    python -m keel.deployment executor ...                 flower-superexec, of either of them
    python -m keel.deployment serverapp ...                flwr-serverapp, which an executor starts

The patches are in `flower_adapter`. A SuperLink also creates the directory of its database; a
SuperNode logs why the SuperLink does not answer or does not know its key, and ends when TLS fails.
"""

import argparse
import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from keel.deployment.credentials import warn_of_certificates
from keel.deployment.reach import handshake, proxy_hint
from protocol.processes import return_large_blocks

MODULES = {  # of flower_adapter
    "superlink": "superlink",
    "supernode": "supernode",
    "executor": "superexec",
    "serverapp": "serverapp",
}


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Those of Flower's options that are looked at here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--superlink")
    parser.add_argument("--database")
    parser.add_argument("--auth-supernode-private-key", type=Path)
    for name in ("root-certificates", "ssl-certfile", "ssl-ca-certfile"):
        parser.add_argument(f"--{name}", type=Path)
    return parser.parse_known_args(words)[0]


def check_database(name: str) -> None:
    """Create the directory of a database; end the process, with one line, if it is unusable."""
    if name.startswith(":") or "://" in name:  # such as :flwr-in-memory:, or a URL
        return
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as database:
            database.execute("BEGIN IMMEDIATE")  # to write
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"error: --database {path}: {error}")


def report_superlink(address: str, ca: Path, key: Path | None) -> None:
    """Log why TLS or this client's key fails at the SuperLink."""
    log(f"SuperLink: {address}")
    try:
        handshake(address, ca)
    except (OSError, ValueError) as error:
        log(
            f"warning: SuperLink {address} cannot be reached yet: {error}{proxy_hint(address)}; "
            f"`keel doctor client --fleet {address}` says what to do"
        )
        return
    if key:
        from keel.deployment.doctor import check_key

        for finding in check_key(address, ca, key):
            if finding.is_problem:
                log(f"warning: {finding.text}")


def log(line: str) -> None:
    """Print a line to the process's log."""
    print(line, file=sys.stderr, flush=True)


def main(program: str, words: Sequence[str]) -> NoReturn:
    """Run a program; ends the process where Flower returns, as a SuperNode does if TLS fails."""
    if program not in MODULES:
        sys.exit(f"error: {program!r}: expected {', '.join(MODULES)}")
    os.umask(0o077)  # the database, among others, is for this user alone
    options = options_of(words)
    ca = options.root_certificates
    try:
        warn_of_certificates([ca, options.ssl_ca_certfile, options.ssl_certfile])
    except ValueError as error:
        sys.exit(f"error: {error}")
    if program == "superlink":
        return_large_blocks()
        if options.database:
            check_database(options.database)
    if program == "supernode" and options.superlink and ca:
        report_superlink(options.superlink, ca, options.auth_supernode_private_key)
    sys.argv = [f"keel.deployment {program}", *words]
    try:
        import_module(f"flower_adapter.{MODULES[program]}").main()
    except Exception as error:
        if not ca or "certificate" not in str(error).lower():
            raise
        sys.exit(f"error: --root-certificates {ca}: {error}: expected the server's ca.pem")
    if program == "supernode":
        log("the SuperNode has lost the SuperLink and ends: start it again")
        os._exit(1)  # another thread would keep the process, which never connects again
    sys.exit()


if __name__ == "__main__":
    main("".join(sys.argv[1:2]), sys.argv[2:])
