"""`keel export`: a run's history as CSV, its model as ONNX."""

import itertools
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.arguments import ClientOption, RunArgument
from keel.exports import csv_text
from keel.interrupts import uninterrupted
from keel.saved_runs import SavedRun, find_run
from protocol.files import write_output
from protocol.text import num_of

Format = StrEnum("Format", ["csv", "onnx"])  # what a run is exported to


def export(
    run: RunArgument,
    to: Annotated[Format, typer.Option(help="csv: the history; onnx: the model.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: RUN.csv or .onnx here.")
    ] = None,
    client: ClientOption = "",
) -> None:
    """Export a run's history, or its final model, which includes the normalisation.

    An exported model takes pixels 0..255 as float32 [N, C, H, W] and returns logits and
    probabilities [N, classes]. Its metadata says how an image file becomes these pixels.
    """
    saved = find_run(run)
    stem = f"{saved.name}-{client}" if client else saved.name
    path = (output or Path(f"{stem}.{to}")).expanduser().absolute()
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name a file, such as {path / f'{stem}.{to}'}")
    if client and to is Format.csv:
        raise ValueError("--client does not apply to --to csv: the history covers all clients")
    if to is Format.csv:
        what = f"{num_of('round', write_csv(saved, path))} of {saved.name}"
    else:
        with uninterrupted():
            from keel.onnx_export import export_model

        export_model(saved.directory, client, path)
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
