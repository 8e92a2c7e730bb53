"""`flower-supernode`, with the same options, patched in `flower_adapter/supernode.py`.

Logs the SuperLink's address, and why it does not answer or does not know this client's key, which
Flower's log does not say. Ends after a failed TLS handshake, as with an expired certificate.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flower_adapter.supernode import main
from keel.deployment.checks_host import check_key
from keel.deployment.credentials import warn_of_certificates
from keel.deployment.reach import handshake


def report_superlink(words: Sequence[str]) -> None:
    """Print the address in a command's options, and why TLS or this client's key fails there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--superlink")
    parser.add_argument("--root-certificates", type=Path)
    parser.add_argument("--auth-supernode-private-key", type=Path)
    options, _ = parser.parse_known_args(words)
    if not (options.superlink and options.root_certificates):
        return
    print(f"SuperLink: {options.superlink}", file=sys.stderr, flush=True)
    try:
        handshake(options.superlink, options.root_certificates)
    except (OSError, ValueError) as error:
        print(
            f"warning: SuperLink {options.superlink} cannot be reached yet: {error}; `keel doctor "
            f"client --fleet {options.superlink}` says what to do",
            file=sys.stderr,
            flush=True,
        )
        return
    if key := options.auth_supernode_private_key:
        for finding in check_key(options.superlink, options.root_certificates, key):
            if finding.is_problem:
                print(f"warning: {finding.text}", file=sys.stderr, flush=True)


def run() -> NoReturn:
    """Run the SuperNode; end the process where Flower returns, which it does where TLS fails."""
    main()
    print(
        "the SuperNode has lost the SuperLink and ends: start it again", file=sys.stderr, flush=True
    )
    os._exit(1)  # another thread would keep the process, which never connects again


if __name__ == "__main__":
    os.umask(0o077)
    warn_of_certificates(sys.argv[1:])
    report_superlink(sys.argv[1:])
    run()
