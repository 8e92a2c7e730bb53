"""A run under way: from its keys to its first round, and how its clients are asked."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging.handlers import MemoryHandler
from pathlib import Path

import numpy as np
from flwr.app import Message

from client_app.machine import data_digest, host_name, report_of
from client_app.networks import resolved
from client_app.setup import unused_warnings
from protocol import own_code
from protocol.config import RunConfig, resolve_config
from protocol.messages import PreflightRequest, payload_bytes
from protocol.options import OptionValue
from protocol.own_code import Own
from protocol.text import labels_text
from server_app.checks import config_warnings, noise_warnings, unused_keys
from server_app.diagnostics.monitor import Monitor
from server_app.experiment import Experiment, admit_clients, build_experiment
from server_app.manifest import (
    AuditLog,
    begin_manifest,
    check_same_data,
)
from server_app.pool import Pool
from server_app.preflight import machine_warnings
from server_app.roster import Clients
from server_app.run_directory import (
    Checkpoint,
    RunDirectory,
    new_run_directory,
    open_run_directory,
)
from server_app.run_reader import new_path
from server_app.trackers import check_trackers

log = logging.getLogger("keel.server")
# the experiment, and the directory of the run that is resumed, to its clients
PoolMaker = Callable[[Experiment, Path | None], Pool]


@dataclass
class Run:
    """One run under way. start: the checkpoint that it begins from, of round 0 for a new run."""

    experiment: Experiment
    pool: Pool
    clients: Clients
    directory: RunDirectory
    start: Checkpoint
    monitor: Monitor | None
    # told what is asked, how many clients have answered, and how many were asked
    progress: Callable[[str, int, int], None] = lambda what, num_replies, num_asked: None
    # warnings that the summary repeats, beside those on the data
    notes: Sequence[str] = ()
    loss_terms: set[str] = field(default_factory=set)  # recorded so far
    # the scores of `metrics` that a warning has named, of clients and of the global model
    missing_scores: set[str] = field(default_factory=set)
    missing_global_scores: set[str] = field(default_factory=set)

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.experiment.config

    @property
    def audit(self) -> AuditLog:
        """The run's audit log."""
        return self.directory.audit

    @property
    def name_for_clients(self) -> str:
        """The run directory's path where clients store their state in it; else its name."""
        path = self.directory.path
        return str(path) if self.pool.stores_state_here else path.name


class Question:
    """What is sent in a round. A private release is counted before its message is sent.

    silent: the clients that gave no answer in time. num_bytes: sent. seconds: of each site until
    its reply was there.
    """

    def __init__(
        self, run: Run, number: int, kind: str, what: str, messages: Sequence[Message]
    ) -> None:
        self.run, self.round, self.kind, self.what = run, number, kind, what
        self.messages = messages
        self.sizes = {m.metadata.dst_node_id: payload_bytes(m) for m in messages}
        # when first sent: a client may have moved to another node since
        self.clients = {node: run.pool.roster[node].client for node in self.sizes}
        self.backed_off = sorted(run.experiment.strategy.cohort.backed_off(number))
        self.num_bytes = self.num_replies = 0
        self.silent: set[str] = set()
        self.seconds: dict[str, float] = {}

    def ask(self, on_reply: Callable[[Message], None], max_bytes: int) -> None:
        """Send the messages and take the replies. max_bytes: of a reply."""
        self.on_reply, self.started = on_reply, time.monotonic()
        self.note(*self.sizes)
        self.run.progress(self.what, 0, len(self.messages))
        silent = self.run.pool.ask(
            self.messages, self.what, self.take, max_bytes=max_bytes, before_resend=self.note
        )
        self.silent = {self.clients[node] for node in silent}

    def take(self, reply: Message) -> None:
        """Hand on a reply."""
        self.on_reply(reply)
        if not self.run.pool.stores_state_here:  # those of a simulation take turns
            client = self.clients[reply.metadata.src_node_id]
            self.seconds[client] = time.monotonic() - self.started
        self.num_replies += 1
        self.run.progress(self.what, self.num_replies, len(self.messages))

    def note(self, *nodes: int) -> None:
        """Note that messages to these nodes are about to be sent."""
        clients = [self.clients[node] for node in nodes]
        size = sum(self.sizes[node] for node in nodes)
        self.num_bytes += size
        audit, privacy = self.run.audit, self.run.config.privacy
        audit.note("sent", kind=self.kind, bytes=size, round=self.round, clients=clients)
        if privacy.epsilon and self.kind == "train":
            budget = {"epsilon": privacy.epsilon, "delta": privacy.delta}
            audit.note("released", round=self.round, clients=clients, **budget)


def start_run(
    make_pool: PoolMaker,
    overrides: Mapping[str, OptionValue],
    held: ExitStack,
    early: MemoryHandler | None = None,
    own: Mapping[str, Own] | None = None,
) -> Run:
    """Check all that can be checked before round 1, then make or open the run directory.

    held: closes the directory. early: has warnings for the run's log. own: as `resolve_config`.
    """
    config = resolve_config(overrides, own)
    overrides = {key: value for key, value in overrides.items() if key != "resume"}
    resumed: RunDirectory | None = None
    if config.rounds.resume:
        resumed, config, overrides = open_run_directory(config.rounds.resume, overrides)
        held.callback(resumed.close)
    else:
        new_path(config)  # raises if it exists
    check_trackers(config.rounds)
    experiment = build_experiment(config)
    pool = make_pool(experiment, resumed.path if resumed else None)
    clients, warnings = admit_clients(experiment, pool)
    monitor = Monitor(experiment, clients.are_simulated) if config.rounds.diagnostics else None
    start = Checkpoint(0, experiment.first_arrays, {})
    data = data_digest(experiment.source)
    if resumed:
        if clients.are_simulated:
            check_same_data(resumed.path, config, data, clients.split)
        if resumed.has_checkpoint():
            start = resumed.newest_checkpoint(start.arrays)
            experiment.strategy.load(start.state)
    directory = resumed or new_run_directory(config)
    if not resumed:
        held.callback(directory.close)
    run = Run(experiment, pool, clients, directory, start, monitor)
    run.notes = noise_warnings(config, len(experiment.strategy.cohort.sample(1)), start.arrays)
    run.notes += unused_warnings(config, clients.num) if clients.are_simulated else []
    warnings += [*run.notes, *config_warnings(config), *experiment.source.notes]
    begin_log(run, warnings + own_code.edited(config.own, overrides.values()), early)
    if clients.are_simulated:
        # a resume with another number of simulated clients would split the data differently
        overrides = {**overrides, "num-clients": clients.num}
    config = resolve_config(overrides, config.own)
    directory.save_config(config, overrides, unused_keys(config))
    note_manifest(run, data)
    return run


def begin_log(run: Run, warnings: list[str], early: MemoryHandler | None) -> None:
    """Begin the audit log and run.log, with these warnings. early: as `start_run`."""
    run.audit.note("started", round=run.start.round + 1)
    run.pool.record_in(run.directory.path, run.audit.note)
    run.directory.start_log(early)
    for path in run.directory.skipped:
        text = "%s is damaged: skipped, the run continues from round %d"
        log.warning(text, path, run.start.round)
    if run.pool.machines:
        request = PreflightRequest(run.config, run.experiment.data, host=host_name())
        warnings = warnings + machine_warnings(run.pool.machines, report_of(request))
    for text in warnings:
        log.warning("%s", text)
    log_labels(run)


def log_labels(run: Run) -> None:
    """Log what the labels of the source mean, or those of each site, with their samples."""
    source, names = run.experiment.source, run.experiment.data.class_names
    if len(source.train.labels):
        counts = np.bincount(source.train.labels, minlength=len(names)).tolist()
        text = labels_text(source.own_labels, names, counts)
        log.info("labels and training images of %s: %s", source.name, text)
    for entry in run.clients.shown:
        if entry.own_labels:
            text = labels_text(entry.own_labels, names, entry.label_counts)
            log.info("client %s: labels and training samples: %s", entry.client, text)


def note_manifest(run: Run, data: str) -> None:
    """Write what the run consists of. data: the digest of its data."""
    config, path, clients = run.config, run.directory.path, run.clients
    machines = run.pool.machines
    precisions = [machine.precision for machine in machines]
    if not precisions:
        precisions = [resolved("auto", run.experiment.model, run.experiment.device)]
    begin_manifest(
        path,
        config,
        num_clients=clients.num,
        is_simulated=clients.are_simulated,
        split=clients.split,
        data=data,
        workers=machines,
        precisions=precisions if clients.are_simulated and config.train.precision == "auto" else (),
        trains=run.start.round < config.rounds.num_rounds,
    )
