"""`keel run` and `keel resume` in this process's engine: plan, progress, exit codes, Ctrl-C."""

import json

import pytest
from tools.run_directories import make_run

from keel.cli.main import main
from keel.cli.status import status_lines
from keel.deployment.superlink import check_connection
from keel.engine import NOT_RESUMED, NOT_STARTED
from keel.interrupts import INTERRUPTED_CODE
from keel.saved_runs import SavedRun
from server_app.run_reader import LAYOUT


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--clients", "0"], "--clients"),
        (["--engine", "deployment"], "--federation"),
        (["--preset", "nope"], "preset"),
        (["num-clients=3", "--clients", "4"], "num-clients"),
        (["resume=/x"], "keel resume /x"),
        (["--engine", "flower", "--ray", "10.0.0.1"], "--ray"),
    ],
)
def test_options_that_do_not_fit_are_one_line(refusal, words, named):
    assert named in refusal("run", *words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["method=fedrep"], "local-test-fraction"),
        (["--engine", "flower", "evaluate-clients=all"], "local-test-fraction"),
        (["min-replies=11"], "min-replies"),
        (["aggregation=krum", "num-malicious=9"], "num-malicious"),
        (["data-fraction=0.5", "partition=classes", "classes-per-client=11"], "classes-per-client"),
        (["partition=iid", "--clients", "10000000000"], "num-clients"),
        (["min-samples=5000"], "min-samples"),
        (["source=folder:{home}/nothing"], "{home}/nothing"),
        (["partition=shards", "shards-per-client=999"], "shards-per-client"),
        (["tracker=wandb"], "wandb"),
        (["run-name=old"], "{home}/runs/old"),
        (["run-name=-old"], "run-name"),  # later commands would take it for an option
        (["output-dir={home}/file/runs"], "output-dir"),
        (["--engine", "deployment", "--federation", "mine"], "{home}/config.toml"),
    ],
)
def test_what_is_known_beforehand_is_refused_without_a_plan(
    home, capsys, monkeypatch, words, named
):
    (home / "runs" / "old").mkdir(parents=True)
    (home / "file").touch()
    (home / "config.toml").write_text('[superlink]\n[superlink.ours]\naddress = "x:1"\n')
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.setattr("server_app.trackers.is_installed", lambda _: False)
    assert main(["run", *(word.format(home=home) for word in words)]) == 2
    said = capsys.readouterr()
    assert named.format(home=home) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list((home / "runs").iterdir()) == [home / "runs" / "old"]


def test_a_connection_that_is_not_in_the_file_of_flower_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    check_connection("local")  # Flower is about to make the file
    (tmp_path / "config.toml").write_text('[superlink]\ndefault = "b"\n[superlink.b]\naddress = ""')
    check_connection("b")
    with pytest.raises(ValueError, match="nope"):
        check_connection("nope")
    (tmp_path / "config.toml").write_text("[superlink")
    with pytest.raises(ValueError, match=str(tmp_path / "config.toml")):
        check_connection("b")


def test_the_plan_of_a_deployment_says_nothing_of_this_machine_s_data(home, printed, monkeypatch):
    monkeypatch.setattr("keel.engine.run_on_deployment", lambda *_: None)
    words = ["--engine", "deployment", "--federation", "a:1", "source=folder:/nowhere/data"]
    for more, clients in (
        ([], "all connected clients"),
        (["num-clients=10", "train-fraction=0.2"], "10, 2 in"),
        (["train-fraction=0.2"], "20 % of"),
    ):
        rows = dict(line.split(maxsplit=1) for line in printed("run", *words, *more).splitlines())
        assert rows["data"].startswith("folder:/nowhere/data of the server")
        assert rows["clients"].startswith(clients)


def test_the_flwr_line_of_a_deployment_names_a_connection(home, printed, monkeypatch):
    """`flwr run` takes no address of a SuperLink."""
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.setattr("keel.engine.run_on_deployment", lambda *_: None)
    for federation, expected in (("local", ["flwr run . local --stream"]), ("a:1", [])):
        for words in (["run", "device=cpu"], ["resume", "mine"]):
            shown = printed(*words, "--engine", "deployment", "--federation", federation)
            lines = [line for line in shown.splitlines() if line.startswith("same as")]
            assert [line[12:].partition(" --run-config")[0] for line in lines] == expected


def interrupted(*_):
    raise KeyboardInterrupt


def test_ctrl_c_before_the_plan_says_that_nothing_has_changed(home, capsys, monkeypatch):
    make_run(home / "runs" / "mine", {"method": "fedavg"}, 3, status="stopped", num_written=2)
    monkeypatch.setattr("keel.plan.plan_rows", interrupted)
    for words, said in ((["resume", "mine"], NOT_RESUMED), (["run"], NOT_STARTED)):
        assert main(words) == INTERRUPTED_CODE
        assert capsys.readouterr().out == f"{said}\n"
    assert [path.name for path in (home / "runs").iterdir()] == ["mine"]


def test_a_resume_that_is_stopped_before_its_first_line_can_be_resumed(home, capsys, monkeypatch):
    make_run(home / "runs" / "mine", {"method": "fedavg"}, 3, status="stopped", num_written=2)
    monkeypatch.setattr("keel.engine.run_in_process", interrupted)
    assert main(["resume", "mine"]) == INTERRUPTED_CODE
    assert "keel resume mine" in capsys.readouterr().out


def test_a_deployments_run_is_not_resumed_as_a_simulation(home, capsys):
    run = make_run(home / "runs" / "mine", {"method": "fedavg"}, 4, status="stopped", num_written=2)
    for has_sites in (False, True):
        manifest = {"layout": LAYOUT, "simulated": not has_sites}
        (run / "manifest.json").write_text(json.dumps(manifest))
        command = "keel resume mine" + " --engine deployment --federation NAME" * has_sites
        assert status_lines(SavedRun(run))[-1] == f"resume    {command}"
    assert main(["resume", "mine"]) == 2
    assert command in capsys.readouterr().err
