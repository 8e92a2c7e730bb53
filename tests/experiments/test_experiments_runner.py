"""The runner on digits: what it runs, skips, resumes, survives; the report and verify after it."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from conftest import final_model, history_of, same_bits
from matplotlib.figure import Figure

from keel.cli import experiments as command_line
from keel.experiments import figures, runner
from keel.experiments.claims import Verdict, tally, verdict_of
from keel.experiments.figures import curve_of
from keel.experiments.plan import Result, best_candidate, runs_needed, selected
from keel.experiments.recipe import Claim, Recipe, load_recipe, parse_recipe
from keel.experiments.rendering import write_report
from keel.experiments.runs import Options, Run, run_of
from keel.experiments.verify import checks
from protocol.config import resolve_config
from server_app.inline import run_inline

root = Path(__file__).parent.parent.parent
sweep = root / "docs" / "sweep.yaml"
ONCE = ("--seeds", "1", "--only", "heterogeneous")
wait_s = 120.0


def main(*arguments: str) -> int:
    """`keel experiments` in this process; a run of the runner still has one of its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        command = typer.main.get_command(command_line.app)
        return int(command.main(list(arguments), standalone_mode=False) or 0)
    except (ValueError, OSError, click.ClickException) as error:  # as keel.cli.main does
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder after half of the documented example: two runs of three rounds."""
    output = tmp_path_factory.mktemp("experiments")
    assert main("run", str(sweep), "--output", str(output), *ONCE) == 0
    return output


def folders(output: Path) -> list[Path]:
    """The folders of all attempts, by the name of their run."""
    return [path.parent for path in sorted(output.glob("runs/*/*/config.json"))]


def test_the_documented_sweep_gives_what_the_same_runs_give_by_hand(swept, tmp_path):
    assert len(folders(swept)) == 2
    for folder in folders(swept):
        given = json.loads((folder / "config.json").read_text())["overrides"]
        assert given["alpha"] == 0.5
        by_hand = run_inline({**given, "output-dir": str(tmp_path)}, 4)
        assert same_bits(final_model(folder), final_model(by_hand))


def test_what_is_finished_is_not_run_again(swept, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(runner.subprocess, "Popen", refuse)
    assert main("run", str(sweep), "--output", str(swept), *ONCE) == 0
    assert "2 runs are already finished" in capsys.readouterr().out


def test_a_failing_run_is_survived_and_named(swept, tmp_path, capsys):
    text = sweep.read_text().replace("[0.01, 1.0]", "[0.01, 1.0e+30]")
    recipe = tmp_path / "diverging.yaml"
    recipe.write_text(text)
    before = folders(swept)
    assert main("run", str(recipe), "--output", str(swept), *ONCE) == 1
    message = capsys.readouterr().out
    assert "failed" in message
    assert "values that are not finite" in message
    assert "1 runs are already finished" in message  # the sweep's own, shared
    new = set(folders(swept)) - set(before)
    assert len(new) == 1
    shutil.rmtree(new.pop().parent)
    (job,) = swept.glob("jobs/diverging*")
    job.unlink()


def long_recipe(folder: Path) -> Path:
    """A recipe of one run, long enough to be interrupted."""
    path = folder / "long.yaml"
    path.write_text(
        "config: {source: digits, model: cnn-fedreco, num-clients: 4, num-rounds: 20, lr: 0.05}\n"
        "rows:\n  FedAvg: {method: fedavg}\n"
    )
    return path


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; fails after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[Callable[[], tuple[int, str, int]]]:
    """A runner in a process of its own; interrupted() stops it in the middle of its run."""
    arguments = ["run", str(long_recipe(tmp_path)), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "keel.cli.experiments", *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a shell that started us in the background has it ignored, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def stop() -> tuple[int, str, int]:
        def rounds() -> int:
            return sum(len(history_of(f)) for f in folders(tmp_path / "out") if has_history(f))

        wait_for(lambda: rounds() >= 2)
        runs = [pid for pid in processes_with(str(tmp_path / "out")) if pid != process.pid]
        for pid in runs:
            os.kill(pid, signal.SIGSTOP)  # or it would be over before the interrupt
        assert main(*arguments) == 2  # a second runner on the same folder
        assert set(runner.holders(tmp_path / "out" / ".lock")) == {process.pid, *runs}
        process.send_signal(signal.SIGINT)
        for pid in runs:
            os.kill(pid, signal.SIGCONT)
        message, _ = process.communicate(timeout=wait_s)
        return process.returncode, message, rounds()

    try:
        yield stop
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its runs
            process.wait(30)


def has_history(folder: Path) -> bool:
    return (folder / "history.jsonl").exists()


def processes_with(word: str) -> list[int]:
    """Ids of processes that have `word` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_an_interrupted_runner_resumes_bit_for_bit(interrupted, tmp_path, capsys):
    code, message, rounds = interrupted()
    assert (code, "interrupted" in message) == (130, True), message
    rejected = capsys.readouterr().err
    assert re.search(r"in use by another runner, .*: process \d+, \d+$", rejected.strip())
    assert 2 <= rounds < 20, "it was over before it was interrupted"
    assert processes_with(str(tmp_path / "out")) == []
    (attempt,) = folders(tmp_path / "out")
    summary = attempt / "summary.json"  # there unless the run was killed before it could say so
    assert not summary.exists() or json.loads(summary.read_text())["status"] != "finished"
    before = (attempt / "history.jsonl").read_text().splitlines()

    recipe, output = long_recipe(tmp_path), tmp_path / "out"
    assert main("run", str(recipe), "--output", str(output)) == 0
    assert folders(output) == [attempt]  # resumed, not started from scratch
    after = (attempt / "history.jsonl").read_text().splitlines()
    assert after[: len(before)] == before  # only the round in flight was run again
    assert [json.loads(line)["round"] for line in after] == list(range(1, 21))
    given = json.loads((attempt / "config.json").read_text())["overrides"]
    whole = run_inline({**given, "output-dir": str(tmp_path / "whole")}, 4)
    assert same_bits(final_model(attempt), final_model(whole))


def test_runs_that_a_killed_runner_left_behind_keep_the_folder_until_they_end(
    tmp_path, monkeypatch
):
    recipe = load_recipe(str(sweep))
    run = next(runs_needed(recipe, recipe.cells, options(), tmp_path, ()))
    monkeypatch.setattr(runner, "command_of", lambda run: ["sleep", "600"])
    with runner.locked(tmp_path) as lock:
        left = runner.start(run, 0, [], lock, runner.TaskID(0)).process
    try:  # the runner's own hold is gone
        with (
            pytest.raises(ValueError, match=f"left behind: process {left.pid}$"),
            runner.locked(tmp_path),
        ):
            pass
    finally:
        left.kill()
        left.wait()
    with runner.locked(tmp_path):
        assert runner.holders(tmp_path / ".lock") == []


def test_each_run_has_one_gpu_in_turn_and_one_thread(tmp_path, monkeypatch):
    recipe = load_recipe(str(sweep))
    run = next(runs_needed(recipe, recipe.cells, options(), tmp_path, ()))
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(runner.subprocess, "Popen", lambda command, **how: seen.append(how))
    with (tmp_path / "lock").open("w") as lock:
        for slot in range(3):
            runner.start(run, slot, ["4", "7"], lock, runner.TaskID(0))
    assert [how["env"]["CUDA_VISIBLE_DEVICES"] for how in seen] == ["4", "7", "4"]
    assert {how["env"]["OMP_NUM_THREADS"] for how in seen} == {"1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/dev/null/x"], "cannot be written"),
        (["--seeds", "-1"], "-1 is not in the range"),
        (["--set", "seed=3"], "--set seed"),
        (["--set", "lr=high"], "expected a number"),
        (["--set", "lrr=1"], "did you mean lr?"),
        (["--set", "lr"], "expected KEY=VALUE"),
        (["--scale", "week"], "--scale = 'week' is unknown"),
        (["--grid", "half"], "--grid = 'half' is unknown"),
        (["--only", "FedAvgg"], "--only 'FedAvgg'"),
    ],
)
def test_bad_words_are_refused_in_one_line(arguments, message, tmp_path, capsys):
    assert main("run", str(sweep), "--output", str(tmp_path), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# --- tuning -----------------------------------------------------------------------------------

tuned = """\
config: {source: digits, num-clients: 4, model: cnn-fedreco, method: fedprox}
rows:
  FedProx: {tune: {fedprox.mu: [0.1, 1, 10]}, tuned: 1}
"""


def options(**changed: Any) -> Options:
    """One seed at the paper's scale, unless message otherwise."""
    return Options(**{"scale": "paper", "changes": {}, "seeds": [0], "full_grid": True, **changed})


def fake_run(run: Run, accuracy: float, name: str = "attempt", cpu_seconds: float = 1.0) -> Path:
    """Leave the folder of a finished run that had this accuracy after its last round."""
    folder = run.folder / name
    folder.mkdir(parents=True)
    config = {"config": dict(resolve_config(run.keys).flat)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text('{"status": "finished"}')
    times = {"client_seconds": 60.0, "client_cpu_seconds": cpu_seconds, "seconds": {"all": 90.0}}
    line = {"round": run.rounds, "global": {"accuracy": accuracy}, **times}
    (folder / "history.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def fake_runs(recipe: Recipe, output: Path, how: Options, results: dict[float, float]) -> None:
    """Such a run of the first seed for each mu."""
    for mu, accuracy in results.items():
        run = run_of(recipe.cells[0], {"fedprox.mu": mu}, how.seeds[0], how, output)
        fake_run(run, accuracy)


def test_the_best_of_the_first_seed_is_run_with_the_others(tmp_path):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[0, 1])
    first = list(runs_needed(recipe, recipe.cells, how, tmp_path, ()))
    assert [(r.keys["fedprox.mu"], r.keys["seed"]) for r in first] == [(0.1, 0), (1, 0), (10, 0)]
    fake_runs(recipe, tmp_path, how, {0.1: 0.5, 10: 0.7})
    assert (
        len(list(runs_needed(recipe, recipe.cells, how, tmp_path, ()))) == 3
    )  # one is not there yet
    failed = {first[1].name}
    later = list(runs_needed(recipe, recipe.cells, how, tmp_path, failed))
    assert (later[-1].keys["fedprox.mu"], later[-1].keys["seed"]) == (10, 1)
    fake_runs(recipe, tmp_path, how, {1: 0.9})
    assert best_candidate(recipe.cells[0], how, tmp_path, ()) == {"fedprox.mu": 1}
    # without the full grid, the paper's best alone
    only = list(runs_needed(recipe, recipe.cells, options(full_grid=False), tmp_path, ()))
    assert [r.keys["fedprox.mu"] for r in only] == [1]


def make_odd(folder: Path) -> None:
    """As if momentum had had another default when this was run."""
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"momentum": 0.9', '"momentum": 0.8'))


two_rows = """\
config: {source: digits, num-clients: 4, model: cnn-fedreco, num-rounds: 2}
rows:
  FedAvg: {method: fedavg}
  FedProx: {method: fedprox}
"""


def test_a_run_of_other_defaults_fails_alone_and_the_report_says_so(tmp_path, monkeypatch):
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options()
    odd, other = runs_needed(recipe, recipe.cells, how, tmp_path, ())
    make_odd(fake_run(odd, 0.5))
    fake_run(other, 0.25)
    assert odd.finished() is None
    message = "momentum = 0.8, today 0.9"
    monkeypatch.setattr(runner, "start", lambda *_: pytest.fail("started"))
    failed = runner.run_recipe(recipe, recipe.cells, how, tmp_path)
    assert failed == {odd.name: f"{message}: choose another --output"}
    _, text = write_report(tmp_path)
    assert f"| FedAvg | –; a run has other defaults: {message} |" in text.read_text()
    assert "| FedProx | 25.00 |" in text.read_text()


def test_tuning_continues_without_a_value_of_other_defaults(tmp_path, monkeypatch):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[0, 1])
    fake_runs(recipe, tmp_path, how, {0.1: 0.5, 1: 0.9, 10: 0.7})
    best, *_ = [
        r for r in runs_needed(recipe, recipe.cells, how, tmp_path, ()) if r.keys["seed"] == 1
    ]
    assert best.keys["fedprox.mu"] == 1
    make_odd(run_of(recipe.cells[0], {"fedprox.mu": 1}, 0, how, tmp_path).folder / "attempt")
    fake_run(run_of(recipe.cells[0], {"fedprox.mu": 10}, 1, how, tmp_path), 0.8)
    monkeypatch.setattr(runner, "start", lambda *_: pytest.fail("started"))
    assert len(runner.run_recipe(recipe, recipe.cells, how, tmp_path)) == 1


def test_an_interrupted_run_of_other_defaults_starts_from_scratch(tmp_path):
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options()
    run = next(runs_needed(recipe, recipe.cells, how, tmp_path, ()))
    attempt = fake_run(run, 0.5)
    (attempt / "summary.json").unlink()
    (attempt / "checkpoints").mkdir()
    (attempt / "checkpoints" / "round-00001-x.safetensors").touch()
    assert f'resume="{attempt}"' in runner.command_of(run)
    make_odd(attempt)
    assert f'output-dir="{run.folder}"' in runner.command_of(run)


def test_progress_is_that_of_the_newest_attempt(tmp_path):
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options()
    run = next(runs_needed(recipe, recipe.cells, how, tmp_path, ()))
    started = runner.RunProcess(run, None, 0, None, tmp_path, 0)
    assert started.new_rounds() == 0
    fake_run(run, 0.5, "1-old")
    assert [started.new_rounds(), started.new_rounds()] == [1, 0]
    history = fake_run(run, 0.5, "2-new") / "history.jsonl"
    line = history.read_text()
    history.unlink()
    assert started.new_rounds() == -1
    history.write_text(2 * line)
    assert started.new_rounds() == 2


def test_recipes_of_one_name_are_two_jobs_and_one_job_keeps_its_tuning_seed(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    a, b = (parse_recipe(tuned, tmp_path / folder / "t.yaml") for folder in "ab")
    assert runner.save_job(a, options(seeds=[5, 6]), out) == [5, 6]
    assert runner.save_job(b, options(seeds=[3]), out) == [3]
    assert runner.save_job(a, options(seeds=[0, 1], full_grid=False), out) == [0, 1]
    assert runner.save_job(a, options(seeds=[0, 1]), out) == [5, 6, 0, 1]
    assert len(list(out.glob("jobs/*.json"))) == 3
    # what is tuned is tuned on 5, what is not needs no run of it
    how = options(seeds=[0], tuned_on=5)
    assert [r.keys["seed"] for r in runs_needed(a, a.cells, how, out, ())] == [5, 5, 5]
    plain = parse_recipe(two_rows, Path("t.yaml"))
    assert [r.keys["seed"] for r in runs_needed(plain, plain.cells, how, out, ())] == [0, 0]


def test_seeds_asked_for_later_are_run_with_what_the_first_seed_chose(tmp_path, monkeypatch):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[5])
    fake_runs(recipe, tmp_path, how, {0.1: 0.5, 1: 0.9, 10: 0.7})
    (tmp_path / "jobs").mkdir()
    runner.save_job(recipe, how, tmp_path)
    fake_run(run_of(recipe.cells[0], {"fedprox.mu": 1}, 0, how, tmp_path), 0.4)
    monkeypatch.setattr(runner, "start", lambda *_: pytest.fail("started"))
    assert runner.run_recipe(recipe, recipe.cells, options(seeds=[0]), tmp_path) == {}


def test_the_reason_of_a_failure_is_the_signal_or_the_last_line_of_its_own_attempt(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("an earlier attempt\n")
    begin = log.stat().st_size

    def message(script: str) -> str:
        with log.open("ab") as output:
            process = subprocess.Popen(["sh", "-c", script], stdout=output)
        process.wait()
        return runner.failure_of(runner.RunProcess(None, process, 0, None, log, begin))

    assert message("exit 1") == "no output"
    assert message("kill -KILL $$") == "killed by SIGKILL, possibly out of memory"
    assert message("kill -TERM $$") == "killed by SIGTERM"
    assert message("echo no data; exit 1") == "no data"


def test_a_damaged_job_is_named(tmp_path):
    (tmp_path / "jobs").mkdir()
    job = tmp_path / "jobs" / "x.json"
    for text, message in (
        ("{", "is damaged: "),
        ("[]", "expected a JSON object"),
        ("{}", "'text' is missing"),
    ):
        job.write_text(text)
        with pytest.raises(ValueError, match=message) as rejected:
            write_report(tmp_path)
        assert str(job) in str(rejected.value)


# --- the report -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "above", "word", "detail"),
    [
        (
            {0: 52.0, 1: 53.0, 2: 51.5},
            {0: 50.0, 1: 51.0, 2: 50.0},
            True,
            "reproduced",
            "+1.83 ± 0.29",
        ),
        ({0: 50.0, 1: 51.0, 2: 50.0}, {0: 52.0, 1: 53.0, 2: 51.5}, True, "not reproduced", "-1.83"),
        ({0: 50.0, 1: 51.0, 2: 50.0}, {0: 52.0, 1: 53.0, 2: 51.5}, False, "reproduced", "-1.83"),
        ({0: 52.0, 1: 49.0, 2: 55.0}, {0: 50.0, 1: 51.0, 2: 50.0}, True, "inconclusive", "+1.67"),
        ({0: 52.0}, {0: 50.0, 1: 51.0}, True, "inconclusive", "one seed"),
        ({}, {0: 50.0}, True, "not tested", ""),
    ],
)
def test_a_claim_is_judged_over_paired_seeds(left, right, above, word, detail):
    """3 seeds: t(0.975, 2) = 4.303; sd 0.289 reaches 0.72, sd 3.51 reaches 8.7."""
    recipe = parse_recipe(
        "rows:\n  A: {method: fedavg}\n  B: {method: fedprox}\nclaims: [A above B in result]\n",
        Path("c.yaml"),
    )
    results = {
        (name, "result"): Result(recipe.cell(name, "result"), {}, by_seed, len(by_seed))
        for name, by_seed in (("A", left), ("B", right))
    }
    claim = Claim("", "A", "B", above, "result")
    verdict = verdict_of(claim, recipe, results)
    assert verdict.word == word
    assert detail in verdict.detail


def test_verdicts_are_counted():
    claim = load_recipe("fedcka-table-2").claims[0]
    verdicts = [
        Verdict(claim, word, "")
        for word in ("not tested", "reproduced", "inconclusive", "reproduced")
    ]
    assert tally(verdicts).startswith("2 reproduced, 1 inconclusive, 1 not tested; ")


times = """\
config: {source: digits, num-clients: 4, model: cnn-fedreco, num-rounds: 2}
take: seconds to 50
rows:
  A: {method: fedavg}
  B: {method: fedprox}
claims: [A below B in result]
"""


def timed(output: Path, accuracies: dict[str, list[float]]) -> tuple[Recipe, Options]:
    """The recipe of times, with a finished run for each of these accuracies; its options."""
    recipe = parse_recipe(times, Path("t.yaml"))
    how = options(seeds=list(range(max(map(len, accuracies.values())))))
    (output / "jobs").mkdir(parents=True)
    runner.save_job(recipe, how, output)
    for name, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            run = run_of(recipe.cell(name, "result"), {}, seed, how, output)
            fake_run(run, accuracy, cpu_seconds=10.0 + seed)
    return recipe, how


@pytest.mark.parametrize(
    ("a", "b", "cell", "word"),
    [
        ([0.6, 0.6], [0.1, 0.1], "not reached", "reproduced"),
        ([0.1, 0.1], [0.6, 0.6], "10.50 ± 0.71", "not reproduced"),
        ([0.6, 0.6], [0.6, 0.1], "10.00; reached by 1 of 2 seeds", "inconclusive"),
        ([0.1, 0.1], [0.1, 0.1], "not reached", "inconclusive"),
        ([0.6], [0.1], "not reached", "inconclusive"),  # one seed
    ],
)
def test_a_time_that_is_never_reached_is_longer_than_any(a, b, cell, word, tmp_path):
    """The seconds are the clients' of the CPU, 10 and 11, not the 60 of the wall."""
    timed(tmp_path, {"A": a, "B": b})
    text = write_report(tmp_path)[1].read_text()
    assert f"| B | {cell} |" in text
    assert f"| A below B in result | {word} | A reaches it with" in text


def test_times_of_different_machines_are_not_compared(tmp_path):
    recipe, how = timed(tmp_path, {"A": [0.6, 0.6], "B": [0.6, 0.6]})
    for seed in how.seeds:
        (attempt,) = run_of(recipe.cell("B", "result"), {}, seed, how, tmp_path).attempts()
        (attempt / "manifest.json").write_text('{"machines": ["cuda: some GPU"]}')
    text = write_report(tmp_path)[1].read_text()
    assert "| B | 60.00 ± 0.00 |" in text  # there, the clock on the wall
    assert "inconclusive | different machines: cpu: not recorded, cuda: some GPU |" in text
    assert "The seconds are from different machines and cannot be compared." in text
    assert "2 runs on cuda: some GPU: 3 min 0 s of rounds, the longest 1 min 30 s." in text


def test_a_table_says_what_is_missing_in_a_cell(tmp_path):
    text = tuned.replace("rows:", "rows:\n  FedAvg: {method: fedavg}") + (
        "claims: [FedProx above FedAvg in result]\n"
    )
    recipe, how = parse_recipe(text, Path("t.yaml")), options(seeds=[0, 1, 2])
    average, tried = recipe.cells
    (tmp_path / "jobs").mkdir()
    runner.save_job(recipe, how, tmp_path)
    for mu, accuracy in ((0.1, 0.5), (10, 0.7)):
        fake_run(run_of(tried, {"fedprox.mu": mu}, 0, how, tmp_path), accuracy)
    fake_run(run_of(tried, {"fedprox.mu": 10}, 1, how, tmp_path), 0.6)
    for seed in (0, 1):
        fake_run(run_of(average, {}, seed, how, tmp_path), 0.5)
    page = write_report(tmp_path)[1].read_text()
    assert "| FedProx | 65.00 ± 7.07 (10); 2 of 3 seeds; 2 of 3 values tried |" in page
    assert "| FedAvg | 50.00 ± 0.00; 2 of 3 seeds |" in page
    assert "scale paper, full grid; " in page
    # seed 0 chose mu: its +20 says nothing of FedProx
    assert (
        "| inconclusive | +10.00, one seed; without seed 0, which chose the tuned value |" in page
    )


def test_what_a_set_makes_alike_is_reported_where_it_was_asked_for_alone(tmp_path):
    """`--only slow --set lr=0.3`: the column fast, with that lr, would be of the same run."""
    text = two_rows + "columns:\n  slow: {lr: 0.1}\n  fast: {lr: 0.2}\n"
    recipe, how = parse_recipe(text, Path("t.yaml")), options(changes={"lr": 0.3})
    (tmp_path / "jobs").mkdir()
    slow, fast = (selected(recipe, [name]) for name in ("slow", "fast"))
    runner.save_job(recipe, how, tmp_path, slow[:1])
    fake_run(run_of(slow[0], {}, 0, how, tmp_path), 0.5)
    lines = write_report(tmp_path)[1].read_text().splitlines()
    assert "| | slow |" in lines
    assert "| FedAvg | 50.00 |" in lines
    assert not [line for line in lines if "fast" in line or "FedProx" in line]
    with pytest.raises(ValueError, match="--set lr: rows, columns or tuned values of this recipe"):
        runner.save_job(recipe, how, tmp_path, fast)
    runner.save_job(recipe, how, tmp_path, slow)  # of earlier calls, too
    assert "| FedProx | – |" in write_report(tmp_path)[1].read_text().splitlines()
    plain = options()
    runner.save_job(recipe, plain, tmp_path, fast)
    runner.save_job(recipe, plain, tmp_path, slow)
    assert "| | slow | fast |" in write_report(tmp_path)[1].read_text().splitlines()


def test_a_curve_is_the_moving_average_where_its_number_is(tmp_path):
    text = two_rows.replace("FedAvg: {", "FedAvg: {take: ema 0.5, ")
    recipe, how = parse_recipe(text, Path("t.yaml")), options()
    curves = {}
    for cell in recipe.cells:
        run = run_of(cell, {}, 0, how, tmp_path)
        lines = [{"round": i, "global": {"accuracy": a}} for i, a in ((1, 0.2), (2, 0.6))]
        path = fake_run(run, 0.0) / "history.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        curves[cell.row.name] = curve_of(cell, [(run, run.finished())])
    assert curves == {"FedAvg": [(1, 20, 0), (2, 40, 0)], "FedProx": [(1, 20, 0), (2, 60, 0)]}


def test_measures_of_features_are_compared_over_rows_on_one_axis(tmp_path, monkeypatch):
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options(seeds=[0, 1])
    (tmp_path / "jobs").mkdir()
    runner.save_job(recipe, how, tmp_path)
    for i, cell in enumerate(recipe.cells):
        for seed in how.seeds:
            path = fake_run(run_of(cell, {}, seed, how, tmp_path), 0.5) / "history.jsonl"
            measured = {"vci": {"mean": i + seed, "global": None, "clients": {}}}
            line = json.loads(path.read_text()) | {"diagnostics": measured}
            path.write_text(json.dumps(line) + "\n")
    drawn = []

    def panels(everything, draw, title, path):
        axes = Figure().subplots()
        draw(axes, "vci")
        drawn.extend((line.get_label(), line.get_xydata().tolist()) for line in axes.lines)
        path.touch()

    monkeypatch.setattr(figures, "plot_panels", panels)
    text = write_report(tmp_path)[1].read_text()
    shown = [(label, points) for label, points in drawn if points]
    assert shown == [("FedAvg", [[2, 0.5]]), ("FedProx", [[2, 1.5]])]  # the mean over seeds
    assert "result: mean over clients (lines) and global model (dashes), scale paper](" in text


def test_a_report_says_which_of_the_tuned_values_were_tried(tmp_path):
    for text, grid in ((tuned, ", the paper's best of the tuned values"), (two_rows, "")):
        output = tmp_path / str(len(grid))
        output.mkdir()
        how = options(full_grid=False)
        runner.save_job(parse_recipe(text, Path("t.yaml")), how, output)
        assert f"\nscale paper{grid}; seeds [0]; " in write_report(output)[1].read_text()


def test_text_of_a_recipe_is_escaped_and_its_notes_are_below_the_table(tmp_path):
    text = two_rows.replace("FedAvg:", "<b>A & B</b>:")
    text += 'title: a < b\nnotes: ["<script>alert(1)</script>", second]\n'
    text += "claims: [<b>A & B</b> above FedProx in result]\n"
    (tmp_path / "jobs").mkdir()
    runner.save_job(parse_recipe(text, Path("t.yaml")), options(), tmp_path)
    page, markdown = (path.read_text() for path in write_report(tmp_path))
    assert "<h2>a &lt; b</h2>" in page
    assert "&lt;b&gt;A &amp; B&lt;/b&gt;" in page
    assert "<b>" not in page
    assert page.count("<script>") == 1  # the report's own
    note = "<li>&lt;script&gt;alert(1)&lt;/script&gt;</li>"
    assert page.index('<table class="sortable">') < page.index(note) < page.index("not tested")
    assert "\n- <script>alert(1)</script>\n- second\n\n| claim |" in markdown


class Cells(HTMLParser):
    """The cells of a page's tables, row by row, and every address that the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.in_cell = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attributes if k in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data


def test_the_report_holds_the_numbers_of_the_histories(swept):
    page, text = write_report(swept)
    cells = Cells()
    cells.feed(page.read_text())
    for folder in folders(swept):
        mu = json.loads((folder / "config.json").read_text())["overrides"]["fedprox.mu"]
        mean = statistics.fmean(100 * line["global"]["accuracy"] for line in history_of(folder)[1:])
        (row,) = [row for row in cells.rows if row and row[0] == f"fedprox.mu = {mu}"]
        assert row[1:] == ["–", f"{mean:.2f}", "–"]  # the other column was not asked for
        assert f"| fedprox.mu = {mu} | {mean:.2f} |\n" in text.read_text()
    assert ["homogeneous above heterogeneous in fedprox.mu = 1.0", "not tested", ""] in cells.rows
    pictures = [a for a in cells.addresses if a.startswith("data:image/")]
    assert len(pictures) == 2  # the curves, and how the classes lie over the clients
    assert all(a.startswith(("data:image/", "#")) for a in cells.addresses)  # it opens offline
    for line in text.read_text().splitlines():
        if line.startswith("!["):
            assert (swept / line.rpartition("(")[2].rstrip(")")).is_file()


def test_where_curves_are_shown_they_come_before_the_numbers(swept, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(swept, output)
    (job,) = output.glob("jobs/*.json")
    about = json.loads(job.read_text())
    for shows in ("table", "curves"):
        message = about | {"text": f"shows: {shows}\n{about['text']}"}
        job.write_text(json.dumps(message))
        page, text = (path.read_text() for path in write_report(output))
        is_first = shows == "curves"
        assert (page.index("<figure>") < page.index('<table class="sortable">')) is is_first
        assert (text.index("\n![") < text.index("\n| |")) is is_first


def browser() -> str:
    """A headless browser, if there is one; skips without."""
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
    )
    if not found:
        pytest.skip("no Chromium or Chrome on PATH: sorting is not tried in a browser")
    return found


def test_a_click_on_a_heading_sorts_in_a_real_browser(swept, tmp_path):
    page, _ = write_report(swept)
    click = """<script>
      const heads = document.querySelectorAll("table.sortable thead tr:last-child button");
      const read = () => [...document.querySelectorAll("table.sortable tbody tr")].map(
        row => row.cells[2].textContent).join();
      const seen = [];
      heads[2].click(); seen.push(read()); heads[2].click(); seen.push(read());
      document.title = seen.join(";");
    </script>"""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</html>", click + "</html>"))
    dump = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    falling, rising = dump.partition("<title>")[2].partition("</title>")[0].split(";")
    values = [float(value) for value in falling.split(",")]
    assert len(values) == 2
    assert values == sorted(values, reverse=True)
    assert rising.split(",") == falling.split(",")[::-1]


def test_labels_need_no_run(tmp_path):
    recipe = tmp_path / "labels.yaml"
    recipe.write_text(
        "shows: labels\nconfig: {source: digits, num-clients: 4, method: fedavg}\n"
        "columns:\n  even: {alpha: 100.0}\n  odd: {alpha: 0.1}\nrows:\n  digits: {}\n"
    )
    output = tmp_path / "out"
    assert main("run", str(recipe), "--output", str(output)) == 0
    page, text = write_report(output)
    assert page.read_text().count("<img ") == 2
    assert "digits, odd: samples of each class by client" in text.read_text()
    assert not (output / "runs").exists()


# --- verify -----------------------------------------------------------------------------------


def wrong(folder: Path) -> list[str]:
    """What verify finds wrong, replaying two rounds."""
    return [check.found for check in checks(folder, 2) if not check.passed]


@pytest.fixture
def copied(swept: Path, tmp_path: Path) -> Path:
    """A copy of one finished run, to be tampered with."""
    return Path(shutil.copytree(folders(swept)[0], tmp_path / "run"))


def test_a_finished_run_verifies_to_the_bit(swept, capsys):
    assert main("verify", str(folders(swept)[0])) == 0
    message = capsys.readouterr().out
    assert "split: " in message
    assert message.count("bit-identical (") == 2
    assert "1 runs, 0 checks failed" in message


def test_files_that_are_not_the_runs_are_found(copied):
    model = copied / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x01")
    assert [found.partition(":")[0] for found in wrong(copied)] == ["model.safetensors"]


def test_accuracies_that_the_replay_does_not_give_are_found(copied):
    lines = history_of(copied)
    lines[1]["global"]["accuracy"] += 0.05
    (copied / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [found.partition(":")[0] for found in wrong(copied)] == ["history.jsonl", "round 2"]


def test_another_split_and_other_weights_are_found(copied):
    """A bundle that fits its files, but not the run: only the replay can tell."""
    bundle = json.loads((copied / "manifest.json").read_text())
    bundle["split"] = bundle["rounds"]["1"] = "0" * 16
    (copied / "manifest.json").write_text(json.dumps(bundle))
    assert [found.partition(":")[0] for found in wrong(copied)] == ["split", "round 1"]


def test_a_run_that_did_not_end_is_not_verified(copied):
    bundle = json.loads((copied / "manifest.json").read_text())
    del bundle["files"]
    (copied / "manifest.json").write_text(json.dumps(bundle))
    assert wrong(copied) == ["the run has not ended: its manifest is incomplete"]
    assert main("verify", str(copied.parent / "nothing")) == 2


def test_of_several_runs_one_that_was_killed_is_skipped_by_name(copied, capsys):
    killed = Path(shutil.copytree(copied, copied.parent / "killed"))
    bundle = json.loads((killed / "manifest.json").read_text())
    del bundle["files"]
    (killed / "manifest.json").write_text(json.dumps(bundle))
    assert main("verify", str(killed)) == 1
    assert main("verify", str(copied.parent), "--rounds", "1") == 0
    assert "2 runs, 1 skipped, 0 checks failed" in capsys.readouterr().out
    shutil.copytree(killed, copied, dirs_exist_ok=True)
    assert main("verify", str(copied.parent)) == 1  # nothing was looked at
