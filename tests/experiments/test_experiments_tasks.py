"""What a run is executed with and where, and the words of the command."""

from pathlib import Path

import numpy as np
import pytest
from data_fixtures import random_images
from experiment_fixtures import TWO_ROWS, leave_all, options
from filelock import FileLock

from keel.experiments import runner
from keel.experiments.runs import Options
from keel.experiments.tasks import BUSY, FAILED, Resources, digest_of_data, execute, unfit
from protocol.code import code_version
from protocol.config import resolve_config
from protocol.ray_nodes import Node

SWEEP = str(Path(__file__).parent.parent.parent / "docs" / "sweep.yaml")
CPU, GPU = Node("a", 4, 0), Node("b", 4, 1)


@pytest.mark.parametrize(
    ("resources", "nodes", "share"),
    [
        (Resources(), [CPU], 0.0),
        (Resources(), [CPU, GPU], 1.0),
        (Resources(workers=4), [GPU], 0.25),
        (Resources(gpus=0.5), [GPU], 0.5),
        (Resources(gpus=0.0), [GPU], 0.0),
    ],
)
def test_a_run_has_a_gpu_or_a_part_where_there_are_fewer_than_workers(resources, nodes, share):
    assert resources.gpus_on(nodes) == share


@pytest.mark.parametrize("resources", [Resources(cpus=8), Resources(gpus=1.0)])
def test_a_share_that_no_machine_has_is_refused(resources):
    with pytest.raises(ValueError, match=CPU.address):
        resources.gpus_on([CPU])


def test_a_machine_with_other_code_or_data_or_without_the_folder_is_unfit(tmp_path):
    arrays = {"x_train": random_images(40, 28, 28), "y_train": np.arange(40) % 2}
    arrays |= {"x_test": arrays["x_train"][:9], "y_test": arrays["y_train"][:9]}
    np.savez(tmp_path / "data.npz", **arrays)
    config = resolve_config({"source": f"npz:{tmp_path / 'data.npz'}", "num-clients": 2})
    data = digest_of_data(config)
    assert unfit(tmp_path, code_version(), [(config, data)]) == ""
    assert "another" in unfit(tmp_path, code_version(), [(config, "another")])
    assert "another" in unfit(tmp_path, "another")
    assert str(tmp_path) in unfit(tmp_path / "none", code_version())


def test_a_run_that_another_runner_has_is_left_alone(tmp_path):
    _, (run, *_) = leave_all(tmp_path, how=options())
    with FileLock(run.beside("lock")):
        assert execute(run, code_version()) == (BUSY, "")
    assert execute(run, code_version()) == ("finished", "")
    assert execute(run, "another")[0] == FAILED


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--output", "/dev/null/x"], "/dev/null/x"),
        (["--seeds", "-1"], "-1"),
        (["--set", "seed=3"], "--set seed"),
        (["--set", "lr=high"], "lr"),
        (["--set", "lrr=1"], "lrr"),
        (["--only", "FedAvgg"], "FedAvgg"),
        (["--ray", ""], "--ray"),
        (["--ray", "127.0.0.1:1"], "127.0.0.1:1"),
        (["--gpus-per-run", "1.5"], "1.5"),
        (["--gpus-per-run", "nan"], "nan"),
    ],
)
def test_bad_words_are_refused_in_one_line(words, named, tmp_path, refusal):
    output = str(tmp_path / "out")
    assert named in refusal("experiments", "run", SWEEP, "--output", output, *words)
    assert not list(tmp_path.glob("out/runs/*/*"))


@pytest.mark.parametrize(
    ("number", "seeds"), [(0, [7, 42]), (1, [7]), (2, [7, 42]), (5, [7, 42, 0, 1, 2])]
)
def test_seeds_are_the_recipes_before_others(number, seeds, tmp_path, monkeypatch, printed):
    (tmp_path / "r.yaml").write_text(TWO_ROWS.replace("seeds: 3", "seeds: [7, 42]"))
    found: list[Options] = []
    monkeypatch.setattr(runner, "run_recipe", lambda *of: found.append(of[2]) or {})
    words = ["run", str(tmp_path / "r.yaml"), "--output", str(tmp_path), "--seeds", str(number)]
    printed("experiments", *words)
    assert found[0].seeds == seeds
