"""`keel experiments run` on a small sweep: killed, interrupted, shared, and as by hand."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiment_fixtures import folder_in, options
from run_fixtures import final_model, history_of, same_bits, summary_of, wait_until, without_times

from keel.cli.main import main as keel
from keel.experiments import runner
from keel.experiments.recipe import load_recipe
from keel.experiments.report import write_report
from keel.experiments.runs import run_of
from keel.saved_runs import holders, is_locked
from server_app.inline import run_inline

pytestmark = pytest.mark.timeout(900)
root = Path(__file__).parent.parent.parent
NUM_ROUNDS = 20  # for a second: there has to be time to kill it
wait_s = 300.0
# of one row each: one that trains, one that has diverged, one that cannot be begun
RECIPE = f"""\
title: a small sweep
config: {{source: digits, model: cnn-fedreco, method: fedprox, num-clients: 4, device: cpu,
         num-rounds: {NUM_ROUNDS}, data-fraction: 0.4, alpha: 0.5, lr: 0.05}}
take: mean 2
grid:
  fedprox.mu: [0.01, 1.0e+30, 0.1]
"""


@contextlib.contextmanager
def started(output: Path) -> Iterator[subprocess.Popen[str]]:
    """A runner in a process and a process group of its own, one run at a time."""
    words = ["run", str(output / "sweep.yaml"), "--output", str(output), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "keel", "experiments", *words],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell that started us in the background has it ignored, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its runs
            process.wait(60)


def process_of(directory: Path, rounds: int) -> int:
    """The process of the run in this directory, once it has done so many rounds."""
    history = directory / "history.jsonl"
    wait_until(lambda: history.exists() and len(history_of(directory)) >= rounds, wait_s)
    (pid,) = holders(directory / ".lock")
    return pid


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process that is stopped has been sent this signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [line for line in lines if line.startswith("ShdPnd:")]
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


@pytest.fixture(scope="module")
def directory(output: Path) -> Path:
    """The directory of the run that trains."""
    cell = load_recipe(str(output / "sweep.yaml")).cells[0]
    return run_of(cell, {}, 0, options(), folder_in(output)).directory


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with the recipe: one of its runs has diverged, one cannot be begun."""
    output = tmp_path_factory.mktemp("experiments")
    (output / "sweep.yaml").write_text(RECIPE)
    _, diverging, failing = (
        run_of(cell, {}, 0, options(), folder_in(output))
        for cell in load_recipe(str(output / "sweep.yaml")).cells
    )
    assert keel(diverging.prepare()) == 1
    failing.directory.touch()  # a file in the place of its directory
    return output


@pytest.fixture(scope="module")
def shared(output: Path, directory: Path) -> tuple[list[dict], str, str]:
    """The history of the run when it was interrupted, and what both runners printed.

    One runner has it under way, is killed and resumes it; another executes the others meanwhile;
    then Ctrl-C reaches every process of the first one's group, and the other takes over.
    """
    with started(output) as one:
        os.kill(process_of(directory, 2), signal.SIGKILL)
        done = len(history_of(directory))
        pid = process_of(directory, done + 1)
        os.kill(pid, signal.SIGSTOP)  # or it would be over before the interrupt
        with started(output) as other:
            wait_until(lambda: list(output.glob("runs/*/*.failed")), wait_s)
            os.killpg(one.pid, signal.SIGINT)
            wait_until(lambda: is_pending(pid, signal.SIGINT), wait_s)
            os.kill(pid, signal.SIGCONT)
            message, _ = one.communicate(timeout=wait_s)
            assert not Path(f"/proc/{pid}").exists()
            before = history_of(directory)
            printed, _ = other.communicate(timeout=wait_s)
    assert (one.returncode, other.returncode) == (130, 1), message + printed
    return before[: done + 2], message, printed


def test_a_killed_run_is_resumed_once_and_an_interrupt_ends_the_runner_in_a_line(shared):
    _, message, _ = shared
    assert message.count("it is resumed once") == 1
    assert "interrupted" in message
    assert "Traceback" not in message


def test_only_rounds_in_flight_were_run_again(directory, shared):
    """The last line may be there before its checkpoint is."""
    before, *_ = shared
    after = history_of(directory)[: len(before)]
    assert len(before) < NUM_ROUNDS, "it was over before it was interrupted"
    assert after[:-1] == before[:-1]
    assert without_times(after[-1:]) == without_times(before[-1:])


def test_a_run_that_was_killed_and_interrupted_is_that_of_keel_run(
    output, directory, shared, tmp_path, no_pictures
):
    assert summary_of(directory)["status"] == "finished"
    given = json.loads((directory / "config.json").read_text())["overrides"]
    by_hand = run_inline(given | {"output-dir": str(tmp_path)}, 4)
    assert same_bits(final_model(directory), final_model(by_hand))
    assert [line["round"] for line in history_of(directory)] == list(range(1, NUM_ROUNDS + 1))
    assert not any(map(is_locked, output.glob("runs/*/*.lock")))


def test_a_failure_is_named_once_with_its_log_and_what_has_ended_is_not_run_again(
    output, shared, capsys
):
    _, _, printed = shared
    (line,) = [line for line in printed.splitlines() if line.startswith("failed")]
    assert "fedprox.mu = 0.1, result, seed 0" in line
    assert ".log" in line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "ray_tasks", lambda *_: pytest.fail("Ray was started"))
        words = ["--only", "fedprox.mu = 0.01;fedprox.mu = 1e+30", "--output", str(output)]
        assert keel(["experiments", "run", str(output / "sweep.yaml"), *words]) == 0
    done = capsys.readouterr().out
    text = write_report(output)[1].read_text()
    (cell,) = [line for line in text.splitlines() if line.startswith("| fedprox.mu = 0.01 |")]
    assert f"fedprox.mu = 0.01, result, seed 0: {cell.split('|')[2].strip()} %" in done
    assert "| fedprox.mu = 1e+30 | –; diverged 1/1 |" in text
    assert "| fedprox.mu = 0.1 | –; failed 1/1 |" in text
