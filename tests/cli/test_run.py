"""`keel run` and `keel resume` in this process's engine: plan, progress, exit codes, Ctrl-C."""

import pytest
from tools.sizes import as_json, measured_sizes

from keel.cli.main import main
from keel.cli.run import EngineOptions, config_of, with_clients
from keel.cli.sizes import SIZES_FILE, data_size, parameter_count, stored_sizes
from keel.runs import SavedRun
from protocol.config import presets, resolve_config

SMALL = ["model=cnn-fedreco", "lr=0.05", "alpha=5", "num-rounds=3"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A Keel home of its own."""
    monkeypatch.setenv("KEEL_HOME", str(tmp_path))
    return tmp_path


def only_run(home):
    [directory] = (home / "runs").iterdir()
    return directory


def test_a_run_that_fails_is_one_line_and_code_1(home, capsys):
    assert main(["run", *SMALL, "lr=1e9", "clip-norm=0"]) in (1, 2)  # lr is set twice: 2
    assert capsys.readouterr().err.startswith("error: lr is set twice")
    words = [word for word in SMALL if not word.startswith("lr")]
    assert main(["run", *words, "lr=1e30", "--clients", "2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert SavedRun(only_run(home)).state.startswith("failed: ")


def test_data_that_does_not_fit_is_refused_with_code_2(home, capsys):
    assert main(["run", *SMALL, "--clients", "3", "min-samples=1000"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (home / "runs").exists()
    assert main(["run", f"source=folder:{home}/nothing"]) == 2
    assert f"{home}/nothing does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--clients", "0"], "--clients 0: expected a number >= 1"),
        (["--gpus-per-client", "0.5"], "--gpus-per-client needs --engine flower"),
        (["--engine", "deployment"], "--engine deployment and --federation go together"),
        (["--federation", "x"], "--engine deployment and --federation go together"),
        (["--preset", "nope"], "preset = 'nope' is unknown"),
        (["num-clients=3", "--clients", "4"], "--clients 4: num-clients is 3; remove one of them"),
        (["resume=/x"], "resume: use `keel resume /x`"),
    ],
)
def test_options_that_do_not_fit_are_one_line(home, capsys, words, line):
    assert main(["run", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1


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


<<<<<<< HEAD
=======
# --- Ctrl-C and resume ---------------------------------------------------------------------------


@pytest.mark.parametrize("stopped_by", ["signal", "keel stop"])
def test_ctrl_c_stops_the_run_cleanly(home, stopped_by):
    command = [sys.executable, "-m", "keel", "run", *SMALL[:-1], "num-rounds=100000"]
    process = subprocess.Popen(
        [*command, "--clients", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 100
        while not list(home.glob("runs/*/checkpoints/round-00002*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        directory = only_run(home)
        assert SavedRun(directory).state == "running"
        if stopped_by == "signal":
            process.send_signal(signal.SIGINT)
        else:
            assert main(["stop", directory.name]) == 0
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert process.returncode == 130
    assert summary_of(directory)["status"] == "stopped"
    assert SavedRun(directory).state == "stopped"
    assert f"keel resume {directory.name}" in out
    assert err == ""


def test_a_resumed_run_equals_one_that_was_not_interrupted(home, capsys, monkeypatch):
    answer, asked = InlineGrid.pull_messages, []

    def interrupted(grid, message_ids):
        asked.append(1)
        if len(asked) == 4:  # the roster, round 1, round 2; then Ctrl-C
            raise KeyboardInterrupt
        return answer(grid, message_ids)

    words = ["method=moon", *SMALL, "--clients", "3"]
    assert main(["run", "run-name=whole", *words]) == 0
    monkeypatch.setattr(InlineGrid, "pull_messages", interrupted)
    assert main(["run", "run-name=cut", *words]) == 130
    monkeypatch.undo()
    monkeypatch.setenv("KEEL_HOME", str(home))
    assert "keel resume cut" in capsys.readouterr().out
    assert SavedRun(home / "runs" / "cut").state == "stopped"
    assert main(["resume", "cut", "lr=1"]) == 2
    assert main(["resume", "cu"]) == 0
    whole, cut = (home / "runs" / name for name in ("whole", "cut"))
    assert same_bits(all_models(whole), all_models(cut))
    assert without_times(history_of(whole)) == without_times(history_of(cut))


def test_a_finished_run_is_resumed_for_more_rounds_only(home, capsys):
    assert main(["run", "run-name=a", *SMALL, "--clients", "2"]) == 0
    assert main(["resume", "a"]) == 2
    assert "a has finished its 3 rounds: set more, such as num-rounds=6" in capsys.readouterr().err
    assert main(["resume", "a", "num-rounds=4"]) == 0
    assert [line["round"] for line in history_of(home / "runs" / "a")] == [1, 2, 3, 4]


>>>>>>> w/style
# --- sizes ---------------------------------------------------------------------------------------


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
    network = model_for(config, open_source(config))
    size = data_size(config)
    assert size.image_shape == network.input_shape
    assert parameter_count(config, size) == sum(p.numel() for p in network.parameters())
