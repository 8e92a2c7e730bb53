"""Ray on this machine with no more processes than runs need.

Ray's `init` also starts a server for its dashboard, with `include_dashboard=False` too, a monitor
for an autoscaler, one that shows what workers print, and workers for tasks that have no environment
of their own, as those of a run have. They take half of the time until it is ready, and Ray 2.55 has
no option for the first three.
"""

import os
from typing import Any


def start_less(shows_output: bool) -> None:
    """Do without these in every Ray that this process starts from now on.

    shows_output: of workers, for which Ray has the third.
    """
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    from ray._private.node import Node

    for name in ("start_api_server", "start_monitor"):
        setattr(Node, name, nothing)
    if not shows_output:
        Node.start_log_monitor = nothing  # type: ignore[method-assign]


def nothing(*_: Any, **__: Any) -> None:
    """In the place of a method of Ray's that starts a process."""
