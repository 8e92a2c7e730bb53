"""`import keel`: runs started and read from Python, and the notebooks that show it."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from own_fixtures import execute
from run_fixtures import final_model, history_of, same_bits, without_pictures

import keel
from protocol.options import ConfigError

root = Path(__file__).parent.parent.parent
OWN = ("method", "model", "partition")
SMALL = {"data-fraction": 0.4, "model": "cnn-fedreco", "num-rounds": 2, "lr": 0.05}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of two clients, for tests that change nothing of it."""
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setenv("KEEL_HOME", str(home))
        return keel.run(SMALL, clients=2, quiet=True)


def test_run_takes_a_dict_keywords_dotted_keys_numpy_numbers_and_paths(home, tmp_path, capsys):
    numbers = {"lr": np.float64(0.125), "num-rounds": np.int64(1), "fedcka.mu": 5}
    run = keel.run(SMALL | numbers, method="fedcka", batch_size=32, clients=np.int64(3))
    config = {"lr": 0.125, "num-rounds": 1, "fedcka.mu": 5, "batch-size": 32, "num-clients": 3}
    assert {key: run.config[key] for key in config} == config
    assert run.directory.parent == home / "runs"
    assert run.state == run.summary["status"] == "finished"
    assert "round 1/1" in capsys.readouterr().out
    found = keel.load_run(run.directory.name[:15])
    assert found.directory == keel.load_run(run).directory == run.directory
    assert repr(found).startswith(f"<keel.Run {run.directory.name}: finished after round 1>")
    for resumed in (str(run.directory), run.directory, run):
        with pytest.raises(ValueError, match="keep-state"):
            keel.run(resume=resumed)
    for several in (np.linspace(0.1, 0.2, 2), torch.ones(2)):
        with pytest.raises(ConfigError) as error:
            keel.run(lr=several)
        assert error.value.key == "lr"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert keel.__version__ == project["version"]


def test_history_model_and_plot(made, monkeypatch):
    accuracies = [line["global"]["accuracy"] for line in history_of(made.directory)]
    pandas = pytest.importorskip("pandas")
    assert isinstance(made.history, pandas.DataFrame)
    assert list(made.history["accuracy/global.accuracy"]) == accuracies
    assert list(made.history.index) == [1, 2]
    monkeypatch.setattr("keel.api.is_installed", lambda name: False)
    assert [row["accuracy/global.accuracy"] for row in made.history] == accuracies
    names = made.model().predict(np.zeros((3, 32, 32), np.uint8))
    assert len(names) == 3
    assert names == keel.load_model(made.directory).predict(np.zeros((3, 32, 32), np.uint8))
    for kind, images in (("str", "x.png"), ("int64", np.zeros((3, 32, 32), np.int64))):
        with pytest.raises(ValueError, match=kind):
            made.model().predict(images)
    figure = made.plot()
    assert isinstance(figure, Figure)
    [line] = figure.axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), [100 * value for value in accuracies])


@pytest.mark.parametrize("name", ["config", "summary", "history"])
def test_a_run_that_was_deleted_has_nothing_to_read(made, tmp_path, name):
    run = keel.load_run(shutil.copytree(made.directory, tmp_path / "run"))
    shutil.rmtree(run.directory)
    with pytest.raises(ValueError, match=str(run.directory)):
        getattr(run, name)


def test_runs_in_threads_are_those_made_one_after_the_other(home):
    """Two that draw their first weights at once would draw them from one generator."""

    def weights(seed):
        short = SMALL | {"num-rounds": 1}
        return final_model(keel.run(short, clients=2, seed=seed, quiet=True).directory)

    alone = [weights(seed) for seed in (1, 2)]
    level = logging.getLogger("keel").level
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(weights, (1, 2)))
    assert all(map(same_bits, alone, together))
    logger = logging.getLogger("keel")
    assert (logger.level, logger.propagate) == (level, True)


def test_a_run_says_no_more_in_a_programs_log_than_its_level_asks_for(home, caplog):
    short = SMALL | {"num-rounds": 1, "local-epochs": 0}
    for level, names in ((logging.WARNING, set()), (logging.INFO, {"keel.server"})):
        caplog.clear()
        caplog.set_level(level)
        # Keel's own level as in a new process, and the handler's as that of logging.basicConfig
        caplog.set_level(logging.NOTSET, logger="keel")
        run = keel.run(short, clients=2, quiet=True)
        assert "round 1/1" in (run.directory / "run.log").read_text()
        found = {record.name for record in caplog.records if record.levelno == logging.INFO}
        assert found & {"keel.server"} == names
    assert logging.getLogger("keel").propagate


def test_a_run_and_a_model_neither_read_nor_change_torchs_settings(made, home):
    images = np.full((2, 40, 40, 3), 7, np.uint8)
    probabilities = made.model().probabilities(images)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        keel.run(SMALL, clients=2, quiet=True)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")  # on some CPUs in bfloat16
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            run = keel.run(SMALL, clients=2, quiet=True)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        torch.set_float32_matmul_precision("highest")
        found = keel.load_model(run).probabilities(images)
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float64, 2)
    assert same_bits(final_model(made.directory), final_model(run.directory))
    assert torch.equal(found, probabilities)


FORKED = """
import faulthandler, os, sys, keel, numpy as np, torch
torch.set_num_threads(2)
model = keel.load_model("")
images = np.zeros([1000, 8, 8], np.uint8)
model.predict(images)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
faulthandler.dump_traceback_later(30, exit=True)  # where it waits
keys = {"model": "cnn-fedreco", "num-rounds": 1, "data-fraction": 0.1}
for call in (
    lambda: keel.run(keys, clients=2, quiet=True),
    lambda: keel.load_model(""),
    lambda: model.predict(images),
):
    try:
        call()
    except ValueError as error:
        print(error, flush=True)
os._exit(3)
"""


def test_a_process_that_was_forked_after_torch_had_computed_is_refused(made):
    """Its threads are not those of the parent: PyTorch would wait for them for ever."""
    env = os.environ | {"KEEL_HOME": str(made.directory.parent.parent)}
    command = [sys.executable, "-c", FORKED]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.count('multiprocessing.get_context("spawn")') == 3


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"config": {"alpha": 1.0}, "alpha": 2.0}, "alpha"),
        ({"method": 3}, "method"),
        ({"mehtod": "fedcka"}, "mehtod"),
        ({"lambda_": 3}, "lambda_"),
        ({"engine": "ray"}, "engine"),
        ({"clients": 0}, "clients"),
        ({"clients": 3, "num_clients": 4}, "clients"),
        ({"gpus_per_client": 0.5}, "gpus_per_client"),
        ({"engine": "flower", "cpus_per_client": 0.5}, "cpus_per_client"),
        ({"engine": "flower", "ray": "10.0.0.1"}, "ray"),
    ],
)
def test_a_mistake_is_a_line_that_names_the_argument_or_the_key(home, arguments, name):
    with pytest.raises(ValueError) as error:
        keel.run(**arguments)
    assert str(error.value).startswith((name, f"config key = {name!r}"))
    assert "\n" not in str(error.value)


def test_a_run_or_a_function_that_is_not_there_is_named(home):
    with pytest.raises(ValueError, match="'x'"):
        keel.load_run("x")
    with pytest.raises(AttributeError, match="runn"):
        keel.runn  # noqa: B018


@pytest.mark.parametrize("name", ["keel-in-a-notebook.ipynb", "own-code-in-a-notebook.ipynb"])
def test_a_notebook_runs(name, home, monkeypatch):
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    content = json.loads((root / "docs" / name).read_text())
    assert content["nbformat"] == 4
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    names = {"__name__": "__main__"}
    for cell in cells:
        execute("".join(cell["source"]).replace("num_rounds=5", "num_rounds=2"), names)
    assert keel.load_run().state == "finished"
    if name.startswith("own"):
        run = names["run"]
        assert [run.config[key].partition(":")[0] for key in OWN] == ["own"] * len(OWN)
        assert run.config["source"].startswith("npz:")
        assert run.history["score/global.top2"].iloc[-1] > 0.6
        assert len(run.client_data("even").train.labels) == len(names["partition"]["even"])
