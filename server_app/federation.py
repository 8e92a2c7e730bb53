"""A run on any engine: check, gather the clients, train round by round, end it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from logging.handlers import MemoryHandler
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from client_app.machine import data_digest, report_of
from client_app.methods import method_of
from client_app.precision import resolved
from client_app.samples import Samples
from client_app.setup import dataset_spec_of, device_for, model_for, open_source, pixels_of, placed
from flower_adapter import has_own_clients, is_in_process_grid
from protocol.code import line_in_method, place_of
from protocol.config import RunConfig, resolve_config
from protocol.files import digest, private_files
from protocol.messages import (
    Arrays,
    PreflightRequest,
    RosterRequest,
    array_record,
    request_record,
    tensors,
)
from protocol.options import OptionValue
from protocol.privacy import privacy_statement
from protocol.processes import give_back_freed_memory
from server_app.checks import config_warnings
from server_app.client_registry import ClientRegistry, gather_roster
from server_app.diagnostics.monitor import Monitor
from server_app.diagnostics.plots import plot_rounds
from server_app.exchange import Exchange
from server_app.history import Line
from server_app.logical_clients import LogicalGrid, with_logical_clients
from server_app.manifest import (
    NUM_NOTED_ROUNDS,
    begin_manifest,
    check_same_data,
    note_round,
    split_digest,
)
from server_app.observers import RunInfo, RunObserver
from server_app.preflight import checked_workers, log_lines, worker_warnings
from server_app.report import Reporter, plot_split
from server_app.roster import (
    ROSTER_FILE,
    partition_sizes,
    read_saved_roster,
    roster_warnings,
    save_roster,
)
from server_app.rounds import (
    DivergedError,
    Run,
    record_round,
    train_round,
)
from server_app.run_directory import (
    Checkpoint,
    RunDirectory,
    new_run_directory,
    open_run_directory,
    save_arrays,
)
from server_app.run_reader import RunReader, new_path, runs_directory
from server_app.simulated_roster import (
    ByName,
    Roster,
    SimulatedRoster,
    shown_entries,
    simulated_roster,
)
from server_app.trackers import check_trackers
from strategies import Average, strategy_for
from strategies.average import TooFewRepliesError, returned
from strategies.backoff import Backoff
from strategies.sampling import FIRST_NODE

log = logging.getLogger("keel.server")


@private_files()
def run_federation(
    grid: Grid,
    overrides: Mapping[str, OptionValue],
    at_exit: Callable[[Callable[[], None]], None] = lambda note: None,
    observers: Sequence[RunObserver] = (),
    early: MemoryHandler | None = None,
) -> RunDirectory:
    """Run from the first round, or from where `resume` says, to the last; return the run directory.

    at_exit: registers a function that notes the run as stopped, for processes that are ended where
    no exception reaches the run. observers: are told of the start, every round and the end.
    early: has the warnings until there is a run.log, which gets them.

    ValueError, one line, before anything is trained, if the config, the data and the clients do not
    fit together. TooFewRepliesError and DivergedError end a run with its last checkpoint intact.
    """
    config = resolve_config(overrides)
    resumed: RunDirectory | None = None
    overrides = {key: value for key, value in overrides.items() if key != "resume"}
    with ExitStack() as held:
        if config.rounds.resume:
            resumed, config, overrides = open_run_directory(config.rounds.resume, overrides)
            held.callback(resumed.close)
        run = prepare(grid, config, overrides, resumed, held, early)
        run_rounds(run, at_exit, observers)
    return run.directory


def prepare(
    grid: Grid,
    config: RunConfig,
    overrides: Mapping[str, OptionValue],
    resumed: RunDirectory | None,
    held: ExitStack,
    early: MemoryHandler | None = None,
) -> Run:
    """Check all that can be checked before round 1, then make (or open) the run directory.

    held: ends what the run holds of this process: the directory's lock and log, memory.
    early: as `run_federation`.
    """
    check_trackers(config.rounds)
    if not resumed:
        new_path(config)  # raises if it exists
    grid = with_logical_clients(grid, config.rounds.num_clients)
    method = method_of(config)
    source = open_source(config)  # decoded here, before any client opens it
    model = model_for(config, source)
    method.check_model(model)  # raises for layers that this network does not have
    initial_weights = {name: array.clone() for name, array in model.state_dict().items()}
    strategy = strategy_for(config, model)
    device = device_for(config.train.device)
    images, labels = np.asarray(source.test.images), np.asarray(source.test.labels)
    test_samples = Samples(images, labels, pixels_of(config, source), device)
    data = dataset_spec_of(config, source)
    query = request_record(RosterRequest(config, data))
    roster: Roster
    if isinstance(grid, LogicalGrid):
        roster = simulated_roster(config, source, grid)
    elif resumed and not is_in_process_grid(grid):
        roster = read_saved_roster(resumed.path / ROSTER_FILE)
    else:
        roster = gather_roster(grid, config, query, source)
    listed = roster if isinstance(roster, dict) else {}
    registry = ClientRegistry(grid, config, query, source, listed)
    if resumed and not isinstance(roster, SimulatedRoster):
        registry.note = resumed.audit.note
        registry.gather()
    strategy.roster = roster
    entries = shown_entries(roster)
    is_simulated = any(entry.num_partitions for entry in entries)
    if isinstance(roster, SimulatedRoster):
        strategy.partition_sizes = ByName(roster, lambda n: int(roster.sizes[n, 0]))
    elif is_simulated:
        strategy.partition_sizes = partition_sizes(config, entries)
    known = roster.label_counts if isinstance(roster, SimulatedRoster) else None
    notes = roster_warnings(config, entries, known)  # raises where the method cannot train
    cohort = len(strategy.sample(1))
    config.rounds.check_cohort(cohort)
    start = Checkpoint(0, returned(strategy.initial_arrays, model), {})
    unknown = start.arrays.keys() - initial_weights.keys()
    if method.has_global_model and unknown:
        raise ValueError(
            f"{place_of(strategy.initial_arrays)} returned {min(unknown)!r}, which {model.name} "
            "lacks: return arrays of the network, and others from `extra`"
        )
    monitor = None
    if config.rounds.diagnostics:  # moves the model to the device; `start` stays on the CPU
        architectures = (
            ByName(roster, lambda n: roster[FIRST_NODE + n].model)
            if isinstance(roster, SimulatedRoster)
            else {entry.client: entry.model for entry in roster.values()}
        )
        monitor = Monitor(
            config,
            method,
            source,
            placed(model, device),
            initial_weights,
            architectures=architectures,
            is_simulated=is_simulated,
        )

    parent = resumed.path.parent if resumed else runs_directory(config)
    workers = checked_workers(grid, config, data, source, parent, len(roster))
    if isinstance(grid, LogicalGrid) and workers:
        del grid.workers[len(workers) :]  # nodes that no worker would play
    if isinstance(roster, SimulatedRoster) and len(entries) < len(roster):
        split = roster.digest()
    else:
        split = split_digest(config, entries)
    data_of_run = data_digest(source) if is_in_process_grid(grid) else ""
    if resumed and data_of_run:
        check_same_data(resumed.path, config, data_of_run, split)
    if resumed and resumed.has_checkpoint(config.rounds.checkpoint_every):
        start = resumed.newest_checkpoint(start.arrays, config.model.model)
        strategy.load(start.state)
    directory = resumed or new_run_directory(config)
    held.callback(directory.close)
    directory.checkpoint_interval = config.rounds.checkpoint_every
    audit = directory.audit
    registry.note = audit.note
    audit.note("started", round=start.round + 1)
    if isinstance(roster, SimulatedRoster):
        audit.note("joined", simulated=len(roster))
    else:
        present = [(e.client, n) for n, e in roster.items() if e.client not in registry.missing]
        audit.note_all("joined", ({"client": c, "node": n} for c, n in sorted(present)))
    directory.start_log(None, early)
    for level, text in log_lines(workers):
        log.log(level, "%s", text)
    for path in directory.skipped:
        log.warning("%s is damaged: skipped, the run continues from round %d", path, start.round)
    notes += config_warnings(config, overrides)
    if workers:
        notes += worker_warnings(workers, report_of(PreflightRequest(config, data, "", "", False)))
    for note in notes:
        log.warning("%s", note)
    save_roster(directory.path / ROSTER_FILE, roster)
    if is_simulated:
        # a resume with another number of simulated clients would split the data differently
        overrides = {**overrides, "num-clients": len(roster)}
    directory.save_config(resolve_config(overrides), overrides)
    precisions = [each.report.precision for each in workers] or [resolved("auto", model, device)]
    begin_manifest(
        directory.path,
        config,
        num_clients=len(roster),
        is_simulated=is_simulated,
        split=split,
        data=data_of_run,
        workers=workers,
        precisions=precisions if is_simulated and config.train.precision == "auto" else (),
        trains=start.round < config.rounds.num_rounds,
    )
    noted = RunReader(directory.path).manifest.get("rounds", {})
    if 0 < start.round <= NUM_NOTED_ROUNDS and str(start.round) not in noted:  # killed before it
        content = start.pieces(config.model.model)
        note_round(directory.path, config, start.round, digest(*content))
    return Run(
        config=config,
        data=data,
        directory=directory,
        grid=grid,
        strategy=strategy,
        method=method,
        model=placed(model, device),
        initial_weights=initial_weights,
        source=source,
        test_samples=test_samples,
        roster=roster,
        registry=registry,
        audit=audit,
        exchange=exchange_of(grid, strategy, registry, len(workers)),
        cohort_size=cohort,
        start=start,
        monitor=monitor,
        evaluation_backoff=Backoff(config.rounds.backoff_after, config.rounds.backoff_rounds),
    )


def exchange_of(
    grid: Grid, strategy: Average, registry: ClientRegistry, num_workers: int
) -> Exchange:
    """The run's exchange. num_workers: of Flower's simulation."""
    exchange = Exchange(grid, lambda node: strategy.addressed[node].client)
    if not is_in_process_grid(grid):
        exchange.returned = registry.returned
    # in a simulation the result must not depend on how many workers share the clients
    if isinstance(grid, LogicalGrid):
        exchange.turns = lambda _: grid.largest_share
    elif num_workers:  # whoever is idle takes the next one, also that of a worker that has died
        exchange.turns = lambda num: -(-num // num_workers) + (num > num_workers)
    return exchange


def run_rounds(
    run: Run, at_exit: Callable[[Callable[[], None]], None], observers: Sequence[RunObserver]
) -> None:
    """All rounds from the first or the checkpoint's, then the final model and the report."""
    config = run.config
    history = run.directory.rewind(run.start.round)
    run.loss_terms = {f"loss.{name}" for line in history for name in line["losses"]}
    reporter = Reporter(config, info_of(run, history), observers, lambda: privacy_spent(run))
    at_exit(reporter.interrupted)
    run.exchange.progress = reporter.replied
    arrays = array_record(run.start.arrays)  # after the last round that is on disk
    status = "finished"
    try:
        reporter.begin()
        for server_round in range(run.start.round + 1, config.rounds.num_rounds + 1):
            trained = train_round(run, server_round, arrays)
            line = record_round(run, trained)
            arrays = trained.arrays
            reporter.round_done(line)
            give_back_memory(run)
    except BaseException as error:
        status = status_after(error)
        raise
    finally:
        try:
            end_run(run, reporter, tensors(arrays), status)
        except OSError as error:  # such as a full disk, which may be what ended the run
            if status == "finished":
                raise
            log.warning("the end of the run is incomplete: %s", error)
        finally:  # last: an observer may raise
            reporter.tell_end()


def end_run(run: Run, reporter: Reporter, final: Arrays, status: str) -> None:
    """Write the final model, summary, manifest and pictures; remove the state of a finished run."""
    config, path = run.config, run.directory.path
    try:
        if run.method.has_global_model:  # arrays that are never sent keep their initial values
            final = run.initial_weights | final
        save_arrays(path / "model.safetensors", final, model_metadata(run))
        plot_split(shown_entries(run.roster), run.source, path / "labels.png")
    except BaseException as error:
        if status == "finished":
            status = status_after(error)
        raise
    finally:
        reporter.finish(status)
        run.audit.note("ended", status=status)
    removes_state = status == "finished" and not config.rounds.keep_state
    last_round = max(run.start.round, len(reporter.history))
    run.directory.finish(last_round, removes_state, run.method.is_personal)
    if run.monitor:
        plot_rounds(reporter.history, reporter.info.title, path / "diagnostics")


def give_back_memory(run: Run) -> None:
    """Return freed memory to the system, unless clients in this process reuse it."""
    if not has_own_clients(run.grid):
        give_back_freed_memory()


def status_after(error: BaseException) -> str:
    """The status of a run that this error ends."""
    if isinstance(error, TooFewRepliesError | DivergedError):
        return f"failed: {error}"
    if isinstance(error, Exception):
        place = line_in_method(error)
        return " ".join(f"failed: {type(error).__name__}: {error}{place}".split())
    return "stopped"


def info_of(run: Run, history: Sequence[Line]) -> RunInfo:
    """What the observers are told at the start."""
    config, source, roster = run.config, run.source, run.roster
    num_train = (
        roster.num_train
        if isinstance(roster, SimulatedRoster)
        else sum(entry.num_examples for entry in roster.values())
    )
    return RunInfo(
        directory=run.directory.path,
        method=config.rounds.method,
        server_optimizer=config.rounds.server_optimizer,
        source=config.data.source,
        num_train=num_train,
        num_test=len(source.test.labels),
        image_shape=source.image_shape,
        num_classes=source.num_classes,
        model=config.model.model,
        num_parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        num_clients=len(run.roster),
        clients_per_round=run.cohort_size,
        num_rounds=config.rounds.num_rounds,
        history=tuple(history),
        config=RunReader(run.directory.path).config,  # in which num-clients is set
        device=str(next(run.model.parameters()).device),
    )


def model_metadata(run: Run) -> dict[str, str]:
    """Metadata of model.safetensors: enough to build and use the model without the data."""
    pixels = pixels_of(run.config, run.source)
    config, entries = run.config, shown_entries(run.roster)
    if len(entries) < len(run.roster):
        others = {"client-models": ",".join(config.client_models)}
    else:
        pairs = sorted((e.client, e.model) for e in entries if e.model != config.model.model)
        others = {f"model of {client}": model for client, model in pairs}
    return others | {
        "shape": ",".join(map(str, run.source.image_shape)),
        "classes": "\n".join(run.source.class_names),
        "mean": ",".join(map(str, pixels.mean)),
        "std": ",".join(map(str, pixels.std)),
    }


def privacy_spent(run: Run) -> dict[str, Any] | None:
    """The privacy statement for the client with the most releases; None without privacy."""
    privacy = run.config.privacy
    if not privacy.epsilon:
        return None
    num_entries = sum(array.numel() for array in run.start.arrays.values())
    releases = max(run.audit.releases.values(), default=0)
    reads_state = bool(run.monitor) and run.method.is_stateful
    return privacy_statement(privacy, num_entries, releases, reads_state)
