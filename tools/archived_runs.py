"""The archive of finished runs: one zip a table, an output directory in small.

Of each run it has the config, how it ended, its code and machines, and each round's accuracies and
times. Unpacked, `keel experiments report --output` judges it again.
"""

import json
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.experiments.jobs import Job, folder_of, job_name, load_job
from keel.experiments.measure import CLOCKS, DIVERGENCE, is_divergence
from keel.experiments.results import runs_needed
from keel.experiments.runs import history_in, identity, name_of
from protocol.config import resolve_config
from protocol.files import digest
from server_app.history import CURVES, Line
from server_app.run_reader import CLIENTS_FILE, HISTORY_FILE, RunReader

HISTORIES = Path(__file__).resolve().parents[1] / "docs" / "results" / "histories"
MANIFEST = ("layout", "code", "data", "keel", "machines", "precision", "simulated", "versions")
MAX_STATUS = 200  # characters
PATH = re.compile(r"(?<!\w)/\S+")  # in a status


def archive(output: Path, histories: Path = HISTORIES) -> list[Path]:
    """Copy every job of an output directory that has runs into a zip; returns the zips.

    ValueError, before anything is written, if a zip that is there has a run that this one lacks.
    """
    zips: dict[Path, dict[str, str]] = {}
    for path in sorted((output / "jobs").glob("*.json")):
        recipe, options = load_job(path)
        folder = folder_of(recipe, options, output)
        files: dict[str, str] = {}
        for cell, run in runs_needed(recipe.cells, options, folder):
            if run.status and run.directory.is_dir():
                name = name_of(resolve_config(without_folders(run.keys)), cell.is_timed)
                for file, text in copies(run.directory):
                    files[f"runs/{folder.name}/{name}/{file}"] = text
        if files:
            job = Job.model_validate_json(path.read_bytes())
            changes = without_folders(options.changes)
            about = job.model_copy(update={"recipe": recipe.path.name, "changes": changes})
            name = job_name(recipe, replace(options, changes=changes))
            files[f"jobs/{name}.json"] = about.model_dump_json(indent=1)
            zips[histories / f"{name}.zip"] = files
    for path, files in zips.items():
        before = set(zipfile.ZipFile(path).namelist()) if path.exists() else set()
        if lost := sorted(before - files.keys()):
            raise ValueError(f"{path} has {lost[0]}, which {output} lacks: unpack it there first")
    for path, files in zips.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as written:
            for name, text in sorted(files.items()):  # the same files give the same bytes
                written.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return list(zips)


def without_folders(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys without the places of files on this machine; of the source, the name stays."""
    kept = {k: v for k, v in keys.items() if k not in ("output-dir", "data-dir", "run-name")}
    kind, _, path = str(kept.get("source", "")).partition(":")
    if "/" in path:
        name = path.rstrip("/").rpartition("/")[2]
        kept["source"] = f"{kind}:/data/{digest(path.encode())[:6]}/{name}"  # never one of others
    return kept


def copies(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the small copies of a run directory's files.

    ValueError if a file is damaged, or the history lacks a round.
    """
    history_in(directory)  # raises
    run = RunReader(directory)
    flat = without_folders(identity(run.config, is_timed=True))
    yield "config.json", json.dumps({"config": flat, "overrides": {}})
    status = str(run.summary["status"])
    short = PATH.sub("…", status)[:MAX_STATUS]
    if is_divergence(status) and not is_divergence(short):  # a reader has to see that it diverged
        short += ": " + next(sign for sign in DIVERGENCE if sign in status)
    yield "summary.json", json.dumps({"status": short})
    kept = {key: run.manifest[key] for key in MANIFEST if key in run.manifest}
    yield "manifest.json", json.dumps(kept)
    yield HISTORY_FILE, "".join(json.dumps(line) + "\n" for line in lines(run.history))
    yield CLIENTS_FILE, "".join(json.dumps(line) + "\n" for line in reasons(run.clients()))


def lines(history: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """The accuracies and times of each round, rounded."""
    for line in history:
        kept = ("round", "num_left_out", "num_evaluation_left_out")
        small: dict[str, Any] = {key: line[key] for key in kept if key in line} | {"losses": {}}
        small |= {key: round(line[key], 4) for key in CLOCKS if key in line}
        small["seconds"] = {"all": round(sum(line["seconds"].values()), 4)}
        for key, name, _ in CURVES:
            if key in line:
                small.setdefault(key, {})[name] = round(line[key][name], 5)
        if line.get("global", {}).get("loss", 0.0) is None:  # the sign of divergence
            small["global"]["loss"] = None
        yield small


def reasons(clients: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """Why clients were left out, numbered instead of named, in the rounds in which one was."""
    for line in clients:
        small = {"round": line["round"]}
        for key in ("left_out", "evaluation_left_out"):
            if found := line.get(key, {}).values():
                diverged = ("not finite" if is_divergence(reason) else "" for reason in found)
                small[key] = {str(n): reason for n, reason in enumerate(diverged)}
        if len(small) > 1:
            yield small


@contextmanager
def unpacked(histories: Path = HISTORIES) -> Iterator[list[Path]]:
    """An output directory for each zip, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = []
        for path in sorted(histories.glob("*.zip")):
            outputs.append(Path(folder) / path.stem)
            with zipfile.ZipFile(path) as file:
                file.extractall(outputs[-1])
        yield outputs
