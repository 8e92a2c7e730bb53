"""Start Ray on this machine without processes that no run uses.

`ray.init` also starts a dashboard server (even with `include_dashboard=False`), an autoscaler
monitor, a log monitor that forwards what workers print, and idle workers that a run cannot use,
because its tasks have a runtime environment of their own. Together they take half of the start-up
time, and Ray 2.55 has no option to leave out the first three.
"""

import os
from typing import Any


def skip_unused_processes(forwards_output: bool) -> None:
    """Change Ray in this process, so that every later start on this machine leaves them out.

    forwards_output: keep the log monitor, which forwards what workers print.
    """
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    from ray._private.node import Node

    for name in ("start_api_server", "start_monitor"):
        setattr(Node, name, nothing)
    if not forwards_output:
        Node.start_log_monitor = nothing  # type: ignore[method-assign]


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a method of Ray that starts a process."""
