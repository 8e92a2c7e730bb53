"""Seconds a deployed round costs beside training, under Keel's processes and under Flower's own.

Both run FedAvg on `digits` over TLS on loopback. The time is from the first message sent to the
last reply read, the median over all rounds but the first; a tenth of a second of it is training.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from keel.benchmarks.report import BenchOptions, Row
from keel.deployment.loopback import Loopback, partitions, running
from protocol.options import OptionValue
from server_app.run_reader import RunReader

CONFIG: dict[str, OptionValue] = {
    "source": "digits",
    "model": "cnn-fedreco",
    "alpha": 5.0,
    "evaluate-global": False,
    "device": "cpu",
}
run_limit_s = 1800.0


class StockLoopback(Loopback):
    """Flower's own processes: no resident worker, polling intervals as they come."""

    def start_client(self, name: str, node_config: Mapping[str, OptionValue]) -> None:
        """flower-supernode and flower-superexec."""
        env = self.environment(name)
        del env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
        supernode = self.supernode_command(name, node_config)
        self.start(f"supernode-{name}", name, ["flower-supernode", *supernode[3:]], env)
        executor = self.executor_command(name, self.runtime_ports[name], "--insecure")
        self.start(f"executor-{name}", name, ["flower-superexec", *executor[3:]], env)


def round_cost(options: BenchOptions) -> Iterator[Row]:
    """One row for each set of processes, with two clients."""
    for name, kind in (("Keel", Loopback), ("Flower's own", StockLoopback)):
        with (
            tempfile.TemporaryDirectory(prefix="keel-cost-") as folder,
            running(Path(folder), partitions(2), kind=kind) as local,
        ):
            rounds = 2 if options.is_quick else max(10, options.rounds)
            run_id = local.superlink.submit(CONFIG | {"num-rounds": rounds})
            status = local.superlink.wait(run_id, run_limit_s)
            if status != "finished:completed":
                raise RuntimeError(f"run {run_id}: {status}")
            [path] = (local.root / "server" / "keel" / "runs").glob("*/history.jsonl")
            training_s = [line["seconds"]["training"] for line in RunReader(path).history[1:]]
            traffic = local.superlink.run_info(run_id)["network-traffic"]  # of all rounds
        yield {
            "what": f"deployed round, processes: {name}",
            "wall_seconds": round(statistics.median(training_s), 2),
            "bytes": traffic,
        }
