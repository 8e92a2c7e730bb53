"""Registers the public keys of credentials/server/clients with the SuperLink, once each.

python -m keel.deployment.register --credentials credentials/server --superlink localhost:8000
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keel.deployment.reach import handshake
from keel.deployment.superlink import SuperLinkClient


def register_all(keys: Path, superlink: SuperLinkClient) -> list[str]:
    """Register each NAME.pub in `keys` that is not yet there; a line for each."""
    lines = []
    for path in sorted(keys.glob("*.pub")):
        try:
            superlink.register(path, path.stem)
        except RuntimeError as error:  # the SuperLink's list has no names: asking is how to know
            if "already in use" not in str(error):
                raise
            lines.append(f"known       {path.stem}")
        else:
            lines.append(f"registered  {path.stem}")
    return lines


def wait_for_server(address: str, ca: Path, limit_s: float) -> None:
    """Return once it answers over TLS; the OSError of the last try after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            handshake(address, ca)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m keel.deployment.register", description=__doc__)
    parser.add_argument("--credentials", type=Path, default=Path("credentials/server"))
    parser.add_argument("--superlink", default="localhost:8000", help="its HTTP API")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds for it to start")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        client = SuperLinkClient(Path(home), arguments.superlink, arguments.credentials / "ca.pem")
        try:
            wait_for_server(arguments.superlink, arguments.credentials / "ca.pem", arguments.wait)
            lines = register_all(arguments.credentials / "clients", client)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines) or f"no keys in {arguments.credentials / 'clients'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
