"""The nodes of a Ray cluster that exists, asked for in a process of its own.

`python -m keel.deployment.cluster ADDRESS` prints them; Ray takes a second to import, and stays in
a process that has connected.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from keel.deployment.superlink import captured
from protocol.options import CommandOptionError
from protocol.ray_nodes import Node, living_nodes

CONNECT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 60.0
START = (
    "start a cluster with `ray start --head`, and join it with `ray start --address HOST:PORT` on "
    "each machine"
)
FOUND = "nodes: "  # begins the line with the nodes; Ray's own lines may come before and after it
THIS_MACHINE = "auto"  # the cluster that this machine is a node of


def cluster_nodes(address: str, named: str = "ray") -> list[Node]:
    """The living nodes of the cluster at HOST:PORT, or `auto`.

    named: the option with the address, as in Python, or RAY_ADDRESS. CommandOptionError where there
    is no cluster, or where this machine is not one of its nodes.
    """
    if address != THIS_MACHINE:
        check_address(address, named)
    command = [sys.executable, "-m", "keel.deployment.cluster", address]
    environment = {**os.environ, "RAY_LOG_TO_DRIVER": "0"}
    environment.pop("RAY_ADDRESS", None)
    try:
        done = captured(command, environment, LIST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CommandOptionError(
            named,
            f"{address}: no answer in {LIST_TIMEOUT_S:g} s; expected the HOST:PORT that "
            "`ray start --head` prints",
        ) from None
    lines = done.stdout.splitlines()
    found = [line.removeprefix(FOUND) for line in lines if line.startswith(FOUND)]
    if done.returncode or not found:
        reason = lines[-1] if lines else (done.stderr.splitlines() or ["no output"])[-1]
        raise CommandOptionError(named, f"{address}: {reason}")
    return [Node(**node) for node in json.loads(found[0])]


def check_address(address: str, named: str = "ray") -> None:
    """CommandOptionError unless something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise CommandOptionError(
            named,
            f"{address}: expected HOST:PORT, as `ray start --head` prints it, or "
            f"{THIS_MACHINE} for the cluster that this machine is a node of",
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise CommandOptionError(
            named, f"{address}: nothing listens there ({error}): {START}"
        ) from None


def main(arguments: Sequence[str]) -> int:
    """Print the nodes as JSON, or why there are none in one line; exit code 1 then."""
    import ray

    try:
        ray.init(address=arguments[0], logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError:  # its text names options that Keel does not have
        print(f"no Ray cluster there: {START}")
        return 1
    except Exception as error:
        print(" ".join(str(error).split())[:500])
        return 1
    print(FOUND + json.dumps([asdict(node) for node in living_nodes()]))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
