"""`keel list`, `stop`, `compare`, `predict`, `diagnose`, `export`: on runs."""

import io
import itertools
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from keel.exports import csv_text
from keel.interrupts import uninterrupted
from keel.runs import (
    COLOURS,
    SavedRun,
    all_runs,
    differing_keys,
    find_run,
    lock_holder,
    only_run,
    runs_directory,
    uses,
)
from keel.tables import add_column, is_too_wide, print_table, terminal_console
from protocol.config import keel_home
from protocol.files import digest, private_files, write_output
from protocol.options import typed
from protocol.text import in_one_line, num_of, printable, shortened
from server_app.history import CURVES, duration, summarise
from server_app.run_reader import CONFIG_FILE, LOCK_FILE

STOP_TIMEOUT_S = 90.0
MAX_NAME_BYTES = 200  # of a run's name, in the name of a plot
MAX_SHOWN_NAME = 60  # characters of a run's name in a table, or half of the terminal
PLACES = {"output-dir", "run-name", "data-dir", "resume"}  # keys that `compare` ignores

RunName = Annotated[str, typer.Argument()]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_command(
    base: Annotated[Path | None, typer.Argument(metavar="[DIRECTORY]")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Number of runs; 0: all.")
    ] = 30,
    as_json: JsonOption = False,
) -> None:
    """List the runs of a directory, by default $KEEL_HOME/runs, most recently changed first."""
    base = (base or runs_directory()).expanduser()
    if not base.is_dir() and base != runs_directory():
        raise ValueError(f"{base} is not a directory")
    if (base / CONFIG_FILE).is_file():
        raise ValueError(f"{base} is a run directory: `keel status {base}` shows it")
    found = all_runs(base)
    shown = found[:limit] if limit else found
    rows = [row_of(SavedRun(run.directory)) for run in shown]  # no history stays in memory
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = {
        "run": [row["run"] for row in rows],
        "method": [row["method"] for row in rows],
        "data": [row["source"] for row in rows],
        "rounds": [f"{row['rounds']}/{row['num_rounds']}" for row in rows],
        "accuracy": [percent(row["accuracy"]) for row in rows],
        "state": [state_text(row["state"]) for row in rows],
        "age": [age_of(run) for run in shown],
    }
    if rows:
        print_runs(columns, ["data", "method", "age", "accuracy"])
    if not found:
        hint = " yet; `keel run` starts one" if base == runs_directory() else ""
        print(f"no runs in {base}{hint}")
    elif len(shown) < len(found):
        print(f"{num_of('older run', len(found) - len(shown))}: keel list --limit 0")


def row_of(run: SavedRun) -> dict[str, Any]:
    """A run as a row; "?" and None where it cannot be read."""
    is_readable = not run.fault
    config = run.config if is_readable else {}
    return {
        "run": run.name,
        "directory": str(run.directory),
        "method": str(config.get("method", "?")),
        "source": run.source if is_readable else "?",
        "model": str(config.get("model", "?")),
        "rounds": run.last_round if is_readable else 0,
        "num_rounds": config.get("num-rounds", "?"),
        "accuracy": run.accuracy if is_readable else None,
        "state": run.state,
        "changed": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(run.last_change)),
    }


def age_of(run: SavedRun) -> str:
    """The time since its last change, in one unit; empty where that cannot be read."""
    last = run.last_change
    return " ".join(duration(time.time() - last).split()[:2]) if last else ""


def state_text(state: str) -> str:
    """A state, cut where the terminal is narrow: `keel status` shows all of it."""
    return in_one_line(state, max(14, terminal_console().width // 5))


def table_of(columns: Mapping[str, Sequence[str]]) -> Table:
    """A table of runs; their states have colours."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name, cells in columns.items():
        is_text = name in ("run", "method", "data", "state", "differs in")
        justify: Literal["left", "right"] = "left" if is_text else "right"
        add_column(table, name, cells, justify, is_whole=name != "differs in")
    for row in zip(*columns.values(), strict=True):
        shown = dict(zip(columns, map(escape, map(printable, row)), strict=True))
        if state := shown.get("state"):  # not where the terminal is narrow
            shown["state"] = f"[{COLOURS.get(state, 'red')}]{state}[/]"
        table.add_row(*shown.values())
    return table


def print_runs(columns: Mapping[str, Sequence[str]], drop_first: Sequence[str]) -> None:
    """Print a table of runs, without the columns `drop_first` where the terminal is too narrow.

    A name that would take more than half of it is cut: commands find a run by how its name begins.
    """
    max_length = max(MAX_SHOWN_NAME, terminal_console().width // 2)
    names = [n if len(n) <= max_length else f"{n[: max_length - 1]}…" for n in columns["run"]]
    shown = {**columns, "run": names}
    print_table(lambda names: table_of({name: shown[name] for name in names}), shown, drop_first)


def stop(run: Annotated[str, typer.Argument(show_default=False)] = "") -> None:
    """Stop a run cleanly, as Ctrl-C in its terminal does; `keel resume` continues it.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one; it can be left out if only
    one run is running.
    """
    running = [] if run else [each for each in all_runs() if each.is_running]
    saved = find_run(run) if run else only_run(running, "can be stopped", "keel stop")
    if not saved.is_running:
        raise ValueError(f"{saved.name} is not running: {saved.state}")
    pid = lock_holder(saved.directory / LOCK_FILE)
    if pid is None:
        raise RuntimeError(
            f"cannot determine which process writes {saved.directory}: press Ctrl-C where it runs"
        )
    if is_flower(pid):
        raise ValueError(
            f"{saved.name} was started by `flwr run` (process {pid}): use `flwr stop RUN_ID`"
        )
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while saved.is_running and time.monotonic() < deadline:
        time.sleep(0.1)
    if saved.is_running:
        raise RuntimeError(
            f"process {pid} still writes the run {STOP_TIMEOUT_S:g} s after it was asked to stop: "
            "repeat `keel stop` to end it at once"
        )
    saved = SavedRun(saved.directory)
    print(f"{saved.name}: {saved.state} after round {saved.last_round}")


def is_flower(pid: int) -> bool:
    """Whether the process is one of Flower's, whose runs `flwr stop` ends."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return any(Path(part).name.startswith(("flower-", "flwr-")) for part in command[:2])


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table here.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            "--plot",
            help="The plot. Default: a file in $KEEL_HOME/comparisons, named after the runs.",
        ),
    ] = None,
) -> None:
    """Compare runs: accuracy, time, the config keys that differ, and their curves in one plot.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one.
    """
    is_directory = plot and plot.expanduser().is_dir()
    if plot and (is_directory or not plot.suffix):
        example = plot / "plot.png" if is_directory else plot.with_suffix(".png")
        raise ValueError(f"--output {plot}: name a file, such as {example}")
    found = [find_run(run) for run in runs]
    keys = differing_keys([run.config for run in found], PLACES)
    rows = [comparison_row(run) for run in found]
    columns = {
        "run": [run.name for run in found],
        "rounds": [str(row["rounds"]) for row in rows],
        "final": [percent(row["final"]) for row in rows],
        "best": [percent(row["best"]) for row in rows],
        "s/round": ["" if (s := row["seconds_per_round"]) is None else f"{s:.2f}" for row in rows],
        "state": [state_text(row["state"]) for row in rows],
    }
    differences = [
        " ".join(f"{k}={typed(run.config.get(k))}" for k in keys if uses(run.config, k))
        for run in found
    ]
    everything = columns | {"differs in": differences}
    is_apart = is_too_wide(table_of(everything))
    print_runs(columns if is_apart else everything, ["s/round", "rounds", "best"])
    if is_apart and keys:
        print("differs in")
        for run, difference in zip(found, differences, strict=True):
            terminal_console().print(printable(f"{run.name}: {difference}"), markup=False)
    for remark in accuracy_remarks((row["run"], row["accuracy_of"]) for row in rows):
        print(printable(remark))
    if csv_file:
        table: list[list[object]] = [[*rows[0], *keys]]
        for run, row in zip(found, rows, strict=True):
            own = (run.config.get(k) if uses(run.config, k) else None for k in keys)
            table.append([*row.values(), *own])
        write_output(csv_file.expanduser(), csv_text(table).encode(errors="replace"))
        print(f"table: {csv_file}")
    path = (plot or keel_home() / "comparisons" / f"{comparison_name(found)}.png").expanduser()
    from keel.plots import figure_of

    with nullcontext() if plot else private_files():
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = io.BytesIO()
        figure = figure_of(found, keys)
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
        of.setdefault(accuracy_of or "", []).append(name)
    if unevaluated := of.pop("", []):
        yield f"no evaluation yet, so not in the plot: {shortened(unevaluated)}"
    if len(of) > 1:
        descriptions = {f"{key}.{name}": text for key, name, text in CURVES}
        parts = [f"{descriptions[curve]}: {shortened(names)}" for curve, names in of.items()]
        yield f"accuracies of different models: {'; '.join(parts)}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "" if value is None else f"{100 * value:.2f} %"


ClientName = Annotated[
    str, typer.Option(help="The personal model of this client, such as client-0000.")
]


def predict(
    run: RunName,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...")],
    client: ClientName = "",
    as_json: JsonOption = False,
) -> None:
    """Classify images with the final model of a run: file, class, probability."""
    directory = find_run(run).directory
    for path in images:  # before torch is imported
        check_image(path)

    with uninterrupted():
        from server_app.load_model import load_model

    model = load_model(directory, client)
    found = []
    for path in images:
        probabilities = model.probabilities(read_image(path)[None])[0]
        best = int(probabilities.argmax())
        name, share = model.class_names[best], float(probabilities[best])
        found.append({"image": str(path), "class": name, "probability": round(share, 4)})
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        image, name = (printable(str(row[key])) for key in ("image", "class"))
        print(f"{image}\t{name}\t{row['probability']:.3f}")


def check_image(path: Path) -> None:
    """ValueError naming the file if it is missing, or training would refuse it by its header."""
    from data.decoding import with_file

    if not path.expanduser().exists():
        raise ValueError(f"{path} does not exist")
    if not path.expanduser().is_file() and not path.expanduser().is_dir():  # a folder: `with_file`
        raise ValueError(f"{path}: not a plain file: write the image to one")  # a pipe blocks
    with_file(str(path.expanduser()), lambda image: None, upright=False)


def read_image(path: Path) -> Any:
    """An image as uint8 [H, W] if it is grey, else [H, W, 3], read as training reads it."""
    import numpy as np

    from data.decoding import CHANNELS_OF_MODE, with_file

    modes = {1: "L", 3: "RGB"}
    return with_file(
        str(path.expanduser()),
        lambda image: np.array(image.convert(modes[CHANNELS_OF_MODE[image.mode]])),
    )


def diagnose(
    run: RunName,
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")] = None,
    only: Annotated[str, typer.Option(help="Comma-separated names of measures, or all.")] = "all",
    samples: Annotated[int, typer.Option(help="Size of the probe, from the test set.")] = 2000,
    output: Annotated[
        Path | None, typer.Option(help="New directory; default RUN/diagnostics-models.")
    ] = None,
) -> None:
    """Measure the representations of a run's models.

    Compares them with the run's final global model and with each other. A MODEL is a client's name
    (its own model), a checkpoint of the run, or another run's model.safetensors; by default all
    clients that have a model. Writes numbers.json, cka.png and features.png.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one.
    """
    directory = find_run(run).directory
    to = (output or directory / "diagnostics-models").expanduser().absolute()
    with uninterrupted():
        from keel.model_diagnostics import write_diagnostics

    with nullcontext() if output else private_files():
        write_diagnostics(directory, models or [], only, samples, to)
    print(to)


Format = StrEnum("Format", ["csv", "onnx", "torchscript"])  # what a run is exported to


def export(
    run: RunName,
    to: Annotated[Format, typer.Option(help="csv: the history; onnx, torchscript: the model.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: RUN.csv, .onnx or .pt here.")
    ] = None,
    client: ClientName = "",
) -> None:
    """Export a run's history, or its final model, which includes the normalisation.

    An exported model takes pixels 0..255 as float32 [N, C, H, W] and returns logits [N, classes].
    """
    saved = find_run(run)
    suffix = {Format.csv: "csv", Format.onnx: "onnx", Format.torchscript: "pt"}[to]
    stem = f"{saved.name}-{client}" if client else saved.name
    path = (output or Path(f"{stem}.{suffix}")).expanduser().absolute()
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name a file, such as {path / f'{stem}.{suffix}'}")
    if client and to is Format.csv:
        raise ValueError("--client does not apply to --to csv: the history covers all clients")
    if to is Format.csv:
        what = f"{num_of('round', write_csv(saved, path))} of {saved.name}"
    else:
        with uninterrupted():
            from keel.cli.export import export_model

        export_model(saved.directory, client, to, path)
        what = f"the model of {f'{client} in ' if client else ''}{saved.name}"
    print(f"wrote {what}: {path}")


def write_csv(run: SavedRun, path: Path) -> int:
    """Every round's numbers as a row; returns how many there are."""
    rows = run.rows()
    if not rows:
        raise ValueError(f"{run.name} has no finished round: nothing to export")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = ([row.get(name) for name in columns] for row in rows)
    write_output(path, csv_text(itertools.chain([columns], cells)).encode(errors="replace"))
    return len(rows)
