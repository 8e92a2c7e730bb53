"""Runs a config in this process, on Flower's simulation or on a deployment.

    job = prepare({"method": "fedcka"}, EngineOptions(clients=10))     # refuses what it can
    run = execute(job, Terminal(job.config.rounds.num_rounds))         # trains

`run` does both and shows the plan and the progress; `keel.run` and the command `keel run` call it.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keel.interrupts import uninterrupted
from keel.job import Engine, EngineOptions, Job
from keel.run_checks import check_new_directory, check_simulated, checked_config
from keel.saved_runs import SavedRun, find_run
from protocol.code import line_in_method
from protocol.config import RunConfig
from protocol.options import CommandOptionError, ConfigError, OptionValue
from protocol.own_code import Own, check_on_all_machines
from protocol.processes import check_not_forked
from protocol.ray_nodes import WorkerOptions
from server_app.run_reader import check_has_rounds_left

if TYPE_CHECKING:
    from keel.progress import Terminal

DEFAULT_CLIENTS = 10
NOT_STARTED = "stopped before the run started: nothing was saved"
NOT_RESUMED = "stopped before the run was resumed: it is unchanged"


def run(
    overrides: Mapping[str, OptionValue],
    options: EngineOptions,
    quiet: bool = False,
    own: Mapping[str, Own] | None = None,
) -> SavedRun | None:
    """Execute a run and show its progress; returns its directory once it has finished.

    own: what specs in the config name, where Python has handed over an object. None: on a
    deployment, where the directory is on the server.
    Raises what `prepare` and `execute` raise.
    """
    try:
        job = prepare(overrides, options, own)

        from keel.plan import plan_rows  # after what may be refused: it imports more
        from keel.progress import Terminal

        terminal = Terminal(job.config.rounds.num_rounds, quiet)
        if job.resumed:
            terminal.resume_command = f"keel resume {job.resumed.reference}"
        rows = plan_rows(job)
        terminal.shown = dict(rows)
        terminal.plan(rows)
    except KeyboardInterrupt:
        if not quiet:
            print(NOT_RESUMED if overrides.get("resume") else NOT_STARTED)
        raise
    return execute(job, terminal)


def prepare(
    overrides: Mapping[str, OptionValue],
    options: EngineOptions,
    own: Mapping[str, Own] | None = None,
) -> Job:
    """Check all that can be known before a run starts. own: as in `run`.

    ConfigError names a config key, CommandOptionError an option; other ValueErrors have one line,
    such as for several mistakes.
    """
    name = str(overrides.get("resume", ""))
    resumed = find_run(name) if name and not options.is_remote else None
    config = config_of(overrides, resumed, own)
    if resumed:
        if resumed.has_sites:
            raise ValueError(
                f"{resumed.name}: its clients have data of their own, as in a deployment: resume "
                f"it with `{resumed.resume_command}`"
            )
        check_has_rounds_left(resumed, config.rounds.num_rounds)
    if not options.is_remote:
        num_clients = number_of_clients(config, options.clients, overrides, resumed)
        if not resumed:
            from server_app.checks import IN_SIMULATION, INLINE, refuse_unused  # imports torch

            unused = INLINE if options.engine is Engine.inline else IN_SIMULATION
            refuse_unused(config, overrides, unused)
            overrides = {**overrides, "num-clients": num_clients}
            config = config_of(overrides, None, config.own)
            check_simulated(config, num_clients)
            check_new_directory(config)
    if options.engine is Engine.flower:
        check_device(config, options.gpus_per_client)

    from keel.deployment.cluster import cluster_nodes
    from keel.deployment.superlink import check_connection

    if options.is_remote:
        check_on_all_machines(config.own)
        check_connection(options.federation)
    ray, ray_key = options.ray or "", "ray"
    if options.engine is Engine.flower and not ray:  # the processes would use it, unchecked
        ray, ray_key = os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS"
    nodes = cluster_nodes(ray, ray_key) if ray else ()
    return Job(dict(overrides), config, options, resumed, ray, nodes)


def config_of(
    overrides: Mapping[str, OptionValue],
    resumed: SavedRun | None,
    own: Mapping[str, Own] | None = None,
) -> RunConfig:
    """The config of a run, or of one to resume with these keys changed."""
    if resumed is None:
        return checked_config(overrides, own)
    changed = {k: v for k, v in overrides.items() if k != "resume"}
    return checked_config(resumed.overrides | changed, resumed.own, is_new=False)


def number_of_clients(
    config: RunConfig,
    clients: int | None,
    overrides: Mapping[str, OptionValue],
    resumed: SavedRun | None,
) -> int:
    """How many clients are simulated: the option `clients` wins over a preset's num-clients."""
    from data.own_partition import fixed_number

    of_partition = fixed_number(config.own.get(config.data.partition))
    expected = config.rounds.num_clients or of_partition
    if clients is None or clients == expected:
        return expected or DEFAULT_CLIENTS
    if resumed or "num-clients" in overrides:
        what = "a resumed run keeps its number" if resumed else "set only one of them"
        raise CommandOptionError("clients", f"{clients}, but num-clients = {expected}: {what}")
    return clients


def check_device(config: RunConfig, gpus: float | None) -> None:
    """ConfigError for a GPU that a worker of the flower engine would not see."""
    device = config.train.device
    number = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0
    if gpus != 0 and number >= max(1, gpus or 1):
        raise ConfigError(
            "device",
            f"device = {device!r}: with --engine flower Ray gives each worker its own GPU, which "
            "is cuda:0 there: set device=cuda",
        )


def execute(job: Job, terminal: "Terminal") -> SavedRun | None:
    """Execute a run, which `terminal` follows; returns its directory, None on a deployment.

    ValueError, one line, if the run is refused before round 1, RuntimeError if it failed.
    KeyboardInterrupt stops it cleanly and is raised again.
    """
    engine = {
        Engine.inline: run_in_process,
        Engine.flower: run_on_flower,
        Engine.deployment: run_on_deployment,
    }[job.options.engine]
    with terminal:
        try:
            engine(job, terminal)
        except KeyboardInterrupt:
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


def run_in_process(job: Job, terminal: "Terminal") -> None:
    """Execute the run in this process, one client after the other."""
    terminal.phase("loading PyTorch")
    with uninterrupted():
        from keel.process_settings import own_settings
        from server_app.inline import run_inline

    check_not_forked()
    terminal.phase("reading data")
    with own_settings():
        run_inline(job.overrides, job.num_clients, observers=[terminal], own=job.config.own)


def run_on_flower(job: Job, terminal: "Terminal") -> None:
    """Execute the run in this process, with workers of Flower's simulation on Ray."""
    terminal.phase("loading PyTorch")
    with uninterrupted():
        from keel.process_settings import own_settings
        from server_app.simulation import run_simulated

    check_not_forked()
    terminal.phase("reading data, starting Ray")
    workers = WorkerOptions(job.options.cpus, job.gpus, job.ray)
    with own_settings():
        observers = [terminal]
        run_simulated(job.overrides, job.num_clients, workers, observers, job.config.own)


def run_on_deployment(job: Job, terminal: "Terminal") -> None:
    """Execute the run on a SuperLink."""
    from keel.remote import run_remotely

    run_remotely(job, terminal)
