"""The `source` key: which data sources there are, and how their values are written.

Imports neither numpy nor torch, so a mistake is refused before either is loaded. `data.readers`
holds one reader for each name.
"""

import os
from pathlib import Path

from protocol.options import ConfigError, did_you_mean

SOURCE_NAMES = (
    "digits",
    "fashion-mnist",
    "mnist",
    "cifar10",
    "cifar100",
    "svhn",
    "tiny-imagenet",
    "folder:PATH",
    "npz:PATH",
)
SITES = "sites"  # in a deployment: the sites' own data, of which the server holds none


def parse_source(spec: str) -> tuple[str, Path | None]:
    """(name in SOURCE_NAMES or SITES, PATH with `~` expanded or None) of a `source` value.

    ValueError for an unknown name and for a relative path.
    """
    kind, colon, location = spec.partition(":")
    name = f"{kind}:PATH" if colon else kind
    known = (*SOURCE_NAMES, SITES)
    if name not in known or (colon and not location):
        names, hint = ", ".join(known), did_you_mean(name, known)
        raise ConfigError("source", f"source = {spec!r}: expected one of {names}{hint}")
    if not colon:
        return name, None
    path = Path(os.path.expanduser(location))  # pathlib's raises for an unknown user
    if not path.is_absolute():
        raise ConfigError(
            "source",
            f"source = {spec!r}: PATH must be absolute, because a Flower run has its own working "
            f"directory; from the current directory it is {kind}:{path.absolute()}",
        )
    return name, path
