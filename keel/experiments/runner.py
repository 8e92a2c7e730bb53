"""Runs a recipe: starts its runs, several at once, and follows them.

Each run is a process of the inline engine: the same ServerApp and ClientApp as under `flwr run`,
with bit-identical results. Finished runs are skipped, interrupted runs are resumed, failed runs
are reported at the end. Several runners, on several machines, may work on one output folder: each
run is locked by the runner that has started it.

Runs are processes, not Ray tasks: see docs/development/experiments.md for what Ray would cost.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
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

from keel.experiments.plan import candidates_of, narrowed, runs_needed
from keel.experiments.preflight import check_recipe, refuse_overriding
from keel.experiments.recipe import Cell, Recipe, parse_recipe
from keel.experiments.runs import (
    DIVERGED,
    FAILED,
    Options,
    Run,
    history_in,
    read_json,
    run_of,
    wall_seconds,
)
from protocol.config import app_folder
from protocol.files import digest, write_atomically
from protocol.options import OptionValue
from protocol.text import in_one_line
from server_app.history import HISTORY_FILE, HistoryReader

POLL_S = 0.2
OTHERS_POLL_S = 5.0  # between two looks at what other runners have done
GRACE_S = 10.0  # between SIGTERM and SIGKILL
MAX_ERROR = 300  # characters shown of a failed run's last line
HEADLINE_CURVES = (("personal", "mean"), ("local_global", "mean"), ("global", "accuracy"))


# --- the output folder ------------------------------------------------------------------------


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


def claimed(run: Run) -> TextIO | None:
    """The run's lock; None while another runner has it.

    The run's process inherits it, so that a run of a killed runner has it until it ends.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    file = (run.folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def failed_since(run: Run, when: float) -> bool:
    """Whether its newest attempt has failed after this time: another runner's."""
    attempts = run.attempts()
    summary = attempts[-1] / "summary.json" if attempts else None
    if summary is None or run.failure() != FAILED:
        return False
    return summary.stat().st_mtime >= when


def save_job(
    recipe: Recipe, options: Options, output: Path, cells: Sequence[Cell] | None = None
) -> list[int]:
    """Record what is run, for the report; returns the job's seeds, those of earlier calls first.

    cells: the selected ones, None for all. A call with the same cells in its recipe, wherever that
    is, and the same options continues the same job: its tuning seed stays, selected cells are
    added. ValueError if two cells would be one run.
    """
    job: dict[str, object] = {
        "recipe": str(recipe.path.absolute()),
        "scale": options.scale,
        "changes": dict(options.changes),
        "full_grid": options.full_grid,
    }
    key = json.dumps([recipe.content, options.label, options.full_grid]).encode()

    def is_same(path: Path) -> bool:
        other = read_json(path)
        same = all(other.get(key) == job[key] for key in job.keys() - {"recipe"})
        return same and parse_recipe(other.get("text", ""), recipe.path).content == recipe.content

    folder = output / "jobs"
    folder.mkdir(exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in f"{recipe.name}--{options.label}")
    free = folder / f"{slug}-{digest(key)[:8]}.json"
    path = next(filter(is_same, sorted(folder.glob("*.json"))), free)
    before = read_json(path)
    seeds = list(dict.fromkeys([*before.get("seeds", []), *options.seeds]))
    selected = [[c.row.name, c.column.name] for c in (recipe.cells if cells is None else cells)]
    selected += [names for names in before.get("cells", []) if names not in selected]
    refuse_overriding(narrowed(recipe, selected).cells, options.changes)
    job |= {"text": recipe.text, "seeds": seeds, "cells": selected}
    write_atomically(path, json.dumps(job, indent=2).encode())
    return seeds


# --- one run ----------------------------------------------------------------------------------


@dataclass
class RunProcess:
    """A run under way: its process, its progress bar, and the history that it is writing."""

    run: Run
    process: subprocess.Popen[bytes]
    slot: int
    task: TaskID
    log_path: Path
    log_start: int  # size of the log before this attempt, in bytes
    lock: TextIO | None = None
    reader: HistoryReader | None = None  # of the newest attempt's history
    rounds: int = 0

    def new_rounds(self) -> int:
        """Rounds finished since the last call; negative when an attempt starts from scratch."""
        attempts = self.run.attempts()
        if not attempts:
            return 0
        path = attempts[-1] / HISTORY_FILE
        if self.reader is None or self.reader.path != path:
            self.reader = HistoryReader(path)
        self.reader.update()
        finished = len(self.reader.lines)
        new, self.rounds = finished - self.rounds, finished
        return new

    @property
    def accuracy(self) -> str:
        """The newest accuracy, for the bar."""
        for key, name in HEADLINE_CURVES:
            for line in reversed(self.reader.lines if self.reader else ()):
                if key in line:
                    return f"{100 * line[key][name]:.2f} %"
        return ""


def gpu_slots() -> list[str]:
    """The values of CUDA_VISIBLE_DEVICES for one GPU each; empty without a GPU."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()
    return visible[:count] if visible else [str(i) for i in range(count)]


def command_of(run: Run) -> list[str]:
    """The command line that resumes the run's newest attempt with a checkpoint, or starts one."""
    keys: Mapping[str, OptionValue] = {**run.keys, "output-dir": str(run.folder)}
    for attempt in reversed(run.attempts()):
        has_checkpoint = any((attempt / "checkpoints").glob("round-*.safetensors"))
        if has_checkpoint and not (run.other_default(attempt) or run.other_code(attempt)):
            keys = {"resume": str(attempt)}
            break
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]  # JSON is TOML here
    module = [sys.executable, "-m", "server_app.inline", "--num-clients", str(run.clients)]
    return [*module, *overrides]


def start(run: Run, slot: int, gpus: Sequence[str], lock: TextIO, task: TaskID) -> RunProcess:
    """Start the run's process on one core and at most one GPU, out of reach of our Ctrl-C."""
    run.folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    log_path = run.folder / "log.txt"
    with log_path.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            command_of(run),
            cwd=app_folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    return RunProcess(run, process, slot, task, log_path, log_start, lock)


def failure_of(ended: RunProcess) -> str:
    """The signal that ended a run, or the last line of its log."""
    code = ended.process.returncode
    if code < 0:
        hint = ", possibly out of memory" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    log_text = ended.log_path.read_bytes()[ended.log_start :].decode(errors="replace")
    lines = [line for line in log_text.splitlines() if line.strip()]
    return in_one_line(lines[-1][-MAX_ERROR:], MAX_ERROR) if lines else "no output"


def outcome(directory: Path) -> str:
    """The last accuracy and the duration of a finished run."""
    duration = f"{wall_seconds(directory):.0f} s"
    for curve in map(".".join, HEADLINE_CURVES):
        if points := history_in(directory).points(curve):
            return f"{100 * points[-1][1]:.2f} % ({curve}), {duration}"
    return duration


# --- all runs ---------------------------------------------------------------------------------


def run_recipe(
    recipe: Recipe,
    cells: Sequence[Cell],
    options: Options,
    output: Path,
    workers: int = 0,
    console: Console | None = None,
) -> dict[str, str]:
    """Run everything that has not ended; returns the reason for each run that failed.

    A run that diverges is a result and not run again; one that ended with other code or another
    config is.

    workers: runs at a time; 0: one a GPU, or one a core without GPUs.
    Runs that another runner works on are left to it, and waited for. A run that was killed is
    resumed once. KeyboardInterrupt ends the runs under way; the next call resumes them.
    """
    console = console or Console()
    gpus = gpu_slots()
    slots = range(workers or len(gpus) or len(os.sched_getaffinity(0)))
    failed: dict[str, str] = {}
    begun = time.time()
    with locked(output):
        check_recipe(recipe, cells, options, output)
        options = replace(options, tuned_on=save_job(recipe, options, output, cells)[0])
    with progress_bars(console) as progress:
        running: list[RunProcess] = []
        own: set[str] = set()  # runs that were started here
        resumed: set[str] = set()  # of these, runs that were killed and started once more
        is_waiting = False
        before: dict[str, int] = {}  # run name to the rounds that earlier calls have run
        total = progress.add_task(f"{recipe.name}, {options.label}", total=None, accuracy="")
        labels = labels_of(cells, options, output)

        def needed() -> list[Run]:
            return list(runs_needed(recipe, cells, options, output, failed))

        try:
            skipped = {run.name: run for run in needed() if run.is_done()}
            if skipped:
                console.print(f"{len(skipped)} runs are already finished:")
            for run in skipped.values():
                directory = run.finished()
                number = outcome(directory) if directory else f"[red]{DIVERGED}[/]"
                console.print(f"  {escape(labels[run.name])}: {number}")
            seen = set(skipped)
            announce_outdated(needed(), console)
            while True:
                runs = needed()
                left = [r.rounds - before.get(r.name, 0) for r in runs if r.name not in skipped]
                progress.update(total, total=sum(left))
                done = {run.name: run for run in runs if run.is_done()}
                for name, run in done.items():
                    if name not in seen | own:
                        seen.add(name)
                        progress.advance(total, run.rounds)
                        console.print(f"{escape(labels[name])}: by another runner")
                excluded = {each.run.name for each in running} | failed.keys() | done.keys()
                waiting = [run for run in runs if run.name not in excluded]
                free = [slot for slot in slots if slot not in {each.slot for each in running}]
                for run in waiting:
                    lock = claimed(run) if free else None
                    if lock is None:
                        continue
                    if run.is_done():  # since it was looked at
                        lock.close()
                    elif run.name not in own and failed_since(run, begun):
                        lock.close()
                        failed[run.name] = "failed in another runner"
                        name = escape(labels[run.name])
                        console.print(f"[red]failed[/] {name}: in another runner")
                    else:
                        own.add(run.name)
                        label = escape(labels[run.name])
                        task = progress.add_task(label, total=run.rounds, accuracy="")
                        each = start(run, free.pop(0), gpus, lock, task)
                        running.append(each)
                        num = each.new_rounds()  # of a resumed run: they took no time now
                        progress.update(task, completed=num)
                        progress.advance(total, num - before.setdefault(run.name, num))
                if not running:
                    if all(run.name in failed or run.is_done() for run in waiting):
                        if needed() == runs:
                            break
                        continue
                    if not is_waiting:
                        is_waiting = True
                        console.print(f"waiting for {len(waiting)} runs of other runners")
                    time.sleep(OTHERS_POLL_S)
                    continue
                for each in follow(running, progress, total, OTHERS_POLL_S if free else None):
                    running.remove(each)
                    if each.lock:
                        each.lock.close()
                    progress.remove_task(each.task)
                    name = escape(labels[each.run.name])
                    if directory := each.run.finished():
                        console.print(f"{name}: {outcome(directory)}")
                        continue
                    reason, log = failure_of(each), f"(log: {each.log_path})"
                    if each.process.returncode < 0 and each.run.name not in resumed:
                        resumed.add(each.run.name)
                        progress.advance(total, before[each.run.name] - each.rounds)
                        console.print(f"{name}: {escape(reason)}; it is resumed once")
                        continue
                    word = DIVERGED if each.run.failure() == DIVERGED else "failed"
                    if word != DIVERGED:
                        failed[each.run.name] = reason
                    console.print(f"[red]{word}[/] {name}: {escape(f'{reason} {log}')}")
        finally:
            end(running)
    return failed


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
        console.print(f"{len(outdated)} runs do not count, stay on disk and are run again:")
    for name, reason in outdated.items():
        console.print(f"  {name}: {escape(reason)}")


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
    running: Sequence[RunProcess], progress: Progress, total: TaskID, limit_s: float | None = None
) -> list[RunProcess]:
    """Update the bars until a run ends, or for `limit_s`; returns those that have ended."""
    deadline = time.monotonic() + (float("inf") if limit_s is None else limit_s)
    while True:
        ended = [each for each in running if each.process.poll() is not None]
        for each in running:
            if new := each.new_rounds():
                progress.update(each.task, advance=new, accuracy=each.accuracy)
                progress.advance(total, new)
        if ended or time.monotonic() > deadline:
            return ended
        time.sleep(POLL_S)


def end(running: Sequence[RunProcess]) -> None:
    """End these runs; each has the checkpoint of its last finished round."""
    for each in running:
        each.process.send_signal(signal.SIGTERM)
    for each in running:
        try:
            each.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
