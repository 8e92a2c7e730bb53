"""The ServerApp: what Flower calls; the run itself is `federation.run_federation`."""

import logging
import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import add_exit_handler

from server_app.federation import run_federation

app = ServerApp()
log = logging.getLogger("keel.server")
superlink_gone_s = 600.0  # how long a SuperLink may be out of reach before the run ends


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation with the keys that the user gave to `flwr run`."""
    log_to_stdout()
    bound_retries(grid)
    try:
        run_federation(grid, dict(grid.run.override_config), add_exit_handler)
    except (ValueError, OSError, RuntimeError) as error:
        log.error("error: %s", error)
        # Flower follows up with a traceback, short if it begins here; its last line says it again
        raise RuntimeError(str(error)) from None


def bound_retries(grid: Grid) -> None:
    """Flower's grid of a deployment tries without end to reach its SuperLink: end that."""
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is not None:
        invoker.max_time = superlink_gone_s


def log_to_stdout() -> None:
    """Keel's own log lines, plain, once."""
    logger = logging.getLogger("keel")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
