"""The runner on digits: what it runs, skips, resumes, survives; the report and verify after it."""

import io
import json
import math
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from keel.cli.main import main as keel
from keel.experiments import plan, runner, tasks
from keel.experiments.archive import pack, unpacked
from keel.experiments.claims import (
    JudgedClaim,
    compared,
    judge,
    judge_claims,
    read_differently,
    tally,
    verdict_on,
)
from keel.experiments.figures import curve_of, run_charts
from keel.experiments.plan import (
    Result,
    best_candidate,
    load_job,
    results_of,
    runs_needed,
    selected,
)
from keel.experiments.recipe import Claim, Recipe, parse_recipe
from keel.experiments.rendering import ours as cell_text
from keel.experiments.rendering import section_of, write_report
from keel.experiments.runs import Options, Run, history_in, run_of, status_of
from keel.experiments.summary import Evidence, curves_of
from keel.experiments.tasks import KilledError, Resources, claimed, overrides_of
from protocol.code import code_version
from protocol.config import resolve_config
from protocol.files import digest
from server_app.record import split
from server_app.run_reader import CLIENTS_FILE, LAYOUT

root = Path(__file__).parent.parent.parent
sweep = root / "docs" / "sweep.yaml"


def main(*arguments: str) -> int:
    """`keel experiments` in this process; a run of the runner still has one of its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        return keel(["experiments", *arguments])
    finally:
        signal.signal(signal.SIGTERM, before)


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


@pytest.mark.parametrize("ending", ["finished", "failed", "interrupted"])
def test_pack_leaves_one_small_file_with_the_runs_that_have_ended(
    ending, tmp_path, monkeypatch, capsys
):
    path, output, folder = tmp_path / "t.yaml", tmp_path / "output", tmp_path / "packed"
    path.write_text(tuned)

    def run_recipe(recipe, cells, how, output, resources, console):
        runner.save_job(recipe, how, output, cells)
        fake_runs(recipe, output, how, {0.1: 0.3, 1.0: 0.5})
        if ending == "interrupted":
            raise KeyboardInterrupt
        return {"a run": "no disk"} if ending == "failed" else {}

    monkeypatch.setattr(runner, "run_recipe", run_recipe)
    output.mkdir()
    words = ["run", str(path), "--seeds", "1", "--grid", "full", "--output", str(output)]
    code = {"finished": 0, "failed": 1, "interrupted": 130}[ending]
    assert main(*words, "--pack", str(folder)) == code
    [packed] = folder.iterdir()
    assert str(packed) in capsys.readouterr().out
    assert packed.stat().st_size < 20_000
    names = zipfile.ZipFile(packed).namelist()
    for name in ("config.json", "manifest.json", "summary.json", "history.jsonl"):
        assert sum(each.endswith(f"/{name}") for each in names) == 2


def test_a_file_to_pack_into_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main("run", str(sweep), "--output", str(tmp_path), "--pack", str(tmp_path / "file")) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'file'}' is a file" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# --- tuning -----------------------------------------------------------------------------------

tuned = """\
config: {source: digits, num-clients: 4, model: cnn-fedreco, method: fedprox}
rows:
  FedProx: {tune: {fedprox.mu: [0.1, 1, 10]}, tuned: 1}
"""


@pytest.mark.parametrize(("words", "is_told"), [((), True), (("--seeds", "2"), False)])
def test_more_seeds_than_the_recipe_names_are_announced(
    words, is_told, tmp_path, monkeypatch, capsys
):
    (tmp_path / "t.yaml").write_text(f"seeds: 2\n{tuned}".replace(", tuned: 1", ""))
    monkeypatch.setattr(runner, "run_recipe", lambda *_: {})
    assert main("run", str(tmp_path / "t.yaml"), "--output", str(tmp_path), *words) == 0
    told = "6 seeds instead of the recipe's 2" in " ".join(capsys.readouterr().out.split())
    assert told == is_told


@pytest.mark.parametrize(
    ("number", "seeds"), [(0, [7, 42]), (1, [7]), (2, [7, 42]), (5, [7, 42, 0, 1, 2])]
)
def test_seeds_are_the_recipes_before_others(number, seeds, tmp_path, monkeypatch):
    """With 0 to 4 beside the recipe's two, a verdict stayed at `after 5 of 7 seeds`."""
    (tmp_path / "t.yaml").write_text(f"seeds: [7, 42]\n{two_rows}")
    found: list[Options] = []
    monkeypatch.setattr(runner, "run_recipe", lambda *of: found.append(of[2]) or {})
    words = ["run", str(tmp_path / "t.yaml"), "--output", str(tmp_path)]
    assert main(*words, "--seeds", str(number)) == 0
    assert found[0].seeds == seeds


def options(**changed: Any) -> Options:
    """One seed at the paper's scale, unless `changed` says otherwise."""
    return Options(**{"scale": "paper", "changes": {}, "seeds": [0], "full_grid": True, **changed})


THREE = options(seeds=[0, 1, 2])


def fake_run(
    run: Run,
    accuracy: float,
    name: str = "attempt",
    cpu_seconds: float = 1.0,
    status: str = "finished",
    code: str = "",
    left_out: dict[str, str] | None = None,
    **manifest: Any,
) -> Path:
    """Leave the folder of a run that ended so: the accuracy and all time are the last round's."""
    folder = run.folder / name
    folder.mkdir(parents=True)
    config = {"config": dict(resolve_config(run.keys).flat), "overrides": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    manifest |= {"layout": LAYOUT, "code": [code or code_version()]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    times = {"client_seconds": 60.0, "client_cpu_seconds": cpu_seconds, "seconds": {"all": 90.0}}
    no_time = {"client_seconds": 0.0, "client_cpu_seconds": 0.0, "seconds": {}}
    earlier = [{"round": n, "losses": {}, "left_out": {}} | no_time for n in range(1, run.rounds)]
    line = {"round": run.rounds, "global": {"accuracy": accuracy}, "losses": {}}
    line |= times | {"left_out": left_out or {}}
    write_lines(folder / "history.jsonl", [*earlier, line])
    return folder


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a history, with what clients.jsonl has of the same rounds."""
    both = (path, path.with_name(CLIENTS_FILE))
    lines = ([json.loads(text) for text in file.read_text().splitlines()] for file in both)
    return [of_clients | line for line, of_clients in zip(*lines, strict=True)]


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a history of these rounds, and clients.jsonl beside it."""
    divided = [split(line) for line in lines]
    for file, part in ((path, 0), (path.with_name(CLIENTS_FILE), 1)):
        file.write_text("".join(json.dumps(each[part]) + "\n" for each in divided))


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


def two_runs(output: Path) -> tuple[Recipe, Options, list[Run]]:
    """The recipe with two rows, one seed, and its runs."""
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options()
    return recipe, how, list(runs_needed(recipe, recipe.cells, how, output, ()))


FINITE = "failed: round 7: the server update gave values that are not finite"


class FakeTasks:
    """In the place of `RayTasks`: a run ends at once, as `ending` says."""

    slots = 1

    def __init__(self, ending: Callable[[Run], str | None]) -> None:
        self.ending, self.started, self.pending = ending, list[str](), list[Run]()

    def __call__(self, *_: Any) -> "FakeTasks":
        return self

    def __enter__(self) -> "FakeTasks":
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def submit(self, run: Run) -> Run:
        self.started.append(run.name)
        self.pending.append(run)
        return run

    def wait(self, seconds: float) -> list[Run]:
        return list(self.pending)

    def is_kept_waiting(self) -> bool:
        return False

    def result(self, task: Run) -> str | None:
        self.pending.remove(task)
        return self.ending(task)


def ran(
    recipe: Recipe,
    how: Options,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: Callable[[Run], str | None] = lambda run: "no reason",
    kind: type[FakeTasks] = FakeTasks,
) -> tuple[list[str], str, dict[str, str]]:
    """(names of the runs that are started, what the runner prints, the failed runs)."""
    tasks = kind(ending)
    monkeypatch.setattr(runner, "RayTasks", tasks)
    with io.StringIO() as text:
        console = Console(file=text, soft_wrap=True, highlight=False)
        failed = runner.run_recipe(recipe, recipe.cells, how, output, Resources(), console)
        return tasks.started, text.getvalue(), failed


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [("cpu", None, 0.0), ("cpu", 0.5, 0.5), ("auto", None, None), ("cuda", None, None)],
)
def test_runs_on_the_cpu_are_given_no_gpu_by_default(
    device, asked, expected, tmp_path, monkeypatch
):
    """On a machine with one GPU, they ran one after the other."""
    recipe, seen = parse_recipe(two_rows, Path("t.yaml")), list[Resources]()

    class Seen(FakeTasks):
        def __call__(self, *about: Any) -> FakeTasks:
            seen.append(about[0])
            return self

    monkeypatch.setattr(runner, "RayTasks", Seen(lambda run: "no reason"))
    how, console = options(changes={"device": device}), Console(file=io.StringIO())
    runner.run_recipe(recipe, recipe.cells, how, tmp_path, Resources(gpus=asked), console)
    assert [resources.gpus for resources in seen] == [expected]


def while_waiting(sleep: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner sleeps so. Not `time.sleep` itself: threads of earlier tests call it too."""
    clock = SimpleNamespace(sleep=sleep, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(runner, "time", clock)


def test_a_run_of_another_config_does_not_count_is_named_and_run_again(tmp_path, monkeypatch):
    recipe, how, (odd, other) = two_runs(tmp_path)
    make_odd(fake_run(odd, 0.5))
    fake_run(other, 0.25)
    assert odd.finished() is None
    message = "momentum = 0.8, today 0.9"
    started, printed, _ = ran(recipe, how, tmp_path, monkeypatch)
    assert started == [odd.name]
    assert f"not counted, kept on disk and run again: 1 run\n  {odd.name}: {message}" in printed
    _, text = write_report(tmp_path)
    assert f"| FedAvg | –; a run does not count: {message} |" in text.read_text()
    assert "| FedProx | 25.00 |" in text.read_text()


def test_a_damaged_interrupted_attempt_does_not_stop_other_runs(tmp_path, monkeypatch):
    """The runner ended with an error as it was about to start the run."""
    recipe, how, (damaged, other) = two_runs(tmp_path)
    attempt = fake_run(damaged, 0.5)
    (attempt / "summary.json").unlink()
    (attempt / "config.json").write_text('{"conf')  # half copied
    started, _, _ = ran(recipe, how, tmp_path, monkeypatch)
    assert started == [damaged.name, other.name]
    assert overrides_of(damaged)["output-dir"] == str(damaged.folder)  # nothing is lost
    (attempt / "checkpoints").mkdir()
    (attempt / "checkpoints" / "round-00001-x.safetensors").touch()
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*; remove its run directory"):
        overrides_of(damaged)
    assert ran(recipe, how, tmp_path, monkeypatch)[0] == [damaged.name, other.name]


# --- other code, divergence -------------------------------------------------------------------

OTHER = "sources 0123456789abcdef, torch 2.0.0"
judged = two_rows + "seeds: 3\nclaims: [FedProx above FedAvg in result]\n"


def all_run(
    output: Path, text: str = judged, how: Options = THREE, **of: Sequence[Any]
) -> tuple[Recipe, list[Run]]:
    """A recipe with finished runs: FedAvg 50, FedProx 60 %; `of`: for each run, in turn."""
    recipe = parse_recipe(text, Path("t.yaml"))
    runner.save_job(recipe, how, output)
    runs = list(runs_needed(recipe, recipe.cells, how, output, ()))
    for i, run in enumerate(runs):
        accuracy = (0.5 if run.keys["method"] == "fedavg" else 0.6) + 0.01 * int(run.keys["seed"])
        own = {name: values[i] for name, values in of.items()}
        fake_run(run, **{"accuracy": accuracy} | own)
    return recipe, runs


def leading(leads: Sequence[float]) -> list[float]:
    """The accuracies of FedAvg and FedProx in turn, FedProx ahead by these points."""
    return [0.5 + lead / 100 for each in leads for lead in (0, each)]


def claims_of(recipe: Recipe, output: Path, how: Options = THREE) -> list[JudgedClaim]:
    """Its claims, judged by the runs there."""
    return judge_claims(recipe, results_of(recipe, how, output), how)


def test_a_run_of_other_code_does_not_count_is_named_and_run_again(tmp_path, monkeypatch):
    recipe, runs = all_run(tmp_path, code=[OTHER, *5 * [""]])
    assert [run.finished() is None for run in runs] == [True, *5 * [False]]
    started, printed, _ = ran(recipe, THREE, tmp_path, monkeypatch)
    assert started == [runs[0].name]
    assert f"{runs[0].name}: {OTHER}; today {code_version()}" in printed
    assert (runs[0].folder / "attempt").is_dir()


def test_finished_runs_on_other_data_than_todays_are_named(tmp_path, monkeypatch):
    """Hours of new runs beside them would get no verdict."""
    recipe, runs = all_run(tmp_path, data=["then", "now", *4 * [""]])
    monkeypatch.setattr(runner, "digest_of_data", lambda config: "now")
    started, printed, _ = ran(recipe, THREE, tmp_path, monkeypatch)
    assert started == []
    assert "on other data than today's, not compared with new runs: 1 run; restore" in printed
    assert f"  {runs[0].name}: digest of the data then, today now\n" in printed
    assert runs[1].name not in printed


def test_runs_of_different_code_are_not_averaged_and_not_judged(tmp_path):
    """A changed loss beside the old one: no `55.43 ± 51.61` with a verdict."""
    all_run(tmp_path, code=[OTHER, *5 * [""]])
    text = write_report(tmp_path)[1].read_text()
    assert "| FedAvg | runs of different code |" in text
    assert "| FedProx | 61.00 ± 1.00 |" in text
    assert "| not tested | no verdict on runs of different code |" in text  # and no difference
    (_, figure), *_ = section_of(next((tmp_path / "jobs").iterdir()), tmp_path).charts
    assert "FedProx" in str(figure)
    assert "FedAvg" not in str(figure)
    named = "; ".join(sorted([OTHER, code_version()]))
    assert f"Runs of different code, never averaged or judged together: {named}." in text


def test_exports_of_a_table_say_that_its_rows_are_of_different_code(tmp_path):
    """Each row alone is of one: nothing in its cells shows it."""
    all_run(tmp_path, code=3 * [OTHER, ""])
    write_report(tmp_path)
    (table,) = (tmp_path / "tables").glob("*.csv")
    _, *lines = table.read_text().splitlines()
    assert [line.endswith(",table has cells of different code") for line in lines] == [True, True]
    assert "Not to be compared: cells of different code." in table.with_suffix(".tex").read_text()


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_verdict_before_all_seeds_have_ended_says_so(num_missing, tmp_path):
    """Who stops when the interval excludes 0 favours a decision."""
    recipe, runs = all_run(tmp_path)
    for run in runs[:num_missing]:
        (run.folder / "attempt" / "summary.json").unlink()
    (claim,) = claims_of(recipe, tmp_path)
    assert (claim.verdict, claim.seeds) == ("reproduced", 3 - num_missing)
    assert claim.remarks == "after 2 of 3 seeds" * num_missing
    assert claim.decide == "3 seeds" * num_missing
    for page in write_report(tmp_path)[:2]:
        text = page.read_text().replace("<small>", "")
        assert ("reproduced; after 2 of 3 seeds" in text) == bool(num_missing)
    assert ("| reproduced |" in page.read_text()) != bool(num_missing)


@pytest.mark.parametrize(
    ("precisions", "verdict", "row"),  # of the runs: FedAvg and FedProx with seeds 0, 1 and 2
    [
        (6 * ["bf16"], "reproduced", "61.00 ± 1.00"),
        (["bf16", "fp32", *4 * ["bf16"]], "not tested", "runs in different precision"),
        (3 * ["bf16", "fp32"], "not tested", "61.00 ± 1.00"),
    ],
)
def test_runs_in_different_precision_are_not_judged(precisions, verdict, row, tmp_path):
    """`precision = "auto"` is bf16 on one machine, or for one network, and fp32 on another."""
    recipe, _ = all_run(tmp_path, precision=[[each] for each in precisions])
    (claim,) = claims_of(recipe, tmp_path)
    assert claim.verdict == verdict
    text = write_report(tmp_path)[1].read_text()
    assert f"Precision: {', '.join(sorted(set(precisions)))}." in text
    assert f"| FedProx | {row} |" in text


def test_a_stated_precision_is_not_that_which_auto_became_on_the_other_side(tmp_path):
    text = judged.replace("{method: fedprox", "{precision: auto, method: fedprox")
    assert text != judged
    recipe, _ = all_run(tmp_path, text, precision=3 * [["fp32"], ["bf16"]])
    (claim,) = claims_of(recipe, tmp_path)
    assert (claim.verdict, claim.effect) == ("not tested", None)
    assert claim.detail == "no verdict on runs in different precision"


@pytest.mark.parametrize("of_each", ["{model: cnn-fedintr, ", "{image-size: 28, "])
@pytest.mark.parametrize(
    ("digests", "verdict"), [("ababab", "reproduced"), ("abacab", "not tested")]
)
def test_images_of_another_size_are_no_other_data(of_each, digests, verdict, tmp_path):
    """The digest is of the images as the network takes them: `model` and `image-size` change it."""
    text = judged.replace("{method: fedprox", f"{of_each}method: fedprox")
    recipe, _ = all_run(tmp_path, text, data=digests)
    (claim,) = claims_of(recipe, tmp_path)
    assert claim.verdict == verdict
    section = section_of(next((tmp_path / "jobs").iterdir()), tmp_path)
    ranked = section.rank(section.results["FedProx", "result"])
    assert ranked == ("best" if verdict == "reproduced" else "")


@pytest.mark.parametrize(
    ("key", "reads"),
    [
        ("take: best", "best accuracy and final accuracy"),
        ("take: mean 2", "mean over the last 2 rounds of accuracy and final accuracy"),
    ],
)
def test_sides_that_are_read_differently_are_named_beside_the_verdict(key, reads, tmp_path):
    text = judged.replace("{method: fedprox", f"{{{key}, method: fedprox")
    recipe, _ = all_run(tmp_path, text)
    (claim,) = claims_of(recipe, tmp_path)
    assert f"read differently: {reads}" in claim.remarks.split("; ")


def test_sides_that_are_read_at_different_rounds_are_read_differently():
    text = judged.replace("{method: fedprox", "{at: 1, method: fedprox")
    recipe = parse_recipe(text, Path("t.yaml"))
    sides = [Result(cell, None, {}, num_seeds=1) for cell in recipe.cells]
    assert list(read_differently(sides)) == [
        "read differently: final accuracy and final accuracy at round 1"
    ]
    assert not list(read_differently(sides[:1] * 2))


@pytest.mark.parametrize("take", ["seconds a round", "seconds to 40"])
def test_a_time_is_not_compared_with_something_else(take):
    text = judged.replace("{method: fedprox", f"{{take: {take}, method: fedprox")
    assert text != judged
    with pytest.raises(
        ValueError, match=r"line \d+: 'FedProx above FedAvg in result' would compare seconds"
    ):
        parse_recipe(text, Path("t.yaml"))


def test_rounds_that_are_there_twice_are_damage(tmp_path):
    _, runs = all_run(tmp_path)
    path = runs[0].folder / "attempt" / "history.jsonl"
    path.write_text(2 * path.read_text())
    with pytest.raises(ValueError, match=r"history\.jsonl is damaged"):
        write_report(tmp_path)


def test_runs_that_all_are_of_one_older_code_are_reported_and_it_is_named(tmp_path):
    _, runs = all_run(tmp_path, code=6 * [OTHER])
    text = write_report(tmp_path)[1].read_text()
    assert "| FedAvg | 51.00 ± 1.00; a run" not in text
    assert f"Code: {OTHER}." in text
    assert "| FedProx above FedAvg in result | reproduced | +10.00 ± 0.00, 3 seeds |" in text
    fake_run(runs[0], 0.9, "later")  # again, with today's
    assert "| FedAvg | runs of different code |" in write_report(tmp_path)[1].read_text()


def test_an_interrupted_run_of_other_code_starts_from_scratch_and_a_mixed_one_is_known(tmp_path):
    _, (run, *_) = all_run(tmp_path, code=[OTHER, *5 * [""]])
    attempt = run.folder / "attempt"
    (attempt / "summary.json").unlink()
    (attempt / "checkpoints").mkdir()
    (attempt / "checkpoints" / "round-00001-x.safetensors").touch()
    assert overrides_of(run)["output-dir"] == str(run.folder)
    both = {"layout": LAYOUT, "code": [OTHER, code_version()]}
    (attempt / "manifest.json").write_text(json.dumps(both))
    assert run.other_code(attempt) == f"{OTHER}, then {code_version()}; today {code_version()}"


@pytest.mark.parametrize(
    ("ends", "word", "detail"),
    [
        ([*5 * ["finished"], FINITE], "inconclusive", "FedProx diverged 1/3, +10.00 ± 0.00"),
        (["finished", FINITE, *2 * ["finished", FINITE]], "not reproduced", "FedProx diverged 3/3"),
        (
            ["finished", FINITE, "finished", "failed: OSError: x", *2 * ["finished"]],
            "not reproduced",
            "FedProx diverged 1/3, failed 1/3, +10.00, 3 seeds",
        ),
        ([FINITE, "finished", FINITE, *3 * ["finished"]], "inconclusive", "FedAvg diverged 2/3"),
    ],
)
def test_divergence_and_failure_are_results_that_count_against_the_claim(
    ends, word, detail, tmp_path
):
    """Runs alternate: FedAvg and FedProx of seed 0, then of 1 and 2."""
    all_run(tmp_path, status=ends)
    text = write_report(tmp_path)[1].read_text()
    assert f"| FedProx above FedAvg in result | {word} | {detail}" in text
    side, _, share = detail.partition(", +")[0].partition(" ")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {side} |")]
    assert share in row
    assert "not run" not in text


@pytest.mark.parametrize("ends", [["finished", FINITE], [FINITE, "finished"]])
def test_below_is_above_the_other_way_round(ends, tmp_path):
    """The side that a claim puts ahead counts against it where it diverges, on either side."""
    recipe, _ = all_run(tmp_path, status=3 * ends)
    claim = Claim("", "FedProx", "FedAvg", True, "result")
    turned = Claim("", "FedAvg", "FedProx", False, "result")
    one, two = claims_of(replace(recipe, claims=[claim, turned]), tmp_path)
    assert one.verdict == two.verdict == ("not reproduced" if ends[1] == FINITE else "inconclusive")
    assert one.failures == f"{'FedAvg' if ends[0] == FINITE else 'FedProx'} diverged 3/3"


def test_updates_that_were_left_out_are_named_beside_the_number_and_the_claim(tmp_path):
    lost = {"a": "local training left values that are not finite in 'w'", "b": "no answer"}
    recipe, _ = all_run(tmp_path, left_out=[lost, *5 * [{}]])
    text = write_report(tmp_path)[1].read_text()
    words = "updates left out: 2, in 1 round for values not finite or too large"
    assert f"| FedAvg | 51.00 ± 1.00; {words} |" in text
    (claim,) = claims_of(recipe, tmp_path)
    assert claim.failures == f"FedAvg: {words}"
    assert not claim.deviations


def test_runs_whose_code_is_not_recorded_are_not_judged(tmp_path):
    recipe, runs = all_run(tmp_path)
    for run in runs:
        (run.folder / "attempt" / "manifest.json").write_text('{"layout": 2}')
    how = options(seeds=[0, 1, 2], any_code=True)
    (claim,) = claims_of(recipe, tmp_path, how)
    assert (claim.verdict, claim.effect) == ("not tested", None)
    assert claim.detail.startswith("no verdict on runs whose code is not recorded; +10.00")
    assert claim.decide == "runs of today's code"


def test_a_run_that_diverged_is_not_run_again_and_one_that_failed_is(tmp_path, monkeypatch):
    ends = [FINITE, "failed: OSError: no space", *4 * ["finished"]]
    recipe, runs = all_run(tmp_path, status=ends)
    assert ran(recipe, THREE, tmp_path, monkeypatch)[0] == [runs[1].name]


def test_a_value_that_diverges_is_the_worst_of_the_tuned_ones(tmp_path):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[0, 1])
    for mu, status in ((0.1, "finished"), (1, FINITE), (10, FINITE)):
        run = run_of(recipe.cells[0], {"fedprox.mu": mu}, 0, how, tmp_path)
        fake_run(run, 0.1, status=status)
    assert best_candidate(recipe.cells[0], how, tmp_path, ()) == {"fedprox.mu": 0.1}


@pytest.mark.parametrize(("is_time", "best"), [(True, 2), (False, 3)])
def test_the_best_of_times_is_the_shortest(monkeypatch, is_time, best):
    numbers = {1: 30.0, 2: 12.0, 3: math.inf if is_time else 40.0, 4: None}

    def finished(cell, keys, *_):
        return SimpleNamespace(finished=lambda: True, mu=keys["mu"])

    monkeypatch.setattr(plan, "run_of", finished)
    monkeypatch.setattr(plan, "number_of", lambda cell, run: numbers[run.mu])
    cell = SimpleNamespace(
        take=SimpleNamespace(is_time=is_time),
        paper_candidate=None,
        candidates=[{"mu": mu} for mu in numbers],
    )
    options = SimpleNamespace(full_grid=False, tuning_seed=0)
    assert plan.best_candidate(cell, options, Path()) == {"mu": best}


def test_where_every_tuned_value_diverges_one_is_run_with_the_other_seeds_and_the_side_fails(
    tmp_path,
):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[0, 1])
    for mu in (0.1, 1, 10):
        run = run_of(recipe.cells[0], {"fedprox.mu": mu}, 0, how, tmp_path)
        fake_run(run, 0.1, status=FINITE)
    *_, last = runs_needed(recipe, recipe.cells, how, tmp_path, ())
    assert (last.keys["seed"], last.keys["fedprox.mu"]) == (1, 0.1)
    (result,) = results_of(recipe, how, tmp_path).values()
    assert result.failures == {0: "diverged"}


def test_an_interrupted_run_of_other_defaults_starts_from_scratch(tmp_path):
    *_, (run, _) = two_runs(tmp_path)
    attempt = fake_run(run, 0.5)
    (attempt / "summary.json").unlink()
    (attempt / "checkpoints").mkdir()
    (attempt / "checkpoints" / "round-00001-x.safetensors").touch()
    assert overrides_of(run) == {"resume": str(attempt)}
    make_odd(attempt)
    assert overrides_of(run)["output-dir"] == str(run.folder)


def test_progress_is_that_of_the_newest_attempt(tmp_path):
    *_, (run, _) = two_runs(tmp_path)
    run = replace(run, rounds=1)
    started = runner.ActiveRun(run, None, runner.TaskID(0))
    assert started.new_rounds() == 0
    fake_run(run, 0.5, "1-old")
    assert [started.new_rounds(), started.new_rounds()] == [1, 0]
    history = fake_run(run, 0.5, "2-new") / "history.jsonl"
    history.unlink()
    assert started.new_rounds() == -1
    write_lines(history, [{"round": n, "losses": {}, "seconds": {}} for n in (1, 2)])
    assert started.new_rounds() == 2


def test_rounds_of_an_attempt_that_is_not_resumed_are_not_progress(tmp_path):
    """Where runs of other code were run again, the bar ended with 0/0 and showed no time left."""
    *_, (run, _) = two_runs(tmp_path)
    run = replace(run, rounds=1)
    attempt = fake_run(run, 0.5, "1-old")
    assert runner.num_earlier(run) == 1
    again = runner.ActiveRun(run, None, runner.TaskID(0), num_earlier=1)
    assert again.new_rounds() == 0
    fake_run(run, 0.5, "2-new")
    assert [again.new_rounds(), again.new_rounds()] == [1, 0]
    (attempt.with_name("2-new") / "checkpoints").mkdir()
    (attempt.with_name("2-new") / "checkpoints" / "round-00001-x.safetensors").touch()
    assert runner.num_earlier(run) == 0


def test_a_job_is_known_by_its_content_and_keeps_its_tuning_seed(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    a, moved = (parse_recipe(tuned, tmp_path / folder / "t.yaml") for folder in "ab")
    noted = parse_recipe(tuned + "notes: [x]\n", tmp_path / "a" / "t.yaml")
    changed = parse_recipe(tuned.replace("cnn-fedreco", "cnn-fedcka"), tmp_path / "a" / "t.yaml")
    assert runner.save_job(a, options(seeds=[5, 6]), out) == [5, 6]
    assert runner.save_job(changed, options(seeds=[3]), out) == [3]
    assert runner.save_job(a, options(seeds=[0, 1], full_grid=False), out) == [0, 1]
    for same in (moved, noted, a):
        assert runner.save_job(same, options(seeds=[0, 1]), out) == [5, 6, 0, 1]
    assert len(list(out.glob("jobs/*.json"))) == 3
    # what is tuned is tuned on 5, what is not needs no run of it
    how = options(seeds=[0], tuned_on=5)
    assert [r.keys["seed"] for r in runs_needed(a, a.cells, how, out, ())] == [5, 5, 5]
    plain = parse_recipe(two_rows, Path("t.yaml"))
    assert [r.keys["seed"] for r in runs_needed(plain, plain.cells, how, out, ())] == [0, 0]


def test_a_job_with_keys_of_a_method_that_is_not_here_is_another(tmp_path):
    recipe = parse_recipe(two_rows, Path("t.yaml"))
    runner.save_job(recipe, options(), tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    about = json.loads(job.read_text())
    about["text"] = about["text"].replace("config: {", "config: {mymethod.mu: 1, ")
    job.rename(other := job.with_name("other.json")).write_text(json.dumps(about))
    assert runner.save_job(recipe, options(seeds=[1]), tmp_path) == [1]
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {job.name, other.name}


def test_a_job_of_many_changes_has_a_name_that_file_systems_allow(tmp_path):
    recipe = parse_recipe(two_rows, Path("t.yaml"))
    changes = [{"data-dir": "/data" * 60, "lr": lr} for lr in (0.1, 0.2)]
    for changed in changes:
        runner.save_job(recipe, options(changes=changed), tmp_path)
    assert len(list(tmp_path.glob("jobs/*.json"))) == 2
    assert all(len(path.name) < 150 for path in tmp_path.glob("jobs/*.json"))


def test_seeds_asked_for_later_are_run_with_what_the_first_seed_chose(tmp_path, monkeypatch):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[5])
    fake_runs(recipe, tmp_path, how, {0.1: 0.5, 1: 0.9, 10: 0.7})
    runner.save_job(recipe, how, tmp_path)
    fake_run(run_of(recipe.cells[0], {"fedprox.mu": 1}, 0, how, tmp_path), 0.4)
    assert ran(recipe, options(seeds=[0]), tmp_path, monkeypatch)[0] == []


def test_a_failure_is_said_once_with_its_reason_and_its_log(tmp_path, monkeypatch):
    recipe, how, (run, _) = two_runs(tmp_path)
    started, printed, failed = ran(recipe, how, tmp_path, monkeypatch, lambda run: "no [b]data")
    assert sorted(started) == sorted(failed)
    line = f"failed FedAvg, result, seed 0: no [b]data (log: {run.folder / 'log.txt'})"
    assert printed.count(line) == 1


def test_a_run_that_was_killed_is_started_once_more(tmp_path, monkeypatch):
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options()

    def ending(run: Run) -> str:
        raise KilledError("its machine is lost")

    started, printed, failed = ran(recipe, how, tmp_path, monkeypatch, ending)
    assert sorted(started) == sorted([*failed, *failed])
    assert printed.count("its machine is lost; it is resumed once") == 2
    assert set(failed.values()) == {"its machine is lost"}


def test_a_run_that_was_killed_counts_against_its_claim_until_it_is_repeated(tmp_path, monkeypatch):
    """Its run directory says that it is running, and another's failure may leave none."""
    recipe, runs = all_run(tmp_path)
    killed = runs[-1]
    attempt = killed.folder / "attempt"
    (attempt / "summary.json").write_text(json.dumps({"status": "running"}))
    locks = []

    def ending(run: Run) -> str:
        if len(locks) == 1:  # at the second time, another runner has begun it again
            locks.append(claimed(run))
        locks.append(None)
        raise KilledError("its process was killed")

    ran(recipe, THREE, tmp_path, monkeypatch, ending)
    assert not killed.note.exists()
    locks[1].close()
    ran(recipe, THREE, tmp_path, monkeypatch, ending)
    text = write_report(tmp_path)[1].read_text()
    assert "| FedProx above FedAvg in result | inconclusive | FedProx failed 1/3, " in text
    pack(tmp_path, tmp_path / "packed")
    with unpacked(tmp_path / "packed") as (copy,):
        (claim,) = claims_of(recipe, copy)
        assert claim.failures == "FedProx failed 1/3"
    assert overrides_of(killed) == {**killed.keys, "output-dir": str(killed.folder)}
    (attempt / "checkpoints").mkdir()
    (attempt / "checkpoints" / "round-00001-ab.safetensors").touch()
    assert overrides_of(killed) == {"resume": str(attempt)}
    monkeypatch.setattr(tasks, "run_alone", lambda run: attempt)
    assert tasks.execute(killed, code_version()) == ""
    assert not killed.note.exists()
    killed.note_failure("its process was killed")
    (attempt / "summary.json").write_text(json.dumps({"status": "finished"}))
    assert killed.finished() == attempt  # whatever a note says
    pack(tmp_path, tmp_path / "packed")  # nor does the archive keep it
    (killed.note / "config.json").unlink()
    (killed.note / "summary.json").unlink()  # cut off
    (attempt / "summary.json").unlink()
    assert killed.ended() is None


def test_a_note_that_another_runner_removes_while_it_is_read_does_not_count(tmp_path, monkeypatch):
    """It begins the run again: this ended the first runner, and all of its runs."""
    _, (run, *_) = all_run(tmp_path)
    shutil.rmtree(run.folder / "attempt")
    run.note_failure("its process was killed")

    def removed_after(directory: Path) -> str:
        status = status_of(directory)
        run.remove_note()
        return status

    monkeypatch.setattr("keel.experiments.runs.status_of", removed_after)
    assert runner.failure_of(run) is None


@pytest.mark.parametrize("seed", [0, 2])
def test_a_failed_run_counts_with_every_seed(seed, tmp_path):
    recipe, runs = all_run(tmp_path)
    (run,) = [r for r in runs if (r.keys["method"], r.keys["seed"]) == ("fedprox", seed)]
    (run.folder / "attempt" / "summary.json").write_text(json.dumps({"status": "failed: no disk"}))
    (claim,) = claims_of(recipe, tmp_path)
    assert (claim.verdict, claim.failures) == ("inconclusive", "FedProx failed 1/3")


def test_a_run_that_another_runner_locked_first_is_left_to_it(tmp_path, monkeypatch):
    """Between our look at its lock and the start of its task."""
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options()

    def ending(run: Run) -> None:
        fake_run(run, 0.5)  # as the other one does

    started, printed, failed = ran(recipe, how, tmp_path, monkeypatch, ending)
    assert (len(started), failed) == (2, {})
    assert printed.count("50.00 % (global.accuracy)") == 2


def test_rounds_that_another_runner_does_count_once(tmp_path, monkeypatch):
    """It locks the run just before our task, which sees two of its rounds, and finishes later."""
    recipe, how, (one, other) = two_runs(tmp_path)
    fake_run(other, 0.5)
    one.folder.mkdir()
    locks = []

    class Others(FakeTasks):
        def wait(self, seconds: float) -> list[Run]:
            fake_run(one, 0.5, status="running")
            locks.append(claimed(one))
            return super().wait(seconds)

    def sleep(seconds: float) -> None:
        (one.folder / "attempt" / "summary.json").write_text(json.dumps({"status": "finished"}))
        locks[0].close()

    while_waiting(sleep, monkeypatch)
    _, printed, _ = ran(recipe, how, tmp_path, monkeypatch, lambda run: None, Others)
    assert "finished by another runner" in printed
    assert " 2/2 " in printed.splitlines()[-1]


def test_a_run_that_has_failed_in_another_runner_is_not_run_again(tmp_path, monkeypatch):
    """It is under way there at first; of an earlier failure nothing is said."""
    recipe, how, (one, other) = two_runs(tmp_path)
    fake_run(other, 0.5)
    one.folder.mkdir()
    lock = claimed(one)

    def sleep(seconds: float) -> None:
        fake_run(one, 0.1, status="failed: no reason")
        lock.close()

    while_waiting(sleep, monkeypatch)
    started, printed, failed = ran(recipe, how, tmp_path, monkeypatch)
    assert started == []
    assert "waiting for 1 run of other runners" in printed
    assert failed == {one.name: "failed in another runner"}


@pytest.mark.parametrize(("ends", "word"), [("failed: no disk", ""), ("finished", "finished")])
def test_a_clock_that_was_wrong_does_not_hide_a_result(ends, word, tmp_path, monkeypatch):
    """A failure of tomorrow is run again, once: the result is older by its name and time."""
    recipe, how, (one, other) = two_runs(tmp_path)
    fake_run(other, 0.5)
    failed = fake_run(one, 0.1, "20991231-000000-fedavg-digits", status="failed: no disk")
    os.utime(failed / "summary.json", 2 * (time.time() + 86400,))

    def ending(run: Run) -> str:
        fake_run(run, 0.5, "20261231-000000-fedavg-digits", status=ends)
        return "" if word else "no disk"

    started, printed, _ = ran(recipe, how, tmp_path, monkeypatch, ending)
    assert started == [one.name]
    assert one.failure() == ("" if word else "failed")
    assert ("50.00 % (global.accuracy)" in printed.splitlines()[-2]) == bool(word)
    assert "in another runner" not in printed


@pytest.mark.parametrize(
    ("name", "damage", "found"),
    [
        ("config.json", lambda text: "{}", "config.json is damaged"),
        ("summary.json", lambda text: text[:-2], "Unterminated"),
        ("history.jsonl", lambda text: "", "round 1 is missing"),
        ("history.jsonl", lambda text: text.partition("\n")[2], "round 1 is missing"),
        ("history.jsonl", lambda text: text.replace("0.5", "0.6"), "its digest is not the one"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_what_to_do(
    name, damage, found, tmp_path, monkeypatch
):
    """Before, a finished run whose history was lost had no number, and was never run again."""
    history_in.cache_clear()
    recipe, (run, *_) = all_run(tmp_path)
    path = run.folder / "attempt" / name
    if "digest" in found:
        manifest = json.loads(path.with_name("manifest.json").read_text())
        manifest["files"] = {name: digest(path.read_bytes())}
        path.with_name("manifest.json").write_text(json.dumps(manifest))
    path.write_text(damage(path.read_text()))
    for command in (
        lambda: write_report(tmp_path),
        lambda: pack(tmp_path, tmp_path / "archive"),
        lambda: ran(recipe, THREE, tmp_path, monkeypatch),
    ):
        with pytest.raises(
            ValueError, match="remove its run directory, then run it again"
        ) as refused:
            command()
        assert str(path) in str(refused.value)
        assert found in str(refused.value)
    shutil.rmtree(path.parent)
    assert ran(recipe, THREE, tmp_path, monkeypatch)[0] == [run.name]


@pytest.mark.parametrize("command", ["report", "archive"])
def test_a_job_with_a_method_that_is_gone_is_named(tmp_path, capsys, command):
    all_run(tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    job.write_text(job.read_text().replace("fedprox", "ours"))
    assert main(command, "--output", str(tmp_path)) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {job}: method = 'ours' is unknown")
    assert message.endswith("; to leave its table out, move this file out of jobs/\n")


def test_a_job_without_a_cell_of_its_recipe_is_named_and_no_empty_table(tmp_path):
    all_run(tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    job.write_text(json.dumps(json.loads(job.read_text()) | {"cells": [["False", "a"]]}))
    with pytest.raises(ValueError, match=r"none of its cells, such as \['False', 'a'\], is in its"):
        write_report(tmp_path)


@pytest.mark.parametrize("key", ["machines", "code"])
def test_text_that_utf_8_lacks_is_a_question_mark_in_a_report(key, tmp_path):
    """The runs of a restored archive may be anyone's: a report ended without the file's name."""
    _, (run, *_) = all_run(tmp_path)
    path = run.folder / "attempt" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: ["x\ud800y"]}))
    for report in write_report(tmp_path):
        assert "x?y" in report.read_text("utf-8")


def test_a_damaged_job_is_named(tmp_path):
    (tmp_path / "jobs").mkdir()
    job = tmp_path / "jobs" / "x.json"
    for text, message in (
        ("{", "is damaged: "),
        ("[]", "it is not a JSON object"),
        ("{}", "'text' is missing"),
    ):
        job.write_text(text)
        with pytest.raises(ValueError, match=message) as rejected:
            write_report(tmp_path)
        assert str(job) in str(rejected.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("text", 3), ("recipe", 3), ("scale", "week"), ("changes", []), ("full_grid", "x")),
        *(("seeds", None), ("seeds", []), ("seeds", [0, "x"]), ("seeds", "ab")),
        ("seeds", [10**30]),
        *(("cells", 3), ("cells", [["FedAvg"]]), ("cells", [["FedAvg", 1]])),
    ],
)
def test_a_job_of_odd_values_is_named_with_what_to_do(key, value, tmp_path):
    recipe, _ = all_run(tmp_path)
    (job,) = (tmp_path / "jobs").iterdir()
    job.write_text(json.dumps(json.loads(job.read_text()) | {key: value}))
    for command in (
        lambda: write_report(tmp_path),
        lambda: runner.save_job(recipe, THREE, tmp_path),
    ):
        with pytest.raises(ValueError, match=f"{job} is damaged: {key} = .*; remove it and repeat"):
            command()


def test_tables_of_a_recipe_before_and_after_a_value_was_changed_are_told_apart(tmp_path):
    all_run(tmp_path)
    changed = judged.replace("method: fedprox", "method: fedprox, fedprox.mu: 0.5")
    runner.save_job(parse_recipe(changed, Path("t.yaml")), THREE, tmp_path)
    text = write_report(tmp_path)[1].read_text()
    assert "as in the recipe, fedprox.mu = 0.5 in FedProx; seeds" in text


# --- the report -------------------------------------------------------------------------------


A_AND_B = "config: {num-clients: 2}\nrows:\n  A: {method: fedavg}\n  B: {method: fedprox}\n"


def judged_sides(
    text: str, *sides: dict[int, float], seeds: Sequence[int] = (0,)
) -> list[JudgedClaim]:
    """The claims of this recipe, with these numbers by seed of its rows A and B."""
    recipe = parse_recipe(text, Path("c.yaml"))
    results = {
        (name, "result"): Result(recipe.cell(name, "result"), {}, by_seed, len(by_seed))
        for name, by_seed in zip("AB", sides, strict=True)
    }
    return judge_claims(recipe, results, options(seeds=list(seeds)))


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
    claim = f"A {'above' if above else 'below'} B in result"
    (found,) = judged_sides(f"{A_AND_B}claims: [{claim}]\n", left, right)
    assert found.verdict == word
    assert detail in found.detail


def test_verdicts_are_counted():
    words = ("not tested", "reproduced", "inconclusive", "reproduced")
    empty = dict.fromkeys((field.name for field in fields(JudgedClaim)), None)
    claims = [
        JudgedClaim(**{**empty, "verdict": word, "runs": (str(i),), "read_at": 1000})
        for i, word in enumerate(words)
    ]
    assert tally(claims).startswith("2 reproduced, 1 inconclusive, 1 not tested; ")
    earlier = replace(claims[1], verdict="not reproduced", read_at=500)  # of the same runs
    assert tally([earlier, *claims]).startswith(
        "2 reproduced, 1 inconclusive, 1 not tested; 1 at an earlier round of the same runs"
    )
    assert tally(claims[:1]) == "1 not tested"  # nothing was judged


def test_claims_of_different_kinds_on_the_same_runs_all_count():
    claims = "A above B in result, A below B in result, A within 1 of B in result"
    text = f"{A_AND_B}claims: [{claims}]\n"
    found = tally(judged_sides(text, {0: 52.0, 1: 52.1}, {0: 50.0, 1: 50.0}))
    assert found.startswith("1 reproduced, 2 not reproduced; where"), found


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


@pytest.mark.parametrize(("failed", "lead"), [("A", -math.inf), ("B", 0.0)])
def test_a_run_that_failed_is_no_evidence_for_the_side_said_to_be_faster(failed, lead):
    recipe = parse_recipe(times, Path("t.yaml"))
    sides = [
        replace(
            Result(recipe.cell(name, "result"), None, {} if name == failed else {0: 10.0}, 1),
            failures={0: "diverged"} if name == failed else {},
        )
        for name in ("A", "B")
    ]
    assert compared(recipe.claims[0], *sides)[:2] == ([], [lead])


@pytest.mark.parametrize(
    ("leads", "verdict"),
    [
        # a seed that is lost makes no verdict better: without one, -10, -10.1, -10.2 is decided
        ([-10, -10.1, -math.inf], "not reproduced"),
        ([-10.1, -10.2, -10, -10, -10.3, -math.inf], "not reproduced"),
        ([-5, -math.inf], "inconclusive"),
        ([10, 10.2, -math.inf], "inconclusive"),
        ([10, -math.inf, -math.inf], "not reproduced"),
        # a time that the other never reaches makes none worse
        ([10, 11, math.inf], "reproduced"),
        ([5, math.inf], "inconclusive"),
        ([-5, math.inf], "inconclusive"),
        ([-5, -5.1, math.inf], "inconclusive"),
        ([5, 5.1, math.inf, -math.inf], "inconclusive"),
        # 3, 5, 5: the half width is 2.87; 3 and 5 alone: 12.7
        ([3, 5, math.inf], "reproduced"),
        ([-3, -5, -math.inf], "not reproduced"),
        ([math.inf, -math.inf], "inconclusive"),
        ([math.inf, math.inf], "reproduced"),
        ([math.inf], "inconclusive"),
    ],
)
def test_an_infinite_lead_counts_as_the_largest_on_its_side(leads, verdict):
    assert judge(leads) == verdict


def test_a_single_difference_decides_nothing_where_the_other_runs_failed():
    """The leads of 0 of two pairs that failed on both sides counted as measured."""
    claim = Claim("A above B in c", "A", "B", True, "c")
    leads = [*3 * [-math.inf], 0.0, 0.0, -5.0]
    assert verdict_on(claim, [-5.0], leads) == "inconclusive"
    assert verdict_on(claim, [-5.0], [-math.inf, *leads]) == "not reproduced"  # most failed


@pytest.mark.parametrize(
    ("differences", "pairs", "verdict"),  # the half width of [x - 0.1, x, x + 0.1] is 0.248
    [
        ([-0.1, 0, 0.1], 3, "reproduced"),
        ([0.65, 0.75, 0.85], 3, "reproduced"),
        ([0.66, 0.76, 0.86], 3, "inconclusive"),
        ([-0.86, -0.76, -0.66], 3, "inconclusive"),
        ([1.14, 1.24, 1.34], 3, "inconclusive"),
        ([1.15, 1.25, 1.35], 3, "not reproduced"),
        ([-4.8, -4.2, -3.4], 3, "not reproduced"),
        ([-2, 0, 2], 3, "inconclusive"),
        ([0.0, 0.0], 3, "inconclusive"),  # a run of either side failed
        ([0.0], 1, "inconclusive"),
        ([], 0, "inconclusive"),
    ],
)
def test_two_sides_are_within_a_margin_if_the_interval_is(differences, pairs, verdict):
    claim = Claim("A within 1 of B in c", "A", "B", False, "c", margin=1.0)
    assert verdict_on(claim, differences, pairs * [0.0]) == verdict


def test_a_claim_within_a_margin_is_reported(tmp_path):
    """FedProx is 10 points above FedAvg."""
    claims = [f"FedProx within {margin} of FedAvg in result" for margin in (11, 2)]
    text = f"{two_rows}seeds: 3\nclaims: {json.dumps(claims)}\n"
    all_run(tmp_path, text)
    text = write_report(tmp_path)[1].read_text()
    assert "| FedProx within 11 of FedAvg in result | reproduced | +10.00" in text
    assert "| FedProx within 2 of FedAvg in result | not reproduced | +10.00" in text


@pytest.mark.parametrize("claim", ["FedProx within 1 of FedAvg", "FedAvg within 1 of FedProx"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_an_update_left_out_on_either_side_leaves_a_margin_open(claim, method, tmp_path):
    """FedProx is 10 points above FedAvg, were it not for the round."""
    text = f"{two_rows}seeds: 3\nclaims: [{claim} in result]\n"
    lost = [{} for _ in range(6)]
    lost[2 + (method == "fedprox")] = {"a": "not finite"}  # with seed 1
    recipe, _ = all_run(tmp_path, text, left_out=lost)
    (found,) = claims_of(recipe, tmp_path)
    assert (found.verdict, found.interval) == ("inconclusive", None)


def test_what_decides_a_margin_is_its_distance_from_the_mean(tmp_path):
    """Mean 0.4, SD 0.5: t(0.975, n - 1) * 0.5 / sqrt(n) is first below 0.6 at n = 6."""
    text = f"{two_rows}seeds: 3\nclaims: [FedProx within 1 of FedAvg in result]\n"
    recipe, _ = all_run(tmp_path, text, accuracy=leading([0.9, 0.4, -0.1]))
    (claim,) = claims_of(recipe, tmp_path)
    assert (claim.verdict, claim.decide) == ("inconclusive", "6 seeds")


@pytest.mark.parametrize(
    ("paper", "changes", "remarks"),
    [
        ("[50.0], [60.0]", {}, ""),
        ("[50.0], [55.0]", {}, "the paper's +5.00 is outside the interval"),
        ("[50.0], [75.0]", {}, "the paper's +25.00 is outside the interval"),
        ("[50.0], [55.0]", {"num-rounds": 1}, "at round 1 instead of 2"),
        ("[50.0], [55.0]", {"num-rounds": 4}, "at round 4 instead of 2"),
    ],
)
def test_whether_the_papers_difference_is_in_the_interval(paper, changes, remarks, tmp_path):
    """It is 10 +- 0.25 here."""
    ours, theirs = paper.split(", ")
    text = judged.replace("{method: fedavg", f"{{paper: {ours}, method: fedavg")
    text = text.replace("{method: fedprox", f"{{paper: {theirs}, method: fedprox")
    text = text.replace("in result]", "in result from round 1]")
    how = options(seeds=[0, 1, 2], changes=changes)
    recipe, _ = all_run(tmp_path, text, how, accuracy=leading([9.9, 10, 10.1]))
    (claim,) = claims_of(recipe, tmp_path, how)
    assert (claim.verdict, claim.remarks) == ("reproduced", remarks)


@pytest.mark.parametrize(
    ("added", "remarks"),
    [
        ([], ""),
        ([2.0, 2.1, 1.9], "inconclusive with the planned 3 seeds"),
        ([-9.0, 9.0], "more than the planned 3 seeds"),
    ],
)
def test_seeds_that_were_added_are_named_beside_the_verdict(added, remarks, tmp_path):
    """3.5, 2 and 0.5 alone: 2 +- 3.7."""
    leads = [3.5, 2.0, 0.5, *added]
    how = options(seeds=list(range(len(leads))))
    recipe, _ = all_run(tmp_path, judged, how, accuracy=leading(leads))
    (claim,) = claims_of(recipe, tmp_path, how)
    assert (claim.remarks, claim.seeds) == (remarks, len(leads))
    assert claim.verdict == ("reproduced" if len(added) == 3 else "inconclusive")


@pytest.mark.parametrize("ends", [["finished", FINITE], [FINITE, "finished"]])
def test_there_is_no_interval_of_fewer_pairs_than_the_verdict_rests_on(ends, tmp_path):
    recipe, _ = all_run(tmp_path, status=[*4 * ["finished"], *ends])
    (claim,) = claims_of(recipe, tmp_path)
    assert (claim.effect, claim.interval, claim.seeds) == (pytest.approx(10.0), None, 3)


@pytest.mark.parametrize(
    ("row", "verdict", "effect"), [(0, "inconclusive", None), (1, "reproduced", 10.0)]
)
def test_ahead_of_runs_whose_updates_were_not_finite_is_no_lead(row, verdict, effect, tmp_path):
    """Runs alternate: FedAvg and FedProx, which the claim puts ahead."""
    lost = {"a": "values that are not finite in 'w'"}
    recipe, _ = all_run(tmp_path, left_out=3 * [*row * [{}], lost, *(1 - row) * [{}]])
    claim, turned = (
        Claim("", *names, True, "result")
        for names in (("FedProx", "FedAvg"), ("FedAvg", "FedProx"))
    )
    (found, other) = claims_of(replace(recipe, claims=[claim, turned]), tmp_path)
    assert found.verdict == verdict
    assert found.effect == (effect and pytest.approx(effect))
    assert other.verdict == "not reproduced"  # that counts in full


@pytest.mark.parametrize(
    ("reason", "word", "has_mean"),
    [("personal-loss is nan, not finite", "diverged", True), ("no answer", "failed", False)],
)
def test_a_run_without_the_number_due_counts_against_its_claim(reason, word, has_mean, tmp_path):
    """A client, or all, could not be evaluated: its mean was that of the others, or "not run"."""
    recipe, runs = all_run(tmp_path, f"{judged}of: local_global.mean\n")
    for run in runs:
        path = run.folder / "attempt" / "history.jsonl"
        *earlier, line = lines_of(path)
        line["local_global"] = {"mean": line["global"]["accuracy"], "worst_decile": 0.0}
        if run.keys["method"] == "fedprox":
            line["evaluation_left_out"] = {"a": reason}
            if not has_mean:
                del line["local_global"]
        write_lines(path, [*earlier, line])
    (claim,) = claims_of(recipe, tmp_path)
    assert claim.verdict == "not reproduced"
    assert f"FedProx {word} 3/3" in claim.failures
    rounds = ", in 3 rounds for values not finite or too large" if has_mean else ""
    _, page = write_report(tmp_path)
    assert f"| FedProx | –; {word} 3/3; evaluations left out: 3{rounds} |" in page.read_text()


def test_a_run_whose_global_model_has_a_loss_that_is_not_finite_has_diverged(tmp_path):
    """Its accuracy, of chance, made a verdict for the other side."""
    recipe, runs = all_run(tmp_path, accuracy=leading([50, 50, 50]))
    for run in runs:
        if run.keys["method"] == "fedavg":
            path = run.folder / "attempt" / "history.jsonl"
            *earlier, line = lines_of(path)
            line["global"]["loss"] = None  # as NaN is recorded
            write_lines(path, [*earlier, line])
    (claim,) = claims_of(recipe, tmp_path)
    assert (claim.verdict, claim.failures) == ("inconclusive", "FedAvg diverged 3/3")
    assert "| FedAvg | –; diverged 3/3 |" in write_report(tmp_path)[1].read_text()


def test_after_two_seeds_of_which_one_never_reached_it_a_second_is_not_what_decides():
    (claim,) = judged_sides(times, {0: 6.0, 1: 5.0}, {0: 6.0, 1: math.inf}, seeds=[0, 1])
    assert (claim.verdict, claim.decide) == ("inconclusive", "more seeds")


def test_times_of_different_machines_are_not_compared(tmp_path):
    recipe, how = timed(tmp_path, {"A": [0.6, 0.6], "B": [0.6, 0.6]})
    for seed in how.seeds:
        (attempt,) = run_of(recipe.cell("B", "result"), {}, seed, how, tmp_path).attempts()
        about = json.loads((attempt / "manifest.json").read_text())
        (attempt / "manifest.json").write_text(json.dumps(about | {"machines": ["cuda: some GPU"]}))
    text = write_report(tmp_path)[1].read_text()
    assert "| B | 60.00 ± 0.00 |" in text  # there, the clock on the wall
    assert "inconclusive | different machines: cpu: not recorded, cuda: some GPU |" in text
    assert "The seconds are from different machines and cannot be compared." in text
    assert "2 runs on cuda: some GPU: 3 min 0 s of rounds, the longest 1 min 30 s." in text
    (attempt / "manifest.json").write_text(json.dumps(about))  # of one seed
    assert "| B | runs on different machines |" in write_report(tmp_path)[1].read_text()


def test_a_table_says_what_is_missing_in_a_cell(tmp_path):
    text = tuned.replace("rows:", "rows:\n  FedAvg: {method: fedavg}") + (
        "claims: [FedProx above FedAvg in result]\n"
    )
    recipe, how = parse_recipe(text, Path("t.yaml")), options(seeds=[0, 1, 2])
    average, tried = recipe.cells
    runner.save_job(recipe, how, tmp_path)
    for mu, accuracy in ((0.1, 0.5), (10, 0.7)):
        fake_run(run_of(tried, {"fedprox.mu": mu}, 0, how, tmp_path), accuracy)
    page = write_report(tmp_path)[1].read_text()
    assert "tuned cells without" not in page  # seed 0 is all there is
    fake_run(run_of(tried, {"fedprox.mu": 10}, 1, how, tmp_path), 0.6)
    for seed in (0, 1):
        fake_run(run_of(average, {}, seed, how, tmp_path), 0.5)
    page = write_report(tmp_path)[1].read_text()
    # seed 0 chose mu: its 70 % is no part of the mean
    assert "| FedProx | 60.00 (10); 2 of 3 seeds; 2 of 3 values tried |" in page
    assert "; tuned cells without seed 0, which chose their values; " in page
    results = results_of(recipe, how, tmp_path)
    ((_, figure),) = run_charts(recipe, results)
    assert [trace["y"] for trace in figure["data"] if trace.get("name") == "FedProx"] == [[60.0]]
    evidence = Evidence(recipe, how, results, claims=())
    with_all = replace(results["FedProx", "result"], tuned_on=None)
    both = replace(evidence, results={**results, ("FedProx", "result"): with_all})
    assert curves_of(recipe.claims[0], evidence) != curves_of(recipe.claims[0], both)
    assert "| FedAvg | 50.00 ± 0.00; 2 of 3 seeds |" in page
    assert "as in the recipe, full grid; " in page
    # likewise its +20
    without = "+10.00, one seed; without seed 0, which chose the tuned value |"
    # mu = 1 may have been better
    lacking = "no verdict on a side whose tuned values were not all tried, or failed"
    assert f"| not tested | {lacking}; {without}" in page
    fake_run(run_of(tried, {"fedprox.mu": 1}, 0, how, tmp_path), 0.6)
    page = write_report(tmp_path)[1].read_text()
    assert f"| inconclusive; after 1 of 2 seeds | {without}" in page


def test_a_value_whose_run_failed_was_not_tried_and_its_table_is_archived(tmp_path):
    recipe, how = parse_recipe(tuned, Path("t.yaml")), options(seeds=[0, 1])
    runner.save_job(recipe, how, tmp_path)
    fake_runs(recipe, tmp_path, how, {0.1: 0.5, 10: 0.7})
    failing = run_of(recipe.cells[0], {"fedprox.mu": 1}, 0, how, tmp_path)
    fake_run(failing, 0.0, status="failed: out of memory")
    fake_run(run_of(recipe.cells[0], {"fedprox.mu": 10}, 1, how, tmp_path), 0.6)
    pack(tmp_path, tmp_path / "packed")
    with unpacked(tmp_path / "packed") as (copy,):
        for output in (tmp_path, copy):
            (result,) = results_of(recipe, how, output).values()
            assert cell_text(result) == "60.00 (10); 2 of 3 values tried, 1 failed"
    fake_run(failing, 0.0, "attempt-2", status=FINITE)  # a value that diverges is a bad one
    (result,) = results_of(recipe, how, tmp_path).values()
    assert cell_text(result) == "60.00 (10)"


def test_what_a_set_makes_alike_is_reported_where_it_was_asked_for_alone(tmp_path):
    """`--only slow --set lr=0.3`: the column fast, with that lr, would be of the same run."""
    text = two_rows + "columns:\n  slow: {lr: 0.1}\n  fast: {lr: 0.2}\n"
    recipe, how = parse_recipe(text, Path("t.yaml")), options(changes={"lr": 0.3})
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
        path = fake_run(run, 0.0) / "history.jsonl"
        *_, line = lines_of(path)
        points = ((1, 0.2), (2, 0.6))
        write_lines(path, [line | {"round": i, "global": {"accuracy": a}} for i, a in points])
        curves[cell.row.name] = curve_of(cell, [(run, run.finished())])
    assert curves == {"FedAvg": [(1, 20, 0), (2, 40, 0)], "FedProx": [(1, 20, 0), (2, 60, 0)]}


def test_measures_of_features_are_compared_over_rows_on_one_axis(tmp_path):
    recipe, how = parse_recipe(two_rows, Path("t.yaml")), options(seeds=[0, 1])
    runner.save_job(recipe, how, tmp_path)
    for i, cell in enumerate(recipe.cells):
        for seed in how.seeds:
            path = fake_run(run_of(cell, {}, seed, how, tmp_path), 0.5) / "history.jsonl"
            measured = {"vci": {"mean": i + seed, "global": None, "clients": {}}}
            *earlier, line = lines_of(path)
            write_lines(path, [*earlier, line | {"diagnostics": measured}])
    *_, (title, figure) = run_charts(recipe, results_of(recipe, how, tmp_path))
    shown = [(trace["name"], trace["x"], trace["y"]) for trace in figure["data"]]
    assert shown == [("FedAvg", [2], [0.5]), ("FedProx", [2], [1.5])]  # the mean over seeds
    assert title == "result: vci, mean over clients and of the global model"
    assert title in write_report(tmp_path)[0].read_text()
    manifest = run_of(recipe.cells[0], {}, 0, how, tmp_path).finished() / "manifest.json"
    manifest.write_text(json.dumps({"layout": LAYOUT, "code": [OTHER]}))
    recipe, how = load_job(*(tmp_path / "jobs").iterdir())
    *_, (_, figure) = run_charts(recipe, results_of(recipe, how, tmp_path))
    assert [trace["name"] for trace in figure["data"]] == ["FedProx"]  # not of different code


def test_columns_that_read_other_curves_of_the_same_runs_have_charts_of_their_own(tmp_path):
    """The report lacked the curves of the clients' test parts, although its table had them."""
    columns = "columns: {test: {}, parts: {of: local_global.mean}, average: {take: ema 0.5}}\n"
    recipe, runs = all_run(tmp_path, two_rows + columns, options())
    for run in runs:
        path = run.finished() / "history.jsonl"
        *earlier, line = lines_of(path)
        more = {"local_global": {"mean": 0.25, "worst_decile": 0.0}}
        more |= {"diagnostics": {"vci": {"mean": 0.5, "global": None, "clients": {}}}}
        write_lines(path, [*earlier, line | more])
    charts = dict(run_charts(recipe, results_of(recipe, options(), tmp_path)))
    ys = {title: [trace["y"] for trace in figure["data"]] for title, figure in charts.items()}
    assert ys == {
        "test: accuracy over rounds": [[50.0], [60.0]],
        "test: vci, mean over clients and of the global model": [[0.5], [0.5]],
        "parts: accuracy over rounds": [[25.0], [25.0]],
        "average: accuracy over rounds, moving average 0.5": [[50.0], [60.0]],
    }


def test_the_heading_of_a_chart_names_columns_that_share_no_part(tmp_path):
    """Its heading was ": accuracy over rounds"."""
    text = two_rows + "columns: {final: {}, best: {take: best}}\n"
    recipe, _ = all_run(tmp_path, text, options())
    ((title, _),) = run_charts(recipe, results_of(recipe, options(), tmp_path))
    assert title == "final and best: accuracy over rounds"


def test_a_report_says_which_of_the_tuned_values_were_tried(tmp_path):
    for text, grid in ((tuned, ", the paper's best of the tuned values"), (two_rows, "")):
        output = tmp_path / str(len(grid))
        output.mkdir()
        how = options(full_grid=False)
        runner.save_job(parse_recipe(text, Path("t.yaml")), how, output)
        assert f"\nas in the recipe{grid}; seeds 0; " in write_report(output)[1].read_text()


def test_text_of_a_recipe_is_escaped_and_its_notes_are_below_the_table(tmp_path):
    text = two_rows.replace("FedAvg:", "<b>A & B</b>:")
    text += 'title: a < b\nnotes: ["<script>alert(1)</script>", second]\n'
    text += "claims: [<b>A & B</b> above FedProx in result]\n"
    runner.save_job(parse_recipe(text, Path("t.yaml")), options(), tmp_path)
    page, markdown = (path.read_text() for path in write_report(tmp_path))
    assert "<h2>a &lt; b</h2>" in page
    assert "&lt;b&gt;A &amp; B&lt;/b&gt;" in page
    assert "<b>A" not in page
    assert "<script>alert" not in page
    note = "<li>&lt;script&gt;alert(1)&lt;/script&gt;</li>"
    assert page.index("not tested") < page.index('<table class="sortable') < page.index(note)
    assert "\n## a < b\n" in markdown
    assert "\n| &lt;b>A & B&lt;/b> |" in markdown
    assert "\n- &lt;script>alert(1)&lt;/script>\n- second\n\n| claim |" in markdown
    assert markdown.count("<") == markdown.count(" < ")


def test_a_bar_in_a_name_divides_no_cell_of_the_report(tmp_path):
    text = two_rows.replace("FedAvg:", "Fed|Avg:")
    text += (
        "claims: [Fed|Avg above FedProx in result]\nheadlines: [Fed|Avg above FedProx in result]\n"
    )
    runner.save_job(parse_recipe(text, Path("t.yaml")), options(), tmp_path)
    lines = write_report(tmp_path)[1].read_text().splitlines()
    named = [line for line in lines if line.startswith("| Fed")]
    assert len(named) == 4  # the headline, the rows, the claim
    assert [line.split(" |")[0] for line in named if "Avg" in line] == [
        *(r"| Fed\|Avg above FedProx in result", r"| Fed\|Avg"),
        r"| Fed\|Avg above FedProx in result",
    ]


@pytest.mark.end_to_end  # draws pictures and a report
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
