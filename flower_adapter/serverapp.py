"""`flwr-serverapp` for which an app is installed only if it is whole: see app_install.py.

Replaces `make_simple_http_retry_invoker` in the grid's module. Why: at a SuperLink that hangs while
a ServerApp starts, the ServerApp ends, and the run with it; from its first round on,
`bound_superlink_retries` waits. Public way: none.
"""

import sys

import flwr.superlink.grid.http_grid as http_grid
from flwr.cli.install import install_from_fab
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
from flwr.superlink.runtime.run_serverapp import run_serverapp

from flower_adapter import replace, wait_out_time_outs
from flower_adapter.app_install import install_to_run


def main() -> None:
    """Run `flwr-serverapp` with its options, and wait out a SuperLink that is away."""
    module = sys.modules[run_serverapp.__module__]
    replace(module, "install_from_fab", install_to_run, install_from_fab)
    invoker = make_simple_http_retry_invoker
    name = "make_simple_http_retry_invoker"
    replace(http_grid, name, lambda: wait_out_time_outs(invoker()), invoker)
    flwr_serverapp()
