"""Evaluation after a round: on the source's test set, and on the clients' local test parts."""

import logging
import math
from collections.abc import Sequence, Set

from flwr.app import Message, MessageType

import client_app.evaluation
from client_app.scores import score_functions
from protocol.array_records import array_record
from protocol.arrays import Arrays
from protocol.config_keys import ALWAYS_MEASURED, RoundsConfig
from protocol.messages import EvaluateRequest, TrainReply, request_record
from protocol.text import shortened
from server_app.confusion import note_confusion
from server_app.history import Line
from server_app.record import client_fields
from server_app.start import Question, Run
from strategies.cohort import BACKOFF_ROUNDS
from strategies.validation import RECORD_BYTES, RoundReport

log = logging.getLogger("keel.server")


def has_own_models(run: Run) -> bool:
    """Whether clients are evaluated with models that change only when they train."""
    method = run.experiment.method
    return method.is_personal and not (method.is_adapted_from_global or method.has_global_model)


def evaluates_with_training(run: Run, number: int) -> bool:
    """Whether the cohort is evaluated when it trains: its models do not change afterwards."""
    rounds = run.config.rounds
    is_due = rounds.is_due(number, rounds.evaluate_every)
    return is_due and run.config.evaluated_clients != "none" and has_own_models(run)


def evaluate_clients(
    run: Run, number: int, arrays: Arrays, report: RoundReport, silent: Set[str]
) -> Line:
    """The part of a line that is about the clients' local test parts.

    report, silent: of the round's training.
    """
    fields: Line = {}
    scored: list[TrainReply] = list(report.accepted) if has_own_models(run) else []
    clients: Set[str] = {reply.client for reply in report.accepted}
    if run.config.evaluated_clients == "all":
        clients = run.experiment.strategy.cohort.clients
    clients = clients - {reply.client for reply in scored}
    unasked = not_to_evaluate(run, number, clients, silent)
    if unasked:
        fields["evaluation_left_out"] = unasked
    if to_ask := sorted(clients - unasked.keys()):
        evaluation, num_bytes = ask_to_evaluate(run, number, arrays, to_ask)
        scored += evaluation.accepted
        fields["evaluation_left_out"] = evaluation.left_out | unasked
        fields["reset_needed"] = sorted({*report.reset_needed, *evaluation.reset_needed})
        fields["evaluation_bytes_down"] = num_bytes
        fields["evaluation_bytes_up"] = evaluation.bytes_up
    note_missing(run, number, scored)
    return fields | client_fields(scored, run.experiment.method, list(run.config.scores))


def note_missing(run: Run, number: int, scored: Sequence[TrainReply]) -> None:
    """A warning, once a run, for each score that some client has no number of."""
    for name in sorted(run.config.scores.keys() - {*ALWAYS_MEASURED} - run.missing_scores):
        metric = f"-score.{name}"
        without = [r.client for r in scored if not any(m.endswith(metric) for m in r.metrics)]
        if without:
            run.missing_scores.add(name)
            text = "round %d: metric %s has no number at %s: its mean is over the other clients"
            log.warning(text, number, name, shortened(without))


def not_to_evaluate(run: Run, number: int, clients: Set[str], silent: Set[str]) -> dict[str, str]:
    """Those of these clients that are not asked to evaluate, and why: each may cost a timeout."""
    cohort = run.experiment.strategy.cohort
    reasons = {
        "no answer to the last evaluations": cohort.evaluation_backoff.backed_off(
            number, clients, 0
        ),
        "in backoff": cohort.backed_off(number),
        "no answer in this round's training": silent,
        "not connected": cohort.away,
    }
    return {c: why for why, found in reasons.items() for c in sorted(clients & found)}


def ask_to_evaluate(
    run: Run, number: int, arrays: Arrays, clients: Sequence[str]
) -> tuple[RoundReport, int]:
    """The clients' replies to an evaluate message and who gave none; the bytes sent."""
    strategy, data = run.experiment.strategy, run.experiment.data
    request = EvaluateRequest(run.config, data, number, run.name_for_clients, run.directory.id)
    nodes = strategy.cohort.nodes_of(clients)
    messages = strategy.messages(
        MessageType.EVALUATE, nodes, array_record(arrays), request_record(request)
    )
    what = f"the evaluation of round {number}"
    question = Question(run, number, "evaluate", what, messages)
    replies: list[Message] = []
    question.ask(replies.append, 2 * RECORD_BYTES)
    strategy.aggregate_evaluate(number, replies)
    report, strategy.report = strategy.report, RoundReport()
    backoff, answered = strategy.cohort.evaluation_backoff, set(clients) - question.silent
    for client in backoff.note(number, answered, question.silent):
        log.warning(
            "%s: client %s gave no answer to %d evaluations in a row; it is not evaluated for %d "
            "rounds, or until it answers",
            what,
            client,
            backoff.failures[client],
            BACKOFF_ROUNDS,
        )
    if report.left_out:
        run.audit.note("rejected", round=number, kind="evaluate", clients=report.left_out)
    return report, question.num_bytes


def global_score(run: Run, number: int, arrays: Arrays) -> Line:
    """Accuracy, loss and other scores of the global model on the source's test set."""
    experiment = run.experiment
    model = experiment.model.to(experiment.device)
    model.load_state_dict(experiment.initial_weights | arrays)
    precision, functions = run.config.train.precision, score_functions(run.config)
    score = client_app.evaluation.evaluate(model, experiment.test_samples, precision, functions)
    for name in sorted(score.faults.keys() - run.missing_global_scores):
        run.missing_global_scores.add(name)
        text = "round %d: metric %s of the global model %s: it has no value in this round"
        log.warning(text, number, name, score.faults[name])
    if not math.isfinite(score.loss):  # null in the history
        log.warning(
            "round %d: the global model's loss on the test set is %s: the model has diverged and "
            "its accuracy is meaningless. %s",
            number,
            score.loss,
            divergence_advice(run.config.rounds),
        )
    note_confusion(run.directory.path, number, score, experiment.data.class_names)
    found: Line = {"accuracy": score.accuracy, "loss": score.loss}
    if names := run.config.scores:
        others = {"loss": score.loss, **score.others}
        found["scores"] = {name: others[name] for name in names if name in others}
    return found


def divergence_advice(rounds: RoundsConfig) -> str:
    """What to change in the config of a run whose global model has diverged."""
    return (
        f"Lower lr, or the server's learning rate (options of {rounds.method} and of "
        f"server-optimizer {rounds.server_optimizer})"
    )
