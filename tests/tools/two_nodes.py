"""Seconds a round of W1 on two Ray nodes with one worker each, over those of one node with two.

python -m tests.tools.two_nodes [--rounds 5] [--repetitions 2]

For docs/results/engine.md. Needs root, iproute2, util-linux and Fashion-MNIST. The nodes are
namespaces of this machine (tests/cluster_fixtures.py); both forms take turns.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_fixtures import Cluster, two_nodes

from keel.benchmarks.engine import W1
from server_app.history import read_history


def round_seconds(cluster: Cluster, name: str, rounds: int) -> list[float]:
    """Seconds of each round of a run on this cluster, but for the first."""
    keys = {**W1, "source": "fashion-mnist", "num-rounds": rounds, "run-name": name}
    words = [f"{key}={value}" for key, value in keys.items()]
    code, out, err = cluster.run(*words, "--clients", "10")
    if code:
        sys.exit(f"{name} failed: {err or out}")
    lines = read_history(cluster.home / "runs" / name)
    return [sum(line["seconds"].values()) for line in lines[1:]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=2)
    given = parser.parse_args()
    forms: dict[str, list[float]] = {"two nodes": [], "one node": []}
    with tempfile.TemporaryDirectory() as folder, two_nodes(Path(folder)) as cluster:
        for repetition in range(given.repetitions):
            for form, seconds in forms.items():
                if form == "two nodes":
                    cluster.start(0)
                    cluster.start(1)
                else:
                    cluster.nodes.pop(1).kill()
                    cluster.start(0, cpus=2)
                name = f"{form.replace(' ', '-')}-{repetition}"
                seconds += round_seconds(cluster, name, given.rounds)
                print(name, [round(s, 2) for s in seconds], flush=True)
    two, one = (statistics.median(seconds) for seconds in forms.values())
    print(f"two nodes {two:.2f} s a round, one node {one:.2f} s, ratio {two / one:.2f}")


if __name__ == "__main__":
    main()
