"""summary.json: the state and results of a run at a glance; needs no torch.

It has all that a list of runs shows, so that no reader has to open the history.
"""

import errno
import json
import logging
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any

from protocol.catalogue import method_spec
from protocol.config import (
    RunConfig,
    config_from_json,
    default_config,
    keel_home,
    presets,
)
from protocol.files import full_path, write_atomically
from protocol.options import OptionValue
from protocol.text import num_of
from server_app.history import CURVES, DAMAGE, HISTORY_FILE, Line, curve, whole_lines

log = logging.getLogger("keel.server")
SUMMARY_FILE = "summary.json"
BLOCK = 4096  # bytes that a file system gives a file at a time, or a multiple
RENAMED_FIELDS = {"folder": "directory", "refused": "rejected"}  # names before 0.2
# of a manifest: the types of its values, and the keys that every run's has
MANIFEST_KINDS: dict[str, type] = {
    "versions": dict,
    "clients": int,
    "simulated": bool,
    "split": str,
    "data": str,
    "code": list,
    "keel": list,
    "machines": list,
    "precision": list,
    "rounds": dict,
    "files": dict,
    "kept": dict,
    "checkpoint": str,
    "audit": dict,
}
MANIFEST_KEYS = ("versions", "clients", "simulated", "split")
# the first of these curves that was measured is the accuracy
HEADLINE = (("personal", "mean"), ("global", "accuracy"), ("local_global", "mean"))


def summarise(
    history: Sequence[Line], config: Mapping[str, Any], last_rounds: int
) -> dict[str, Any]:
    """The fields of summary.json for these rounds of a run with this flat config.

    accuracy: final and best of the headline curve, None before the first evaluation. results: of
    every curve of CURVES, with mean and median over the last `last_rounds` evaluations.
    """
    results: dict[str, Any] = {}
    for key, name, description in CURVES:
        values = [value for _, value in curve(history, key, name)]
        if values:
            num_last = min(last_rounds, len(values))
            results[f"{key}.{name}"] = {
                "what": description,
                "final": values[-1],
                "best": max(values),
                f"mean of last {num_last}": statistics.fmean(values[-num_last:]),
                f"median of last {num_last}": statistics.median(values[-num_last:]),
                # over all evaluations, as FedRCL reports it
                "EMA 0.9": reduce(lambda ema, value: 0.9 * ema + (1 - 0.9) * value, values),
            }
    seconds = sum(sum(line.get("seconds", {}).values()) for line in history)
    return {
        **about_config(config),
        "rounds": len(history),
        **headline(results),
        "seconds": round(seconds, 2),
        "seconds_per_round": round(seconds / max(1, len(history)), 4),
        "bytes_down": sum(line.get("bytes_down", 0) for line in history),
        "bytes_up": sum(line.get("bytes_up", 0) for line in history),
        "left_out": sum(len(line.get("left_out", {})) for line in history),
        "rejected": sum(line.get("rejected", 0) for line in history),
        "results": results,
    }


def about_config(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a summary that come from the flat config."""
    keys = ("method", "server-optimizer", "source", "model", "seed", "num-rounds")
    return {key.replace("-", "_"): flat[key] for key in keys}


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracy reported for a run: the first curve of HEADLINE that was measured."""
    name = next((name for name in map(".".join, HEADLINE) if name in results), None)
    found = results[name] if name else {}
    return {
        "accuracy_of": name,
        "final_accuracy": found.get("final"),
        "best_accuracy": found.get("best"),
    }


def privacy_text(privacy: Mapping[str, Any]) -> str:
    """The privacy statement of a summary in one line. Raises one of DAMAGE if it is damaged."""
    release, composed = privacy["per_release"], privacy["composed"]
    text = (
        f"epsilon {release['epsilon']}, delta {release['delta']} a release; composed over "
        f"{privacy['releases']} releases: epsilon {composed['epsilon']:.2f}, delta "
        f"{composed['delta']}"
    )
    small = privacy["composed_at_small_delta"]
    if small["delta"] < composed["delta"]:
        text += f" (epsilon {small['epsilon']:.2f} at delta {small['delta']})"
    return text


def read_config_file(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(every key, the keys that the user set) of a run's config.json.

    Keys that did not exist when the run was made have their default. If the preset has changed
    since, the run's values are among the keys set. ValueError naming the file if it is missing or
    damaged.
    """
    path = directory / "config.json"
    if not directory.exists():
        raise ValueError(f"{directory} does not exist: `keel list` names the runs that do")
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: it is not a run directory")
    try:
        saved = json.loads(path.read_text())
        overrides = saved["given"] if "given" in saved else saved["overrides"]  # before 0.2: given
        config = saved["config"]
        # what runs did before these keys existed
        then: dict[str, OptionValue] = {}
        if "privacy.metrics" not in config and config.get("privacy.epsilon"):
            then["privacy.metrics"] = "exact"
        if "scaffold.control-weighting" not in config and config.get("method") == "scaffold":
            then["scaffold.control-weighting"] = "uniform"
        if "keep-state" not in config:
            then["keep-state"] = True
        current = default_config() | config | then
        # a preset may have changed since: the run keeps its own values
        preset = presets().get(str(current["preset"]), {})
        pinned = {key: current[key] for key, value in preset.items() if current[key] != value}
        return current, pinned | overrides | then
    except DAMAGE as error:
        fault = f"it has no key {error}" if isinstance(error, KeyError) else error
        if isinstance(error, TypeError | AttributeError):  # Python only complains about indices
            fault = 'expected an object with the objects "config" and "overrides"'
        raise ValueError(
            f"{path} is damaged or incomplete: {fault}; put back a copy, or start a new run"
        ) from error


def read_run_config(directory: Path) -> RunConfig:
    """The config of a run, from its config.json; ValueError as for `read_config_file`."""
    return config_from_json(json.dumps(read_config_file(directory)[0]))


def read_summary(directory: Path) -> dict[str, Any]:
    """The summary of a run, also of Keel 0.1; status "starting" if none is written yet.

    status is what the run last wrote, so it is "running" after a kill. ValueError naming the file
    if it is damaged.
    """
    path = directory / SUMMARY_FILE
    saved = read_object(path) if path.exists() else dict[str, Any](status="starting")
    summary = {RENAMED_FIELDS.get(key, key): value for key, value in saved.items()}
    if "num_rounds" not in summary:  # before 0.2, or not yet written
        config, _ = read_config_file(directory)
        roster = directory / "roster.json"
        try:
            has_ended = summary["status"] not in ("starting", "running")
            summary = {
                **about_config(config),
                "rounds": 0,
                **headline(summary.get("results", {})),
                "clients": num_listed(json.loads(roster.read_text())) if roster.exists() else None,
                "started": iso_time((directory / "config.json").stat().st_mtime),
                "ended": iso_time(path.stat().st_mtime) if has_ended else None,
                **summary,
            }
        except DAMAGE as error:
            raise ValueError(f"{path} or {roster} is damaged: {error}") from error
    return summary | {"directory": str(directory)}


def runs_directory(config: RunConfig) -> Path:
    """The directory in which the run directory is made."""
    return full_path(Path(config.rounds.output_dir or keel_home() / "runs"))


def new_path(config: RunConfig) -> Path:
    """A path for a run directory, named by run-name, else by time, method and data.

    If a path named by time exists, a number is appended; if that of `run-name` does, ValueError.
    """
    rounds, parent = config.rounds, runs_directory(config)
    if not rounds.run_name:
        source = config.data.source.partition(":")[0]
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{rounds.method}-{source}"
        path, number = parent / stem, 0
        while path.exists():
            number += 1
            path = parent / f"{stem}-{number}"
        return path
    name = rounds.run_name
    path = parent / name
    if path.exists():
        remedy = f"continue that run with `keel resume {name}`"
        if is_over(path):
            remedy = "remove that run, which has finished"
        elif not (path / "config.json").exists():
            remedy = "remove it: it has no config.json, as after a kill before a run began"
        raise ValueError(f"run-name = {name!r}: {path} exists: choose another name, or {remedy}")
    return path


def is_over(directory: Path) -> bool:
    """Whether the run has finished and has no checkpoints to continue it from."""
    return not any((directory / "checkpoints").glob("round-*")) and has_finished(directory)


def check_has_state(directory: Path) -> None:
    """ValueError if the run has finished and has no checkpoints, as with keep-state = false."""
    if is_over(directory):
        raise ValueError(
            f"{directory}: it finished with keep-state = false, which removes its checkpoints: "
            "start a new run with more rounds, and with keep-state = true if it is to be continued"
        )


def has_finished(directory: Path) -> bool:
    """Whether the run has finished and its manifest says so: a kill in between leaves it open.

    False if summary.json is damaged. A manifest that is damaged or cannot be read is ignored.
    """
    try:
        if read_summary(directory)["status"] != "finished":
            return False
    except DAMAGE:
        return False
    try:
        return read_manifest(directory).get("files") != {}
    except (OSError, ValueError):
        return True


def lost_rounds(directory: Path, last_round: int, num_rounds: int) -> str:
    """A sentence on a finished run whose history ends before its last round; "" for others."""
    if last_round >= num_rounds or not has_finished(directory):
        return ""
    return (
        f"{HISTORY_FILE} ends at round {last_round}, but the run has finished all {num_rounds}: "
        "the other rounds' numbers are lost; put back a copy of the file if there is one"
    )


def lacking_rounds(history: Sequence[Line]) -> str:
    """A sentence on a history that damage left without a round before its last; "" for others."""
    found = {line["round"] for line in history}
    last_round = max(found, default=0)
    num_lacking = last_round - len(found)
    if num_lacking <= 0:
        return ""
    return (
        f"{HISTORY_FILE} lacks {num_lacking} of the first {num_of('round', last_round)}: the best "
        "accuracy and the means are of the others; put back a copy of the file if there is one"
    )


def check_has_rounds_left(directory: Path, num_rounds: int) -> None:
    """ValueError, one line, if a resume up to this round would do nothing or undo rounds.

    A resume without rounds left is allowed for a run that ended before its last files were written.
    If a run has finished with `keep-state = false`, state that a kill left behind is removed.
    """
    done = max((line["round"] for line in whole_lines(directory)[0]), default=0)
    if has_finished(directory):
        flat, _ = read_config_file(directory)
        is_whole = done == flat["num-rounds"]
        cannot_continue = num_rounds <= done or not any((directory / "checkpoints").glob("round-*"))
        if is_whole and cannot_continue and not flat["keep-state"]:
            remove_state(directory, done, method_spec(flat["method"]).is_personal)
        check_has_state(directory)
        if num_rounds <= done:
            raise ValueError(
                f"{directory.name} has finished its {num_of('round', done)}: set more, such as "
                f"num-rounds={2 * done}"
            )
    if num_rounds < done:
        raise ValueError(
            f"{directory.name}: {num_of('round is', done, 'rounds are')} done, which a "
            f"resume keeps: num-rounds = {num_rounds} is fewer; set {done} or more"
        )


def check_last_is_evaluated(directory: Path, config: RunConfig) -> None:
    """ValueError if a resume would end the run after a round that is done and was not evaluated."""
    done = max((line["round"] for line in whole_lines(directory)[0]), default=0)
    if config.rounds.num_rounds == done and done % config.rounds.evaluate_every:
        raise ValueError(
            f"{directory.name}: {num_of('round is', done, 'rounds are')} done, and the last was "
            f"not evaluated: set num-rounds={done + 1} or more"
        )


def remove_state(directory: Path, last_round: int, keeps_personal: bool) -> None:
    """Remove the checkpoints and client state of a run that has finished after `last_round`.

    keeps_personal: except the newest of each, from which personal models are made. What cannot be
    removed is named in the log.
    """
    checkpoints, clients = directory / "checkpoints", directory / "clients"
    try:
        if not keeps_personal:
            # in this order: no resume starts from a checkpoint without its clients' state
            for folder in filter(Path.exists, (checkpoints, clients)):
                shutil.rmtree(folder)
            return
        for folder in (checkpoints, *clients.glob("*")):
            if newest := newest_version(folder, last_round):
                for path in {*folder.glob("*")} - {newest}:
                    path.unlink()
    except OSError as error:
        log.warning("state of the finished run is left: %s: %s", error.filename, error.strerror)


def newest_version(folder: Path, last_round: int) -> Path | None:
    """The newest checkpoint, or client state, in a folder of a run that ended after `last_round`.

    A later one is of a round that was interrupted.
    """
    paths = [p for p in folder.glob("round-[0-9]*-*.safetensors") if round_of(p) <= last_round]
    return max(paths, key=lambda path: (round_of(path), path), default=None)


def round_of(version: Path) -> int:
    """The round in the name of a checkpoint or of a client state."""
    return int(version.name.split("-")[1])


def num_listed(rows: Any) -> int:
    """The number of clients in a roster.json."""
    return int(rows["simulated"]) if isinstance(rows, dict) else len(rows)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError naming the file if it has none."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is damaged: it is not a plain file")
    try:
        found = json.loads(path.read_text())
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return found


def read_manifest(directory: Path, is_whole: bool = False) -> dict[str, Any]:
    """The content of manifest.json (bundle.json before 0.2); {} if there is none yet.

    is_whole: all of MANIFEST_KEYS are required; an archive's manifest has only some of them.
    ValueError naming the file if it is damaged.
    """
    path = directory / "manifest.json"
    if not path.exists():
        path = directory / "bundle.json"
    if not path.exists():
        return {}
    manifest = read_object(path)
    missing = [key for key in MANIFEST_KEYS if is_whole and key not in manifest]
    fault = f"it has no key {missing[0]!r}" if missing else odd_value(manifest)
    if fault:
        raise ValueError(f"{path} is damaged: {fault}")
    return manifest


def odd_value(manifest: Mapping[str, Any]) -> str:
    """The first key of a manifest that has an unexpected value, and this value; "" for none."""
    for key, kind in MANIFEST_KINDS.items():
        value = manifest.get(key, kind())
        is_right = isinstance(value, kind)
        if is_right and kind in (dict, list) and key != "audit":
            is_right = all(isinstance(v, str) for v in (value.values() if kind is dict else value))
        if is_right and key == "rounds":
            is_right = all(map(str.isdecimal, value))
        if is_right and key == "audit" and key in manifest:
            is_right = value.keys() == {"lines", "digest"}
        if not is_right:
            return f"{key} = {value!r:.40}"
    return ""


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json whole or not at all.

    On a full disk it overwrites the old one in place if it fits: it says why the run ended.
    """
    path, content = directory / SUMMARY_FILE, json.dumps(summary, indent=2).encode()
    try:
        write_atomically(path, content)
    except OSError as error:
        has_room = path.exists() and len(content) <= -(-path.stat().st_size // BLOCK) * BLOCK
        if error.errno != errno.ENOSPC or not has_room:
            raise
        with path.open("r+b") as file:
            file.write(content)
            file.truncate()


def iso_time(seconds: float) -> str:
    """A time of `time.time` in local time, with its offset: 2026-01-31T12:00:00+01:00."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
