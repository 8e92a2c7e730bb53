"""A run on any engine: check, gather the clients, train round by round, evaluate, record."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from client_app.evaluation import evaluate
from client_app.machine import data_digest
from client_app.method import Method
from client_app.methods import method_of
from client_app.precision import resolved
from client_app.samples import Samples
from client_app.setup import dataset_spec_of, device_for, model_for, open_source, pixels_of
from client_app.stacked import check_stackable
from client_app.state import StateMemory, max_rounds_ahead, memories
from data.sources import Source
from models import StagedModel
from protocol.config import RunConfig, resolve_config
from protocol.files import private_files
from protocol.flower_compat import has_own_clients, is_in_process_grid, watch_superlink
from protocol.messages import (
    Arrays,
    DatasetSpec,
    EvaluateRequest,
    RosterRequest,
    TrainReply,
    TrainRequest,
    all_finite,
    array_record,
    payload_bytes,
    request_record,
    tensors,
)
from protocol.options import OptionValue
from protocol.privacy import privacy_statement
from protocol.processes import give_back_freed_memory, num_cores
from server_app.audit import AuditLog
from server_app.checks import check_config, config_warnings
from server_app.client_registry import ClientRegistry, gather_roster
from server_app.diagnostics.monitor import Monitor
from server_app.diagnostics.plots import plot_rounds
from server_app.exchange import Exchange
from server_app.history import (
    HISTORY_FILE,
    Line,
    append_history,
    finite_or_null,
    truncate_history,
)
from server_app.logical_clients import LogicalGrid, Summing, with_logical_clients
from server_app.manifest import (
    NUM_NOTED_ROUNDS,
    audit_fault,
    begin_manifest,
    check_same_data,
    finish_manifest,
    note_round,
    split_digest,
)
from server_app.observers import RunInfo, RunObserver
from server_app.preflight import WorkerOnNode, checked_workers, worker_warnings
from server_app.record import client_fields, training_fields
from server_app.report import Reporter, plot_split
from server_app.roster import (
    partition_sizes,
    read_saved_roster,
    roster_warnings,
    save_roster,
)
from server_app.run_directory import (
    RELEASES,
    Checkpoint,
    RunDirectory,
    new_run_directory,
    open_run_directory,
    remove_state,
    save_arrays,
)
from server_app.simulated_roster import (
    ByName,
    Roster,
    SimulatedRoster,
    shown_entries,
    simulated_roster,
)
from server_app.summary import new_path, read_manifest, runs_directory
from server_app.untrained import untrained_accuracies
from strategies import Average, strategy_for
from strategies.average import RoundReport, TooFewRepliesError
from strategies.backoff import Backoff
from strategies.sampling import ClientNames
from strategies.validation import RECORD_BYTES

log = logging.getLogger("keel.server")
ROSTER_FILE = "roster.json"


class DivergedError(RuntimeError):
    """The global arrays are no longer finite."""


@dataclass
class Run:
    """One run under way. `start`: the checkpoint that it begins from, of round 0 for a new run."""

    config: RunConfig
    data: DatasetSpec
    directory: RunDirectory
    grid: Grid
    strategy: Average
    method: Method
    model: StagedModel
    initial_weights: Arrays
    source: Source
    test_samples: Samples
    roster: Roster
    registry: ClientRegistry
    audit: AuditLog
    exchange: Exchange
    cohort_size: int
    start: Checkpoint
    monitor: Monitor | None
    memory: StateMemory
    threads_beside_workers: int  # of this process while a simulation's workers train; 0: torch's
    evaluation_backoff: Backoff  # clients that gave no answer to evaluations
    # by client whose newest update was aggregated: its own model's score since, if known
    scores: dict[str, float | None] = field(default_factory=dict)
    # the clients that were asked to train so far; None: not known
    asked: set[str] | None = field(default_factory=set)
    # the loss metrics of all rounds so far: names, and the most clients that sent each in one round
    loss_terms: dict[str, int] = field(default_factory=dict)

    @property
    def has_own_models(self) -> bool:
        """Whether clients are evaluated with models that change when they train, and then only."""
        method = self.method
        return method.is_personal and not (method.is_adapted_from_global or method.has_global_model)

    def is_evaluated(self, server_round: int) -> bool:
        """Whether accuracies are measured after this round."""
        rounds = self.config.rounds
        return server_round == rounds.num_rounds or server_round % rounds.evaluate_every == 0

    @property
    def overlaps_rounds(self) -> bool:
        """Whether a round may be evaluated and written while clients train in the next one.

        Not if they train in this process, nor with private releases: after a crash, a resume
        repeats both rounds, and would request one release more of each client.
        """
        return not has_own_clients(self.grid) and not self.config.privacy.epsilon

    @property
    def keeps_scores(self) -> bool:
        """Whether `scores` holds: in a deployment, a client may lose or reset its state."""
        return self.has_own_models and is_in_process_grid(self.grid)


@private_files()
def run_federation(
    grid: Grid,
    overrides: Mapping[str, OptionValue],
    at_exit: Callable[[Callable[[], None]], None] = lambda note: None,
    observers: Sequence[RunObserver] = (),
) -> RunDirectory:
    """Run from the first round, or from where `resume` says, to the last; return the run directory.

    at_exit: registers a function that notes the run as stopped, for processes that are ended where
    no exception reaches the run. observers: are told of the start, every round and the end.

    ValueError, one line, before anything is trained, if the config, the data and the clients do not
    fit together. TooFewRepliesError and DivergedError end a run with its last checkpoint intact.
    """
    config = resolve_config(overrides)
    resumed: RunDirectory | None = None
    overrides = {key: value for key, value in overrides.items() if key != "resume"}
    if config.rounds.resume:
        resumed, config, overrides = open_run_directory(config.rounds.resume, overrides)
    try:
        run = prepare(grid, config, overrides, resumed)
    except BaseException:
        if resumed:
            resumed.close()
        raise
    try:
        run_rounds(run, at_exit, observers)
    finally:
        memories.pop(run.directory.path, None)
        run.directory.close()
    return run.directory


def prepare(
    grid: Grid,
    config: RunConfig,
    overrides: Mapping[str, OptionValue],
    resumed: RunDirectory | None,
) -> Run:
    """Check all that can be checked before round 1, then make (or open) the run directory."""
    check_config(config)
    if not resumed:
        new_path(config)  # raises if it exists
    grid = with_logical_clients(grid, config.rounds.num_clients)
    method = method_of(config)
    source = open_source(config)  # decoded here, before any client opens it
    model = model_for(config, source)
    method.check_model(model)  # raises for layers that this network does not have
    check_stackable(method, config, model)
    if config.train.clients_per_step > 1 and not getattr(grid, "stacks_clients", False):
        raise ValueError(
            f"clients-per-step = {config.train.clients_per_step}: only the inline engine trains "
            "clients together, and no more than 1,000 of them: run with --engine inline, or set it "
            "to 1"
        )
    companions = getattr(grid, "companions", None)
    if config.train.stacked_runs > 1 and companions is None:
        raise ValueError(
            f"stacked-runs = {config.train.stacked_runs}: runs train together on the inline "
            "engine, with no more than 1,000 clients, under `keel experiments run --stack`, which "
            "also resumes them: repeat that command, or set it to 1"
        )
    initial_weights = {name: array.clone() for name, array in model.state_dict().items()}
    strategy = strategy_for(config, model)
    device = device_for(config.train.device)
    test_samples = Samples(
        np.asarray(source.test.images),
        np.asarray(source.test.labels),
        pixels_of(config, source),
        device,
    )

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
        registry.note = AuditLog(resumed.path).note
        registry.gather()
    strategy.roster = roster
    entries = shown_entries(roster)
    is_simulated = any(entry.num_partitions for entry in entries)
    if isinstance(roster, SimulatedRoster):
        strategy.partition_sizes = ByName(roster, lambda entry: entry.num_examples)
    elif is_simulated:
        strategy.partition_sizes = partition_sizes(config, entries)
    known = roster.label_counts if isinstance(roster, SimulatedRoster) else None
    notes = roster_warnings(config, entries, known)  # raises where the method cannot train
    cohort = len(strategy.sample(1))
    config.rounds.check_cohort(cohort)
    monitor = None
    if config.rounds.diagnostics:
        architectures = (
            ByName(roster, lambda entry: entry.model)
            if isinstance(roster, SimulatedRoster)
            else {entry.client: entry.model for entry in roster.values()}
        )
        monitor = Monitor(
            *(config, method, source, model.to(device), initial_weights),
            *(architectures, is_simulated),
        )

    parent = resumed.path.parent if resumed else runs_directory(config)
    workers = checked_workers(grid, config, data, source, parent)
    if isinstance(grid, LogicalGrid) and workers:
        del grid.workers[len(workers) :]  # nodes that no worker would play
    if isinstance(roster, SimulatedRoster) and len(entries) < len(roster):
        split = roster.digest()
    else:
        split = split_digest(config, entries)
    data_of_run = data_digest(source) if is_in_process_grid(grid) else ""
    if resumed and data_of_run:
        check_same_data(resumed.path, config, data_of_run, split)
    start = Checkpoint(0, strategy.initial_arrays(model), {})
    if resumed and resumed.has_checkpoint(config.rounds.checkpoint_interval):
        start = resumed.newest_checkpoint(start.arrays, config.model.model)
        strategy.load(start.state)
    if resumed and config.privacy.epsilon:
        resumed.restore_releases(start.state)
    directory = resumed or new_run_directory(config)
    directory.checkpoint_interval = config.rounds.checkpoint_interval
    audit = AuditLog(directory.path)
    fault = audit_fault(directory.path)
    registry.note = audit.note
    audit.note("started", round=start.round + 1)
    if fault:
        audit.note("fault", reason=fault)
    if isinstance(roster, SimulatedRoster):
        audit.note("joined", simulated=len(roster))
    else:
        present = [(e.client, n) for n, e in roster.items() if e.client not in registry.missing]
        audit.note_all("joined", ({"client": c, "node": n} for c, n in sorted(present)))
    directory.start_log(companions.is_own if companions else None)
    if fault:
        log.warning("%s", fault)
    for path in directory.skipped:
        log.warning("%s is damaged: skipped, the run continues from round %d", path, start.round)
    notes += [*config_warnings(config, overrides), *worker_warnings(workers, device)]
    if config.rounds.snapshot_every > 1 and workers:
        notes.append(
            f"snapshot-every = {config.rounds.snapshot_every}: the workers of Flower's simulation "
            "still write client state in every round; only the inline engine keeps it in memory"
        )
    for note in notes:
        log.warning("%s", note)
    save_roster(directory.path / ROSTER_FILE, roster)
    if is_simulated:
        # a resume with another number of simulated clients would split the data anew
        overrides = {**overrides, "num-clients": len(roster)}
    directory.save_config(resolve_config(overrides), overrides)
    about = companions.about if companions else {}
    is_auto = is_simulated and config.train.precision == "auto"
    precisions = [each.report.precision for each in workers] or [resolved("auto", model, device)]
    begin_manifest(
        *(directory.path, config, len(roster), is_simulated, split),
        *(data_of_run, workers, about, precisions if is_auto else ()),
        trains=start.round < config.rounds.num_rounds,
    )
    noted = read_manifest(directory.path).get("rounds", {})
    if 0 < start.round <= NUM_NOTED_ROUNDS and str(start.round) not in noted:  # killed before it
        digest = start.noted_digest(config.model.model)
        note_round(directory.path, config, start.round, digest)
    memory = StateMemory(max_rounds_ahead(config.rounds.checkpoint_interval))
    if config.rounds.snapshot_every > 1 and has_own_clients(grid):
        memories[directory.path] = memory
    exchange = Exchange(grid, lambda n: roster[n].client if n in roster else f"on node {n}")
    if not is_in_process_grid(grid):
        exchange.returned, exchange.silent_s = registry.returned, watch_superlink(grid)
    # in a simulation the result must not depend on how many workers share the clients
    if isinstance(grid, LogicalGrid):
        exchange.turns = lambda _: grid.largest_share
    elif workers:  # whoever is idle takes the next of the messages
        exchange.turns = lambda num: -(-num // len(workers)) + (num > len(workers))
    return Run(
        config=config,
        data=data,
        directory=directory,
        grid=grid,
        strategy=strategy,
        method=method,
        model=model.to(device),
        initial_weights=initial_weights,
        source=source,
        test_samples=test_samples,
        roster=roster,
        registry=registry,
        audit=audit,
        exchange=exchange,
        cohort_size=cohort,
        start=start,
        monitor=monitor,
        memory=memory,
        threads_beside_workers=threads_beside(workers, config.train.threads),
        evaluation_backoff=Backoff(config.rounds.backoff_after, config.rounds.backoff_rounds),
    )


def run_rounds(
    run: Run,
    at_exit: Callable[[Callable[[], None]], None],
    observers: Sequence[RunObserver],
) -> None:
    """All rounds from the first or the checkpoint's, then the final model and the report."""
    config, path = run.config, run.directory.path

    def replay(line: Line) -> None:
        if run.keeps_scores:
            note_trained(run, line)
            note_scores(run.scores, line)

    history = truncate_history(path / HISTORY_FILE, run.start.round, replay)
    if len(history) < run.start.round:  # who trained in the lost rounds is not known
        run.scores.clear()
        run.asked = None
    run.loss_terms = {f"loss.{name}": 1 for line in history for name in line["losses"]}
    reporter = Reporter(config, info_of(run, history), observers, lambda: privacy_spent(run))
    at_exit(reporter.interrupted)
    run.exchange.progress = reporter.replied
    arrays = array_record(run.start.arrays)  # after the last round that is on disk
    trained: Trained | None = None  # the round after it, if that is not on disk yet
    # to evaluate and write the last round of each kind: (is evaluated, has a checkpoint)
    recording_s: dict[tuple[bool, bool], float] = {}
    status = "finished"

    def kind_of(server_round: int) -> tuple[bool, bool]:
        has_checkpoint = server_round % config.rounds.checkpoint_interval == 0
        return run.is_evaluated(server_round), has_checkpoint

    def finish_round(beside_training: bool = False) -> None:
        nonlocal arrays, trained
        if trained:
            newest, trained, started = trained, None, time.monotonic()
            line = record_round(run, newest, beside_training)
            arrays = newest.arrays
            reporter.round_done(line)
            give_back_memory(run)
            recording_s[kind_of(newest.round)] = time.monotonic() - started

    try:
        reporter.begin()
        for server_round in range(run.start.round + 1, config.rounds.num_rounds + 1):
            before = trained.arrays if trained else arrays
            try:
                newest = train_round(run, server_round, before, partial(finish_round, True))
            except Exception:
                finish_round()
                raise
            finish_round()
            trained = newest
            give_back_memory(run)  # of this round's updates
            # replies wait meanwhile, and expire; a client that is late must find the round over
            expected_s = recording_s.get(kind_of(server_round), math.inf)
            is_slow = expected_s > config.rounds.round_timeout / 10
            if not run.overlaps_rounds or is_slow or run.exchange.late:
                finish_round()
        finish_round()
    except BaseException as error:
        status = status_after(error)
        raise
    finally:
        try:
            end_run(run, reporter, tensors(arrays), status)
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
    keeps_clients = run.method.is_personal or not removes_state
    last_round = max([run.start.round, *(line["round"] for line in reporter.history[-1:])])
    # first: without state, no resume could complete it
    finish_manifest(path, last_round, keeps_clients)
    if run.monitor:
        plot_rounds(reporter.history, reporter.info.title, path / "diagnostics")
    if removes_state:
        remove_state(path, last_round, keeps_personal=run.method.is_personal)


def give_back_memory(run: Run) -> None:
    """Return freed memory to the system, unless clients in this process reuse it."""
    if not has_own_clients(run.grid):
        give_back_freed_memory()


def status_after(error: BaseException) -> str:
    """The status of a run that this error ends."""
    if isinstance(error, TooFewRepliesError | DivergedError):
        return f"failed: {error}"
    if isinstance(error, Exception):
        return " ".join(f"failed: {type(error).__name__}: {error}".split())
    return "stopped"


@dataclass(frozen=True)
class Trained:
    """A round that is aggregated and not yet on disk: the global arrays and the server's state.

    line: the round's history line without the global model's score.
    """

    round: int
    arrays: ArrayRecord
    state: Arrays
    line: Line


class Sent:
    """Notes in the audit log what is sent in a round, and what is sent again.

    clients: by node, which may no longer be the client's when a message is sent again.
    """

    def __init__(self, run: Run, server_round: int, kind: str, messages: Sequence[Message]) -> None:
        self.audit, self.round, self.kind = run.audit, server_round, kind
        self.sizes = {m.metadata.dst_node_id: payload_bytes(m) for m in messages}
        self.clients = {node: run.roster[node].client for node in self.sizes}
        self.num_bytes = 0
        self.note(*self.sizes)

    def note(self, *nodes: int) -> None:
        """Note the messages to these nodes."""
        clients = [self.clients[node] for node in nodes]
        size = sum(self.sizes[node] for node in nodes)
        self.num_bytes += size
        about = {"kind": self.kind, "bytes": size, "round": self.round}
        self.audit.note("sent", **about, clients=clients)


def train_round(
    run: Run,
    server_round: int,
    arrays: ArrayRecord,
    meanwhile: Callable[[], None] = lambda: None,
) -> Trained:
    """Train, aggregate, and evaluate on the clients where that is due.

    meanwhile: called while the clients train.
    """
    config, strategy = run.config, run.strategy
    rounds = config.rounds
    is_evaluated = run.is_evaluated(server_round)
    evaluated = config.evaluated_clients if is_evaluated else "none"
    # a client's own model does not change between training and evaluation: one message does both
    scores_in_replies = evaluated != "none" and run.has_own_models
    seconds: dict[str, float] = {}

    started = time.perf_counter()
    if not isinstance(run.roster, SimulatedRoster):
        strategy.away = run.registry.absent(run.registry.refresh())
    if run.registry.has_changed:
        save_roster(run.directory.path / ROSTER_FILE, run.roster)
        run.registry.has_changed = False
    checkpoint_rounds = run.directory.checkpoint_rounds()
    run_dir = name_for_clients(run)
    is_measured = run.monitor is not None and run.monitor.is_due(server_round)
    strategy.keeps_updates = is_measured
    request = TrainRequest(
        *(config, run.data, server_round, checkpoint_rounds, scores_in_replies, run_dir),
        run.directory.id,
    )
    messages = list(
        strategy.configure_train(server_round, arrays, request_record(request), run.grid)
    )
    sent = Sent(run, server_round, "train", messages)

    def note_releases(*nodes: int) -> None:
        if config.privacy.epsilon:
            clients = [sent.clients[node] for node in nodes]
            privacy = {"epsilon": config.privacy.epsilon, "delta": config.privacy.delta}
            # first: a resume would complete it from the audit log, with one release more
            run.directory.append_releases(server_round, clients)
            run.audit.note("released", round=server_round, clients=clients, **privacy)

    def note_again(node: int) -> None:
        sent.note(node)
        note_releases(node)

    backed_off = sorted(strategy.backed_off(server_round))
    what = f"round {server_round}"
    if isinstance(run.grid, LogicalGrid):
        # with a rejected client, those summed with it train again: a release more
        shares = {} if config.privacy.epsilon else strategy.begin_sums(server_round)
        extra = strategy.expected_extra()
        like = {"arrays": strategy.expected(strategy.current), "extra": extra}
        summing = Summing(shares, strategy.limits, like, strategy.take_sum)
        run.grid.summing = summing if shares else None

    to_ask, silent = messages, set[str]()
    while to_ask:
        note_releases(*(message.metadata.dst_node_id for message in to_ask))
        run.exchange.ask(
            to_ask,
            rounds.round_timeout,
            what,
            max_bytes=strategy.max_reply_bytes(),
            before_resend=note_again,
            on_reply=lambda reply: strategy.accept(server_round, reply),
            meanwhile=meanwhile,
        )
        silent |= silent_clients(run)
        again = strategy.to_ask_again()
        to_ask = [message for message in messages if message.metadata.dst_node_id in again]
        if to_ask:
            text = "%s: %d clients train again, as their updates were summed with a rejected one"
            log.warning(text, what, len(to_ask))
    seconds["training"] = time.perf_counter() - started

    started = time.perf_counter()
    try:
        following, _ = strategy.aggregate_train(server_round, ())
    finally:  # too few replies end the run
        report = strategy.report
        if report.left_out:
            run.audit.note("rejected", round=server_round, kind="train", clients=report.left_out)
    assert following is not None
    state = strategy.state()
    if not all_finite(tensors(following)) or not all_finite(state):
        raise DivergedError(
            f"round {server_round}: the server update gave values that are not finite; the model "
            f"of the round before is kept. Lower lr, or the server's learning rate (options of "
            f"{rounds.method} and of server-optimizer {rounds.server_optimizer})"
        )
    seconds["aggregation"] = time.perf_counter() - started

    started = time.perf_counter()
    weights = strategy.counts(report.accepted)
    line = training_fields(server_round, report, sent.num_bytes, weights, run.loss_terms)
    line["backed_off"] = backed_off
    note_trained(run, line)
    if run.monitor and is_measured:
        line["diagnostics"] = run.monitor.measure(
            server_round, tensors(arrays), report.accepted, run.directory.path
        )
        seconds["diagnostics"] = time.perf_counter() - started
        started = time.perf_counter()
    if evaluated != "none":
        scored: list[TrainReply] = list(report.accepted) if scores_in_replies else []
        clients: Set[str] = {reply.client for reply in report.accepted}
        if evaluated == "all":
            clients = strategy.clients
        if run.keeps_scores:
            scored += [
                TrainReply(client, server_round, {}, {}, {"personal-accuracy": score})
                for client, score in run.scores.items()
                if score is not None and client in clients
            ]
            scored += score_untrained(run, server_round, following, clients)
        clients = clients - {reply.client for reply in scored}
        unasked = not_to_evaluate(run, server_round, clients, {*backed_off}, silent)
        if unasked:
            line["evaluation_left_out"] = unasked
        nodes = strategy.nodes_of(sorted(clients - unasked.keys()))
        if nodes:
            evaluation = evaluate_on_clients(run, server_round, following, nodes)
            scored += evaluation.accepted
            line["evaluation_left_out"] = evaluation.left_out | unasked
            line["reset_needed"] = sorted({*report.reset_needed, *evaluation.reset_needed})
            line["evaluation_bytes_down"] = evaluation.bytes_down
            line["evaluation_bytes_up"] = evaluation.bytes_up
        line |= client_fields(sorted(scored, key=lambda reply: reply.client), run.method)
        note_scores(run.scores, line)
    seconds["evaluation"] = time.perf_counter() - started

    strategy.report = RoundReport()  # this round's updates are not held during the next
    run.exchange.drain()
    line["late"] = run.exchange.take_late()
    line["seconds"] = seconds
    if run.overlaps_rounds:  # written during the next round, in which a half may change its tensors
        state = {name: array.clone() for name, array in state.items()}
    if config.privacy.epsilon:
        state |= run.directory.release_state()
    return Trained(server_round, following, state, line)


def record_round(run: Run, trained: Trained, beside_training: bool = False) -> Line:
    """Evaluate the global model where that is due, and write the round to disk; its line.

    beside_training: clients train in the next round, whose seconds contain those of this.
    """
    rounds, server_round = run.config.rounds, trained.round
    line: Line = trained.line
    started = time.perf_counter()
    if run.is_evaluated(server_round) and rounds.evaluate_global and run.method.has_global_model:
        num_threads = run.threads_beside_workers if beside_training else 0
        line["global"] = global_score(run, trained.arrays, num_threads)
        taken_s = time.perf_counter() - started
        if beside_training:
            line["overlapped_evaluation_seconds"] = round(taken_s, 4)
        else:
            line["seconds"]["evaluation"] += taken_s
    line["seconds"] = {name: round(value, 4) for name, value in line["seconds"].items()}
    line = finite_or_null(line)
    # before the checkpoint: a resume drops what is ahead of it
    append_history(run.directory.path / HISTORY_FILE, line)
    model, saved = run.config.model.model, ""
    checkpoint = Checkpoint(server_round, tensors(trained.arrays), trained.state)
    if server_round == rounds.num_rounds or server_round % rounds.snapshot_every == 0:
        run.memory.write(run.directory.checkpoint_rounds())
    if server_round == rounds.num_rounds or server_round % rounds.checkpoint_interval == 0:
        saved = run.directory.save_checkpoint(checkpoint, model)
    if server_round <= NUM_NOTED_ROUNDS:
        noted = saved if saved and RELEASES not in trained.state else checkpoint.noted_digest(model)
        note_round(run.directory.path, run.config, server_round, noted)
    return line


def note_trained(run: Run, line: Line) -> None:
    """Note who was asked to train in this round, and forget their scores.

    A client whose update was not aggregated may still be training: its score does not hold.
    """
    for client in line["left_out"]:
        run.scores.pop(client, None)
    run.scores |= dict.fromkeys(line["participants"])
    if run.asked is not None:
        run.asked.update(line["participants"], line["left_out"])


def note_scores(scores: dict[str, float | None], line: Line) -> None:
    """Note the scores in the line, less those of models that clients make from the newest u_0."""
    accuracies = line.get("personal", {}).get("clients", {})
    scores |= {client: accuracies[client] for client in scores.keys() & accuracies.keys()}


def name_for_clients(run: Run) -> str:
    """The run directory's path in a simulation, whose clients store their state there; its name."""
    path = run.directory.path
    return str(path) if is_in_process_grid(run.grid) else path.name


def global_score(run: Run, arrays: ArrayRecord, num_threads: int) -> dict[str, float]:
    """Accuracy and loss of the global model on the source's test set. num_threads: 0: torch's."""
    device, before = run.test_samples.labels.device, torch.get_num_threads()
    run.model.to(device).load_state_dict(run.initial_weights | tensors(arrays))
    torch.set_num_threads(num_threads or before)
    try:
        score = evaluate(run.model, run.test_samples, run.config.train.precision)
    finally:
        torch.set_num_threads(before)
    return {"accuracy": score.accuracy, "loss": score.loss}


def threads_beside(workers: Sequence[WorkerOnNode], threads: int) -> int:
    """The cores of this machine that these workers leave, at least one; 0 without workers.

    threads: of each worker; 0: one. With more threads than cores, all take twice the processor
    time.
    """
    per_node = Counter(worker.node for worker in workers)
    used = max(per_node.values(), default=0) * max(1, threads)
    return max(1, num_cores() - used) if workers else 0


def silent_clients(run: Run) -> set[str]:
    """The clients that gave no answer in time to the newest messages."""
    return {run.roster[node].client for node in run.exchange.silent if node in run.roster}


def not_to_evaluate(
    run: Run, server_round: int, clients: Set[str], backed_off: Set[str], silent: Set[str]
) -> dict[str, str]:
    """Those of these clients that are not asked to evaluate, and why; none in a simulation.

    Each might cost a whole timeout again. backed_off: from training. silent: gave no answer in this
    round's training.
    """
    if is_in_process_grid(run.grid):
        return {}
    reasons = {
        "no answer to the last evaluations": run.evaluation_backoff.backed_off(
            server_round, clients, 0
        ),
        "in backoff": backed_off,
        "no answer in this round's training": silent,
        "not connected": run.strategy.away,
    }
    return {c: why for why, found in reasons.items() for c in sorted(clients & found)}


def evaluate_on_clients(
    run: Run, server_round: int, arrays: ArrayRecord, nodes: Sequence[int]
) -> RoundReport:
    """The replies of these nodes to an evaluate message, and who gave none."""
    record = request_record(evaluate_request(run, server_round))
    messages = run.strategy.messages(MessageType.EVALUATE, nodes, arrays, record)
    what = f"the evaluation of round {server_round}"
    timeout_s = run.config.rounds.round_timeout
    sent = Sent(run, server_round, "evaluate", messages)
    replies = run.exchange.ask(
        messages, timeout_s, what, max_bytes=2 * RECORD_BYTES, before_resend=sent.note
    )
    run.strategy.aggregate_evaluate(server_round, replies)
    report = run.strategy.report
    answered = {reply.client for reply in report.accepted}
    for client in run.evaluation_backoff.note(server_round, answered, silent_clients(run)):
        log.warning(
            "%s: client %s gave no answer to %d evaluations in a row; it is not evaluated for %d "
            "rounds",
            *(what, client, run.evaluation_backoff.failures[client]),
            run.config.rounds.backoff_rounds,
        )
    report.bytes_down = sent.num_bytes
    if report.left_out:
        run.audit.note("rejected", round=server_round, kind="evaluate", clients=report.left_out)
    return report


def score_untrained(
    run: Run, server_round: int, arrays: ArrayRecord, clients: Set[str]
) -> list[TrainReply]:
    """The scores of those of these clients that are simulated and were never asked to train.

    Empty if their personal models do not start alike.
    """
    is_custom = getattr(run.grid, "has_custom_clients", False)
    if not run.method.personal_models_start_alike() or run.asked is None or is_custom:
        return []
    names = ClientNames(run.roster[next(iter(run.roster))].num_partitions)
    untrained = sorted(names.number(client) for client in clients - run.asked if client in names)
    request = evaluate_request(run, server_round)
    scores = untrained_accuracies(request, tensors(arrays), np.array(untrained, int), len(names))
    return [
        TrainReply(client, server_round, {}, {}, {"personal-accuracy": score})
        for client, score in scores.items()
    ]


def evaluate_request(run: Run, server_round: int) -> EvaluateRequest:
    """What evaluate messages of this round ask."""
    run_dir = name_for_clients(run)
    return EvaluateRequest(run.config, run.data, server_round, run_dir, run.directory.id)


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
        config=dict(config.flat),
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
    releases = max(run.directory.release_counts().values(), default=0)
    return privacy_statement(privacy, num_entries, releases)
