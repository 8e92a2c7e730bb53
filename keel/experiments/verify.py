"""Does a finished run's folder hold what it says? Its digests, and a replay of the first rounds."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import client_app.app
from keel.experiments.measure import curves_known
from protocol.config import config_from_json
from protocol.files import digest
from protocol.messages import array_record
from server_app.federation import one_round, prepare
from server_app.history import read_history
from server_app.inline import InlineGrid, simulated_nodes
from server_app.manifest import read_manifest, signed_files, versions
from server_app.summary import read_config_file

close_enough = 0.02  # accuracy 0..1: what other versions or processors may change in a few rounds


@dataclass(frozen=True)
class Check:
    """One thing looked at: whether it is right, and what was found."""

    is_right: bool
    found: str


def verify(folder: Path, rounds: int, console: Console) -> int:
    """Check every run at or under `folder`, print what was found; 1 if anything is wrong.

    Of several, those that did not finish (a killed attempt beside the one that went on) are left
    out by name; one alone has to have finished.
    """
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: it has to be at least 1")
    bundles = sorted(folder.expanduser().absolute().rglob("manifest.json"))
    if not bundles:
        raise ValueError(f"{folder} holds no manifest.json: it is no run's folder")
    wrong = left_out = 0
    for path in bundles:
        console.print(str(path.parent))
        if len(bundles) > 1 and (reason := unfinished(path.parent)):
            console.print(f"  left out: {escape(reason)}")
            left_out += 1
            continue
        for check in checks(path.parent, rounds):
            word = "[green]right[/]" if check.is_right else "[red]wrong[/]"
            console.print(f"  {word} {escape(check.found)}")
            wrong += not check.is_right
    left = f", {left_out} left out" if left_out else ""
    console.print(f"{len(bundles)} runs{left}, {wrong} things wrong")
    return 1 if wrong or left_out == len(bundles) else 0


def unfinished(folder: Path) -> str:
    """Why there is nothing to hold a run to; empty if it finished, or its files say otherwise."""
    try:
        bundle = read_manifest(folder)
    except json.JSONDecodeError:
        return ""
    if "files" not in bundle:
        return "the run has not ended: there is nothing to hold it to"
    path = folder / "summary.json"
    if not path.is_file() or digest(path.read_bytes()) != bundle["files"].get(path.name):
        return ""  # it is not the run's: the checks say so
    status = json.loads(path.read_bytes())["status"]
    return "" if status == "finished" else f"the run did not finish: {status}"


def checks(folder: Path, rounds: int) -> Iterator[Check]:
    """All that is checked of one run; stops where the rest would make no sense."""
    try:
        bundle = read_manifest(folder)
    except json.JSONDecodeError as error:
        yield Check(False, f"manifest.json is damaged: {error}")
        return
    if reason := unfinished(folder):
        yield Check(False, reason)
        return
    yield from file_checks(folder, bundle)
    here = versions()
    differing = [
        f"{name} {then}, here {here.get(name, 'not noted')}"
        for name, then in bundle["versions"].items()
        if here.get(name) != then
    ]
    keel = ", then ".join(bundle.get("keel", ["of before it was noted"]))
    found = "; ".join(differing) or "the same here"
    yield Check(True, f"versions: {found} (the run's Keel: {keel})")
    if not bundle["simulated"]:
        yield Check(True, "its clients had data of their own: it cannot be replayed here")
        return
    try:
        yield from replay_checks(folder, bundle, rounds, same_place=not differing)
    except (ValueError, OSError, RuntimeError) as error:
        yield Check(False, f"the replay failed: {error}")


def file_checks(folder: Path, bundle: Mapping[str, Any]) -> Iterator[Check]:
    """The files are those that the run wrote."""
    for name in signed_files:
        path = folder / name
        there = digest(path.read_bytes()) if path.is_file() else "missing"
        wanted = bundle["files"].get(name)
        is_right = there == wanted
        yield Check(is_right, f"{name}: {there}" + ("" if is_right else f", was {wanted}"))
    kept = {folder / "clients" / client / name for client, name in bundle.get("kept", {}).items()}
    damaged = [
        str(path.relative_to(folder))
        for path in sorted(kept)
        if not path.is_file() or digest(path.read_bytes()) not in path.name
    ]
    if kept:
        found = f"missing or damaged: {', '.join(damaged)}" if damaged else "as they were"
        yield Check(not damaged, f"what {len(kept)} clients kept last: {found}")


def replay_checks(
    folder: Path, bundle: Mapping[str, Any], rounds: int, same_place: bool
) -> Iterator[Check]:
    """The split, and the first rounds run again: the same bits, or accuracies close by."""
    saved, overrides = read_config_file(folder)
    then = read_history(folder)
    with tempfile.TemporaryDirectory() as scratch:
        own = {"output-dir": scratch, "resume": ""}
        flat = {**saved, **own}
        config = config_from_json(json.dumps(flat))
        grid = InlineGrid(client_app.app.app, simulated_nodes(bundle["clients"]))
        run = prepare(grid, config, {**overrides, **own}, None)
        try:
            again = read_manifest(run.directory.path)
            same_split = again["split"] == bundle["split"]
            was = "" if same_split else f", was {bundle['split']}"
            yield Check(same_split, f"split: {again['split']}{was}")
            arrays = array_record(run.start.arrays)
            for line in then[:rounds]:
                arrays, now = one_round(run, line["round"], arrays)
                yield round_check(line, now, bundle, read_manifest(run.directory.path), same_place)
        finally:
            run.directory.close()


def round_check(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    bundle: Mapping[str, Any],
    again: Mapping[str, Any],
    same_place: bool,
) -> Check:
    """One round of the run and of its replay."""
    number = str(then["round"])
    ours, theirs = accuracies(now), accuracies(then)
    noted = bundle["rounds"].get(number)
    if noted is not None and again["rounds"].get(number) == noted and ours == theirs:
        return Check(True, f"round {number}: the same to the bit ({noted})")
    if not ours.keys() & theirs.keys():
        return Check(False, f"round {number}: other bits, and no accuracy to compare them by")
    apart = max((abs(ours[k] - theirs[k]) for k in ours.keys() & theirs.keys()), default=0.0)
    is_close = ours.keys() == theirs.keys() and apart <= close_enough
    on_gpu = again["versions"]["gpu"] != "none"  # sums there are in no fixed order
    is_right = is_close and (noted is None or not same_place or on_gpu)
    return Check(is_right, f"round {number}: other bits, accuracies {100 * apart:.2f} points apart")


def accuracies(line: Mapping[str, Any]) -> dict[str, float]:
    """The accuracies 0..1 of one line of a history."""
    pairs = {of: of.split(".") for of in curves_known}
    return {of: line[key][name] for of, (key, name) in pairs.items() if key in line}
