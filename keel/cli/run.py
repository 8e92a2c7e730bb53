"""`keel run` and `keel resume`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.overrides import parse_overrides
from keel.engine import run as run_on_engine
from keel.interrupts import INTERRUPTED_CODE, interruptible
from keel.job import Engine, EngineOptions
from keel.saved_runs import FINISHED, all_runs, find_run, only_run
from protocol.options import OptionValue

Assignments = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
Clients = Annotated[
    int | None,
    typer.Option(help="Number of simulated clients. Default: num-clients of the config, else 10."),
]
EngineName = Annotated[
    Engine,
    typer.Option(
        "--engine",
        help="inline: in this process; flower: Flower's simulation; deployment: on a SuperLink.",
    ),
]
Cpus = Annotated[
    float | None, typer.Option(help="CPUs per worker, with --engine flower. Default: 1.")
]
Gpus = Annotated[
    float | None,
    typer.Option(
        help="GPUs per worker, with --engine flower, such as 0.25. Default: 1, where there are any."
    ),
]
Federation = Annotated[
    str,
    typer.Option(help="With --engine deployment: a name in Flower's config.toml, or HOST:PORT."),
]
RootCertificates = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="The deployment's ca.pem, with --federation HOST:PORT."
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="With --engine flower: HOST:PORT of a Ray cluster that this machine is part of. "
        "Default: $RAY_ADDRESS."
    ),
]


def run(
    assignments: Assignments = None,
    preset: Annotated[str, typer.Option(help="A paper's setting; see `keel presets`.")] = "",
    clients: Clients = None,
    engine: EngineName = Engine.inline,
    gpus_per_client: Gpus = None,
    cpus_per_client: Cpus = None,
    federation: Federation = "",
    root_certificates: RootCertificates = None,
    ray: Ray = None,
) -> int:
    """Train: `keel run method=fedintr num-rounds=10 source=folder:/data`.

    Arguments are config keys: `keel keys` lists them, `keel methods NAME` those of a method. Exit
    code: 0 if the run finished, 1 if it failed, 2 if it was refused, 130 if it was interrupted.
    """
    overrides = parse_overrides(assignments or [])
    if preset:
        if overrides.get("preset", preset) != preset:
            raise ValueError(f"--preset {preset} and preset={overrides['preset']} differ")
        overrides["preset"] = preset
    if overrides.get("resume"):
        raise ValueError(
            f"resume is not a key of `keel run`: use `keel resume {overrides['resume']}`"
        )
    options = EngineOptions(
        engine, clients, cpus_per_client, gpus_per_client, federation, root_certificates, ray
    )
    return executed(overrides, options)


def resume(
    run: Annotated[str, typer.Argument(show_default=False)] = "",
    assignments: Assignments = None,
    engine: EngineName = Engine.inline,
    gpus_per_client: Gpus = None,
    cpus_per_client: Cpus = None,
    federation: Federation = "",
    root_certificates: RootCertificates = None,
    ray: Ray = None,
) -> int:
    """Continue an interrupted run from its last checkpoint. Only num-rounds=N may change.

    RUN is a path, a name under $KEEL_HOME/runs, or the beginning of one; it can be left out if only
    one run is unfinished. With --engine deployment it is the path or the whole name of a run on
    the server.
    """
    if "=" in run and not Path(run).expanduser().exists():
        run, assignments = "", [run, *(assignments or [])]
    overrides = parse_overrides(assignments or [])
    if changed := sorted(overrides.keys() - {"num-rounds"}):
        raise ValueError(f"{changed[0]}: cannot change in a resumed run; only num-rounds can")
    options = EngineOptions(
        engine, None, cpus_per_client, gpus_per_client, federation, root_certificates, ray
    )
    if engine is Engine.deployment:  # the run is on the server, which checks the rest
        if not run:
            raise ValueError(
                "--engine deployment: name the run; its log on the server has its name"
            )
        return executed({"resume": run} | overrides, options)
    ended = [] if run else [each for each in all_runs() if not each.is_running]
    unfinished = [each for each in ended if each.state != FINISHED]
    saved = find_run(run) if run else only_run(unfinished, "can be resumed", "keel resume")
    if saved.is_running:
        raise ValueError(f"{saved.name} is running: `keel status {saved.reference}` shows it")
    return executed({"resume": str(saved.directory)} | overrides, options)


def executed(overrides: Mapping[str, OptionValue], options: EngineOptions) -> int:
    """Execute a run for the command line; returns the exit code."""
    try:
        # a run on a deployment does not depend on the terminal that submitted it
        with interruptible(ends_on_hangup=not options.is_remote):
            run_on_engine(overrides, options)
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    return 0
