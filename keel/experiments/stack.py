"""Which runs of a recipe train together (`keel experiments run --stack`), and how they resume."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from keel.experiments.runs import Run, status_of
from protocol.config import resolve_config
from server_app.observers import SummaryTable
from server_app.stacked_runs import run_stacked, shared_keys
from server_app.summary import read_manifest


def num_together(run: Run) -> int:
    """How many runs may train together with it, itself among them."""
    return resolve_config(run.keys).train.stacked_runs


def stack_of(run: Run, others: Sequence[Run]) -> list[Run]:
    """The run and those of the others that train with it, at most `stacked-runs` in all.

    They differ in their seed and in numbers of their method, and were interrupted together or not
    at all.
    """
    num = num_together(run)
    if num == 1:
        return [run]
    key = key_of(run)
    return [run, *(other for other in others if other != run and key_of(other) == key)][:num]


def key_of(run: Run) -> tuple[object, ...]:
    """What is the same for runs that train together."""
    keys, group = shared_keys(resolve_config(run.keys)), ""
    with suppress(ValueError):  # of a damaged attempt, which is not resumed
        group = interrupted_group(run)
    return (*sorted(keys.items()), run.clients, group)


def interrupted_group(run: Run) -> str:
    """The group in which the run's newest attempt was interrupted; "": none, so it restarts.

    ValueError if a file of that attempt is damaged.
    """
    for attempt in run.attempts()[-1:]:
        if not (status_of(attempt) or run.other_default(attempt) or run.other_code(attempt)):
            return str(read_manifest(attempt).get("stacked", {}).get("group", ""))
    return ""


def directories_of(group: str, runs: Path) -> list[Path]:
    """The run directories of a group, in their order, below the folder of all runs."""
    places = {}
    for path in runs.glob("*/*/manifest.json"):
        stacked = read_manifest(path.parent).get("stacked", {})
        if stacked.get("group") == group:
            places[stacked["place"]] = path.parent
    return [places[place] for place in sorted(places)]


def run_together(runs: Sequence[Run]) -> list[Path | BaseException]:
    """Run these, or resume their group if they were interrupted; the outcome of each.

    A group that cannot be resumed restarts from round 1.
    """
    if not runs:
        return []
    clients = runs[0].clients

    def observers(place: int) -> list[SummaryTable]:
        return [SummaryTable()] if place == 0 else []  # one table is legible

    try:
        if group := interrupted_group(runs[0]):
            paths = directories_of(group, runs[0].folder.parent)
            outcomes = run_stacked([{"resume": str(path)} for path in paths], clients, observers)
            of_folder = {
                path.parent: outcome for path, outcome in zip(paths, outcomes, strict=True)
            }
            return [of_folder[run.folder] for run in runs]
    except ValueError as error:
        print(f"restarted from round 1: {error}")
    overrides = [{**run.keys, "output-dir": str(run.folder)} for run in runs]
    try:
        return run_stacked(overrides, clients, observers)
    except ValueError as error:
        return [error] * len(runs)
