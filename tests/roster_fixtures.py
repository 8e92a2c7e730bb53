"""Roster entries made by hand."""

from dataclasses import replace

from run_fixtures import SMALL

from protocol.config import resolve_config
from protocol.messages import RosterEntry

versions = "flwr 1.39.0, torch 2.11.0"


def entry(name, counts=(10,) * 10, **about):
    """Of a site with samples of ten classes, but for `about`."""
    made = RosterEntry(
        name, list(counts), [1] * 10, [1, 32, 32], "cnn-fedreco", 64, versions, num_partitions=0
    )
    return replace(made, **about)


def config_of(**given):
    """A small run with these keys; underscores stand for hyphens."""
    given = {k.replace("_", "-"): v for k, v in given.items()}
    return resolve_config(SMALL | {"image-size": "32"} | given)
