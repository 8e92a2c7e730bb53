"""Verifies finished runs against their manifests: file digests, a replay of the first rounds."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from client_app.machine import machine
from client_app.setup import device_or_cpu
from keel.curve_names import CURVES
from keel.experiments.runs import machines_of
from protocol.config import default_config
from protocol.files import digest
from protocol.own_code import FOLDER
from protocol.text import num_of, printable
from server_app.inline import run_inline
from server_app.manifest import (
    NUM_NOTED_ROUNDS,
    check_audit,
    newest_states,
    signed_files,
    versions,
)
from server_app.observers import RunInfo, RunObserver
from server_app.run_reader import AUDIT_FILE, MANIFEST_FILE, SUMMARY_FILE, RunReader

MAX_DIFFERENCE = 0.02  # accuracy in [0, 1]: other versions or processors, after a few rounds


@dataclass(frozen=True)
class Check:
    """One check: whether it passed, and what was found."""

    passed: bool
    found: str


def verify(folder: Path, rounds: int, console: Console) -> int:
    """Verify each run at or below `folder` and print the checks; 1 if one fails, else 0.

    Of several runs, unfinished ones (such as a killed attempt beside its successor) are skipped by
    name; a single run has to be finished.
    """
    found = folder.expanduser().absolute().rglob(MANIFEST_FILE)
    runs = [RunReader(path.parent) for path in sorted(found)]
    if not runs:
        raise ValueError(f"{folder} has no {MANIFEST_FILE}: it is not a run directory")
    num_failed = num_skipped = 0
    for run in runs:
        console.print(escape(printable(str(run.directory))))
        if len(runs) > 1 and (reason := unfinished(run)):
            console.print(f"  skipped: {escape(printable(reason))}")
            num_skipped += 1
            continue
        for check in checks(run, rounds):
            word = "[green]passed[/]" if check.passed else "[red]failed[/]"
            # a line of its own: files that are verified may say anything
            console.print(f"  {word} {escape(printable(check.found))}")
            num_failed += not check.passed
    skipped = f", {num_skipped} skipped" if num_skipped else ""
    console.print(f"{num_of('run', runs)}{skipped}, {num_of('check', num_failed)} failed")
    return 1 if num_failed or num_skipped == len(runs) else 0


def checks(run: RunReader, rounds: int) -> Iterator[Check]:
    """All checks of one run, up to a file that cannot be read."""
    try:
        yield from _checks(run, rounds)
    except (ValueError, OSError, RuntimeError) as error:
        yield Check(False, str(error))


def unfinished(run: RunReader) -> str:
    """Why the run cannot be verified; empty if it finished, or if its files were changed."""
    try:
        if "files" not in run.manifest:
            return "it was restored from an archive, which does not hold its files"
        if not run.manifest["files"]:
            return "the run has not ended: its manifest is incomplete"
        status = str(run.summary["status"])
    except (ValueError, OSError):
        return ""  # the checks report it
    is_changed = digest_in(run, SUMMARY_FILE) != run.manifest["files"].get(SUMMARY_FILE)
    return "" if status == "finished" or is_changed else f"the run did not finish: {status}"


def digest_in(run: RunReader, name: str) -> str:
    """The digest of one of the run's files, or "missing"."""
    path = run.directory / name
    return digest(path.read_bytes()) if path.is_file() else "missing"


def _checks(run: RunReader, rounds: int) -> Iterator[Check]:
    """All checks of one run, up to one without which the rest would make no sense."""
    if reason := unfinished(run):
        yield Check(False, reason)
        return
    yield from file_checks(run)
    manifest, config = run.manifest, run.run_config
    device, absent = device_or_cpu(config.train.device)
    used = [*machines_of(run.directory), machine(device)]
    here = versions(device, config.own)
    differing = differing_versions(manifest["versions"], here, any_gpu(used))
    keel = ", then ".join(manifest.get("keel", ["not recorded"]))
    found = "; ".join(differing) or "the same here"
    yield Check(True, f"versions: {found} (the run's Keel: {keel})")
    if len(code := manifest.get("code", [])) > 1:
        yield Check(True, f"code: the run was resumed with different code: {', then '.join(code)}")
    if not manifest["simulated"]:
        yield Check(True, "not replayed: its clients were sites with data of their own")
        return
    if absent:
        yield Check(True, f"{absent}: replayed on the CPU")
    name = "cpu" if absent else config.train.device
    yield from replay_checks(run, rounds, not differing, name)


def any_gpu(machines: Sequence[str]) -> bool:
    """Whether one of these, as in a manifest, is a GPU: there the order of sums is not fixed."""
    return any(name.startswith("cuda") for name in machines)


def differing_versions(
    then: Mapping[str, str], here: Mapping[str, str], is_on_gpu: bool
) -> list[str]:
    """Each version that differs, in words; one that either side did not record differs.

    is_on_gpu: the run or its replay uses a GPU; else it does not matter which one is there.
    """
    unknown = "not recorded"
    names = dict.fromkeys([*then, *here])
    pairs = [(name, then.get(name, unknown), here.get(name, unknown)) for name in names]
    return [f"{n} {a}, here {b}" for n, a, b in pairs if a != b and (n != "gpu" or is_on_gpu)]


def file_checks(run: RunReader) -> Iterator[Check]:
    """The files have the digests that the run recorded."""
    manifest = run.manifest
    of_own_code = [name for name in manifest["files"] if name.startswith(f"{FOLDER}/")]
    for name in (*signed_files, *of_own_code):
        actual, expected = digest_in(run, name), manifest["files"].get(name)
        passed = actual == expected
        yield Check(passed, f"{name}: {actual}" + ("" if passed else f", expected {expected}"))
    try:
        yield Check(True, f"{AUDIT_FILE}: {check_audit(run)} lines")
    except ValueError as error:
        yield Check(False, str(error))
    kept = manifest.get("kept", {})
    if kept:
        used = newest_states(run.directory, run.last_round)  # by `keel predict`
        wrong = [
            f"clients/{client}/{name}"
            for client, name in sorted({*kept.items(), *used.items()})
            if kept.get(client) != name or not is_intact(run.directory / "clients" / client / name)
        ]
        found = f"missing, damaged or added: {', '.join(wrong)}" if wrong else "unchanged"
        yield Check(not wrong, f"state of {num_of('client', kept)}: {found}")
    if checkpoint := manifest.get("checkpoint"):  # with the heads that FedPAC's server makes
        passed = is_intact(run.directory / "checkpoints" / checkpoint)
        found = "unchanged" if passed else "missing or damaged"
        yield Check(passed, f"checkpoints/{checkpoint}: {found}")


def is_intact(version: Path) -> bool:
    """Whether a client state or checkpoint has the digest in its name."""
    return version.is_file() and digest(version.read_bytes()) in version.name


class Replayed(Exception):
    """The requested number of rounds has been replayed."""


class Replay(RunObserver):
    """Ends a run after some rounds; `lines` are those of the history."""

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds, self.lines = num_rounds, list[Mapping[str, Any]]()
        self.manifest: Mapping[str, Any] = {}

    def on_run_start(self, info: RunInfo) -> None:
        """Note what the replay consists of."""
        self.directory = info.directory
        self.note()

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Note the round."""
        self.lines.append(line)
        self.note()

    def note(self) -> None:
        """Read the manifest, and end the run once it has all rounds."""
        self.manifest = RunReader(self.directory).manifest
        if len(self.lines) >= self.num_rounds:
            raise Replayed


def replay_checks(run: RunReader, rounds: int, is_same_setup: bool, device: str) -> Iterator[Check]:
    """The split and the first rounds, replayed; the manifest has the digests of both."""
    manifest, default = run.manifest, default_config()
    keys = {key: value for key, value in run.config.items() if value != default.get(key)}
    replay = Replay(min(rounds, run.last_round, NUM_NOTED_ROUNDS))
    with tempfile.TemporaryDirectory() as scratch:
        keys |= {"output-dir": scratch, "run-name": "", "device": device, "tracker": "none"}
        keys |= {"num-clients": manifest["clients"]}
        with suppress(Replayed):
            run_inline(keys, manifest["clients"], observers=[replay], own=run.own)
    for key in ("data", "split"):
        then, now = manifest[key], replay.manifest[key]
        yield Check(now == then, f"{key}: {now}" + ("" if now == then else f", expected {then}"))
    has_to_be_same = is_same_setup and not any_gpu(replay.manifest.get("machines", []))
    for line, ours in zip(run.history, replay.lines, strict=False):
        number = str(line["round"])
        then, now = (m.get("rounds", {}).get(number, "") for m in (manifest, replay.manifest))
        if then:
            yield round_check(line, ours, then, now, has_to_be_same)
        else:  # a later round has none after a resume with other versions
            yield Check(number != "1", f"round {number}: not compared, the manifest has no digest")


def round_check(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], then: str, now: str, has_to_be_same: bool
) -> Check:
    """One round of the run and of its replay: bit-identical, or with similar accuracies.

    theirs, ours: lines of histories. then, now: digests of the models after the round. A run that
    was extended has evaluated a round for being its last: accuracies of both sides are compared.
    """
    expected, found = accuracies(theirs), accuracies(ours)
    gaps = [abs(expected[key] - found[key]) for key in expected.keys() & found.keys()]
    label = f"round {theirs['round']}"
    if then == now and not any(gaps):
        return Check(True, f"{label}: bit-identical ({then})")
    if not gaps:
        return Check(False, f"{label}: not bit-identical, and no accuracy to compare")
    is_close = expected.keys() == found.keys() and max(gaps) <= MAX_DIFFERENCE
    points = f"{100 * max(gaps):.2f} points"
    passed = is_close and not has_to_be_same
    return Check(passed, f"{label}: not bit-identical, accuracies differ by {points}")


def accuracies(line: Mapping[str, Any]) -> dict[str, float]:
    """The accuracies in [0, 1] of one line of a history."""
    keys = {curve: curve.split(".") for curve in CURVES}
    return {curve: line[key][name] for curve, (key, name) in keys.items() if key in line}
