"""`keel experiments`: run the papers' tables and figures, report, verify and list them."""

import math
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keel.cli.overrides import parse_overrides
from keel.interrupts import uninterrupted
from keel.saved_runs import find_run
from protocol.config import keel_home
from protocol.files import full_path
from protocol.options import OptionValue
from protocol.ray_nodes import check_gpus
from protocol.text import num_of

app = typer.Typer(
    help="Run, report and verify the papers' tables and figures, and sweeps of your own.",
    no_args_is_help=True,
    add_completion=False,
)

Output = Annotated[
    Path | None,
    typer.Option(help="Directory of all runs and reports. Default: $KEEL_HOME/experiments."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Rows and columns, as 'NAME;NAME'. Repeatable.", metavar="NAMES"),
]
Seeds = Annotated[
    int,
    typer.Option(
        min=0,
        max=10_000,
        help="Number of seeds: the recipe's, then others. 0: the recipe's, but at least 6 if "
        "values are tried.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="A config key of all runs. Repeatable.", metavar="KEY=VALUE"),
]
Workers = Annotated[
    int, typer.Option(min=0, help="Concurrent runs. 0: one per GPU, or one per core.")
]
Cpus = Annotated[int, typer.Option(min=1, help="CPUs of each run.")]
Gpus = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs of each run, such as 0.25. Default: 1, where there are any."),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a Ray cluster that this machine is part of. Default: $RAY_ADDRESS."
    ),
]


def output_folder(output: Path | None) -> Path:
    """The absolute output directory."""
    return full_path(output or keel_home() / "experiments")


def new_console() -> Console:
    """Plain text, one line per message."""
    return Console(highlight=False, soft_wrap=True)


def parse_changes(assignments: Sequence[str]) -> dict[str, OptionValue]:
    """The keys of `--set KEY=VALUE`; text needs no quotes."""
    from keel.experiments.recipe_file import RUNNER_KEYS

    try:
        changes = parse_overrides(assignments)
    except ValueError as error:
        raise ValueError(f"--set {error}") from None
    if own := sorted(changes.keys() & RUNNER_KEYS):
        raise ValueError(f"--set {own[0]}: set by the runner; use --seeds and --output")
    return changes


@app.command("run")
def run_command(
    recipe: Annotated[str, typer.Argument()],
    only: Only = None,
    seeds: Seeds = 0,
    set_: Changes = None,
    workers: Workers = 0,
    cpus_per_run: Cpus = 1,
    gpus_per_run: Gpus = None,
    ray: Ray = None,
    output: Output = None,
) -> None:
    """Run a recipe: a name from `keel experiments list`, or a YAML file.

    Finished runs are skipped, interrupted ones resumed.
    """
    with uninterrupted():
        from keel.experiments.jobs import first_seeds, seeds_for, selected
        from keel.experiments.recipe import load_recipe
        from keel.experiments.runs import Options

    if ray == "":
        raise ValueError("--ray is empty: expected HOST:PORT of a Ray cluster")
    if gpus_per_run is not None and not math.isfinite(gpus_per_run):
        raise ValueError(f"--gpus-per-run {gpus_per_run:g}: expected a finite number >= 0")
    check_gpus("gpus_per_run", gpus_per_run or 0)
    loaded = load_recipe(recipe)
    cells = selected(loaded, [name.strip() for names in only or () for name in names.split(";")])
    options = Options(
        changes=parse_changes(set_ or ()),
        seeds=first_seeds(loaded, seeds) or seeds_for(loaded, cells),
    )
    with uninterrupted():  # imports torch, which the checks above do not need
        from keel.experiments.runner import run_recipe
        from keel.experiments.tasks import Resources

    console, folder = new_console(), output_folder(output)
    if not seeds and len(options.seeds) > len(loaded.seeds):
        console.print(
            f"{len(options.seeds)} seeds instead of the recipe's {len(loaded.seeds)}: the first "
            "selects a value and is left out of the comparison; --seeds sets another number"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        cluster = (ray, "ray") if ray else (os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS")
        resources = Resources(workers, cpus_per_run, gpus_per_run, *cluster)
        failed = run_recipe(loaded, cells, options, folder, resources, console)
    except KeyboardInterrupt:
        console.print("interrupted; repeat the command to resume from the last finished rounds")
        raise typer.Exit(130) from None
    if failed:
        console.print(
            f"[red]{num_of('run', failed)} failed[/]: see the reasons above, and the logs"
        )
    if loaded.shows == "labels":
        console.print("nothing to train: the report plots the splits")
    report = shlex.join(["keel", "experiments", "report", "--output", str(folder)])
    console.print(f"results: {folder}; {report}", markup=False)
    raise typer.Exit(1 if failed else 0)


@app.command("report")
def report_command(output: Output = None) -> None:
    """Write report.html and report.md for all runs in the output directory."""
    from keel.experiments.report import write_report

    for path in write_report(output_folder(output)):
        print(path)


@app.command("verify")
def verify_command(
    run: Annotated[str, typer.Argument()],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to replay.")] = 2,
) -> None:
    """Verify finished runs against their manifests, and replay their first rounds.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one; or a directory of several.
    """
    directory = Path(run).expanduser()
    if not directory.is_dir():
        directory = find_run(run).directory
    from keel.experiments.verify import verify

    raise typer.Exit(verify(directory, rounds, new_console()))


@app.command("list")
def list_command(output: Output = None) -> None:
    """List the recipes, and how many of their runs are finished on this machine."""
    from keel.experiments.recipe import load_recipe, shipped_recipes
    from keel.experiments.results import runs_needed
    from keel.experiments.runs import Options, code_folder
    from keel.tables import show

    folder = output_folder(output) / "runs" / code_folder()
    rows = []
    for name in shipped_recipes():
        recipe = load_recipe(name)
        options = Options({}, recipe.seeds)
        runs = [run.is_done for _, run in runs_needed(recipe.cells, options, folder)]
        is_run = recipe.shows != "labels"
        rows.append(
            {
                "recipe": name,
                "paper": f"{recipe.paper} {recipe.item}",
                "title": recipe.title,
                "size": f"{len(recipe.rows)} x {len(recipe.columns)}",
                "finished": f"{sum(runs)} of {len(runs)}" if is_run else "none needed",
            }
        )
    show(rows, False, "Recipes")
