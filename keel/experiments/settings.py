"""What a table was made with: the settings of its runs beside the paper's, code and machines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.experiments.plan import Result, differing, differs, with_own_lengths
from keel.experiments.recipe import Recipe
from keel.experiments.runs import Options, data_of, machines_of, run_of, wall_seconds
from keel.runs import short_source, split_text
from protocol.config import resolve_config
from protocol.options import typed
from protocol.text import num_of
from server_app.history import duration
from server_app.run_reader import RunReader

# always shown; further keys where they differ from the paper's
SHOWN = (
    "num-rounds",
    "num-clients",
    "fraction-train",
    "local-epochs",
    "batch-size",
    "lr",
    "lr-decay",
    "momentum",
    "weight-decay",
    "model",
)
WHERE = {"source", "partition", "alpha", "classes-per-client", "shards-per-client"}


@dataclass(frozen=True)
class Setting:
    """A key with the values that the runs of a table have. paper: its values, where they differ."""

    name: str
    ours: str
    paper: str = ""


def settings_of(
    recipe: Recipe, results: Mapping[tuple[str, str], Result], options: Options
) -> list[Setting]:
    """Data, split and the keys SHOWN, and every other key whose value is not the paper's."""
    pairs: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    others: dict[str, None] = {}
    for cell in recipe.cells:
        result = results.get((cell.row.name, cell.column.name))
        chosen = (result and result.candidate) or cell.paper_candidate or cell.candidates[0]
        run = run_of(cell, chosen, options.seeds[0], options, Path())
        if run.name in pairs:
            continue
        ours, paper = (resolve_config(keys).flat for keys in (run.keys, {**cell.keys, **chosen}))
        pairs[run.name] = with_own_lengths(ours), with_own_lengths(paper)
        others |= dict.fromkeys(key for key, *_ in differing(cell, chosen, run))
    flats = list(pairs.values())
    found = []
    for name, text in (("data", lambda flat: short_source(flat["source"])), ("split", split_text)):
        found.append(setting(name, [(text(ours), text(paper)) for ours, paper in flats]))
    for key in dict.fromkeys([*SHOWN, *(key for key in others if key not in WHERE)]):
        found.append(setting(key, [(ours.get(key), paper.get(key)) for ours, paper in flats]))
    return found


def setting(name: str, pairs: Sequence[tuple[Any, Any]]) -> Setting:
    """One line: each value once, and the paper's if a run has another."""
    ours, paper = (", ".join(dict.fromkeys(typed(pair[i]) for pair in pairs)) for i in (0, 1))
    return Setting(name, ours, "" if all(a == b for a, b in pairs) else paper)


def ended_in(results: Iterable[Result]) -> list[Path]:
    """The run directories behind the results, each once: of failures and of tuning, too."""
    return sorted({path for result in results for path in result.ended})


def code_sentences(results: Sequence[Result]) -> Iterator[str]:
    """Which code, precision and data the runs are of; several versions are never compared."""
    found = sorted({code for result in results for code in result.code})
    if len(found) > 1:
        yield f"Runs of different code, never averaged or judged together: {'; '.join(found)}."
    elif found:
        yield f"Code: {found[0]}."
    if precision := sorted({name for result in results for name in result.precision}):
        yield f"Precision: {', '.join(precision)}."
    if differs({pair for result in results for pair in result.data}):
        yield "Runs on different data, never averaged or judged together."
    every = [data_of(directory) for directory in ended_in(results)]
    if recorded := [one for one in every if one]:
        many = f"{len(recorded)} of {len(every)} runs"
        yield f"Digest of the data, recorded by {many}: {', '.join(sorted({*recorded}))}."


def package_sentences(results: Sequence[Result]) -> Iterator[str]:
    """The versions of Keel and of packages that the runs recorded, and the processors' features."""
    found: dict[str, dict[str, None]] = {}
    for directory in ended_in(results):
        manifest = RunReader(directory).manifest
        for version in manifest.get("keel", ()):
            found.setdefault("keel", {})[str(version)] = None
        for name, version in manifest.get("versions", {}).items():
            if name not in ("sources", "gpu"):
                found.setdefault(name, {})[str(version)] = None
    processors = found.pop("cpu", {})
    keel = found.get("keel", {})  # a bundle has no commit, which runs of the same code name
    found["keel"] = {v: None for v in keel if not any(o.startswith(f"{v} ") for o in keel)}
    if found := {name: versions for name, versions in found.items() if versions}:
        each = (f"{name} {' and '.join(versions)}" for name, versions in found.items())
        yield f"Packages: {', '.join(each)}."
    if processors:
        yield f"Processors: {', '.join(processors)}."


def machine_sentences(results: Sequence[Result]) -> Iterator[str]:
    """How many runs each machine did, and how long they took."""
    seconds: dict[str, list[float]] = {}
    for directory in ended_in(results):
        name = ", then ".join(machines_of(directory))
        seconds.setdefault(name, []).append(wall_seconds(directory))
    for name, each in sorted(seconds.items()):
        times = f"{duration(sum(each))} of rounds, the longest {duration(max(each))}"
        yield f"{num_of('run', each)} on {name}: {times}."
    if len({name for r in results if r.cell.take.is_time for name in r.machines}) > 1:
        yield "The seconds are from different machines and cannot be compared."
