"""The run: roster, rounds, evaluation, record. One function for every engine."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from client_app.evaluation import Score, evaluate
from client_app.method import LocalObjective, Method
from client_app.methods import method_of
from client_app.samples import Samples
from client_app.setup import dataset_spec_of, device_for, model_for, open_source, pixels_of
from data.sources import Source
from models import StagedModel
from protocol.catalogue import method_names, server_optimizer_names
from protocol.config import RunConfig, resolve_config
from protocol.messages import (
    Arrays,
    RosterEntry,
    TrainReply,
    TrainRequest,
    all_finite,
    array_record,
    payload_bytes,
    request_record,
    tensors,
)
from protocol.options import OptionValue
from protocol.privacy import composed_budget
from server_app.diagnostics.comparison import chosen_diagnostics
from server_app.diagnostics.monitor import Monitor
from server_app.diagnostics.plots import plot_rounds
from server_app.exchange import Exchange
from server_app.manifest import begin_manifest, finish_manifest, note_round
from server_app.report import Reporter, check_tensorboard
from server_app.roster import (
    ClientRegistry,
    evaluates_clients,
    gather_roster,
    is_simulation,
    read_saved_roster,
    roster_warnings,
    save_roster,
)
from server_app.run_directory import (
    Checkpoint,
    RunDirectory,
    kept_checkpoints,
    new_run_directory,
    open_run_directory,
    save_arrays,
)
from strategies import Average, strategy_for
from strategies.average import RoundReport, TooFewRepliesError

log = logging.getLogger("keel.server")
roster_file = "roster.json"  # in the run's folder: who takes part


class DivergedError(RuntimeError):
    """The global arrays are not finite any more."""


@dataclass
class Run:
    """One run under way."""

    config: RunConfig
    given: Mapping[str, OptionValue]
    folder: RunDirectory
    grid: Grid
    strategy: Average
    method: Method
    model: StagedModel
    initial_weights: Arrays
    source: Source
    test_samples: Samples
    roster: dict[int, RosterEntry]
    registry: ClientRegistry
    exchange: Exchange
    reporter: Reporter
    start: Checkpoint
    monitor: Monitor | None

    def request(self, server_round: int, checkpoint_round: int, evaluate: bool) -> ConfigRecord:
        """What every client is told in this round."""
        data, folder = dataset_spec_of(self.config, self.source), str(self.folder.path)
        return request_record(
            TrainRequest(self.config, data, server_round, checkpoint_round, evaluate, folder)
        )


def check_config(config: RunConfig) -> None:
    """ValueError, one line, for what `protocol.config.validate` cannot know: before training."""
    method_of(config)
    chosen_diagnostics(config.rounds.diagnostics)
    check_tensorboard(config.rounds)


def idle_keys(config: RunConfig, given: Mapping[str, OptionValue]) -> list[str]:
    """What to warn of, a line each: keys given that do nothing in this run, models never judged."""
    rounds, method = config.rounds, method_of(config)
    tables = {*method_names(), *server_optimizer_names()} - {rounds.method, rounds.server_optimizer}
    lines = [
        f"{key} is given and does nothing: method is {rounds.method}, server "
        f"{rounds.server_optimizer}"
        for key in sorted(given)
        if key.partition(".")[0] in tables and "." in key
    ]
    on_clients = evaluates_clients(config, method) != "none"
    if method.is_personal and not on_clients:
        lines.append("evaluate-clients = 'none': the clients' personal models are never evaluated")
    elif not on_clients and not rounds.evaluate_global:
        lines.append("evaluate-global = false: nothing is evaluated in this run")
    return lines


def run_federation(
    grid: Grid,
    overrides: Mapping[str, OptionValue],
    at_exit: Callable[[Callable[[], None]], None] = lambda note: None,
) -> RunDirectory:
    """A whole run on this grid; returns its folder.

    at_exit: registers what a process does that is ended from outside, where no exception reaches
    the run: it then notes that the run was stopped.

    ValueError, one line, before anything is trained, where the config, the data or the clients do
    not fit. TooFewRepliesError or DivergedError end a run with its last checkpoint intact.
    """
    config = resolve_config(overrides)
    resumed: RunDirectory | None = None
    given = {k: v for k, v in overrides.items() if k != "resume"}
    if config.rounds.resume:
        resumed, config, given = open_run_directory(config.rounds.resume, overrides)
    try:
        run = prepare(grid, config, given, resumed)
    except BaseException:
        if resumed:
            resumed.close()
        raise
    at_exit(lambda: run.reporter.stopped("stopped", privacy_spent(run)))
    try:
        run_rounds(run)
    finally:
        run.folder.close()
    return run.folder


def prepare(
    grid: Grid,
    config: RunConfig,
    given: Mapping[str, OptionValue],
    resumed: RunDirectory | None,
) -> Run:
    """Check everything that can be checked before round 1, then make (or open) the folder."""
    check_config(config)
    method = method_of(config)
    source = open_source(config)  # before any worker: they find it decoded
    model = model_for(config, source)
    if isinstance(method, LocalObjective):
        method.taps(model)  # refuses taps that this network does not have
    initial = {name: array.clone() for name, array in model.state_dict().items()}
    strategy = strategy_for(config, model)
    device = device_for(config.train.device)
    test = Samples(
        np.asarray(source.test.images),
        np.asarray(source.test.labels),
        pixels_of(config, source),
        device,
    )
    hello = TrainRequest(config, dataset_spec_of(config, source), 0, 0, False, "")
    if resumed and not is_simulation(grid):
        roster = read_saved_roster(resumed.path / roster_file)
    else:
        roster = gather_roster(grid, config, hello, source)
    registry = ClientRegistry(grid, config, hello, source, roster)
    if resumed:
        registry.gather()
    strategy.roster = roster
    cohort = len(strategy.sample(1))
    strategy.check_cohort(cohort)
    if config.rounds.min_replies > cohort:
        raise ValueError(
            f"min-replies = {config.rounds.min_replies}: {cohort} clients train in a round"
        )
    monitor = None
    if config.rounds.diagnostics:
        entries = list(roster.values())
        monitor = Monitor(config, method, source, model.to(device), initial, entries)
    start = Checkpoint(0, strategy.initial_arrays(model), {})
    if resumed and resumed.has_rounds():  # one that ended in round 1 begins again
        start = resumed.newest_checkpoint(start.arrays, config.model.model)
        strategy.load(start.state)
    folder = resumed or new_run_directory(config)
    folder.start_log()
    strategy.summary()
    for warning in [*roster_warnings(config, list(roster.values())), *idle_keys(config, given)]:
        log.warning("%s", warning)
    save_roster(folder.path / roster_file, roster)
    if any(entry.num_partitions for entry in roster.values()):
        # a resume with another number of simulated clients would split the data anew
        given = {**given, "num-clients": len(roster)}
    folder.save_config(resolve_config(given), given)
    begin_manifest(folder.path, config, list(roster.values()))
    reporter = Reporter(folder, config, method, source, list(roster.values()))
    exchange = Exchange(
        grid,
        lambda node: roster[node].client if node in roster else f"on node {node}",
        None if is_simulation(grid) else registry.returned,
    )
    return Run(
        *(config, given, folder, grid, strategy, method, model.to(device), initial, source, test),
        *(roster, registry, exchange, reporter, start, monitor),
    )


def run_rounds(run: Run) -> None:
    """All rounds from the first or the checkpoint's, then the final model and the report."""
    config, start = run.config, run.start
    run.reporter.begin(run.folder.truncate_history(start.round), privacy_spent(run))
    arrays = array_record(start.arrays)
    status = "stopped"
    try:
        for server_round in range(start.round + 1, config.rounds.num_rounds + 1):
            arrays = one_round(run, server_round, arrays)
        status = "finished"
    except (TooFewRepliesError, DivergedError) as error:
        status = f"failed: {error}"
        raise
    except Exception as error:
        status = " ".join(f"failed: {type(error).__name__}: {error}".split())
        raise
    finally:
        try:
            final = tensors(arrays)
            if run.method.has_global_model:  # what never travels stayed as the seed drew it
                final = run.initial_weights | final
            save_arrays(run.folder.path / "model.safetensors", final, about_model(run))
        finally:
            run.reporter.finish(status, privacy_spent(run))
        finish_manifest(run.folder.path)
        if run.monitor:
            plot_rounds(run.reporter.history, run.reporter.title(), run.folder.path / "diagnostics")


def one_round(run: Run, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
    """Train, aggregate, evaluate, record, checkpoint; returns the next global arrays."""
    config, strategy = run.config, run.strategy
    rounds = config.rounds
    is_last = server_round == rounds.num_rounds
    due = is_last or server_round % rounds.evaluate_every == 0
    whom = evaluates_clients(config, run.method) if due else "none"
    # a personal model does not change between training and evaluation: one message does for both
    on_train = (
        whom != "none"
        and run.method.is_personal
        and not (run.method.adapts_global or run.method.has_global_model)
    )
    seconds: dict[str, float] = {}

    started = time.perf_counter()
    strategy.away = run.registry.absent(run.registry.refresh())
    if run.registry.has_changed:
        save_roster(run.folder.path / roster_file, run.roster)
        run.registry.has_changed = False
    oldest = max(0, server_round - kept_checkpoints)  # what a resume may have to start from
    ask = run.request(server_round, oldest, on_train)
    messages = list(strategy.configure_train(server_round, arrays, ask, run.grid))
    bytes_down = sum(payload_bytes(m) for m in messages)
    if config.privacy.epsilon:
        asked = [run.roster[m.metadata.dst_node_id].client for m in messages]
        run.folder.append_releases(server_round, asked)
    resting = sorted(strategy.resting(server_round))
    replies = run.exchange.ask(messages, rounds.round_timeout, f"round {server_round}")
    seconds["training"] = time.perf_counter() - started

    started = time.perf_counter()
    following, _ = strategy.aggregate_train(server_round, replies)
    report = strategy.report
    assert following is not None
    if not all_finite(tensors(following)) or not all_finite(strategy.state()):
        raise DivergedError(
            f"round {server_round}: the server's step left values that are not finite; the model "
            "of the round before is kept. A smaller learning rate may help "
            + ("(fedreco.eta-0)" if rounds.method == "fedreco" else "(lr, or the server's)")
        )
    seconds["aggregation"] = time.perf_counter() - started

    started = time.perf_counter()
    line = round_line(server_round, report, bytes_down)
    line["resting"] = resting
    if run.monitor and run.monitor.is_due(server_round):
        line["diagnostics"] = run.monitor.measure(
            server_round, tensors(arrays), report.kept, run.folder.path
        )
        seconds["diagnostics"] = time.perf_counter() - started
        started = time.perf_counter()
    if due and rounds.evaluate_global and run.method.has_global_model:
        line["global"] = score_line(global_score(run, following))
    if whom != "none":
        on_clients = list(report.kept) if on_train else []
        wanted = {reply.client for reply in report.kept}
        if whom == "all":
            wanted = {entry.client for entry in run.roster.values()}
        wanted -= {reply.client for reply in on_clients}
        rest = [
            node for node, entry in run.roster.items() if entry.client in wanted - strategy.away
        ]
        if rest:
            evaluation = evaluate_on_clients(run, server_round, following, rest)
            on_clients += evaluation.kept
            away = dict.fromkeys(sorted(wanted & strategy.away), "not connected")
            line["evaluation_left_out"] = evaluation.left_out | away
            line["evaluation_bytes_down"] = evaluation.bytes_down
            line["evaluation_bytes_up"] = evaluation.bytes_up
        line |= clients_lines(on_clients)
    seconds["evaluation"] = time.perf_counter() - started

    run.exchange.drain()
    line["late"] = run.exchange.take_late()
    line["seconds"] = {name: round(value, 4) for name, value in seconds.items()}
    run.folder.append_history(line)  # before the checkpoint: a resume drops what is ahead of it
    checkpoint_digest = run.folder.save_checkpoint(
        Checkpoint(server_round, tensors(following), strategy.state()), config.model.model
    )
    note_round(run.folder.path, server_round, checkpoint_digest)
    run.reporter.round_done(line)
    return following


def global_score(run: Run, arrays: ArrayRecord) -> Score:
    """The global model on the source's test set."""
    device = run.test_samples.labels.device
    run.model.to(device).load_state_dict(run.initial_weights | tensors(arrays))
    return evaluate(run.model, run.test_samples)


def evaluate_on_clients(
    run: Run, server_round: int, arrays: ArrayRecord, nodes: list[int]
) -> RoundReport:
    """What became of an evaluate message to each of these clients."""
    ask = run.request(server_round, server_round - 1, True)
    everyones = run.strategy.configure_evaluate(server_round, arrays, ask, run.grid)
    messages = [m for m in everyones if m.metadata.dst_node_id in set(nodes)]
    what = f"the evaluation of round {server_round}"
    replies = run.exchange.ask(messages, run.config.rounds.round_timeout, what)
    run.strategy.aggregate_evaluate(server_round, replies)
    report = run.strategy.report
    report.bytes_down = sum(payload_bytes(message) for message in messages)
    return report


def round_line(server_round: int, report: RoundReport, bytes_down: int) -> dict[str, Any]:
    """The part of a round's history that is about training."""
    examples = [reply.metrics["num-examples"] for reply in report.kept]
    names = sorted({n for r in report.kept for n in r.metrics if n.startswith("loss.")})
    losses = {}
    for name in names:
        having = [
            (r.metrics[name], n)
            for r, n in zip(report.kept, examples, strict=True)
            if name in r.metrics
        ]
        values, weights = zip(*having, strict=True)
        losses[name.removeprefix("loss.")] = float(np.average(values, weights=weights))
    return {
        "round": server_round,
        "participants": [reply.client for reply in report.kept],
        "left_out": report.left_out,
        "refused": report.rejected,
        "losses": losses,
        "bytes_down": bytes_down,
        "bytes_up": report.bytes_up,
        "client_seconds": round(sum(r.metrics.get("seconds", 0.0) for r in report.kept), 4),
        "client_cpu_seconds": round(sum(r.metrics.get("cpu-seconds", 0.0) for r in report.kept), 4),
    }


def score_line(score: Score) -> dict[str, float]:
    """A score as it stands in the history."""
    return {"accuracy": score.accuracy, "loss": score.loss}


def clients_lines(replies: list[TrainReply]) -> dict[str, Any]:
    """Accuracies on the clients' local test parts: mean, worst decile, and each client's.

    `personal` is of the clients' own models, `local_global` of the global one.
    """
    lines: dict[str, Any] = {}
    for key, metric in (("local_global", "global-accuracy"), ("personal", "personal-accuracy")):
        each = {r.client: r.metrics[metric] for r in replies if metric in r.metrics}
        if each:
            values = sorted(each.values())
            worst = values[: max(1, len(values) // 10)]
            lines[key] = {
                "mean": float(np.mean(values)),
                "worst_decile": float(np.mean(worst)),
                "clients": dict(sorted(each.items())),
            }
    return lines


def about_model(run: Run) -> dict[str, str]:
    """What model.safetensors says of itself: enough to build and use the model without the data."""
    pixels = pixels_of(run.config, run.source)
    others = {e.client: e.model for e in run.roster.values() if e.model != run.config.model.model}
    return {f"model of {client}": model for client, model in sorted(others.items())} | {
        "shape": ",".join(map(str, run.source.image_shape)),
        "classes": "\n".join(run.source.class_names),
        "mean": ",".join(map(str, pixels.mean)),
        "std": ",".join(map(str, pixels.std)),
    }


def privacy_spent(run: Run) -> dict[str, Any] | None:
    """Per release and composed over those of the client asked most often; None without noise."""
    privacy = run.config.privacy
    if not privacy.epsilon:
        return None
    counts = Counter(client for asked in run.folder.read_releases() for client in asked)
    budget = composed_budget(privacy, max(counts.values(), default=0))
    return {
        "per_release": {"epsilon": privacy.epsilon, "delta": privacy.delta},
        "releases": budget.releases,
        "composed": {"epsilon": budget.epsilon, "delta": budget.delta},
    }
