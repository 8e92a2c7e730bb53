"""`flwr-serverapp` for which an app is installed only if it is whole: see app_install.py."""

import sys

from flwr.cli.install import install_from_fab
from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
from flwr.superlink.runtime.run_serverapp import run_serverapp

from protocol.flower_compat import replace
from protocol.flower_compat.app_install import install_whole


def main() -> None:
    """As `flwr-serverapp`, with the same options."""
    module = sys.modules[run_serverapp.__module__]
    replace(module, "install_from_fab", install_whole, install_from_fab)
    flwr_serverapp()
