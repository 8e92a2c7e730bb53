"""The ServerApp: what Flower calls; the run itself is `federation.run_federation`."""

import logging
import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server_app.federation import run_federation

app = ServerApp()
log = logging.getLogger("keel.server")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation with the keys that the user gave to `flwr run`."""
    log_to_stdout()
    try:
        run_federation(grid, dict(grid.run.override_config))
    except (ValueError, OSError, RuntimeError) as error:
        log.error("error: %s", error)
        # Flower follows up with a traceback, short if it begins here; its last line says it again
        raise RuntimeError(str(error)) from None


def log_to_stdout() -> None:
    """Keel's own log lines, plain, once."""
    logger = logging.getLogger("keel")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
