"""Runs a recipe: has its runs executed (see `tasks`), several at once, and follows them.

Finished runs are skipped, interrupted runs are resumed, failed runs are reported at the end.
Several runners, on several machines, may work on one output folder.
"""

import contextlib
import fcntl
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from keel.experiments.plan import (
    candidates_of,
    images_of,
    job_name,
    narrowed,
    read_job,
    runs_needed,
)
from keel.experiments.preflight import check_recipe, refuse_overriding
from keel.experiments.recipe import Cell, Recipe, parse_recipe
from keel.experiments.runs import (
    DIVERGED,
    FAILED,
    Options,
    Run,
    data_of,
    history_in,
    read_json,
    run_of,
    wall_seconds,
)
from keel.experiments.tasks import (
    LOG_FILE,
    KilledError,
    RayTasks,
    Resources,
    claimed,
    digest_of_data,
    is_executed,
    overrides_of,
)
from protocol.config import resolve_config
from protocol.files import write_atomically
from protocol.text import num_of
from server_app.history import HEADLINE, Line
from server_app.run_reader import HISTORY_FILE, lines_in_order

POLL_S = 0.2
OTHERS_POLL_S = 5.0  # between two looks at what other runners have done


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Create the output folder; hold its lock, for which other runners wait.

    ValueError if that is impossible.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def failure_of(run: Run) -> tuple[Path, int] | None:
    """What tells two failures of a run apart; None if the attempt that counts did not fail.

    Times are only tested for equality, because the clocks of machines differ, and jump.
    """
    attempt = run.ended()
    if attempt is None or run.failure() != FAILED:
        return None
    with contextlib.suppress(FileNotFoundError):  # another runner has started it again
        return attempt, (attempt / "summary.json").stat().st_mtime_ns
    return None


def save_job(
    recipe: Recipe,
    options: Options,
    output: Path,
    cells: Sequence[Cell] | None = None,
    archived_source: str = "",
) -> list[int]:
    """Record what is run, for the report; returns the job's seeds, those of earlier calls first.

    cells: the selected ones, None for all. A call with the same cells in its recipe, wherever that
    is, and the same options continues the same job: its tuning seed stays, selected cells are
    added. archived_source: the name of its source in the archive that it is restored from.
    ValueError if two cells would be one run.
    """
    job: dict[str, object] = {
        "recipe": str(recipe.path.absolute()),
        "scale": options.scale,
        "changes": dict(options.changes),
        "full_grid": options.full_grid,
    }

    def is_same(path: Path) -> bool:
        other = read_job(path)
        if any(other.get(key) != job[key] for key in job.keys() - {"recipe"}):
            return False
        try:
            return parse_recipe(other["text"], recipe.path).content == recipe.content
        except ValueError:  # of another recipe, with keys of a method that is not here today, say
            return False

    folder = output / "jobs"
    folder.mkdir(exist_ok=True)
    free = folder / f"{job_name(recipe, options)}.json"
    path = next(filter(is_same, sorted(folder.glob("*.json"))), free)
    before = read_json(path)
    seeds = list(dict.fromkeys([*before.get("seeds", []), *options.seeds]))
    selected = [[c.row.name, c.column.name] for c in (recipe.cells if cells is None else cells)]
    selected += [names for names in before.get("cells", []) if names not in selected]
    refuse_overriding(narrowed(recipe, selected).cells, options.changes)
    job |= {"text": recipe.text, "seeds": seeds, "cells": selected}
    if source := archived_source or before.get("archived-source"):
        job["archived-source"] = source
    write_atomically(path, json.dumps(job, indent=2).encode())
    return seeds


@dataclass
class ActiveRun:
    """A run under way: its task, its progress bar, and the history that it is writing."""

    run: Run
    task: Any
    bar: TaskID
    num_earlier: int = 0  # attempts, unless one is resumed
    history: Sequence[Line] = ()  # of the newest attempt
    rounds: int = 0

    def new_rounds(self) -> int:
        """Rounds finished since the last call; negative when an attempt starts from scratch."""
        attempts = self.run.attempts()[self.num_earlier :]
        if not attempts:
            return 0
        self.history = lines_in_order(attempts[-1] / HISTORY_FILE)
        finished = len(self.history)
        new, self.rounds = finished - self.rounds, finished
        return new

    @property
    def accuracy(self) -> str:
        """The newest accuracy, for the bar."""
        for key, name in HEADLINE:
            for line in reversed(self.history):
                if key in line:
                    return f"{100 * line[key][name]:.2f} %"
        return ""


def outcome(directory: Path) -> str:
    """The last accuracy and the duration of a finished run."""
    duration = f"{wall_seconds(directory):.0f} s"
    for curve in map(".".join, HEADLINE):
        if points := history_in(directory).points(curve):
            return f"{100 * points[-1][1]:.2f} % ({curve}), {duration}"
    return duration


def run_recipe(
    recipe: Recipe,
    cells: Sequence[Cell],
    options: Options,
    output: Path,
    resources: Resources,
    console: Console,
) -> dict[str, str]:
    """Run everything that has not ended; returns the reason for each run that failed.

    A run that diverges is a result and not run again; one that ended with other code or another
    config is.

    Runs that another runner works on are left to it, and waited for. A run that was killed is
    resumed once. KeyboardInterrupt ends the runs under way; the next call resumes them.
    """
    failed: dict[str, str] = {}
    earlier: dict[str, tuple[Path, int] | None] = {}  # run name to how it had failed before
    with locked(output):
        with_data = check_recipe(recipe, cells, options, output)
        options = replace(options, tuned_on=save_job(recipe, options, output, cells)[0])
    planned = runs_needed(recipe, cells, options, output, failed)
    if resources.gpus is None and all(run.keys.get("device") == "cpu" for run in planned):
        resources = replace(resources, gpus=0.0)  # each would wait for a GPU of its own
    with progress_bars(console) as progress, RayTasks(resources, output, with_data) as tasks:
        running: list[ActiveRun] = []
        own: set[str] = set()  # runs that were started here
        resumed: set[str] = set()  # of these, runs that were killed and started once more
        is_waiting = False
        before: dict[str, int] = {}  # run name to the rounds that earlier calls have run
        total = progress.add_task(
            f"{recipe.name}, {options.label}: rounds", total=None, accuracy=""
        )
        labels = labels_of(cells, options, output)

        def needed() -> list[Run]:
            return list(runs_needed(recipe, cells, options, output, failed))

        def start(run: Run) -> None:
            """Start a run."""
            count = num_earlier(run)  # before it starts
            task = tasks.submit(run)
            own.add(run.name)
            bar = progress.add_task(escape(labels[run.name]), total=run.rounds, accuracy="")
            each = ActiveRun(run, task, bar, count)
            running.append(each)
            num = each.new_rounds()  # of a resumed run: they took no time now
            progress.update(bar, completed=num)
            progress.advance(total, num - before.setdefault(run.name, num))

        def end(each: ActiveRun) -> None:
            """Take the result of a run whose task has ended, and print it."""
            running.remove(each)
            progress.remove_task(each.bar)
            run, name = each.run, escape(labels[each.run.name])
            try:
                reason = tasks.result(each.task)
            except KilledError as error:
                reason = str(error)
                if run.name not in resumed:
                    resumed.add(run.name)
                    progress.advance(total, before[run.name] - each.rounds)
                    console.print(f"{name}: {escape(reason)}; it is resumed once")
                    return
                run.folder.mkdir(parents=True, exist_ok=True)
                if lock := claimed(run):  # else another runner has started it again
                    with lock:
                        if not run.ended():
                            run.note_failure(reason)
            if directory := run.finished():
                console.print(f"{name}: {outcome(directory)}")
            elif reason:
                has_diverged = run.failure() == DIVERGED
                if not has_diverged:
                    failed[run.name] = reason
                word = DIVERGED if has_diverged else "failed"
                log = run.folder / LOG_FILE
                console.print(f"[red]{word}[/] {name}: {escape(f'{reason} (log: {log})')}")
            else:  # another runner was first
                own.discard(run.name)
                progress.advance(total, before.pop(run.name) - each.rounds)

        skipped = {run.name: run for run in needed() if run.is_done()}
        if skipped:
            console.print(f"{num_of('run', skipped)} already finished:")
        for run in skipped.values():
            directory = run.finished()
            number = outcome(directory) if directory else f"[red]{DIVERGED}[/]"
            console.print(f"  {escape(labels[run.name])}: {number}")
        seen = set(skipped)
        announce_outdated(needed(), console)
        announce_other_data(skipped.values(), console)
        while True:
            runs = needed()
            left = [r.rounds - before.get(r.name, 0) for r in runs if r.name not in skipped]
            progress.update(total, total=sum(left))
            done = {run.name: run for run in runs if run.is_done()}
            earlier |= {run.name: failure_of(run) for run in runs if run.name not in earlier}
            for name, run in done.items():
                if name not in seen | own:
                    seen.add(name)
                    progress.advance(total, run.rounds)
                    console.print(f"{escape(labels[name])}: finished by another runner")
            excluded = {each.run.name for each in running} | failed.keys() | done.keys()
            waiting = [run for run in runs if run.name not in excluded]
            for run in waiting:
                if len(running) >= tasks.slots or is_executed(run):
                    continue
                if run.name not in own and failure_of(run) not in (None, earlier[run.name]):
                    failed[run.name] = "failed in another runner"
                    name = escape(labels[run.name])
                    console.print(f"[red]failed[/] {name}: in another runner")
                    continue
                start(run)
            if not running:
                if all(run.name in failed or run.is_done() for run in waiting):
                    if needed() == runs:
                        break
                    continue
                if not is_waiting:
                    is_waiting = True
                    console.print(f"waiting for {num_of('run', waiting)} of other runners")
                time.sleep(OTHERS_POLL_S)
                continue
            is_full = len(running) == tasks.slots
            for each in follow(running, tasks, progress, total, is_full):
                end(each)
    return failed


def num_earlier(run: Run) -> int:
    """How many attempts precede the one about to start; 0 if one is resumed."""
    with contextlib.suppress(ValueError):  # of a damaged attempt: the run's task reports it
        if "resume" in overrides_of(run):
            return 0
    return len(run.attempts())


def labels_of(cells: Sequence[Cell], options: Options, output: Path) -> dict[str, str]:
    """Run name to row, column, tuned values and seed; a run of several cells has the first's."""
    found: dict[str, str] = {}
    for cell in cells:
        for seed in (*options.seeds, options.tuning_seed):
            candidates = candidates_of(cell, options)
            for candidate in candidates:
                tuned = [f"{k}={v}" for k, v in candidate.items()] if len(candidates) > 1 else []
                parts = [cell.row.name, cell.column.name, *tuned, f"seed {seed}"]
                name = run_of(cell, candidate, seed, options, output).name
                found.setdefault(name, ", ".join(filter(None, parts)))
    return found


def announce_outdated(runs: Sequence[Run], console: Console) -> None:
    """Name the runs that ended with another config or other code, which are run again."""
    outdated = {run.name: reason for run in runs if (reason := run.outdated())}
    if outdated:
        console.print(f"not counted, kept on disk and run again: {num_of('run', outdated)}")
    for name, reason in outdated.items():
        console.print(f"  {name}: {escape(reason)}")


def announce_other_data(runs: Iterable[Run], console: Console) -> None:
    """Name the finished runs whose data has changed since: new ones are not compared with them."""
    today: dict[tuple[str, str], str] = {}
    found: dict[str, str] = {}
    for run in runs:
        directory, config = run.finished(), resolve_config(run.keys)
        if not directory or not (then := data_of(directory)):
            continue
        images = images_of(config), config.data.data_dir
        if images not in today:
            today[images] = digest_of_data(config)
        if then != today[images]:
            found[run.name] = f"digest of the data {then}, today {today[images]}"
    if found:
        console.print(
            f"on other data than today's, not compared with new runs: {num_of('run', found)}; "
            "restore the data, or remove their run directories to run them again"
        )
    for name, reason in found.items():
        console.print(f"  {name}: {reason}")


def progress_bars(console: Console) -> Progress:
    """A bar for each run, with its accuracy, and one for all that is queued; with the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600,
    )


def follow(
    running: Sequence[ActiveRun], tasks: RayTasks, progress: Progress, total: TaskID, is_full: bool
) -> list[ActiveRun]:
    """Update the bars until a run ends, or until another runner's may; returns those that have."""
    deadline = time.monotonic() + (float("inf") if is_full else OTHERS_POLL_S)
    while True:
        ended = tasks.wait(POLL_S)
        if tasks.is_kept_waiting():
            progress.console.print("waiting for the cluster: other work may have its CPUs or GPUs")
        for each in running:
            if new := each.new_rounds():
                progress.update(each.bar, advance=new, accuracy=each.accuracy)
                progress.advance(total, new)
        if ended or time.monotonic() > deadline:
            return [each for each in running if each.task in ended]
