"""A real deployment on loopback with SuperNodes that send far more than they may."""

import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from deployment_fixtures import new_run, wait_for_round
from run_fixtures import SMALL, history_of

from flower_adapter import MAX_OBJECT_BYTES
from flower_adapter.reply_bounds import MAX_LOG_BYTES
from keel.deployment.loopback import Loopback, partitions, running

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.deployment]
MIB = 2**20
HOSTILE = {"client-0001": "40,900:5", "client-0002": "8,8:8"}  # MiB of each reply : of one object


class HostileLoopback(Loopback):
    """Some SuperNodes are hostile."""

    def start(self, name, owner, command, env):
        if name.startswith("supernode-") and owner in HOSTILE:
            script = Path(__file__).parents[1] / "hostile_supernode.py"
            command = [sys.executable, str(script), *command[3:]]
            size = HOSTILE[owner].partition(":")[2]
            env = env | {
                "HOSTILE_SUPERNODE": HOSTILE[owner],
                "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(int(size) * MIB),
            }
        super().start(name, owner, command, env)


def resident_bytes(pid):
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_replies_of_many_times_their_bound_cost_their_senders_the_round_and_no_memory(tmp_path):
    keys = SMALL | {
        "method": "fedavg",
        "model": "resnet18",
        "num-rounds": 2,
        "local-epochs": 0,
        "round-timeout": 400.0,
        "evaluate-global": False,
        "evaluate-clients": "none",
        "device": "cpu",
    }
    with running(tmp_path, partitions(3), kind=HostileLoopback) as local:
        superlink, database = local.pid("superlink"), tmp_path / "server" / "superlink.db"
        samples = []  # (time, memory of the SuperLink, size of its database)
        done = threading.Event()

        def watch():
            while not done.wait(0.02):
                files = database.parent.glob("superlink.db*")
                stored = sum(path.stat().st_size for path in files)
                samples.append((time.time(), resident_bytes(superlink), stored))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            _, run = new_run(local, keys)
            wait_for_round(run, 2)
            time.sleep(1)
        finally:
            done.set()
            watcher.join()
        first, line = history_of(run)
        logs = [local.log_file(f"supernode-{name}").read_text() for name in HOSTILE]
    assert "sending 40 MiB" in logs[0]  # within the bound
    [began] = re.findall(r"sending 900 MiB at ([\d.]+)", logs[0])
    assert logs[1].count("sending 8 MiB") == 2
    before = max(memory for when, memory, _ in samples if when < float(began))
    peak = max(memory for _, memory, _ in samples)
    stored = max(size for _, _, size in samples)
    print(line["left_out"], before // MIB, peak // MIB, stored // MIB)
    assert first["left_out"]["client-0001"] == "the reply has no record 'reply'"
    assert line["participants"] == ["client-0000"]
    bound = int(line["left_out"]["client-0001"].split("more than the bound of ")[1].split()[0])
    assert line["bytes_up"] <= bound <= 1.1 * line["bytes_up"] + 2 * MIB
    assert "bytes in one object" in line["left_out"]["client-0002"]
    assert peak - before <= 2 * bound  # beyond what replies within their bounds need
    # The model for three clients once, and three replies; in the write-ahead log, what is stored
    # before it is emptied, the object after that, and what else SQLite writes before it copies it.
    log = MAX_LOG_BYTES + MAX_OBJECT_BYTES + 4 * MIB
    assert stored <= 4 * bound + log
