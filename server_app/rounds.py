"""One round of a run: train, aggregate, evaluate, record."""

import logging
import math
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from client_app.evaluation import evaluate
from client_app.method import Method
from client_app.samples import Samples
from data.sources import Source
from flower_adapter import is_in_process_grid
from models import StagedModel
from protocol.config import RoundsConfig, RunConfig
from protocol.files import digest
from protocol.messages import (
    Arrays,
    DatasetSpec,
    EvaluateRequest,
    TrainReply,
    TrainRequest,
    all_finite,
    payload_bytes,
    request_record,
    tensors,
)
from server_app.audit import AuditLog
from server_app.client_registry import ClientRegistry
from server_app.diagnostics.monitor import Monitor
from server_app.exchange import Exchange
from server_app.history import Line
from server_app.manifest import NUM_NOTED_ROUNDS, note_round
from server_app.record import client_fields, training_fields
from server_app.roster import ROSTER_FILE, save_roster
from server_app.run_directory import Checkpoint, RunDirectory
from server_app.simulated_roster import Roster, SimulatedRoster
from strategies import Average
from strategies.average import RoundReport
from strategies.backoff import Backoff
from strategies.validation import RECORD_BYTES

log = logging.getLogger("keel.server")


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
    evaluation_backoff: Backoff  # clients that gave no answer to evaluations
    # the names of the loss metrics of all rounds so far
    loss_terms: set[str] = field(default_factory=set)

    @property
    def has_own_models(self) -> bool:
        """Whether clients are evaluated with models that change when they train, and then only."""
        method = self.method
        return method.is_personal and not (method.is_adapted_from_global or method.has_global_model)

    def is_evaluated(self, server_round: int) -> bool:
        """Whether accuracies are measured after this round."""
        rounds = self.config.rounds
        return server_round == rounds.num_rounds or server_round % rounds.evaluate_every == 0

    def evaluated_clients(self, server_round: int) -> str:
        """Whose local test parts are evaluated on after this round: none, cohort or all."""
        return self.config.evaluated_clients if self.is_evaluated(server_round) else "none"


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
    """Notes in the audit log what is sent and resent in a round, and the private releases.

    clients: by node, when the messages were first sent; a client may have moved to another since.
    """

    def __init__(self, run: Run, server_round: int, kind: str, messages: Sequence[Message]) -> None:
        self.run, self.round, self.kind = run, server_round, kind
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
        self.run.audit.note("sent", **about, clients=clients)
        privacy = self.run.config.privacy
        if privacy.epsilon and self.kind == "train":
            budget = {"epsilon": privacy.epsilon, "delta": privacy.delta}
            self.run.audit.note("released", round=self.round, clients=clients, **budget)


def train_round(run: Run, server_round: int, arrays: ArrayRecord) -> Trained:
    """Train, aggregate, and evaluate on the clients where that is due."""
    config, strategy = run.config, run.strategy
    rounds, seconds = config.rounds, dict[str, float]()
    # a client's own model does not change between training and evaluation: one message does both
    scores_in_replies = run.has_own_models and run.evaluated_clients(server_round) != "none"

    started = time.perf_counter()
    if not isinstance(run.roster, SimulatedRoster):
        strategy.away = run.registry.absent(run.registry.refresh())
    if run.registry.has_changed:
        save_roster(run.directory.path / ROSTER_FILE, run.roster)
        run.registry.has_changed = False
    is_measured = run.monitor is not None and run.monitor.is_due(server_round)
    strategy.keeps_updates = is_measured
    request = TrainRequest(
        config,
        run.data,
        server_round,
        run.directory.checkpoint_rounds(),
        evaluate=scores_in_replies,
        run_dir=name_for_clients(run),
        run_id=run.directory.id,
    )
    messages = list(
        strategy.configure_train(server_round, arrays, request_record(request), run.grid)
    )
    sent = Sent(run, server_round, "train", messages)
    backed_off = sorted(strategy.backed_off(server_round))
    what = f"round {server_round}"
    run.exchange.ask(
        messages,
        rounds.round_timeout,
        what,
        max_bytes=strategy.max_reply_bytes(),
        before_resend=sent.note,
        on_reply=lambda reply: strategy.accept(server_round, reply),
    )
    silent = {sent.clients[node] for node in run.exchange.silent}
    seconds["training"] = time.perf_counter() - started

    started = time.perf_counter()
    try:
        # on every engine the same number: the last bits of a server half's sums depend on it
        with threads(run.config.train.threads):
            following, _ = strategy.aggregate_train(server_round, ())
    finally:  # too few replies end the run
        report = strategy.report
        if report.left_out:
            run.audit.note("rejected", round=server_round, kind="train", clients=report.left_out)
    state = strategy.state()
    if not all_finite(tensors(following)) or not all_finite(state):
        raise DivergedError(
            f"round {server_round}: the server update gave values that are not finite; the model "
            f"of the round before is kept. {divergence_advice(rounds)}"
        )
    seconds["aggregation"] = time.perf_counter() - started

    started = time.perf_counter()
    weights = strategy.counts(report.accepted)
    line = training_fields(server_round, report, sent.num_bytes, weights, run.loss_terms)
    line["backed_off"] = backed_off
    if run.monitor and is_measured:
        with threads(run.config.train.threads):
            line["diagnostics"] = run.monitor.measure(
                server_round, tensors(arrays), report.accepted, run.directory.path
            )
        seconds["diagnostics"] = time.perf_counter() - started
        started = time.perf_counter()
    line |= evaluation_fields(run, server_round, following, report, {*backed_off}, silent)
    seconds["evaluation"] = time.perf_counter() - started

    strategy.report = RoundReport()  # this round's updates are not held during the next
    run.exchange.drain()
    line["late"] = run.exchange.take_late()
    line["seconds"] = seconds
    return Trained(server_round, following, state, line)


def divergence_advice(rounds: RoundsConfig) -> str:
    """What to change in the config of a run whose global model has diverged."""
    return (
        f"Lower lr, or the server's learning rate (options of {rounds.method} and of "
        f"server-optimizer {rounds.server_optimizer})"
    )


def evaluation_fields(
    run: Run,
    server_round: int,
    arrays: ArrayRecord,
    report: RoundReport,
    backed_off: Set[str],
    silent: Set[str],
) -> Line:
    """The part of a line that is about the clients' local test parts; {} if none is evaluated on.

    report: of the round's training. backed_off, silent: as `not_to_evaluate`.
    """
    evaluated, fields = run.evaluated_clients(server_round), dict[str, Any]()
    if evaluated == "none":
        return fields
    scored: list[TrainReply] = list(report.accepted) if run.has_own_models else []
    clients: Set[str] = {reply.client for reply in report.accepted}
    if evaluated == "all":
        clients = run.strategy.clients
    clients = clients - {reply.client for reply in scored}
    unasked = not_to_evaluate(run, server_round, clients, backed_off, silent)
    if unasked:
        fields["evaluation_left_out"] = unasked
    nodes = run.strategy.nodes_of(sorted(clients - unasked.keys()))
    if nodes:
        evaluation = evaluate_on_clients(run, server_round, arrays, nodes)
        scored += evaluation.accepted
        fields["evaluation_left_out"] = evaluation.left_out | unasked
        fields["reset_needed"] = sorted({*report.reset_needed, *evaluation.reset_needed})
        fields["evaluation_bytes_down"] = evaluation.bytes_down
        fields["evaluation_bytes_up"] = evaluation.bytes_up
    return fields | client_fields(scored, run.method)


def record_round(run: Run, trained: Trained) -> Line:
    """Evaluate the global model where that is due, and write the round to disk; its line."""
    rounds, server_round = run.config.rounds, trained.round
    line: Line = trained.line
    started = time.perf_counter()
    if run.is_evaluated(server_round) and rounds.evaluate_global and run.method.has_global_model:
        line["global"] = global_score(run, trained.arrays)
        if not math.isfinite(loss := line["global"]["loss"]):  # null in the history
            log.warning(
                "round %d: the global model's loss on the test set is %s: the model has diverged "
                "and its accuracy is meaningless. %s",
                server_round,
                loss,
                divergence_advice(rounds),
            )
        line["seconds"]["evaluation"] += time.perf_counter() - started
    line["seconds"] = {name: round(value, 4) for name, value in line["seconds"].items()}
    line = run.directory.record(line)
    model, saved = run.config.model.model, ""
    checkpoint = Checkpoint(server_round, tensors(trained.arrays), trained.state)
    if server_round == rounds.num_rounds or server_round % rounds.checkpoint_every == 0:
        saved = run.directory.save_checkpoint(checkpoint, model)
    if server_round <= NUM_NOTED_ROUNDS:
        noted = saved or digest(*checkpoint.pieces(model))
        note_round(run.directory.path, run.config, server_round, noted)
    return line


def name_for_clients(run: Run) -> str:
    """The run directory's path in a simulation, whose clients store their state there; its name."""
    path = run.directory.path
    return str(path) if is_in_process_grid(run.grid) else path.name


def global_score(run: Run, arrays: ArrayRecord) -> dict[str, float]:
    """Accuracy and loss of the global model on the source's test set."""
    device = run.test_samples.labels.device
    run.model.to(device).load_state_dict(run.initial_weights | tensors(arrays))
    score = evaluate(run.model, run.test_samples, run.config.train.precision)
    return {"accuracy": score.accuracy, "loss": score.loss}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run the block with `number` torch threads, 0: as before. Last bits may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    silent = {sent.clients[node] for node in run.exchange.silent}
    answered = set(sent.clients.values()) - silent
    for client in run.evaluation_backoff.note(server_round, answered, silent):
        log.warning(
            "%s: client %s gave no answer to %d evaluations in a row; it is not evaluated for %d "
            "rounds",
            what,
            client,
            run.evaluation_backoff.failures[client],
            run.config.rounds.backoff_rounds,
        )
    report.bytes_down = sent.num_bytes
    if report.left_out:
        run.audit.note("rejected", round=server_round, kind="evaluate", clients=report.left_out)
    return report


def evaluate_request(run: Run, server_round: int) -> EvaluateRequest:
    """What evaluate messages of this round ask."""
    run_dir = name_for_clients(run)
    return EvaluateRequest(run.config, run.data, server_round, run_dir, run.directory.id)
