"""Registers the public keys of credentials/server/clients with the SuperLink, once each.

python -m deployment.register --credentials credentials/server --superlink localhost:8000
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from deployment.superlink import SuperLinkClient


def register_all(keys: Path, superlink: SuperLinkClient) -> list[str]:
    """Register each NAME.pub in `keys` that is not yet there; a line for each."""
    known = {str(node.get("name", "")) for node in superlink.nodes()}
    lines = []
    for path in sorted(keys.glob("*.pub")):
        if path.stem in known:
            lines.append(f"known       {path.stem}")
            continue
        superlink.register(path, path.stem)
        lines.append(f"registered  {path.stem}")
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deployment.register", description=__doc__)
    parser.add_argument("--credentials", type=Path, default=Path("credentials/server"))
    parser.add_argument("--superlink", default="localhost:8000", help="its HTTP API")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        client = SuperLinkClient(Path(home), arguments.superlink, arguments.credentials / "ca.pem")
        try:
            lines = register_all(arguments.credentials / "clients", client)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines) or f"no keys in {arguments.credentials / 'clients'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
