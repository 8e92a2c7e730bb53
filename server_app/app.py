"""The ServerApp that Flower calls; the run itself is `federation.run_federation`."""

import logging
import sys
from logging.handlers import MemoryHandler

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_adapter import bound_superlink_retries, on_process_exit
from server_app.federation import run_federation
from server_app.observers import SummaryTable

app = ServerApp()
log = logging.getLogger("keel.server")
SUPERLINK_TIMEOUT_S = 600.0  # how long the SuperLink may be out of reach before the run ends


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation with the keys set by `flwr run`; logs one line per round."""
    log_to_stdout()
    early = MemoryHandler(sys.maxsize)
    early.setLevel(logging.WARNING)
    logging.getLogger("keel").addHandler(early)
    bound_superlink_retries(grid, SUPERLINK_TIMEOUT_S)
    try:
        keys = dict(grid.run.override_config)
        run_federation(grid, keys, on_process_exit, [SummaryTable()], early)
    except (ValueError, OSError, RuntimeError) as error:
        log.error("error: %s", error)
        # Flower logs the traceback: `from None` keeps it short
        raise RuntimeError(str(error)) from None


def log_to_stdout() -> None:
    """Print Keel's log lines, without decoration, once."""
    logger = logging.getLogger("keel")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
