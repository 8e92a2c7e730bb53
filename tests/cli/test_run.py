"""`keel run` and `keel resume` in this process's engine: plan, progress, exit codes, Ctrl-C."""

import json
import socket
import sys

import pytest
from model_fixtures import undrawn
from run_fixtures import only_run
from tools.run_directories import make_run
from tools.sizes import as_json, measured_sizes

from keel.cli import engines
from keel.cli.interrupts import INTERRUPTED_CODE
from keel.cli.main import main
from keel.cli.run import NOT_STARTED, Engine, EngineOptions, config_of, with_clients
from keel.cli.sizes import SIZES_FILE, data_size, parameter_count, stored_sizes
from keel.cli.status import status_lines
from keel.deployment.superlink import check_connection
from keel.runs import SavedRun
from protocol.config import presets, resolve_config
from server_app.run_reader import LAYOUT

SMALL = ["model=cnn-fedreco", "lr=0.05", "alpha=5", "num-rounds=3"]


@pytest.mark.end_to_end
def test_a_run_that_fails_is_one_line_and_code_1(home, capsys):
    assert main(["run", *SMALL, "lr=1e9", "clip-norm=0"]) in (1, 2)  # lr is set twice: 2
    assert capsys.readouterr().err.startswith("error: lr is set twice")
    words = [word for word in SMALL if not word.startswith("lr")]
    assert main(["run", *words, "lr=1e30", "--clients", "2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert SavedRun(only_run(home)).state.startswith("failed: ")


@pytest.mark.end_to_end
def test_a_run_whose_output_nobody_reads_goes_on(home, no_reader, monkeypatch):
    """`keel run | head -3`"""
    monkeypatch.setattr(sys, "stdout", no_reader)
    assert main(["run", *SMALL, "num-clients=2"]) == 0
    assert SavedRun(only_run(home)).state == "finished"


def test_data_that_does_not_fit_is_refused_with_code_2(home, refusal, capsys):
    assert main(["run", *SMALL, "--clients", "3", "min-samples=1000"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (home / "runs").exists()
    assert f"{home}/nothing does not exist" in refusal("run", f"source=folder:{home}/nothing")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--clients", "0"], "--clients 0: expected a number >= 1"),
        (["--gpus-per-client", "0.5"], "--gpus-per-client needs"),
        (["--engine", "deployment"], "--federation goes together"),
        (["--federation", "x"], "--federation goes together"),
        (
            ["--engine", "deployment", "--federation", "a:1", "--clients", "3"],
            "--clients 3: the clients of a deployment are not simulated; num-clients=3 waits for",
        ),
        (["--preset", "nope"], "preset = 'nope' is unknown"),
        (
            ["num-clients=3", "--clients", "4"],
            "clients = 4, but num-clients = 3: set only one of them",
        ),
        (["resume=/x"], "resume is not a key of `keel run`: use `keel resume /x`"),
        (
            ["--engine", "flower", "--cpus-per-client", "0.5"],
            "--cpus-per-client 0.5: expected a whole number >= 1",
        ),
        (
            ["--engine", "flower", "--cpus-per-client", "0"],
            "--cpus-per-client 0: expected a whole number >= 1",
        ),
        (
            ["--engine", "flower", "--cpus-per-client", "inf"],
            "--cpus-per-client inf: expected a finite number >= 0",
        ),
        (
            ["--engine", "flower", "--gpus-per-client", "nan"],
            "--gpus-per-client nan: expected a finite number >= 0",
        ),
        (
            ["--engine", "flower", "--gpus-per-client", "1.5"],
            "--gpus-per-client 1.5: expected a whole number or a fraction from 0.0001 to 1",
        ),
        (["--engine", "flower", "--gpus-per-client", "1e-5"], "--gpus-per-client 1e-05: expected"),
        (["--ray", "10.0.0.1:6379"], "--ray needs"),
        (["--engine", "flower", "--ray", ""], "--ray is empty: expected HOST:PORT"),
        (["--engine", "flower", "--ray", "10.0.0.1"], "--ray 10.0.0.1: expected HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_are_one_line(home, refusal, words, line):
    assert refusal("run", *words).startswith(f"error: {line}")


def test_a_cluster_of_the_environment_is_checked_as_one_of_the_command_line(
    home, refusal, monkeypatch
):
    """With RAY_ADDRESS set to a cluster that has ended, the run waited without a word."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        line = f"error: RAY_ADDRESS {address}: nothing listens there"
        assert refusal("run", "--engine", "flower").startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["method=fedrep"],
            "client client-0000 has no local test part (fedrep has personal models, which are "
            "evaluated on it): set local-test-fraction, such as local-test-fraction=0.2\n",
        ),
        (["--engine", "flower", "evaluate-clients=all"], "client client-0000 has no local test"),
        (["min-replies=11"], "min-replies = 11: only 10 clients train in a round"),
        (["aggregation=krum", "num-malicious=9"], "num-malicious = 9: krum needs 2 * 9 + 3 = 21"),
        (
            ["source=digits", "data-fraction=1e-9"],
            "data-fraction = 1e-09 leaves at most 10 training images, and 10 clients with "
            "min-samples = 10 need 100: raise data-fraction",
        ),
        (["source=digits", "data-fraction=1e-9", "partition=iid", "--clients", "11"], "data-frac"),
        (
            ["data-fraction=0.5", "partition=classes", "classes-per-client=11"],
            "classes-per-client = 11: expected 1 to",
        ),
        (["partition=iid", "--clients", "10000000000"], "num-clients = 10000000000: expected 1 to"),
        (["min-samples=5000"], "min-samples = 5000 for 10 clients needs 50000 samples"),
        (["partition=classes", "classes-per-client=11"], "classes-per-client = 11: expected 1 to"),
        (["partition=shards", "shards-per-client=999"], "shards-per-client = 999 for 10 clients"),
        (["--engine", "flower", "device=cuda:1"], "device = 'cuda:1': with --engine flower Ray"),
        (
            ["--engine", "flower", "--gpus-per-client", "2", "device=cuda:2"],
            "device = 'cuda:2': with --engine flower Ray",
        ),
        (["tracker=wandb"], "tracker = 'wandb': the package wandb is not installed"),
        (["run-name=old"], "run-name = 'old': {home}/runs/old exists: choose another name"),
        # later commands would take it for an option
        (["run-name=-old"], "run-name = '-old': expected 1 to 64 of the characters A-Z a-z"),
        (["output-dir={home}/file/runs"], "output-dir: {home}/file/runs/"),
        (
            ["--engine", "deployment", "--federation", "mine"],
            "--federation mine: expected HOST:PORT, or a connection in {home}/config.toml: ours",
        ),
    ],
)
def test_what_is_known_beforehand_is_refused_without_a_plan(home, capsys, monkeypatch, words, line):
    (home / "runs" / "old").mkdir(parents=True)
    (home / "file").touch()
    (home / "config.toml").write_text('[superlink]\n[superlink.ours]\naddress = "x:1"\n')
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.setattr("server_app.trackers.is_installed", lambda _: False)
    assert main(["run", *(word.format(home=home) for word in words)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {line.format(home=home)}")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_connection_is_checked_before_flower_has_made_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"^--federation nope: .*/config\.toml: local, supergrid$"):
        check_connection("nope")
    check_connection("local")


def test_the_plan_of_a_deployment_says_nothing_of_this_machine_s_data(
    home, printed, capsys, monkeypatch
):
    monkeypatch.setattr("keel.cli.engines.run_on_deployment", lambda *_: None)
    words = ["--engine", "deployment", "--federation", "a:1", "source=folder:/nowhere/data"]
    rows = dict(line.split(maxsplit=1) for line in printed("run", *words).splitlines())
    assert rows["data"] == "folder:/nowhere/data of the server; each client has its own"
    assert rows["clients"] == "all connected clients, every round"
    assert main(["run", *words, "num-clients=10", "fraction-train=0.2"]) == 0
    assert "clients     10, 2 in a round\n" in capsys.readouterr().out
    assert main(["run", *words, "fraction-train=0.2"]) == 0
    assert "clients     20 % of the connected clients, every round\n" in capsys.readouterr().out


def test_the_flwr_line_of_a_deployment_names_a_connection(home, printed, monkeypatch):
    """It named an address, which `flwr run` does not take, and a variable of simulations."""
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.setattr("keel.cli.engines.run_on_deployment", lambda *_: None)
    for federation, expected in (("local", ["flwr run . local --stream"]), ("a:1", [])):
        for words in (["run", "device=cpu"], ["resume", "mine"]):
            shown = printed(*words, "--engine", "deployment", "--federation", federation)
            lines = [line for line in shown.splitlines() if line.startswith("same as")]
            assert [line[12:].partition(" --run-config")[0] for line in lines] == expected


def test_nan_is_not_said_to_be_renamed(home, refusal, caplog):
    assert refusal("run", "alpha=nan") == "error: alpha = nan: expected a finite number > 0\n"
    assert caplog.text == ""


def test_ctrl_c_before_a_run_resumes_says_that_it_is_unchanged(home, capsys, monkeypatch):
    """It was "stopped before the run started: nothing was saved", of a run with finished rounds."""

    def interrupted(*_):
        raise KeyboardInterrupt

    make_run(home / "runs" / "mine", {"method": "fedavg"}, 3, status="stopped", num_written=2)
    monkeypatch.setattr("keel.cli.plan.plan_rows", interrupted)
    assert main(["resume", "mine"]) == 130
    assert capsys.readouterr().out == "stopped before the run was resumed: it is unchanged\n"


def test_ctrl_c_before_the_run_starts_says_that_nothing_was_saved(home, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("keel.cli.plan.plan_rows", interrupted)
    assert main(["run"]) == 130
    assert capsys.readouterr().out == f"{NOT_STARTED}\n"
    assert not (home / "runs").exists()


def test_clients_come_from_the_option_the_config_or_are_ten():
    name, preset = next((n, p) for n, p in presets().items() if p.get("num-clients"))
    for overrides, clients, expected in (
        ({}, None, ({}, 10)),
        ({}, 4, ({}, 4)),
        ({"num-clients": 3}, None, ({"num-clients": 3}, 3)),
        ({"preset": name}, None, ({"preset": name}, preset["num-clients"])),
        ({"preset": name}, 2, ({"preset": name, "num-clients": 2}, 2)),
    ):
        found = with_clients(overrides, config_of(overrides, None), clients, None)
        assert found == expected
    assert EngineOptions().engine == "inline"


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.end_to_end
def test_the_stored_sizes_are_those_of_the_registries():
    """At one input: measuring all of them takes a quarter of a minute."""
    stored = stored_sizes()
    models = {name: {"1x28": counts["1x28"]} for name, counts in stored["models"].items()}
    expected = stored | {"models": models}
    assert measured_sizes([(1, 28)]) == expected, "run: python -m tests.tools.sizes"
    assert SIZES_FILE.read_text() == as_json(stored)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"method": "fedintr"},
        {"method": "moon", "moon.projection": "mlp", "model": "cnn-fedcka"},
        {"method": "fedproc", "model": "resnet20", "norm": "group"},
        {"method": "fedcr", "model": "vgg9", "channels": 3},
    ],
)
def test_the_parameter_count_before_the_run_is_the_networks(keys):
    from client_app.setup import model_for, open_source

    config = resolve_config(keys)
    size = data_size(config)
    with undrawn():
        network = model_for(config, open_source(config))
        assert parameter_count(config, size) == sum(p.numel() for p in network.parameters())
    assert size.image_shape == network.input_shape


@pytest.mark.end_to_end
@pytest.mark.parametrize("engine", [Engine.inline, Engine.deployment])
def test_a_resume_that_is_stopped_before_its_first_line_can_be_resumed(
    home, capsys, monkeypatch, engine
):
    """It said that there is no run to resume."""
    assert main(["run", *SMALL, "num-clients=2", "keep-state=true", "run-name=mine"]) == 0

    def interrupted(job, terminal):
        raise KeyboardInterrupt

    monkeypatch.setattr(engines, "run_in_process", interrupted)
    monkeypatch.setattr(engines, "run_on_deployment", interrupted)
    capsys.readouterr()
    where = ["--engine", "deployment", "--federation", "localhost:8000"]
    where = where if engine is Engine.deployment else []
    assert main(["resume", "mine", "num-rounds=4", *where]) == INTERRUPTED_CODE
    expected = " ".join(["stopped; to continue: keel resume mine", *where])
    assert expected in capsys.readouterr().out


def test_a_deployments_run_is_not_resumed_as_a_simulation(home, capsys):
    run = make_run(home / "runs" / "mine", {"method": "fedavg"}, 4, status="stopped", num_written=2)
    for has_sites in (False, True):
        manifest = {"layout": LAYOUT, "simulated": not has_sites}
        (run / "manifest.json").write_text(json.dumps(manifest))
        command = "keel resume mine" + " --engine deployment --federation NAME" * has_sites
        assert status_lines(SavedRun(run))[-1] == f"resume    {command}"
    assert main(["resume", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: mine: its clients have data of their own, as in a deployment: ")
    assert said.endswith(f": resume it with `{command}`\n")
