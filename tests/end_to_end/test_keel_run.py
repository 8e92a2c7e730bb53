"""`keel run` and `keel resume` in this process, and a run that is stopped."""

import errno
import os
import re
import signal
from functools import partial

import pytest
from run_fixtures import (
    all_models,
    assert_same_run,
    audit_of,
    history_of,
    keel_run,
    only_run,
    same_bits,
    summary_of,
    wait_until,
)

import protocol.files
import server_app.manifest
import server_app.run_directory
from keel.cli.main import main
from keel.experiments.verify import unfinished
from keel.interrupts import ENDED, STOPPING
from keel.saved_runs import SavedRun
from protocol.processes import num_cores
from server_app.pool import InlineWorkers
from server_app.run_reader import RunReader

WHOLE = ["model=cnn-fedreco", "lr=0.05", "alpha=5", "num-rounds=3"]
SMALL = ["model=cnn-fedreco", "data-fraction=0.4", *WHOLE[1:]]
FULL = "failed: OSError: [Errno 28] No space left on device"


long_run = partial(keel_run, *SMALL[:-1], "num-rounds=100000", "--clients", "2")


def test_a_run_shows_its_plan_then_a_line_a_round(home, capsys):
    words = ["run", "method=fedprox", "fedprox.mu=1", *WHOLE, "--clients", "3"]
    assert main(words) == 0
    said = capsys.readouterr()
    directory, shown = only_run(home), said.out
    assert "fedprox (mu 1.0, half true, squared true)" in shown
    assert "digits: 1,438 training and 359 test images, 1 x 32 x 32, 10 classes" in shown
    assert "model       cnn-fedreco\n" in shown
    assert "parameters  61,706\n" in shown
    assert "3, all of them in every round" in shown
    assert str(directory) in shown
    for number, line in enumerate(history_of(directory), start=1):
        accuracy = f"{100 * line['global']['accuracy']:.2f} %"
        assert re.search(rf"round {number}/3 +accuracy +{re.escape(accuracy)} +loss ", shown)
    assert summary_of(directory)["status"] == "finished"
    assert "Traceback" not in said.err
    [line] = [line for line in shown.splitlines() if "flwr run ." in line]
    num_nodes = min(3, num_cores())
    nodes = f"'num-supernodes={num_nodes} client-resources-num-cpus=1'"
    assert f"--federation-config {nodes}" in line
    assert "num-clients=3" in line
    assert 'method="fedprox" fedprox.mu=1.0 model="cnn-fedreco"' in line


def test_keel_stop_stops_the_run_cleanly(home):
    """By the signal of Ctrl-C."""
    with long_run() as process:
        wait_until(lambda: list(home.glob("runs/*/checkpoints/round-00002*")), process=process)
        directory = only_run(home)
        assert SavedRun(directory).state == "running"
        assert main(["stop", directory.name]) == 0
        out, err = process.communicate(timeout=250)
    assert process.returncode == 130
    assert summary_of(directory)["status"] == "stopped"
    assert SavedRun(directory).state == "stopped"
    assert out.count(STOPPING) == 1
    assert f"keel resume {directory.name}" in out
    assert err == ""


def test_a_second_ctrl_c_ends_the_run_at_once(home):
    with long_run() as process:
        for line in process.stdout:
            if line.startswith("round      2/"):
                process.send_signal(signal.SIGINT)
            if line.startswith(STOPPING):  # it now writes the model, the summary and the plots
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, f"{ENDED}\n", "")
    directory = only_run(home)
    done = SavedRun(directory).last_round
    assert done >= 2
    assert main(["resume", directory.name, f"num-rounds={done + 1}"]) == 0
    assert SavedRun(directory).last_round == done + 1


def test_a_run_that_fails_ends_with_one_line_and_exit_code_1(home, capsys):
    diverging = ["method=fedreco", "fedreco.eta-0=1e38", "local-test-fraction=0.2"]
    used = [word for word in SMALL if not word.startswith("lr=")]
    assert main(["run", *used, *diverging, "--clients", "3"]) == 1
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert re.match(r"error: round \d: .*not finite", line)
    assert str(only_run(home)) in said.out


def test_a_resumed_run_equals_one_that_was_not_interrupted(home, capsys, monkeypatch):
    answers, asked = InlineWorkers.answers, []

    def interrupted(workers, contents, kind, seconds):
        for found in answers(workers, contents, kind, seconds):
            asked.append(1)
            if len(asked) == 5:  # three in round 1, and the second of round 2; then Ctrl-C
                raise KeyboardInterrupt
            yield found

    words = ["method=moon", *SMALL, "--clients", "3"]
    assert main(["run", "run-name=whole", *words]) == 0
    monkeypatch.setattr(InlineWorkers, "answers", interrupted)
    assert main(["run", "run-name=cut", *words]) == 130
    monkeypatch.undo()
    monkeypatch.setenv("KEEL_HOME", str(home))
    assert "keel resume cut" in capsys.readouterr().out
    assert SavedRun(home / "runs" / "cut").state == "stopped"
    assert main(["resume", "cut", "lr=1"]) == 2
    assert main(["resume", "cu"]) == 0
    whole, cut = (home / "runs" / name for name in ("whole", "cut"))
    assert_same_run(whole, cut)


@pytest.mark.parametrize(
    ("name", "state", "noted"),
    [("model.safetensors", FULL, FULL), ("manifest.json", "interrupted", "finished")],
)
def test_a_run_whose_end_could_not_be_written_is_completed_by_a_resume(
    name, state, noted, home, monkeypatch
):
    """Not "finished": it has no model or no manifest, and its checkpoints are still there."""
    save = protocol.files.write_atomically

    def full(path, *content):
        if path.name == name and b'"files": {}' not in content[0]:  # the manifest of a run's end
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(path, *content)

    assert main(["run", "run-name=whole", *SMALL, "--clients", "2"]) == 0
    with monkeypatch.context() as patch:
        for module in (server_app.manifest, server_app.run_directory):
            patch.setattr(module, "write_atomically", full)
        assert main(["run", "run-name=cut", *SMALL, "--clients", "2"]) == 1
    whole, cut = (home / "runs" / name for name in ("whole", "cut"))
    assert SavedRun(cut).state == state
    assert [line["status"] for line in audit_of(cut, "ended")] == [noted]
    monkeypatch.setattr(server_app.manifest, "code_of", lambda own: "another")  # trains no round
    assert main(["resume"]) == 0  # the one run that has not finished
    assert SavedRun(cut).state == "finished"
    assert same_bits(all_models(whole), all_models(cut))
    assert RunReader(cut).manifest["code"] == RunReader(whole).manifest["code"]
    assert unfinished(RunReader(cut)) == ""


def test_resume_prints_which_checkpoint_it_skipped(home, capsys):
    untrained = [*SMALL, "local-epochs=0", "keep-state=true"]
    assert main(["run", "method=fedavg", *untrained, "--clients", "2"]) == 0
    directory = only_run(home)
    newest = max((directory / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-10])
    assert main(["status", directory.name]) == 0
    assert f"damaged   checkpoints/{newest.name}: a resume skips it" in capsys.readouterr().out
    assert main(["resume", directory.name, "num-rounds=4"]) == 0
    said = capsys.readouterr()
    words = " ".join((said.out + said.err).split())
    assert f"{newest.name} is damaged: skipped, the run continues from round 2" in words
