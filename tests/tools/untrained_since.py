"""Processor milliseconds of a round in which nothing is trained, now and in an earlier commit.

python -m tests.tools.untrained_since [COMMIT] [--rounds 9] [--repetitions 2]

For docs/results/engine.md. COMMIT: by default the last one of version 0.1. The rows are those of
`keel bench untrained`; for each, the commit's code and the current code take turns, each in a
process of its own with this environment's packages.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keel.benchmarks.engine import UNTRAINED, untrained_keys
from protocol.options import OptionValue
from server_app.manifest import NUM_NOTED_ROUNDS

root = Path(__file__).parents[2]
last_of_0_1 = "da1fbf3a"

# What each version runs: it prints its processor seconds at each new line of history.jsonl. Both
# versions have `run_inline` and write such a line at the end of each round, perhaps in pieces.
measure = """
import json, sys, threading, time
from pathlib import Path
from server_app.inline import run_inline

keys, num_clients = json.loads(sys.argv[1]), int(sys.argv[2])
at, is_over = [], threading.Event()

def watch():
    seen, found = 0, []
    while not is_over.wait(0.002):
        found = found or list(Path(keys["output-dir"]).glob("*/history.jsonl"))
        if found and (now := len(found[0].read_bytes().splitlines())) > seen:
            seen = now
            at.append(time.process_time())

watcher = threading.Thread(target=watch)
watcher.start()
try:
    run_inline(keys, num_clients)
finally:
    is_over.set()
    watcher.join()
print("CPU", json.dumps(at))
"""


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the commit's files."""
    with tempfile.TemporaryDirectory(prefix="keel-commit-") as folder:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=root, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def round_ms(code: Path, keys: dict[str, OptionValue], num_clients: int) -> float:
    """Processor milliseconds of a round (median) of a run of this code.

    Without the last round, which always has a checkpoint, and the first, whose digests are noted.
    """
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
        words = [json.dumps({**keys, "output-dir": folder}), str(num_clients)]
        done = subprocess.run(
            [sys.executable, "-c", measure, *words], cwd=code, capture_output=True, text=True
        )
    if done.returncode:
        sys.exit(f"{code} failed: {done.stderr[-2000:]}")
    at = json.loads(done.stdout.rpartition("CPU ")[2])
    rounds = [after - before for before, after in itertools.pairwise(at)]
    if len(at) != keys["num-rounds"]:
        sys.exit(f"saw {len(at)} of {keys['num-rounds']} rounds end: repeat on an idle machine")
    return 1000 * statistics.median(rounds[NUM_NOTED_ROUNDS - 1 : -1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", nargs="?", default=last_of_0_1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repetitions", type=int, default=2)
    given = parser.parse_args()
    print(
        f"| method, model, clients a round | {given.commit} | each round | snapshot-every=1000 |",
        flush=True,
    )
    with checked_out(given.commit) as earlier, tempfile.TemporaryDirectory() as images:
        for method, model, num_clients in UNTRAINED:
            keys = untrained_keys(method, model, num_clients, Path(images))
            keys["num-rounds"] = given.rounds
            of_0_1 = {k: "participants" if v == "cohort" else v for k, v in keys.items()}
            forms = {
                "earlier": (earlier, of_0_1 if given.commit == last_of_0_1 else keys),
                "each round": (root, {**keys, "snapshot-every": 1}),
                "at the end": (root, {**keys, "snapshot-every": 1000}),
            }
            ms: dict[str, list[float]] = {form: [] for form in forms}
            for _ in range(given.repetitions):
                for form, (code, of_form) in forms.items():
                    ms[form].append(round_ms(code, of_form, num_clients))
            before = statistics.mean(ms["earlier"])
            cells = [f"{method}, {model}, {num_clients}"]
            for form, each in ms.items():
                ratio = "" if form == "earlier" else f": {statistics.mean(each) / before:.2f}"
                cells.append(", ".join(f"{one:.0f}" for one in each) + ratio)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
