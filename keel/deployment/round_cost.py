"""What a round of a deployment costs beside training, with Keel's and with Flower's own processes.

    python -m keel.deployment.round_cost --clients 2 --rounds 10

Both run FedAvg on `digits` over TLS on loopback. Cost: the time from the first message sent to the
last reply read; the median over the rounds but the first. Training is in it, a tenth of a second
here. Bytes: what the SuperLink counted, over all rounds.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from keel.deployment.loopback import Loopback, partitions, running
from protocol.options import OptionValue

common: dict[str, OptionValue] = {
    "source": "digits",
    "model": "cnn-fedreco",
    "alpha": 5.0,
    "evaluate-global": False,
    "device": "cpu",
}
run_limit_s = 1800.0


class StockLoopback(Loopback):
    """Flower's own processes: no resident worker, no shortened waits."""

    def start_client(self, name: str, node_config: Mapping[str, OptionValue]) -> None:
        """flower-supernode and flower-superexec, as they come."""
        env = self.environment(name)
        del env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
        supernode = self.supernode_command(name, node_config)
        self.start(f"supernode-{name}", name, ["flower-supernode", *supernode[3:]], env)
        secret = str(self.credentials / name / "executor.secret")
        address = f"127.0.0.1:{self.runtime_ports[name]}"
        command = ["flower-superexec", "--insecure", "--runtime-api-address", address]
        command += ["--superexec-auth-secret-file", secret]
        self.start(f"executor-{name}", name, command, env)


def cost(local: Loopback, rounds: int) -> tuple[float, dict[str, int]]:
    """(seconds a round, the SuperLink's count of bytes) of one run."""
    run_id = local.superlink.submit(common | {"num-rounds": rounds})
    status = local.superlink.wait(run_id, run_limit_s)
    if status != "finished:completed":
        raise RuntimeError(f"run {run_id}: {status}")
    [path] = (local.root / "server" / "keel" / "runs").glob("*/history.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    spent = [line["seconds"]["training"] for line in lines]
    return statistics.median(spent), local.superlink.run_info(run_id)["network-traffic"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m keel.deployment.round_cost", description=__doc__
    )
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    for name, kind in (("Keel", Loopback), ("Flower's own", StockLoopback)):
        with (
            tempfile.TemporaryDirectory(prefix="keel-cost-") as folder,
            running(Path(folder), partitions(arguments.clients), kind=kind) as local,
        ):
            seconds, traffic = cost(local, arguments.rounds)
        print(f"{name}: {seconds:.2f} s a round; bytes {traffic}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
