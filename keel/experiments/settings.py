"""What a table was made with: the settings of its runs beside the paper's, code and machines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.experiments.recipe import Recipe
from keel.experiments.results import Result, Results, differing, with_own_lengths
from keel.experiments.runs import (
    IRRELEVANT,
    Options,
    data_of,
    history_in,
    identity,
    machines_of,
    precision_of,
    run_of,
)
from keel.saved_runs import short_source, split_text
from protocol.config import default_config, resolve_config
from protocol.options import typed
from protocol.text import num_of
from server_app.history import duration
from server_app.run_reader import RunReader

# always shown; further keys where they differ from the default or the paper's value
SHOWN = (
    *("num-rounds", "num-clients", "train-fraction", "local-epochs", "batch-size", "lr"),
    *("lr-decay", "momentum", "weight-decay", "model"),
)
WHERE = {"source", "partition", "alpha", "classes-per-client", "shards-per-client"}
NOT_A_SETTING = {"method", "seed"}  # rows and seeds


@dataclass(frozen=True)
class Setting:
    """A key with the values that the runs of a table have. paper: its values, where they differ."""

    name: str
    ours: str
    paper: str = ""


def settings_of(recipe: Recipe, results: Results, options: Options) -> list[Setting]:
    """Data, split, the keys SHOWN, and each other key that is not the default or the paper's."""
    pairs: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    others: dict[str, None] = {}
    defaults = default_config()
    for cell in recipe.cells:
        result = results.get(cell.name)
        chosen = (result and result.candidate) or cell.candidates[0]
        run = run_of(cell, chosen, options.seeds[0], options, Path())
        if run.name in pairs:
            continue
        flats = (resolve_config(keys).flat for keys in (run.keys, {**cell.keys, **chosen}))
        ours, paper = (identity(with_own_lengths(flat), is_timed=True) for flat in flats)
        pairs[run.name] = ours, paper
        others |= {key: None for key in sorted(ours) if ours[key] != defaults.get(key)}
        others |= dict.fromkeys(key for key, *_ in differing(cell, chosen, run))
    found = []
    for name, text in (("data", lambda flat: short_source(flat["source"])), ("split", split_text)):
        found.append(setting(name, [(text(ours), text(paper)) for ours, paper in pairs.values()]))
    more = [key for key in others if key not in WHERE | NOT_A_SETTING | IRRELEVANT]
    for key in dict.fromkeys([*SHOWN, *more]):
        both = [(ours.get(key), paper.get(key)) for ours, paper in pairs.values()]
        found.append(setting(key, [pair for pair in both if pair != (None, None)]))
    return found


def setting(name: str, pairs: Sequence[tuple[Any, Any]]) -> Setting:
    """One line: each value once, and the paper's if a run has another."""
    ours, paper = (", ".join(dict.fromkeys(typed(pair[i]) for pair in pairs)) for i in (0, 1))
    return Setting(name, ours, "" if all(a == b for a, b in pairs) else paper)


def directories_of(results: Sequence[Result]) -> list[Path]:
    """The run directories of the results, each once."""
    runs = {run.directory for result in results for run in result.runs if run.status}
    return sorted(path for path in runs if path.is_dir())


def origin_of(results: Sequence[Result]) -> list[str]:
    """Sentences on code, precision, data, packages, processors, machines and time."""
    directories = directories_of(results)
    manifests = [RunReader(path).manifest for path in directories]
    versions = [(n, v) for each in manifests for n, v in each.get("versions", {}).items()]
    digests = [digest for path in directories if (digest := data_of(path))]
    recorded = f"recorded by {len(digests)} of {len(directories)} runs"
    facts = {
        "Code": [code for each in manifests for code in each.get("code", ())],
        "Keel": [str(keel) for each in manifests for keel in each.get("keel", ())],
        "Packages": [f"{n} {v}" for n, v in versions if n not in ("sources", "gpu", "cpu")],
        "Processors": [v for n, v in versions if n == "cpu"],
        "Precision": [name for path in directories for name in precision_of(path)],
        f"Digest of the data, {recorded}": digests,
    }
    found = {name: ", ".join(sorted({*values})) for name, values in facts.items()}
    seconds: dict[str, list[float]] = {}
    for directory in directories:
        name = ", then ".join(machines_of(directory))
        seconds.setdefault(name, []).append(sum(history_in(directory).wall_s))
    return [
        *(f"{name}: {text}." for name, text in found.items() if text),
        *(
            f"{num_of('run', each)} on {name}: {duration(sum(each))} of rounds, the longest "
            f"{duration(max(each))}."
            for name, each in sorted(seconds.items())
        ),
    ]
