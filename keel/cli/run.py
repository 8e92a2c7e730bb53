"""`keel run` and `keel resume`: validate, show what will run, execute it on an engine."""

import math
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keel.cli.interrupts import INTERRUPTED_CODE, interruptible
from keel.cli.overrides import check_simulated, checked_config, parse_overrides
from keel.runs import FINISHED, SavedRun, all_runs, find_run, only_run
from protocol.code import line_in_method
from protocol.config import RunConfig
from protocol.options import CommandOptionError, OptionValue
from protocol.ray_nodes import check_gpus
from server_app.run_reader import CONFIG_FILE, check_has_rounds_left, new_path

if TYPE_CHECKING:
    from keel.cli.engines import Job
    from keel.cli.progress import Terminal

DEFAULT_CLIENTS = 10
NOT_STARTED = "stopped before the run started: nothing was saved"
NOT_RESUMED = "stopped before the run was resumed: it is unchanged"


Engine = StrEnum("Engine", ["inline", "flower", "deployment"])  # what executes a run


@dataclass(frozen=True)
class EngineOptions:
    """Which engine executes a run, and its options; None: the default."""

    engine: Engine = Engine.inline
    clients: int | None = None
    cpus_per_client: float | None = None
    gpus_per_client: float | None = None
    federation: str = ""
    root_certificates: Path | None = None
    ray: str | None = None

    def __post_init__(self) -> None:
        other_engine = f"needs the flower engine; this is the {self.engine} engine"
        for name in ("cpus_per_client", "gpus_per_client", "ray"):
            if getattr(self, name) is not None and self.engine is not Engine.flower:
                raise CommandOptionError(name, other_engine)
        for name in ("cpus_per_client", "gpus_per_client"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise CommandOptionError(name, f"{value:g}: expected a finite number >= 0")
        cpus = self.cpus_per_client
        if cpus is not None and (cpus < 1 or cpus != int(cpus)):
            raise CommandOptionError(
                "cpus_per_client",
                f"{cpus:g}: expected a whole number >= 1, because Flower does not divide a CPU",
            )
        check_gpus("gpus_per_client", self.gpus_per_client or 0)
        if self.ray == "":
            raise CommandOptionError("ray", "is empty: expected HOST:PORT of a Ray cluster")
        if self.clients is not None and self.clients < 1:
            raise CommandOptionError("clients", f"{self.clients}: expected a number >= 1")
        if self.clients is not None and self.engine is Engine.deployment:
            raise CommandOptionError(
                "clients",
                f"{self.clients}: the clients of a deployment are not simulated; "
                f"num-clients={self.clients} waits for {self.clients} connected clients",
            )
        if bool(self.federation) != (self.engine is Engine.deployment):
            raise CommandOptionError(
                "federation",
                "goes together with --engine deployment: it is the name of a connection in "
                "Flower's config.toml, or the HOST:PORT of a SuperLink",
            )


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
    readable = [r for r in all_runs() if os.access(r.directory / CONFIG_FILE, os.R_OK)]
    unfinished = [] if run else [r for r in readable if not r.is_running and r.state != FINISHED]
    saved = find_run(run) if run else only_run(unfinished, "can be resumed", "keel resume")
    if saved.is_running:
        raise ValueError(f"{saved.name} is running: `keel status {saved.reference}` shows it")
    return executed({"resume": str(saved.directory)} | overrides, options)


def executed(overrides: Mapping[str, OptionValue], options: EngineOptions) -> int:
    """Execute a run for the command line; returns the exit code."""

    try:
        # a run on a deployment does not depend on the terminal that submitted it
        with interruptible(ends_on_hangup=options.engine is not Engine.deployment):
            execute(overrides, options)
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    return 0


def execute(
    overrides: Mapping[str, OptionValue],
    options: EngineOptions,
    quiet: bool = False,
    hidden: Container[str] = (),
) -> SavedRun | None:
    """Execute a run and show its progress; returns its directory once it has finished.

    hidden: labels of rows of the plan that are not shown.
    None: on a deployment, where the directory is on the server. ValueError, one line, if the run is
    refused, RuntimeError if it failed. KeyboardInterrupt stops it cleanly and is raised again.
    """
    try:
        engine, job, terminal = prepared(overrides, options, quiet, hidden)
    except KeyboardInterrupt:
        if not quiet:
            print(NOT_RESUMED if overrides.get("resume") else NOT_STARTED)
        raise
    with terminal:
        try:
            engine(job, terminal)
        except KeyboardInterrupt:
            terminal.bar.stop()
            terminal.stopped()
            raise
        except (ValueError, OSError, RuntimeError) as error:
            terminal.failed()
            if terminal.directory:  # training has begun: a failure
                raise RuntimeError(f"{error}{line_in_method(error)}") from error
            raise
        except Exception as error:
            if place := line_in_method(error):  # a mistake in a method of the user's own
                raise RuntimeError(f"{type(error).__name__}: {error}{place}") from error
            raise
    terminal.finished()
    return SavedRun(terminal.directory) if terminal.directory else None


def prepared(
    overrides: Mapping[str, OptionValue],
    options: EngineOptions,
    quiet: bool,
    hidden: Container[str],
) -> "tuple[Callable[[Job, Terminal], None], Job, Terminal]":
    """(the engine, what it is to execute, the terminal with the plan). ValueError if refused."""
    overrides = dict(overrides)
    name = str(overrides.get("resume", ""))
    is_remote = options.engine is Engine.deployment
    resumed = find_run(name) if name and not is_remote else None
    config = config_of(overrides, resumed)
    if resumed and resumed.has_sites:
        raise ValueError(
            f"{resumed.name}: its clients have data of their own, as in a deployment: resume it "
            f"with `{resumed.resume_command}`"
        )
    if resumed:
        check_has_rounds_left(resumed, config.rounds.num_rounds)
    overrides, num_clients = with_clients(overrides, config, options.clients, resumed)
    config = config_of(overrides, resumed)

    if options.engine is Engine.flower and (gpu := config.train.device).startswith("cuda:"):
        gpus = options.gpus_per_client
        if gpus != 0 and int(gpu.removeprefix("cuda:")) >= max(1, gpus or 1):
            raise ValueError(
                f"device = {gpu!r}: with --engine flower Ray gives each worker its own GPU, which "
                "is cuda:0 there: set device=cuda"
            )

    from keel.deployment.superlink import check_connection

    if is_remote:
        check_connection(options.federation)
    elif not resumed:
        check_simulated(config, num_clients)
        check_new_directory(config)

    from keel.cli import engines
    from keel.cli.plan import flwr_rows, plan_rows
    from keel.cli.progress import Terminal
    from keel.deployment.cluster import cluster_nodes

    ray, ray_key = options.ray or "", "--ray"
    if options.engine is Engine.flower and not ray:  # the processes would use it, unchecked
        ray, ray_key = os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS"
    job = engines.Job(
        overrides,
        num_clients,
        cpus_per_client=1 if options.cpus_per_client is None else options.cpus_per_client,
        gpus_per_client=options.gpus_per_client,
        federation=options.federation,
        root_certificates=options.root_certificates,
        ray=ray,
        nodes=cluster_nodes(ray, ray_key) if ray else (),
        is_on_cpu=config.train.device == "cpu",
    )
    terminal = Terminal(config.rounds.num_rounds, quiet)
    if resumed:
        terminal.resume_command = f"keel resume {resumed.reference}"
    elif name:
        terminal.resume_command = engines.resume_command(name, job)
    if name and is_remote:  # its config is on the server
        rows = [("resume", name), *flwr_rows(job)]
    else:
        rows = plan_rows(config, job, resumed.last_round if resumed else 0)
    terminal.shown = dict(rows)
    terminal.plan([row for row in rows if row[0] not in hidden])
    engine = {
        Engine.inline: engines.run_in_process,
        Engine.flower: engines.run_on_flower,
        Engine.deployment: engines.run_on_deployment,
    }[options.engine]
    return engine, job, terminal


def config_of(overrides: Mapping[str, OptionValue], resumed: SavedRun | None) -> RunConfig:
    """The config of a run, or of one to resume with these keys changed."""
    if resumed is None:
        return checked_config(overrides)
    return checked_config(resumed.overrides | {k: v for k, v in overrides.items() if k != "resume"})


def with_clients(
    overrides: Mapping[str, OptionValue],
    config: RunConfig,
    clients: int | None,
    resumed: SavedRun | None,
) -> tuple[dict[str, OptionValue], int]:
    """(overrides, number of clients): --clients wins over a preset's num-clients."""
    expected = config.rounds.num_clients
    if clients is None or clients == expected:
        return dict(overrides), expected or DEFAULT_CLIENTS
    if resumed or "num-clients" in overrides:
        what = "a resumed run keeps its number" if resumed else "set only one of them"
        raise ValueError(f"clients = {clients}, but num-clients = {expected}: {what}")
    changed = dict(overrides)
    if expected:
        changed["num-clients"] = clients
    return changed, clients


def check_new_directory(config: RunConfig) -> None:
    """ValueError if the run directory exists already or cannot be made."""
    path = new_path(config)
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(
            f"output-dir: {path} cannot be made: {parent} is not a directory that you can write "
            "to; set output-dir or KEEL_HOME to another"
        )
