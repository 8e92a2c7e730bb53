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
        lines = captured(command, environment, LIST_TIMEOUT_S).stdout.splitlines()
    except subprocess.TimeoutExpired:
        lines = [f"no answer in {LIST_TIMEOUT_S:g} s"]
    for line in lines:
        if line.startswith(FOUND):
            return [Node(**node) for node in json.loads(line.removeprefix(FOUND))]
    reason = lines[-1] if lines else "Ray cannot be used"
    raise CommandOptionError(named, f"{address}: {reason}: {START}")


def check_address(address: str, named: str = "ray") -> None:
    """CommandOptionError unless something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise CommandOptionError(
            named, f"{address}: expected HOST:PORT, or {THIS_MACHINE} for this machine's cluster"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise CommandOptionError(
            named, f"{address}: nothing listens there ({error}): {START}"
        ) from None


def main(address: str) -> None:
    """Print the nodes as JSON; end with the reason in one line if there are none."""
    import ray

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:
        print(" ".join(str(error).split())[:500])
        sys.exit(1)
    print(FOUND + json.dumps([asdict(node) for node in living_nodes()]))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
