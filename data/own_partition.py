"""Partitions of the user's own: the samples of each client, as a dict, a list or a function.

    {"site-a": [0, 5, 9], "site-b": range(100, 200)}      names of clients to training samples
    [[0, 5, 9], range(100, 200)]                          the same, of client-0000, client-0001
    split(labels, num_clients, seed)                      a function that returns either

Samples may be left out, but none may be at two clients. Nothing here imports torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from data.partitions import Parts
from protocol.code import place_of
from protocol.options import ConfigError
from protocol.own_code import Own
from protocol.text import check_client_name, num_of

EXPECTED = "expected a dict from clients to samples, or a list of each client's samples"
INDICES = "expected indices of training samples, integers from 0"


def refused(own: Own, what: str) -> ConfigError:
    """The refusal of a partition."""
    return ConfigError("partition", f"partition = {own.spec!r}: {what}")


def value_of(own: Own) -> Any:
    """The dict, list or function; ConfigError, one line, if it cannot be loaded or is another."""
    try:
        value = own.value
    except ValueError as error:
        raise refused(own, str(error)) from error
    if not callable(value) and not isinstance(value, Mapping | list | tuple):
        raise refused(
            own, f"is a {type(value).__name__}: {EXPECTED}, or a function that returns it"
        )
    return value


def fixed_number(own: Own | None) -> int:
    """The number of clients of a dict or list; 0 of a function, and without a partition."""
    value = None if own is None else value_of(own)
    return len(value) if isinstance(value, Mapping | list | tuple) else 0


def own_parts(own: Own, labels: np.ndarray, num_clients: int, seed: int) -> Parts:
    """The samples of each client, with the names of the clients if they have any.

    ConfigError naming the client and the sample if one is there twice or not at all.
    """
    value = value_of(own)
    if callable(value):
        try:
            value = value(labels.copy(), num_clients, seed)  # it may write to them
        except Exception as error:  # a user's function may raise anything
            place = place_of(value)
            raise refused(own, f"{place} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, Iterable):
            returned = f"{place_of(own.value)} returned a {type(value).__name__}"
            raise refused(own, f"{returned}: {EXPECTED}")
    names = tuple(map(str, value)) if isinstance(value, Mapping) else ()
    found = list(value.values() if isinstance(value, Mapping) else value)
    if len(found) != num_clients:
        raise ConfigError(
            "num-clients",
            f"num-clients = {num_clients}: partition = {own.spec!r} has "
            f"{num_of('client', len(found))}",
        )
    for name in names:
        try:
            check_client_name(name)
        except ValueError as error:
            raise refused(own, str(error)) from error
    owners = np.full(len(labels), -1)
    for number, samples in enumerate(found):
        name = names[number] if names else f"client-{number:04d}"
        try:
            indices = np.asarray(samples)
        except ValueError as error:  # lists of different lengths
            raise refused(own, f"{name} has lists in its list: {INDICES}") from error
        if indices.size == 0:
            raise refused(own, f"{name} has no samples: {INDICES}")
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            what = f"has {indices.dtype} {list(indices.shape)}"
            raise refused(own, f"{name} {what}: {INDICES}")
        beyond = indices[(indices < 0) | (indices >= len(labels))]
        if len(beyond):
            what = f"has the sample {beyond[0]}: expected 0 to {len(labels) - 1}"
            raise refused(own, f"{name} {what}")
        chosen, counts = np.unique(indices, return_counts=True)
        twice = chosen[(counts > 1) | (owners[chosen] >= 0)]
        if len(twice):
            first = owners[twice[0]]
            other = (names[first] if names else f"client-{first:04d}") if first >= 0 else name
            raise refused(own, f"the sample {twice[0]} is at {other} and again at {name}")
        owners[chosen] = number
    used = np.flatnonzero(owners >= 0)
    return Parts(used, owners[used], num_clients, names)
