"""Start Ray on this machine, for this user alone, without processes that no run uses.

`ray.init` also starts a dashboard server (even with `include_dashboard=False`), an autoscaler
monitor, a log monitor that forwards what workers print, and idle workers that a run cannot use,
because its tasks have a runtime environment of their own. Together they take half of the start-up
time, and Ray 2.55 has no option to leave out the first three.
"""

import os
import secrets
import shlex
import sys
from typing import Any

# for a runtime environment: Ray runs this path, which may contain blanks, unquoted in a shell
OWN_PYTHON = {"py_executable": shlex.quote(sys.executable)}


def require_token() -> None:
    """Have a Ray that this process starts require a token. Call this before Ray is imported.

    Its ports are open to other users and machines, which could otherwise run code as this user. Ray
    reads the variables when it is imported; set later, they would reach only the servers that it
    starts.
    """
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


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


# variables that workers get: Keel's, and those of the libraries that compute
SHARED = (
    *("KEEL_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH_"),
    *("CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE"),
)


def worker_variables() -> dict[str, str]:
    """The environment of workers, also on other machines; they import what this process imports."""
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    names = [name for name in os.environ if name.startswith(SHARED) and name != "KEEL_WORKER"]
    return {"PYTHONPATH": path} | {name: os.environ[name] for name in names}


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a method of Ray that starts a process."""
