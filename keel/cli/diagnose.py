"""`keel diagnose`: measure the representations of a finished run's models."""

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Client, checkpoint or model.safetensors."),
    ] = None,
    only: Annotated[str, typer.Option(help="Comma-separated names of diagnostics.")] = "all",
    samples: Annotated[int, typer.Option(help="Size of the probe, from the test set.")] = 2000,
    output: Annotated[
        Path | None, typer.Option(help="New directory; default RUN/diagnostics-models.")
    ] = None,
) -> None:
    """Measure the representations of a run's models.

    Compares them with the run's final global model and with each other. A MODEL is a client's name
    (its own model), a checkpoint of the run, or another run's model.safetensors; by default all
    clients that have a model. Writes numbers.json, cka.png and features.png.
    """
    from keel.model_diagnostics import write_diagnostics

    run = run.expanduser().absolute()
    output = (output or run / "diagnostics-models").expanduser().absolute()
    write_diagnostics(run, models or [], only, samples, output)
    print(output)
