"""Starts the runs of a recipe, several at once, and follows them.

A run is `python -m server_app.inline` in a process of its own: the same ServerApp and ClientApp as
under `flwr run`, to the bit. What is finished is skipped, what was cut is resumed, what fails is
named at the end; one runner at a time works on an output folder.
"""

import contextlib
import fcntl
import itertools
import json
import logging
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

from client_app.methods import method_of
from client_app.setup import client_indices, model_for, open_source
from keel.experiments.measure import points_of
from keel.experiments.plan import (
    Options,
    Run,
    due,
    history_in,
    last_read,
    narrowed,
    read_json,
    run_of,
)
from keel.experiments.recipe import Cell, Recipe
from protocol.config import RunConfig, app_folder, resolve_config
from protocol.files import write_atomically
from protocol.options import OptionValue
from server_app.checks import check_config
from server_app.roster import evaluates_clients

log = logging.getLogger("keel.experiments")
poll_s = 0.2
grace_s = 10.0  # for a run that is told to end
shown_error = 300  # characters of a failed run's last line


# --- before the first run ---------------------------------------------------------------------


def check_recipe(recipe: Recipe, cells: Sequence[Cell], options: Options, output: Path) -> None:
    """ValueError naming the recipe's line for a run that could not start.

    Checks every config, its data (read, and downloaded, once), its split and its network.
    """
    refuse_overriding(cells, options.changes)
    checked: set[object] = set()

    def is_new(what: object) -> bool:
        was = what in checked
        checked.add(what)
        return not was

    for cell in cells:
        for candidate in cell.candidates:
            try:
                runs = [run_of(cell, candidate, seed, options, output) for seed in options.seeds]
                configs = [resolve_config(run.keys) for run in runs]
                if is_new(runs[0].name):
                    check_config(configs[0])
                for config in configs:  # a seed's split may not come out where another's does
                    clients = config.rounds.num_clients
                    if is_new((config.data, clients, config.rounds.seed)):
                        client_indices(config, 0, clients)
                if recipe.shows != "labels":
                    check_reading(cell, runs[0], configs[0])
                    if is_new((runs[0].name, "network")):
                        check_network(configs[0])
            except (ValueError, OSError) as error:
                raise ValueError(
                    f"{recipe.path}, {recipe.place(cell, str(error))} "
                    f"({cell.row.name}; {cell.column.name}): {error}"
                ) from error


def refuse_overriding(cells: Sequence[Cell], changes: Mapping[str, OptionValue]) -> None:
    """ValueError where a --set would make cells alike that the table shows as different."""
    if not changes:
        return
    configs = [resolve_config(cell.keys).flat for cell in cells]
    for key in sorted(changes):
        is_tuned = any(key in candidate for cell in cells for candidate in cell.candidates)
        values = sorted({str(flat.get(key)) for flat in configs})
        if is_tuned or len(values) > 1:
            raise ValueError(
                f"--set {key}: rows, columns or tuned values of this recipe differ in it "
                f"({', '.join(values)}); --only chooses among them, and those asked for before "
                "in the same --output count"
            )


def check_network(config: RunConfig) -> None:
    """ValueError where the method reads of the network what it does not have."""
    method = method_of(config)
    if method.is_local_objective:
        method.check_model(model_for(config, open_source(config)))


def check_reading(cell: Cell, run: Run, config: RunConfig) -> None:
    """ValueError, one line, where the cell's number could not be read from this run."""
    if cell.at > run.paper_rounds:
        raise ValueError(f"at = {cell.at}: there are {run.paper_rounds} rounds")
    if cell.take.how == "seconds a round":
        return
    last, every = last_read(cell, run), config.rounds.evaluate_every
    if last % every and last < run.rounds:
        raise ValueError(
            f"at = {cell.at}: here that is round {last} of {run.rounds}, which "
            f"evaluate-every = {every} leaves out"
        )
    method = method_of(config)
    whom = evaluates_clients(config, method)
    has_curve = {
        "global.accuracy": method.has_global_model and config.rounds.evaluate_global,
        "local_global.mean": method.has_global_model and whom != "none",
        "personal.mean": method.is_personal and whom != "none",
    }
    if not has_curve[cell.of]:
        raise ValueError(f"of = {cell.of!r}: {config.rounds.method} does not record it here")


@contextlib.contextmanager
def locked(output: Path) -> Iterator[TextIO]:
    """The output folder, made if need be, for this runner alone; ValueError if that cannot be.

    The runs inherit the lock, so those of a runner that was killed keep it until they end.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pids = ", ".join(map(str, holders(output / ".lock"))) or "unknown"
            raise ValueError(
                f"--output {output} is in use by another runner, or by runs that one left behind: "
                f"process {pids}"
            ) from error
        yield file


def holders(path: Path) -> list[int]:
    """Ids of the other processes that have this file open, as far as we may look."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path.resolve():
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})


def save_job(
    recipe: Recipe, options: Options, output: Path, cells: Sequence[Cell] | None = None
) -> list[int]:
    """Note what was run, for the report; returns its seeds, those of earlier calls first.

    cells: those asked for; all if None. A call with the same file and options is of the same job:
    the seed it was tuned on stays, cells are added. ValueError where one run would be of two cells.
    """
    same: dict[str, object] = {
        "recipe": str(recipe.path.absolute()),
        "scale": options.scale,
        "changes": dict(options.changes),
        "full_grid": options.full_grid,
    }
    folder = output / "jobs"
    folder.mkdir(exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in f"{recipe.name}--{options.label}")
    names = itertools.chain([slug], (f"{slug}-{number}" for number in itertools.count(2)))
    free = next(path for name in names if not (path := folder / f"{name}.json").exists())
    jobs = sorted(folder.glob("*.json"))
    path = next((path for path in jobs if same.items() <= read_json(path).items()), free)
    before = read_json(path)
    seeds = list(dict.fromkeys([*before.get("seeds", []), *options.seeds]))
    asked = [[c.row.name, c.column.name] for c in (recipe.cells if cells is None else cells)]
    asked += [names for names in before.get("cells", []) if names not in asked]
    refuse_overriding(narrowed(recipe, asked).cells, options.changes)
    job = {**same, "text": recipe.text, "seeds": seeds, "cells": asked}
    write_atomically(path, json.dumps(job, indent=2).encode())
    return seeds


# --- the runs ---------------------------------------------------------------------------------


@dataclass
class Started:
    """A run under way: its process, its bar, and the history that it is writing."""

    run: Run
    process: subprocess.Popen[bytes]
    slot: int
    task: TaskID
    log_path: Path
    log_start: int  # where this attempt's part of the log begins, in bytes
    seen: tuple[Path, int] | None = None  # the history of the newest attempt, and its size
    rounds: int = 0

    def new_rounds(self) -> int:
        """Rounds finished since the last call; fewer than 0 when an attempt begins anew."""
        attempts = self.run.attempts()
        if not attempts:
            return 0
        history = attempts[-1] / "history.jsonl"
        size = history.stat().st_size if history.exists() else 0
        if self.seen == (history, size):
            return 0
        self.seen = history, size
        done = history.read_bytes().count(b"\n") if size else 0
        new, self.rounds = done - self.rounds, done
        return new


def gpu_slots() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may say of one GPU each; empty without one."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()
    return named[:count] if named else [str(i) for i in range(count)]


def command_of(run: Run) -> list[str]:
    """The command line that starts the run, or goes on with its newest attempt at it."""
    keys: Mapping[str, OptionValue] = {**run.keys, "output-dir": str(run.folder)}
    for folder in reversed(run.attempts()):
        has_rounds = any((folder / "checkpoints").glob("round-*.safetensors"))
        if has_rounds and not run.other_defaults(folder):
            keys = {"resume": str(folder)}
            break
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]  # JSON values are TOML
    module = [sys.executable, "-m", "server_app.inline", "--num-clients", str(run.clients)]
    return [*module, *words]


def start(run: Run, slot: int, gpus: Sequence[str], lock: TextIO, task: TaskID) -> Started:
    """Start the run's process, on one core and at most one GPU, out of reach of our Ctrl-C."""
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
    return Started(run, process, slot, task, log_path, log_start)


def why_failed(started: Started) -> str:
    """The signal that ended a run, or the last line of its log that says something."""
    code = started.process.returncode
    if code < 0:
        reason = ", as by a lack of memory" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{reason}"
    log_text = started.log_path.read_bytes()[started.log_start :].decode(errors="replace")
    lines = [line for line in log_text.splitlines() if line.strip()]
    return lines[-1][-shown_error:] if lines else "it wrote nothing"


def outcome(run: Run) -> str:
    """A finished run in a few words."""
    folder = run.finished()
    assert folder is not None
    history = history_in(folder)
    seconds = sum(sum(line["seconds"].values()) for line in history)
    for of in ("personal.mean", "local_global.mean", "global.accuracy"):
        if points := points_of(history, of):
            return f"{100 * points[-1][1]:.2f} % ({of}), {seconds:.0f} s"
    return f"{seconds:.0f} s"


def run_recipe(
    recipe: Recipe,
    cells: Sequence[Cell],
    options: Options,
    output: Path,
    workers: int = 0,
    console: Console | None = None,
) -> dict[str, str]:
    """Run all that is not finished yet; returns the runs that failed, each with the reason.

    workers: runs at a time; 0: one a GPU, without one one a core.
    KeyboardInterrupt ends the runs under way; the next call resumes them.
    """
    console = console or Console()
    gpus = gpu_slots()
    slots = list(range(workers or len(gpus) or len(os.sched_getaffinity(0))))
    failed: dict[str, str] = {}
    with locked(output) as lock, progress_bars(console) as progress:
        check_recipe(recipe, cells, options, output)
        options = replace(options, tuned_on=save_job(recipe, options, output, cells)[0])
        running: list[Started] = []
        total = progress.add_task(f"{recipe.name}, {options.label}", total=None)
        try:
            skipped = {
                run.name for run in due(recipe, cells, options, output, failed) if run.finished()
            }
            if skipped:
                console.print(f"{len(skipped)} runs are finished already")
            while True:
                runs = list(due(recipe, cells, options, output, failed))
                if odd := {
                    r.name: r.outdated() for r in runs if r.name not in failed and r.outdated()
                }:
                    failed |= {n: f"{why}: choose another --output" for n, why in odd.items()}
                    continue
                progress.update(total, total=sum(r.rounds for r in runs if r.name not in skipped))
                started = {each.run.name for each in running}
                waiting = [
                    r for r in runs if r.name not in started | failed.keys() and not r.finished()
                ]
                free = [slot for slot in slots if slot not in {each.slot for each in running}]
                for slot, run in zip(free, waiting, strict=False):
                    task = progress.add_task(run.name, total=run.rounds)
                    running.append(start(run, slot, gpus, lock, task))
                if not running:
                    break
                for each in follow(running, progress, total):
                    running.remove(each)
                    progress.remove_task(each.task)
                    if each.run.finished():
                        console.print(f"{each.run.name}: {outcome(each.run)}")
                    else:
                        failed[each.run.name] = why_failed(each)
                        reason = escape(failed[each.run.name])
                        console.print(f"[red]failed[/] {each.run.name}: {reason}")
        finally:
            end(running)
    return failed


def progress_bars(console: Console) -> Progress:
    """A line a run and one for all, in rounds, with the time gone and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600,
    )


def follow(running: Sequence[Started], progress: Progress, total: TaskID) -> list[Started]:
    """Move the bars until a run ends; returns those that have."""
    while True:
        ended = [each for each in running if each.process.poll() is not None]
        for each in running:
            if new := each.new_rounds():
                progress.advance(each.task, new)
                progress.advance(total, new)
        if ended:
            return ended
        time.sleep(poll_s)


def end(running: Sequence[Started]) -> None:
    """End these runs; each has the checkpoint of its last whole round."""
    for each in running:
        each.process.send_signal(signal.SIGTERM)
    for each in running:
        try:
            each.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
