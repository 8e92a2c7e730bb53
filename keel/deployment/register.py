"""Registers clients' public keys with a SuperLink, once each."""

import tempfile
from pathlib import Path

from keel.deployment.reach import wait_for_server
from keel.deployment.superlink import SuperLinkClient


def register_all(keys: Path, superlink: SuperLinkClient) -> list[str]:
    """Register each NAME.pub in `keys` that is not registered yet; a line for each."""
    lines = []
    for path in sorted(keys.glob("*.pub")):
        try:
            superlink.register(path, path.stem)
        except RuntimeError as error:  # the SuperLink's list has no names, so there is no other way
            if "already in use" not in str(error):
                raise
            lines.append(f"known       {path.stem}")
        else:
            lines.append(f"registered  {path.stem}")
    return lines


def register(credentials: Path, address: str, wait_s: float) -> list[str]:
    """Register the keys in credentials/clients at this SuperLink, which has `wait_s` to start."""
    ca = credentials / "ca.pem"
    if not ca.exists():
        raise FileNotFoundError(
            f"{ca} is missing: expected the server's directory of `keel deploy credentials`"
        )
    with tempfile.TemporaryDirectory() as home:
        client = SuperLinkClient(Path(home), address, ca)
        wait_for_server(address, ca, wait_s)
        return register_all(credentials / "clients", client)
