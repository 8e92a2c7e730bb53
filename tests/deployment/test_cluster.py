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
        with pytest.raises(CommandOptionError, match=address):
            cluster_nodes(address)


def answered(monkeypatch, code, out):
    def run(command, **options):
        assert "RAY_ADDRESS" not in options["env"]
        return subprocess.CompletedProcess(command, code, out, "")

    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    monkeypatch.setattr(cluster.subprocess, "run", run)


def test_nodes_are_read_from_between_ray_s_own_lines(monkeypatch):
    rows = [{"address": n.address, "num_cpus": n.num_cpus, "num_gpus": n.num_gpus} for n in NODES]
    answered(monkeypatch, 0, f"a warning\nnodes: {json.dumps(rows)}\n[core_worker] another\n")
    assert cluster_nodes("auto") == list(NODES)


def test_what_ray_says_of_a_cluster_it_cannot_use_is_one_line(monkeypatch):
    answered(monkeypatch, 1, "Version mismatch\n")
    with pytest.raises(CommandOptionError, match="auto: Version mismatch"):
        cluster_nodes("auto")


def test_an_address_that_gives_no_answer_is_refused(monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cluster.subprocess, "run", run)
    with pytest.raises(CommandOptionError, match="auto"):
        cluster_nodes("auto")


@pytest.mark.parametrize(
    ("gpus", "share", "num"),
    [(2, 0.6, 2), (2, 0.4, 4), (2, 0.25, 8), (1, 0.1, 10), (3, 2, 1), (2, 1, 2)],
)
def test_a_worker_gets_its_part_of_one_gpu(gpus, share, num):
    assert Node("10.0.0.1", 16, gpus).num_workers(1, share) == num
