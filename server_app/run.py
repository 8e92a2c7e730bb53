"""A run on any engine: from the first round, or a checkpoint's, to the last.

A round is sampled, asked for, aggregated, evaluated, recorded and saved, in that order; replies are
validated as they come.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from logging.handlers import MemoryHandler

import torch
from flwr.app import Message

from protocol.array_records import array_record, tensors
from protocol.arrays import Arrays, all_finite
from protocol.files import digest, private_files
from protocol.messages import TrainRequest, request_record
from protocol.options import OptionValue
from protocol.own_code import Own
from server_app.evaluation import (
    divergence_advice,
    evaluate_clients,
    evaluates_with_training,
    global_score,
)
from server_app.history import Line
from server_app.manifest import NUM_NOTED_ROUNDS, note_round
from server_app.observers import RunObserver
from server_app.record import training_fields
from server_app.report import (
    DivergedError,
    Reporter,
    status_after,
)
from server_app.run_directory import Checkpoint, RunDirectory
from server_app.start import PoolMaker, Question, Run, start_run
from strategies.validation import RoundReport

log = logging.getLogger("keel.server")


@private_files()
def run_federation(
    make_pool: PoolMaker,
    overrides: Mapping[str, OptionValue],
    at_exit: Callable[[Callable[[], None]], None] = lambda note: None,
    observers: Sequence[RunObserver] = (),
    early: MemoryHandler | None = None,
    own: Mapping[str, Own] | None = None,
) -> RunDirectory:
    """Run from the first round, or from where `resume` says, to the last; return the run directory.

    at_exit: registers a function that notes the run as stopped, for processes that are ended where
    no exception reaches the run. observers: are told of the start, every round and the end.
    early: has the warnings until there is a run.log, which gets them. own: as `resolve_config`.

    ValueError, one line, before anything is trained, if the config, the data and the clients do not
    fit together. TooFewRepliesError and DivergedError end a run with its last checkpoint intact.
    """
    with ExitStack() as held:
        run = start_run(make_pool, overrides, held, early, own)
        run_rounds(run, at_exit, observers)
    return run.directory


def run_rounds(
    run: Run, at_exit: Callable[[Callable[[], None]], None], observers: Sequence[RunObserver]
) -> None:
    """All rounds from the first or the checkpoint's, then the final model and the report."""
    history = run.directory.rewind(run.start.round)
    run.loss_terms = {f"loss.{name}" for line in history for name in line["losses"]}
    reporter = Reporter(run, history, observers)
    at_exit(reporter.interrupted)
    run.progress = reporter.replied
    newest, status = run.start, "finished"
    try:
        reporter.begin()
        for number in range(run.start.round + 1, run.config.rounds.num_rounds + 1):
            newest, line = play_round(run, number, newest.arrays)
            reporter.round_done(line)
    except BaseException as error:
        status = status_after(error)
        raise
    finally:
        reporter.end(newest.arrays, status)


def play_round(run: Run, number: int, arrays: Arrays) -> tuple[Checkpoint, Line]:
    """One round from these global arrays: the server after it, and its line in the history."""
    seconds: dict[str, float] = {}
    with timed(seconds, "training"):
        messages = sample(run, number, arrays)
        question = ask(run, number, messages)
    with timed(seconds, "aggregation"):
        following, report = aggregate(run, number)
    line = training_line(run, number, question, report)
    if run.monitor and run.monitor.is_due(number):
        with timed(seconds, "diagnostics"), threads(run.config.train.threads):
            line["diagnostics"] = run.monitor.measure(
                number, arrays, report.accepted, run.directory.path
            )
    with timed(seconds, "evaluation"):
        line |= evaluate(run, number, following.arrays, report, question.silent)
    line["seconds"] = {name: round(value, 4) for name, value in seconds.items()}
    line = run.directory.record(line)  # first: a resume drops what is ahead of its checkpoint
    save_checkpoint(run, following)
    return following, line


def sample(run: Run, number: int, arrays: Arrays) -> list[Message]:
    """The messages to the round's cohort."""
    strategy = run.experiment.strategy
    strategy.cohort.away = run.pool.absent()
    end_backoffs(run, number)
    strategy.keeps_updates = run.monitor is not None and run.monitor.is_due(number)
    request = TrainRequest(
        run.config,
        run.experiment.data,
        number,
        run.directory.checkpoint_rounds(),
        evaluate=evaluates_with_training(run, number),
        run_dir=run.name_for_clients,
        run_id=run.directory.id,
    )
    record = request_record(request)
    return list(strategy.configure_train(number, array_record(arrays), record, None))


def end_backoffs(run: Run, number: int) -> None:
    """Have the clients in backoff that answer again take part again."""
    cohort = run.experiment.strategy.cohort
    backoffs = cohort.backoff, cohort.evaluation_backoff
    waiting = {c for each in backoffs for c, last in each.last_rounds.items() if number <= last}
    for client in sorted(run.pool.returned(waiting)):
        log.info("client %s answers again, and takes part from round %d on", client, number)
        for each in backoffs:
            each.end([client])


def ask(run: Run, number: int, messages: Sequence[Message]) -> Question:
    """Have the cohort train. The server half takes each reply, validated, as it comes."""
    strategy = run.experiment.strategy
    question = Question(run, number, "train", f"round {number}", messages)
    question.ask(lambda reply: strategy.accept(number, reply), strategy.max_reply_bytes())
    return question


def aggregate(run: Run, number: int) -> tuple[Checkpoint, RoundReport]:
    """The server after the accepted replies, and who was left out, and why.

    TooFewRepliesError, DivergedError: the checkpoint of the round before stays.
    """
    strategy = run.experiment.strategy
    try:
        # on every engine the same number: the last bits of a server half's sums depend on it
        with threads(run.config.train.threads):
            following, _ = strategy.aggregate_train(number, ())
    finally:  # too few replies end the run
        report, strategy.report = strategy.report, RoundReport()
        if report.left_out:
            run.audit.note("rejected", round=number, kind="train", clients=report.left_out)
    checkpoint = Checkpoint(number, tensors(following), strategy.state())
    if not all_finite(checkpoint.arrays) or not all_finite(checkpoint.state):
        raise DivergedError(
            f"round {number}: the server update gave values that are not finite; the model of the "
            f"round before is kept. {divergence_advice(run.config.rounds)}"
        )
    return checkpoint, report


def training_line(run: Run, number: int, question: Question, report: RoundReport) -> Line:
    """The part of the round's line that is about training."""
    strategy = run.experiment.strategy
    weights = strategy.counts(report.accepted)
    line: Line = training_fields(
        number, report, question.num_bytes, weights, run.loss_terms, question.seconds
    )
    line["backed_off"] = question.backed_off
    return line


def evaluate(run: Run, number: int, arrays: Arrays, report: RoundReport, silent: set[str]) -> Line:
    """The accuracies after the round, of the models and on the data that the config names."""
    line: Line = {}
    rounds = run.config.rounds
    if not rounds.is_due(number, rounds.evaluate_every):
        return line
    if run.config.evaluated_clients != "none":
        line |= evaluate_clients(run, number, arrays, report, silent)
    if run.config.evaluates_global and run.experiment.method.has_global_model:
        line["global"] = global_score(run, number, arrays)
    return line


def save_checkpoint(run: Run, checkpoint: Checkpoint) -> None:
    """Note the digests of the first rounds, and write the checkpoint if one is due."""
    rounds, number = run.config.rounds, checkpoint.round
    if number <= NUM_NOTED_ROUNDS:  # first: a round without checkpoint is repeated and noted again
        note_round(run.directory.path, run.config, number, digest(*checkpoint.pieces()))
    if rounds.is_due(number, rounds.checkpoint_every):
        run.directory.save_checkpoint(checkpoint)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note the seconds that the block takes."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run the block with `number` torch threads, 0: as before. Last bits may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
