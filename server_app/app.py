"""The ServerApp that Flower calls; the run itself is `run.run_federation`."""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_adapter import bound_superlink_retries, is_in_process_grid, on_process_exit
from protocol.messages import RosterRequest, request_record
from protocol.own_code import check_on_all_machines
from server_app.checks import refuse_unused
from server_app.experiment import Experiment
from server_app.observers import SummaryTable
from server_app.pool import FlowerWorkers, Pool
from server_app.roster import read_saved_roster
from server_app.run import run_federation
from server_app.run_reader import ROSTER_FILE
from server_app.simulation import pool_of_workers
from server_app.sites import Sites, keys_of_sites

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

    def make_pool(experiment: Experiment, resumed: Path | None) -> Pool:
        if not resumed:
            refuse_unused(experiment.config, keys)
        if is_in_process_grid(grid):
            workers = FlowerWorkers(grid)
            num_clients = experiment.config.rounds.num_clients or workers.num
            return pool_of_workers(workers, experiment, num_clients, resumed)
        sites = sites_of(grid, experiment, resumed)
        if not resumed:
            refuse_unused(experiment.config, keys, sites.unused_keys)
        return sites

    bound_superlink_retries(grid, SUPERLINK_TIMEOUT_S)
    try:
        keys = dict(grid.run.override_config)
        if not is_in_process_grid(grid):
            keys |= keys_of_sites(grid, keys)
        run_federation(make_pool, keys, on_process_exit, [SummaryTable()], early)
    except (ValueError, OSError, RuntimeError) as error:
        log.error("error: %s", error)
        # Flower logs the traceback: `from None` keeps it short
        raise RuntimeError(str(error)) from None


def sites_of(grid: Grid, experiment: Experiment, resumed: Path | None) -> Sites:
    """The sites of a deployment, once those that a run needs are connected."""
    check_on_all_machines(experiment.config.own)
    query = request_record(RosterRequest(experiment.config, experiment.data))
    saved = read_saved_roster(resumed / ROSTER_FILE) if resumed else None
    sites = Sites(grid, experiment.config, query, experiment.source, saved)
    sites.gather()
    return sites


def log_to_stdout() -> None:
    """Print Keel's log lines, without decoration, once."""
    logger = logging.getLogger("keel")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
