"""The nodes of a Ray cluster: how many workers they have, and addresses without a cluster."""

import json
import socket
import subprocess

import pytest

from keel.deployment import cluster
from keel.deployment.cluster import check_address, cluster_nodes
from protocol.options import CommandOptionError
from protocol.ray_nodes import Node

NODES = (Node("10.0.0.1", 8, 2), Node("10.0.0.2", 4, 0))


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", ":6379", "host:port"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(CommandOptionError) as error:
        check_address(address)
    assert error.value.name == "ray"
    assert address in error.value.fault


def test_an_address_at_which_nothing_listens_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"nothing listens there .*: start a cluster with"):
            cluster_nodes(address)


def test_nodes_are_read_from_between_ray_s_own_lines(monkeypatch):
    """A line after them was read as JSON."""

    def run(command, **options):
        assert "RAY_ADDRESS" not in options["env"]
        rows = [{"address": n.address, "num_cpus": n.num_cpus, "num_gpus": 0} for n in NODES]
        out = f"a warning\nnodes: {json.dumps(rows)}\n[core_worker] another\n"
        return subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    monkeypatch.setattr(cluster.subprocess, "run", run)
    assert cluster_nodes("auto") == [Node("10.0.0.1", 8, 0), Node("10.0.0.2", 4, 0)]


@pytest.mark.parametrize(("out", "err"), [("Version mismatch\n", ""), ("", "Version mismatch\n")])
def test_what_ray_says_of_a_cluster_it_cannot_use_is_one_line(monkeypatch, out, err):
    done = subprocess.CompletedProcess([], 1, out, err)
    monkeypatch.setattr(cluster.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ValueError, match="auto: Version mismatch"):
        cluster_nodes("auto")


def test_a_machine_without_a_cluster_is_told_how_to_start_one(monkeypatch, capsys):
    """Ray named `--address`, which Keel does not have."""

    def init(**options):
        raise ConnectionError("Please specify the one to connect to by setting `--address`")

    monkeypatch.setattr("ray.init", init)
    assert cluster.main(["auto"]) == 1
    assert capsys.readouterr().out.startswith("no Ray cluster there: start a cluster with `ray st")


def test_an_address_that_gives_no_answer_is_refused(monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cluster.subprocess, "run", run)
    with pytest.raises(ValueError, match="auto"):
        cluster_nodes("auto")


@pytest.mark.parametrize(
    ("gpus", "share", "num"),
    [(2, 0.6, 2), (2, 0.4, 4), (2, 0.25, 8), (1, 0.1, 10), (3, 2, 1), (2, 1, 2)],
)
def test_a_worker_gets_its_part_of_one_gpu(gpus, share, num):
    """0.6 of each of two GPUs counted as three workers, of which Ray never started one."""
    assert Node("10.0.0.1", 16, gpus).num_workers(1, share) == num
