"""Jobs: what is refused before a run, how many workers there are, and what flwr would be told."""

import math
import tomllib

import pytest
from flwr.common.config import parse_config_args

from keel.deployment.superlink import run_config
from keel.engine import config_of, number_of_clients, prepare
from keel.job import Engine, EngineOptions, Job
from keel.plan import federation_config, flwr_line
from protocol.config import presets, resolve_config
from protocol.options import CommandOptionError, ConfigError
from protocol.processes import num_cores
from protocol.ray_nodes import Node

NODES = (Node("10.0.0.1", 8, 2), Node("10.0.0.2", 4, 0))


def job_of(num_clients, cpus=None, gpus=None, device="auto", **cluster):
    config = resolve_config({"num-clients": num_clients, "device": device})
    options = EngineOptions(Engine.flower, cpus_per_client=cpus, gpus_per_client=gpus)
    return Job({"num-clients": num_clients}, config, options, **cluster)


def test_flwr_reads_back_what_a_job_says(home):
    overrides = {"method": "fedreco", "fedreco.k-u": "2 epochs", "flip": True, "lr": 0.1,
                 "num-rounds": 3, "source": "folder:/a b=c"}  # fmt: skip
    assert parse_config_args([run_config(overrides)]) == overrides
    job = job_of(4, cpus=2, gpus=0.25)
    assert job.num_workers == max(1, min(4, num_cores() // 2))
    assert tomllib.loads(federation_config(job).replace(" ", "\n")) == {
        "num-supernodes": job.num_workers,
        "client-resources-num-cpus": 2,
        "client-resources-num-gpus": 0.25,
    }


def test_a_job_has_as_many_workers_as_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("keel.job.num_cores", lambda: 3)
    assert job_of(10).num_workers == 3
    assert job_of(10, cpus=2).num_workers == 1


@pytest.mark.parametrize(
    ("cpus", "gpus", "device", "expected"),
    [
        (1, None, "auto", 2),  # a GPU each
        (1, None, "cpu", 12),
        (1, 0, "auto", 12),
        (1, 0.25, "auto", 8),
        (3, 0, "auto", 3),
        (3, 0.5, "auto", 2),
    ],
)
def test_a_job_has_as_many_workers_as_the_nodes_run_at_once(cpus, gpus, device, expected):
    assert job_of(100, cpus, gpus, device, ray="a:1", nodes=NODES).num_workers == expected
    assert job_of(1, cpus, gpus, device, ray="a:1", nodes=NODES).num_workers == 1


def test_flwr_run_gets_the_address_of_a_cluster():
    assert flwr_line(job_of(4)).startswith("flwr run . ")
    assert flwr_line(job_of(4, ray="a:1")).startswith("RAY_ADDRESS=a:1 flwr run . ")


FLOWER = {"engine": Engine.flower}
REMOTE = {"engine": Engine.deployment, "federation": "a:1"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"clients": 0}, "clients"),
        ({"gpus_per_client": 0.5}, "gpus_per_client"),
        ({"ray": "10.0.0.1:6379"}, "ray"),
        ({"engine": Engine.deployment}, "federation"),
        ({"federation": "x"}, "federation"),
        (REMOTE | {"clients": 3}, "clients"),
        (FLOWER | {"cpus_per_client": 0.5}, "cpus_per_client"),
        (FLOWER | {"gpus_per_client": 1.5}, "gpus_per_client"),
        (FLOWER | {"gpus_per_client": math.nan}, "gpus_per_client"),
        (FLOWER | {"ray": ""}, "ray"),
    ],
)
def test_an_option_that_does_not_fit_is_named(options, name):
    with pytest.raises(CommandOptionError) as error:
        EngineOptions(**options)
    assert error.value.name == name


@pytest.mark.parametrize(
    ("overrides", "options", "key"),
    [
        ({"fedcka.mu": -1.0, "method": "fedcka"}, {}, "fedcka.mu"),
        ({"device": "cuda:1"}, FLOWER, "device"),
        ({"device": "cuda:2"}, FLOWER | {"gpus_per_client": 2}, "device"),
        ({"output-dir": "/dev/null/runs"}, {}, "output-dir"),
        ({"source": "folder:/nothing"}, {}, "source"),
    ],
)
def test_a_key_that_is_refused_before_the_run_is_named(overrides, options, key, home):
    with pytest.raises(ConfigError) as error:
        prepare(overrides, EngineOptions(**options))
    assert error.value.key == key


def test_clients_come_from_the_option_the_config_or_are_ten():
    name, preset = next((n, p) for n, p in presets().items() if p.get("num-clients"))
    for overrides, clients, expected in (
        ({}, None, 10),
        ({}, 4, 4),
        ({"num-clients": 3}, None, 3),
        ({"preset": name}, None, preset["num-clients"]),
        ({"preset": name}, 2, 2),
    ):
        config = config_of(overrides, None)
        assert number_of_clients(config, clients, overrides, None) == expected
    with pytest.raises(CommandOptionError) as error:
        number_of_clients(resolve_config({"num-clients": 3}), 4, {"num-clients": 3}, None)
    assert error.value.name == "clients"


def test_a_cluster_of_the_environment_is_checked_as_one_of_the_command_line(home, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1")
    with pytest.raises(CommandOptionError) as error:
        prepare({}, EngineOptions(Engine.flower))
    assert error.value.name == "RAY_ADDRESS"
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(CommandOptionError) as error:
        prepare({}, EngineOptions(Engine.flower, ray="10.0.0.1"))
    assert error.value.name == "ray"
