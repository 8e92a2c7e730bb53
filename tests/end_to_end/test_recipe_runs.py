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
from run_fixtures import final_model, history_of, same_bits, summary_of, wait_until, without_times

from keel.cli.main import main as keel
from keel.experiments import runner
from keel.experiments.report import write_report
from keel.saved_runs import holders, is_locked
from server_app.inline import run_inline

pytestmark = pytest.mark.timeout(900)
root = Path(__file__).parent.parent.parent
NUM_ROUNDS = 30  # for seconds: there has to be time to kill and to interrupt it
wait_s = 300.0
# of one row each: two that train, one that diverges, one that cannot be begun
RECIPE = f"""\
title: a small sweep
config: {{source: digits, model: cnn-fedreco, method: fedprox, num-clients: 4, device: cpu,
         num-rounds: {NUM_ROUNDS}, data-fraction: 0.4, alpha: 0.5, lr: 0.05}}
take: mean 2
grid:
  fedprox.mu: [0.01, 1.0, 1.0e+30, 0.1]
"""


@contextlib.contextmanager
def started(recipe: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """A runner in a process and a process group of its own, one run at a time."""
    words = ["run", str(recipe), "--output", str(output), "--workers", "1"]
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


def directories(output: Path) -> list[Path]:
    """The run directories."""
    return [path.parent for path in sorted(output.glob("runs/*/*/config.json"))]


def rounds_in(output: Path) -> int:
    """Rounds in all histories."""
    return sum(len(history_of(d)) for d in directories(output) if (d / "history.jsonl").exists())


def process_of(output: Path, rounds: int) -> int:
    """The process of the one run under way, once so many rounds are done in all."""
    wait_until(lambda: rounds_in(output) >= rounds, wait_s)
    (pid,) = {pid for lock in output.glob("runs/*/*/.lock") for pid in holders(lock)}
    return pid


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process that is stopped has been sent this signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [line for line in lines if line.startswith("ShdPnd:")]
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory, with the recipe, in which the run of mu = 0.1 cannot be begun."""
    output = tmp_path_factory.mktemp("experiments")
    (output / "sweep.yaml").write_text(RECIPE)
    return output


@pytest.fixture(scope="module")
def interrupted(output: Path) -> tuple[Path, list[dict]]:
    """The only run of a runner that was interrupted, and its history by then.

    The run was killed first; Ctrl-C in a terminal reaches every process of the group.
    """
    with started(output / "sweep.yaml", output) as process:
        os.kill(process_of(output, 2), signal.SIGKILL)
        done = rounds_in(output)
        pid = process_of(output, done + 1)
        os.kill(pid, signal.SIGSTOP)  # or it would be over before the interrupt
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: is_pending(pid, signal.SIGINT), wait_s)
        os.kill(pid, signal.SIGCONT)
        message, _ = process.communicate(timeout=wait_s)
    assert message.count("it is resumed once") == 1, message
    assert (process.returncode, "interrupted" in message) == (130, True), message
    assert "Traceback" not in message
    assert not Path(f"/proc/{pid}").exists()
    (directory,) = directories(output)  # the killed run was resumed, not started from scratch
    assert summary_of(directory)["status"] == "stopped"
    assert done < rounds_in(output) < NUM_ROUNDS, "it was over before it was interrupted"
    return directory, history_of(directory)


@pytest.fixture(scope="module")
def printed(output: Path, interrupted: tuple[Path, list[dict]]) -> list[str]:
    """What two runners printed that have executed the rest of the recipe at once."""
    recipe = output / "sweep.yaml"
    from keel.experiments.recipe import load_recipe
    from keel.experiments.runs import Options, code_folder, run_of

    cell = load_recipe(str(recipe)).cells[3]
    run = run_of(cell, {}, 0, Options("paper", {}, [0], False), output / "runs" / code_folder())
    run.directory.touch()  # a file in the place of its directory
    with started(recipe, output) as one, started(recipe, output) as other:
        found = [process.communicate(timeout=2 * wait_s)[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [1, 1], found
    run.directory.unlink()
    return found


def test_only_rounds_in_flight_were_run_again(interrupted, printed):
    """The last line may be there before its checkpoint is."""
    directory, before = interrupted
    after = history_of(directory)[: len(before)]
    assert after[:-1] == before[:-1]
    assert without_times(after[-1:]) == without_times(before[-1:])


def test_a_run_that_was_killed_and_interrupted_is_that_of_keel_run(
    output, interrupted, printed, tmp_path, no_pictures
):
    assert len([d for d in directories(output) if summary_of(d)["status"] == "finished"]) == 2
    directory, _ = interrupted
    given = json.loads((directory / "config.json").read_text())["overrides"]
    by_hand = run_inline(given | {"output-dir": str(tmp_path)}, 4)
    assert same_bits(final_model(directory), final_model(by_hand))
    assert [line["round"] for line in history_of(directory)] == list(range(1, NUM_ROUNDS + 1))
    assert not any(map(is_locked, output.glob("runs/*/*.lock")))


def test_each_runner_names_a_failure_once_with_its_log(output, printed):
    for text in printed:
        (line,) = [line for line in text.splitlines() if line.startswith("failed")]
        assert "fedprox.mu = 0.1, result, seed 0" in line
        assert ".log" in line
    assert len(list(output.glob("runs/*/*.failed"))) == 1


def test_what_has_ended_is_not_run_again_and_is_in_the_report(output, printed, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "ray_tasks", lambda *_: pytest.fail("Ray was started"))
        words = ["--only", "fedprox.mu = 0.01;fedprox.mu = 1.0;fedprox.mu = 1e+30"]
        recipe = str(output / "sweep.yaml")
        assert keel(["experiments", "run", recipe, "--output", str(output), *words]) == 0
    done = capsys.readouterr().out
    text = write_report(output)[1].read_text()
    for mu in ("0.01", "1.0"):
        (cell,) = [line for line in text.splitlines() if line.startswith(f"| fedprox.mu = {mu} |")]
        number = cell.split("|")[2].strip()
        assert f"fedprox.mu = {mu}, result, seed 0: {number} %" in done
    assert "| fedprox.mu = 1e+30 | –; diverged 1/1 |" in text
    assert "| fedprox.mu = 0.1 | –; failed 1/1 |" in text
    assert keel(["list", str(output)]) == 0
    assert "fedprox-digits-seed0" in capsys.readouterr().out
