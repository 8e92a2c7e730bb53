"""`keel diagnose`: measures of the representations of a run's models."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.arguments import RunArgument
from keel.interrupts import uninterrupted
from keel.saved_runs import find_run
from protocol.files import private_files


def diagnose(
    run: RunArgument,
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")] = None,
    only: Annotated[str, typer.Option(help="Comma-separated names of measures, or all.")] = "all",
    samples: Annotated[int, typer.Option(help="Size of the probe, from the test set.")] = 2000,
    output: Annotated[
        Path | None, typer.Option(help="New directory. Default: RUN/diagnostics-models.")
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
