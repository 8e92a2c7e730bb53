"""Runs a recipe: has its runs executed (see `tasks`), several at once, and follows them.

Finished runs are skipped, interrupted runs are resumed, failed runs are named at the end. Several
runners, on several machines, may work on one output directory.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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

from keel.experiments.checks import check_recipe
from keel.experiments.jobs import save_job
from keel.experiments.recipe import Cell, Recipe
from keel.experiments.results import number_of, runs_needed
from keel.experiments.runs import (
    FAILED,
    FINISHED,
    Options,
    Run,
    code_folder,
    history_in,
)
from keel.experiments.tasks import BUSY, GRACE_S, KILLED, Resources, ray_tasks
from keel.saved_runs import is_locked
from protocol.code import code_version
from protocol.text import in_one_line, num_of
from server_app.history import duration
from server_app.run_reader import HISTORY_FILE

POLL_S = 0.5
Needed = tuple[Cell, Run]


def run_recipe(
    recipe: Recipe,
    cells: Sequence[Cell],
    options: Options,
    output: Path,
    resources: Resources,
    console: Console,
) -> dict[str, str]:
    """Run everything that has not ended; returns the reason for each run that failed.

    A run that diverges is a result and not run again. Runs that another runner executes are left to
    it, and waited for. A run that was killed is resumed once. KeyboardInterrupt ends the runs under
    way; the next call resumes them.
    """
    folder = output / "runs" / code_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    with_data = check_recipe(recipe, cells, options, folder)
    _, whole = save_job(recipe, options, output, cells)
    if options.seeds[0] != whole.seeds[0]:  # which chose the tuned values
        options = replace(options, seeds=list(dict.fromkeys([whole.seeds[0], *options.seeds])))
    if recipe.shows == "labels":
        return {}

    needed = list(runs_needed(cells, options, folder))
    done = [(cell, run) for cell, run in needed if run.is_done]
    if done:
        console.print(f"{num_of('run', done)} already finished:")
    for cell, run in done:
        console.print(f"  {outcome(cell, run)}")
    left = [(cell, run) for cell, run in needed if not run.is_done]
    if not left:
        return {}
    if resources.gpus is None and all(run.keys.get("device") == "cpu" for _, run in left):
        resources = replace(resources, gpus=0.0)  # each would wait for a GPU of its own
    with progress_bar(console) as progress, ray_tasks(resources, output, with_data) as execute:
        bar = progress.add_task(f"{recipe.name}, {options.label}", total=None)
        runner = Runner(execute, resources.workers, progress, bar)
        try:
            while left:
                runner.run_all(left)
                needed = list(runs_needed(cells, options, folder))  # tuned values are known now
                left = [
                    (cell, run)
                    for cell, run in needed
                    if not run.is_done and run.name not in runner.failed
                ]
        finally:
            runner.interrupt()
    return runner.failed


def outcome(cell: Cell, run: Run) -> str:
    """The row, column and seed of a run that has ended, with the cell's number and the time."""
    label = label_of(cell, run)
    if run.status != FINISHED:
        return f"{label}: [red]{run.status}[/]"
    number, take = number_of(cell, run), cell.take
    seconds = duration(sum(history_in(run.directory).wall_s))
    text = "no number" if number is None else f"{number:.2f} {'s' if take.is_time else '%'}"
    return f"{label}: {text} ({cell.of}), {seconds}"


def label_of(cell: Cell, run: Run) -> str:
    """Row, column, tuned values and seed."""
    tuned = cell.candidates[0] if len(cell.candidates) > 1 else ()
    values = [f"{key}={run.keys[key]}" for key in tuned]
    return escape(", ".join([*cell.name, *values, f"seed {run.seed}"]))


def progress_bar(console: Console) -> Progress:
    """A bar over the rounds of all runs, with the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600,
    )


@dataclass
class Runner:
    """Submits runs to Ray, takes their results and prints them.

    execute: the remote function of `ray_tasks`. max_pending: 0: Ray alone decides how many are
    executed at a time. failed: run name to reason. resumed: names of runs that were killed once.
    """

    execute: Any
    max_pending: int
    progress: Progress
    bar: TaskID
    failed: dict[str, str] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    pending: dict[Any, Needed] = field(default_factory=dict)
    num_rounds: int = 0  # of runs that have ended

    def run_all(self, needed: Iterable[Needed]) -> None:
        """Returns once each of these runs is done or has failed."""
        import ray

        waiting, is_told = list(needed), False
        total = self.num_rounds + sum(run.rounds for _, run in waiting)
        self.progress.update(self.bar, total=total)
        while waiting or self.pending:
            for cell, run in list(waiting):
                is_full = 0 < self.max_pending <= len(self.pending)
                if not is_full and not is_locked(run.beside("lock")):
                    waiting.remove((cell, run))
                    self.pending[self.execute.remote(run, code_version())] = cell, run
            ended = []
            if self.pending:
                ended = ray.wait(list(self.pending), timeout=POLL_S)[0]
            else:
                if not is_told:
                    self.print(f"waiting for {num_of('run', waiting)} of other runners")
                is_told = True
                time.sleep(POLL_S)
            for task in ended:
                cell, run = self.pending.pop(task)
                if self.has_to_wait(cell, run, task):
                    waiting.insert(0, (cell, run))
            under_way = sum(map(rounds_of, (run for _, run in self.pending.values())))
            self.progress.update(self.bar, completed=self.num_rounds + under_way)

    def has_to_wait(self, cell: Cell, run: Run, task: Any) -> bool:
        """Take the result of a run's task; True if it has to be submitted again."""
        status, reason = result_of_task(task)
        if status == BUSY:
            return True
        if status == KILLED and run.name not in self.resumed:
            self.resumed.add(run.name)
            self.print(f"{label_of(cell, run)}: {escape(reason)}; it is resumed once")
            return True
        self.num_rounds += run.rounds
        if status in (KILLED, FAILED):
            if status == KILLED:
                run.note_failure(reason)
            self.failed[run.name] = reason
            log = run.beside("log")
            where = escape(f"{reason} (log: {log})")
            self.print(f"[red]failed[/] {label_of(cell, run)}: {where}")
        else:
            self.print(outcome(cell, run))
        return False

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(text)

    def interrupt(self) -> None:
        """Interrupt the runs under way, and wait until they have saved what they have."""
        if not self.pending:
            return
        import ray

        for task in self.pending:
            ray.cancel(task)
        # a task counts as cancelled before its worker has unwound it
        deadline = time.monotonic() + GRACE_S
        locks = [run.beside("lock") for _, run in self.pending.values()]
        while any(map(is_locked, locks)) and time.monotonic() < deadline:
            time.sleep(0.1)


def result_of_task(task: Any) -> tuple[str, str]:
    """What `execute` has returned; KILLED if its process or machine is gone, FAILED for errors."""
    import ray
    from ray import exceptions

    lost = (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, exceptions.NodeDiedError)
    try:
        status, reason = ray.get(task)
        return status, reason
    except (*lost, exceptions.LocalRayletDiedError) as error:
        return KILLED, in_one_line(str(error))
    except exceptions.RayError as error:
        return FAILED, in_one_line(str(error).strip().splitlines()[-1])


def rounds_of(run: Run) -> int:
    """Rounds that a run under way has done."""
    with suppress(OSError):
        return (run.directory / HISTORY_FILE).read_bytes().count(b"\n")
    return 0
