"""Small copies of finished runs, one zip a job, from which verdicts and curves can be made again.

A copy holds what a report reads: the config without folders, the outcome, the code and machines,
and per round the accuracies and times.
"""

import io
import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.experiments.measure import CLOCKS, DIVERGENCE, is_divergence
from keel.experiments.plan import fault_of_job, job_name, load_job, runs_needed
from keel.experiments.recipe import Recipe, parse_recipe
from keel.experiments.runs import (
    NOTE,
    UNKNOWN,
    Options,
    history_in,
    identity,
    name_of,
    read_json,
    status_of,
)
from protocol.config import default_config, resolve_config
from protocol.files import digest, write_atomically
from protocol.text import num_of
from server_app.history import CURVES, Line
from server_app.run_reader import CLIENTS_FILE, DAMAGE, HISTORY_FILE, RunReader

PRIVATE = ("output-dir", "data-dir", "resume", "run-name")
MANIFEST = ("layout", "code", "data", "keel", "machines", "precision", "simulated", "versions")
RUN_FILES = (
    "config.json",
    "manifest.json",
    "summary.json",
    HISTORY_FILE,
    CLIENTS_FILE,
)  # of a run in a zip
MAX_STATUS = 200  # characters
# in a status, quoted or not; bounded, or an unclosed quote would take seconds
PATH = re.compile(r"""(?<!\w)'[^']{,4096}/[^']{,4096}'|"[^"]{,4096}/[^"]{,4096}"|(?<!\w)/\S+""")
MAX_BYTES = 2**30  # of a zip's files, unpacked; a table of a paper has a few million
COPY_AGAIN = "copy it again from where it was made, or remove it"


def pack(output: Path, archive: Path) -> list[Path]:
    """Copy every job of an output folder that has runs into `archive`; returns the zips.

    ValueError, before anything is written, if this would remove a run from one that is there, or
    put runs of other code beside its runs, if two jobs with different runs have the same zip, or
    for more than `reading` accepts.
    """
    written: dict[Path, dict[str, str]] = {}
    jobs: dict[Path, Path] = {}  # by their zip
    for job in sorted((output / "jobs").glob("*.json")):
        recipe, options = load_job(job)
        about, files = read_json(job), dict[str, str]()
        source = about.pop("archived-source", "")
        places: dict[str, Path] = {}  # of the runs in the zip
        for run in runs_needed(recipe, recipe.cells, options, output, None):
            if directory := run.ended():
                config = resolve_config(without_folders(run.keys, source))
                folder = f"runs/{name_of(config, run.is_timed)}"
                places[folder] = directory
                for name, text in copies(directory, source):
                    files[f"{folder}/{directory.name}/{name}"] = text
        if files:
            changes = without_folders(options.changes, source)
            if "source" not in changes:  # the recipe itself may name folders
                for own in own_sources(parse_recipe(about["text"], recipe.path)):
                    name = str(without_folders({"source": own}, source)["source"])
                    about["text"] = about["text"].replace(own, name)
            about |= {"recipe": recipe.path.name, "changes": changes}
            whole = parse_recipe(about["text"], recipe.path)  # cells added later keep the name
            name = job_name(whole, replace(options, changes=changes))
            files[f"jobs/{name}.json"] = json.dumps(about, indent=1)
            path = archive / f"{name}.zip"
            other = jobs.setdefault(path, job)
            if written.get(path, files) != files:
                raise ValueError(
                    f"{other} and {job} share the archive {path.name}, because they differ only in "
                    "where their data is, but their seeds, cells or runs differ: remove one of "
                    "them, or move it with its runs to another --output"
                )
            num_bytes = sum(len(text.encode()) for text in files.values())
            if num_bytes > MAX_BYTES:  # `reading` would refuse it
                raise ValueError(
                    f"{path} would have {num_bytes:,} bytes, unpacked: expected at most "
                    f"{MAX_BYTES:,}: keep {output} instead"
                )
            refuse_loss(path, files, places, output)
            written[path] = files
    for path, files in written.items():
        write_zip(path, files)
    return list(written)


def refuse_loss(
    path: Path, files: Mapping[str, str], places: Mapping[str, Path], output: Path
) -> None:
    """ValueError if these files would drop archived runs or seeds that were asked for, or mix code.

    A run directory may be replaced by a newer one of the same run, if `output` has both, but not by
    the note of a failure, which any may replace. places: where the run directories are, by their
    folder in the zip.
    """
    if not path.exists():
        return
    with reading(path) as archive:
        before = {name: archive.read(name).decode() for name in archive.namelist()}
    gone = {Path(name).parent for name in before if name.startswith("runs/")}
    gone -= {Path(name).parent for name in files}
    for attempt in sorted(gone):
        now = places.get(str(attempt.parent))
        if now is None:
            continue
        is_newer = now.name != NOTE and now.name > attempt.name
        has_both = (now.parent / attempt.name).exists()
        if attempt.name == NOTE or (is_newer and has_both):
            gone.remove(attempt)
    if gone:
        raise ValueError(
            f"--output {output} lacks {num_of('run', gone)} that {path} has, such as {min(gone)}: "
            "add them with keel experiments restore, or remove the file"
        )
    asked, now_asked = seeds_in(before), seeds_in(files)
    if asked - now_asked:
        raise ValueError(
            f"{path} has the seeds {sorted(asked)}, but --output {output} has only "
            f"{sorted(now_asked)}: restore the archive there, or remove the file"
        )
    then, after = codes_in(before), codes_in(files)
    if len(then) == 1 and len(after) > 1:
        raise ValueError(
            f"{path} has runs of one code ({min(then)}), but --output {output} has runs of "
            f"{'; '.join(sorted(after - then))}, and runs of different code are not compared: "
            "repeat all of them with one version, or archive into another folder"
        )


def seeds_in(files: Mapping[str, str]) -> set[int]:
    """The seeds that the job in these files of a zip asks for."""
    jobs = (text for name, text in files.items() if name.startswith("jobs/"))
    return {seed for text in jobs for seed in json.loads(text)["seeds"]}


def codes_in(files: Mapping[str, str]) -> set[str]:
    """The code of the runs in these files of a zip."""
    manifests = (text for name, text in files.items() if name.endswith("/manifest.json"))
    return {code for text in manifests for code in json.loads(text).get("code", [UNKNOWN])}


def restore(path: Path, output: Path, source: str = "") -> list[Path]:
    """Put a zip's job and runs into an output folder, so that more can be added.

    Returns the runs' directories. source: of the runs, if it is a file or folder, whose path the
    zip does not contain. A run that is there already is left alone, the note of a failure is left
    out if the run has ended there, and the job's seeds and cells are added to those of the job
    there. ValueError if `source` is missing or has another name.
    """
    found = []
    kind_given, _, path_given = source.rstrip("/").partition(":")
    with reading(path) as archive:
        for name in sorted(archive.namelist(), key=lambda name: Path(name).parent.name == NOTE):
            folder = Path(name).parent
            if not name.endswith("/config.json"):
                continue
            flat = known_keys(json.loads(archive.read(name))["config"])
            is_timed = name_of(resolve_config(flat), False) != folder.parent.name
            kind, _, place = flat["source"].partition(":")
            if "/" in place:
                if (kind_given, Path(path_given).name) != (kind, Path(place).name):
                    raise ValueError(
                        f"--source {source!r}: the runs in {path} read {flat['source']}, and the "
                        f"archive does not say where {Path(place).name!r} is: expected its path on "
                        "this machine, as in the config key source"
                    )
                flat["source"] = source.rstrip("/")
            to = output / "runs" / name_of(resolve_config(known_keys(flat)), is_timed) / folder.name
            if folder.name == NOTE and any(map(status_of, to.parent.glob("*"))):
                continue
            found.append(to)
            if (to / "config.json").exists():  # written last
                continue
            to.mkdir(parents=True, exist_ok=True)
            for other in archive.namelist():
                if Path(other).parent == folder and other != name:
                    (to / Path(other).name).write_bytes(archive.read(other))
            defaults = default_config()
            changed = {k: v for k, v in flat.items() if defaults.get(k) != v}
            config = {"config": flat, "overrides": changed}  # the keys of a run's own file
            write_atomically(to / "config.json", json.dumps(config).encode())
        for name in archive.namelist():
            if name.startswith("jobs/"):
                restore_job(json.loads(archive.read(name)), output, source.rstrip("/"))
    return found


def restore_job(about: Mapping[str, Any], output: Path, source: str) -> None:
    """Record an archived job in an output folder. source: as `restore`."""
    # imports torch, which the summary does without
    from keel.experiments.runner import locked, save_job

    text, place, changes = about["text"], Path(about["recipe"]), dict(about["changes"])
    own = own_sources(parse_recipe(text, place))
    archived = str(changes.get("source", "")) or next(iter(own), "")
    if "/" in archived:
        text = text.replace(archived, source)
        if "source" in changes:
            changes["source"] = source
    recipe = parse_recipe(text, place)
    names = about.get("cells", [[c.row.name, c.column.name] for c in recipe.cells])
    cells = [c for c in recipe.cells if [c.row.name, c.column.name] in names]
    options = Options(about["scale"], changes, about["seeds"], about["full_grid"])
    with locked(output):
        save_job(recipe, options, output, cells, archived if "/" in archived else "")


def own_sources(recipe: Recipe) -> list[str]:
    """The files and folders that a recipe's own cells name as their source."""
    return sorted({s for c in recipe.cells if "/" in (s := str(c.keys.get("source", "")))})


def known_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an archived config that Keel has today."""
    defaults = default_config()
    return {key: value for key, value in flat.items() if key in defaults}


def without_folders(keys: Mapping[str, Any], archived: str = "") -> dict[str, Any]:
    """Config keys without the places of files on this machine.

    archived: the source's name in the archive from which the job was restored, if it was.
    """
    kept = {key: value for key, value in keys.items() if key not in PRIVATE}
    if "/" in str(kept.get("source", "")):
        kind, _, path = str(kept["source"]).partition(":")
        name = path.rstrip("/").rpartition("/")[2]
        own = f"{kind}:/data/{digest(path.encode())[:6]}/{name}"  # never one of others
        kept["source"] = archived or own
    return kept


def copies(directory: Path, archived: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of the small copies of a run directory's files. archived: its source's name.

    ValueError if a file is damaged, the history lacks a round, or it was changed after the run.
    """
    history_in(directory)  # raises if it is damaged or was changed
    run = RunReader(directory)
    # keys on which nothing depends may go, or change their values
    kept_keys = without_folders(identity(run.config, is_timed=True), archived)
    yield "config.json", json.dumps({"config": kept_keys, "overrides": {}})
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


def write_zip(path: Path, files: Mapping[str, str]) -> None:
    """The same files give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    write_atomically(path, content.getvalue())


@contextmanager
def reading(path: Path) -> Iterator[zipfile.ZipFile]:
    """The zip. ValueError naming it if it, or a run in it, is damaged, or if it has no job."""
    expected = "expected a zip made by `keel experiments archive`"
    if not path.is_file():
        found = "it is a directory" if path.is_dir() else "it does not exist"
        raise ValueError(f"{path}: {found}; {expected}")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if not any(name.startswith("jobs/") for name in names):
                raise ValueError(f"{path}: {expected}")
            if odd := [name for name in names if not is_of_archive(name)]:
                raise ValueError(f"{path} has {odd[0]!r}, which no archive has; {expected}")
            num_bytes = sum(about.file_size for about in archive.infolist())  # reads stop there
            if num_bytes > MAX_BYTES:
                raise ValueError(
                    f"{path}: its files have {num_bytes:,} bytes, more than {MAX_BYTES:,}; "
                    f"{expected}"
                )
            runs = {name.rpartition("/")[0] for name in names if name.startswith("runs/")}
            needed = {*names, *(f"{run}/{file}" for run in runs for file in RUN_FILES)}
            for name in sorted(needed):
                if fault := fault_in(archive, name):
                    raise ValueError(f"{path} is damaged: {name}: {fault}; {COPY_AGAIN}")
            yield archive
    except (zipfile.BadZipFile, zlib.error) as error:
        if path.read_bytes()[:2] != b"PK":
            raise ValueError(f"{path}: {expected}") from error
        raise ValueError(f"{path} is damaged: {error}; {COPY_AGAIN}") from error


def is_of_archive(name: str) -> bool:
    """Whether `pack` writes files of such names: jobs/JOB, or runs/RUN/ATTEMPT/FILE."""
    top, *parts = name.split("/")
    is_plain = not {"", ".", ".."} & {*parts}  # neither a folder nor a path out of it
    return is_plain and len(parts) == {"jobs": 1, "runs": 3}.get(top)


def fault_in(archive: zipfile.ZipFile, name: str) -> str:
    """What is wrong with a JSON file of a zip; "" for nothing, and for other files."""
    if name not in archive.namelist():
        return "it is missing"
    try:
        if not name.endswith(".json"):
            return ""
        found = json.loads(archive.read(name))
        if name.startswith("jobs/"):
            return fault_of_job(found)
        if name.endswith("/config.json"):
            resolve_config(known_keys(found["config"]))
            return "" if "source" in found["config"] else "it has no source"
        return "" if isinstance(found, dict) else "it is not a JSON object"
    except DAMAGE as error:
        return str(error)


@contextmanager
def unpacked(archive: Path) -> Iterator[list[Path]]:
    """An output folder for each zip of `archive`, for as long as the context lasts.

    Two zips may have the same run in different code: each job is judged on its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = []
        for path in sorted(archive.glob("*.zip")):
            outputs.append(Path(folder) / path.stem)
            with reading(path) as file:
                file.extractall(outputs[-1])
        yield outputs
