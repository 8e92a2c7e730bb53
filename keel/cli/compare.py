"""`keel compare`: runs in one table and one plot."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from keel.cli.list_runs import percent, state_text
from keel.exports import csv_text
from keel.saved_runs import DATA_DIGEST, SITE_COUNTS, SavedRun, differing_keys, find_run, setting_of
from keel.tables import print_table
from protocol.config import keel_home
from protocol.files import digest, private_files, write_output
from protocol.options import typed
from protocol.text import printable, shortened
from server_app.history import CURVES, summarise

MAX_NAME_BYTES = 200  # of a run's name, in the name of a plot


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table here.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The plot. Default: a file in $KEEL_HOME/comparisons, named after the runs.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Plot means of runs with equal values of this key. Default: the keys that differ."
        ),
    ] = None,
    of: Annotated[
        list[str] | None,
        typer.Option(help="Plot this curve, such as personal.mean or global.macro-f1."),
    ] = None,
    band: Annotated[str, typer.Option(help="Around a mean: std, range or none.")] = "std",
) -> None:
    """Compare runs: accuracy, time, the config keys that differ, and their curves in one plot.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one.
    """
    is_directory = plot and plot.expanduser().is_dir()
    if plot and (is_directory or not plot.suffix):
        example = plot / "plot.png" if is_directory else plot.with_suffix(".png")
        raise ValueError(f"--output {plot}: name a file, such as {example}")
    found = [find_run(run) for run in runs]
    settings = [setting_of(run, with_seed=True) for run in found]
    keys = differing_keys(settings, frozenset())
    rows = [comparison_row(run) for run in found]
    columns: dict[str, list[str | Text]] = {
        "run": [run.name for run in found],
        "rounds": [str(row["rounds"]) for row in rows],
        "final": [percent(row["final"]) for row in rows],
        "best": [percent(row["best"]) for row in rows],
        "s/round": ["" if (s := row["seconds_per_round"]) is None else f"{s:.2f}" for row in rows],
        "state": [state_text(row["state"]) for row in rows],
        "differs in": [
            " ".join(f"{key}={typed(setting[key])}" for key in keys if key in setting)
            for setting in settings
        ],
    }
    print_table(columns, ["rounds", "final", "best", "s/round"])
    for remark in accuracy_remarks((row["run"], row["accuracy_of"]) for row in rows):
        print(printable(remark))
    if {DATA_DIGEST, SITE_COUNTS} & set(keys):
        print("the runs are on different data: their accuracies are of different images or labels")
    if csv_file:
        table: list[list[object]] = [[*rows[0], *keys]]
        for setting, row in zip(settings, rows, strict=True):
            table.append([*row.values(), *(setting.get(key) for key in keys)])
        write_output(csv_file.expanduser(), csv_text(table).encode(errors="replace"))
        print(f"table: {csv_file}")
    path = (plot or keel_home() / "comparisons" / f"{comparison_name(found)}.png").expanduser()
    from keel.results import compare as curves_of

    differing = [key for key in keys if any(key in run.config for run in found)] or ["method"]
    figure = curves_of(found, by or differing, of or "", band)
    with nullcontext() if plot else private_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = io.BytesIO()
        try:
            figure.savefig(picture, dpi=150, format=path.suffix[1:])
        except ValueError as error:  # an unknown format
            raise ValueError(f"--output {path}: {error}") from error
        write_output(path, picture.getvalue())
    print(f"plot: {path}")


def comparison_name(runs: Sequence[SavedRun]) -> str:
    """The first run's name, how many others there are, and a digest of all their directories."""
    directories = "\n".join(sorted(str(run.directory) for run in runs))
    others = f"-and-{len(runs) - 1}" if len(runs) > 1 else ""
    # file names have at most 255 bytes
    name = printable(runs[0].name).encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    return f"{name}{others}-{digest(directories.encode(errors='replace'))[:8]}"


def comparison_row(run: SavedRun) -> dict[str, Any]:
    """A run's row in the table of `compare`."""
    numbers = summarise(run.history, run.config, last_rounds=1)
    return {
        "run": run.name,
        "accuracy_of": numbers["accuracy_of"],
        "rounds": run.last_round,
        "final": numbers["final_accuracy"],
        "best": numbers["best_accuracy"],
        "seconds_per_round": numbers["seconds_per_round"] if run.history else None,
        "state": run.state,
    }


def accuracy_remarks(runs: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """What to know about the accuracies of runs, given each one's name and headline curve."""
    of: dict[str, list[str]] = {}
    for name, accuracy_of in runs:
        if accuracy_of:
            of.setdefault(accuracy_of, []).append(name)
    if len(of) > 1:
        descriptions = {f"{key}.{name}": text for key, name, text in CURVES}
        parts = [f"{descriptions[curve]}: {shortened(names)}" for curve, names in of.items()]
        yield f"accuracies of different models: {'; '.join(parts)}"
